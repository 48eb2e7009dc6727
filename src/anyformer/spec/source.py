"""Where a specification comes from: a shipped recipe's name, a TOML or JSON file, a checkpoint folder, tables."""

import tomllib
from collections.abc import Iterable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from anyformer.errors import UserError
from anyformer.spec.condense import condense
from anyformer.spec.expand import expand
from anyformer.spec.folder import SPEC_FILE, is_published, resolve
from anyformer.spec.overrides import apply_overrides
from anyformer.spec.parts import ModelSpec
from anyformer.spec.problems import Problem, SpecError, did_you_mean
from anyformer.spec.stored import from_json

Source = str | Path | Mapping[str, Any] | ModelSpec


def recipes_folder() -> Path:
    """The folder of the recipes that come with the package."""
    return Path(str(files("anyformer"))) / "recipes"


def recipe_names() -> list[str]:
    """The names of the shipped recipes and runs."""
    return sorted(path.stem for path in recipes_folder().glob("*.toml"))


def find_toml(source: str | Path, beside: Path | None = None) -> Path:
    """The file that a path or a shipped name means, looked for first in the folder `beside`.

    Raises `UserError` with the nearest name.
    """
    if beside is not None and (beside / source).is_file():
        return beside / source
    path = Path(source)
    if path.is_dir():
        what = "a folder is no description of a model or a run"
        remedy = "give a TOML file or a shipped recipe's name; training starts from a recipe, not from a checkpoint"
        raise UserError(what, where=path, remedy=remedy)
    if path.exists():
        return path
    shipped = recipes_folder() / f"{source}.toml"
    if len(path.parts) == 1 and shipped.is_file():
        return shipped
    if path.suffix in (".toml", ".json") or len(path.parts) > 1:
        raise UserError("there is no such file", where=path, remedy="give a path or a shipped recipe's name")
    near = did_you_mean(str(source), recipe_names())
    remedy = f"did you mean `{near}`?" if near else "`anyformer plan --list` names the shipped recipes"
    raise UserError(f"no file and no shipped recipe is called `{source}`", remedy=remedy)


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file. Raises `UserError` for what is not UTF-8 or not TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise UserError("not a description: it is nested too deeply", where=path) from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"not TOML: {error}", where=path) from None
    except UnicodeDecodeError as error:
        raise UserError(f"not UTF-8 at byte {error.start}", where=path) from None
    except OSError as error:
        raise UserError(f"cannot read: {error.strerror}", where=path) from None


def load_recipe(source: str | Path, *, named_by: Path | None = None) -> dict[str, Any]:
    """The recipe's tables in a file or of a shipped name; of a run description, its model.

    Args:
        source: a path or a shipped name; a name inside a file is looked for in that file's folder first.
        named_by: the file that names `source`.

    Raises:
        UserError: a file that is not there or cannot be read, or files that name each other in a ring.
    """
    chain = [] if named_by is None else [named_by]
    while True:
        path = find_toml(source, chain[-1].parent if chain else None)
        repeats = path.resolve() in [each.resolve() for each in chain]
        chain.append(path)
        if repeats:
            raise UserError(
                "a description names itself as its model",
                where=chain[0],
                got=" → ".join(map(str, chain)),
                remedy="write the model itself into one of them",
            )
        table = read_toml(path)
        model = table.get("model")
        if not isinstance(model, str):
            return model if isinstance(model, dict) else table
        source = model


def load_spec(source: Source, overrides: Iterable[str] = ()) -> ModelSpec:
    """The specification that `source` means. Raises `SpecError` listing every problem.

    Args:
        source: a shipped recipe's name, a recipe (TOML), an expanded specification (JSON), a checkpoint folder,
            a recipe's tables, or a specification.
        overrides: `"attention.n_kv_heads=2"` and the like, laid on the recipe; an expanded specification is first
            turned back into one.
    """
    overrides = list(overrides)
    if isinstance(source, ModelSpec):
        return _changed(source, overrides, "the specification")
    if isinstance(source, Mapping):
        return expand(apply_overrides(source, overrides))
    path = find_toml(source) if not Path(source).is_dir() else resolve(source) / SPEC_FILE
    if is_published(path.parent) and not path.exists():
        what = "this is a published checkpoint, which only a whole command or af.load_spec reads"
        raise UserError(what, where=path.parent, remedy="convert it: `anyformer convert SRC DST --to anyformer`")
    if path.suffix != ".json":
        return expand(apply_overrides(load_recipe(path), overrides), where=source)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError([Problem("(the whole)", f"cannot be read: {error}")], where=path) from None
    return _changed(from_json(text, where=path), overrides, source)


def _changed(spec: ModelSpec, overrides: list[str], of: object) -> ModelSpec:
    """A specification with overrides laid on its recipe, whose words nobody wrote: a message says whose it is."""
    return expand(apply_overrides(condense(spec), overrides), where=f"the recipe made of {of}") if overrides else spec
