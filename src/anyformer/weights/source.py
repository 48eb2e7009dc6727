"""Where a specification comes from, published configurations among it. Imports no torch."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from anyformer.errors import UserError
from anyformer.spec import source as plain
from anyformer.spec.folder import is_gguf, is_published, resolve
from anyformer.spec.parts import ModelSpec
from anyformer.weights.config import CONFIG_FILE, read_config, read_object
from anyformer.weights.gguf.format import read_gguf
from anyformer.weights.gguf.reading import read_place


def load_spec(source: plain.Source, overrides: Iterable[str] = ()) -> ModelSpec:
    """The specification that `source` means. Raises `SpecError` listing every problem.

    Args:
        source: a shipped recipe's name, a recipe (TOML), an expanded specification (JSON), a checkpoint or run folder,
            a published model's folder or config.json, a GGUF file, a recipe's tables, or a specification.
        overrides: `"attention.n_kv_heads=2"` and the like, laid on the recipe; an expanded specification is first
            turned back into one.
    """
    if isinstance(source, str | Path):
        _require_plain(Path(source))
    path = None if isinstance(source, ModelSpec | Mapping) else _published(source)
    if path is None:
        return plain.load_spec(source, overrides)
    if is_gguf(path):
        return plain.load_spec(read_place(read_gguf(path)).reading.spec, overrides)
    return plain.load_spec(read_config(read_object(path), path).spec, overrides)


def _require_plain(path: Path) -> None:
    """Raises `UserError` for a pipe or a device, which may never end."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise UserError(
            "this is neither a file nor a folder", where=path, expected="a file, a folder or a recipe's name"
        )


def _published(source: str | Path) -> Path | None:
    """The published configuration or GGUF file that a path means, None where it means something else."""
    path = Path(source)
    if path.is_dir():
        folder = resolve(path)
        if is_gguf(folder):
            return folder
        return folder / CONFIG_FILE if is_published(folder) else None
    return path if is_gguf(path) or (path.name == CONFIG_FILE and path.is_file()) else None
