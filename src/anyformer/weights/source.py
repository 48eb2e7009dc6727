"""Where a specification comes from, published configurations among it. Imports no torch."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from anyformer.spec import source as plain
from anyformer.spec.folder import is_published, resolve
from anyformer.spec.parts import ModelSpec
from anyformer.weights.config import CONFIG_FILE, read_config, read_object


def load_spec(source: plain.Source, overrides: Iterable[str] = ()) -> ModelSpec:
    """The specification that `source` means. Raises `SpecError` listing every problem.

    Args:
        source: a shipped recipe's name, a recipe (TOML), an expanded specification (JSON), a checkpoint or run folder,
            a published model's folder or config.json, a recipe's tables, or a specification.
        overrides: `"attention.n_kv_heads=2"` and the like, laid on the recipe; an expanded specification is first
            turned back into one.
    """
    path = None if isinstance(source, ModelSpec | Mapping) else _published(source)
    if path is None:
        return plain.load_spec(source, overrides)
    return plain.load_spec(read_config(read_object(path), path).spec, overrides)


def _published(source: str | Path) -> Path | None:
    """The published configuration that a path means, None where it means something else."""
    path = Path(source)
    if path.is_dir():
        folder = resolve(path)
        return folder / CONFIG_FILE if is_published(folder) else None
    return path if path.name == CONFIG_FILE and path.is_file() else None
