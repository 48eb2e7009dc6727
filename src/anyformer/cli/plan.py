"""`anyformer plan`: what a model costs, before any compute."""

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from anyformer.cli.sampling import quantize_of
from anyformer.errors import UserError

if TYPE_CHECKING:
    from anyformer.spec import ModelSpec

_UNITS = {
    "": 1,
    "k": 1000,
    "m": 1000**2,
    "g": 1000**3,
    "t": 1000**4,
    "ki": 1024,
    "mi": 1024**2,
    "gi": 1024**3,
    "ti": 1024**4,
}


def parse_bytes(text: str) -> int:
    """`16GiB`, `24G`, `8e9` as bytes. Raises `UserError`."""
    word = text.strip().lower().removesuffix("b")
    number = word.rstrip("kmgti")
    unit = word[len(number) :]
    try:
        size = float(number) * _UNITS[unit]
    except (ValueError, KeyError):
        raise UserError("not an amount of memory", where="--memory", got=text, expected="16GiB, 24G or bytes") from None
    if not 0 < size < 1e18:
        raise UserError("not an amount of memory", where="--memory", got=text, expected="16GiB, 24G or bytes")
    return int(size)


def is_run(source: str) -> bool:
    """Whether a name or file is a run description: TOML with a `model` and its data or training."""
    from anyformer.spec.source import find_toml, read_toml

    if Path(source).is_dir():
        return False
    path = find_toml(source)
    if path.suffix != ".toml":
        return False
    table = read_toml(path)
    return "model" in table and bool({"data", "train"} & table.keys())


def shipped() -> dict[str, list[str]]:
    """The names that come with the package: those of models, and those of whole runs."""
    from anyformer.spec import recipe_names

    names: dict[str, list[str]] = {"models": [], "runs": []}
    for name in recipe_names():
        names["runs" if is_run(name) else "models"].append(name)
    return names


def plan(
    spec: Annotated[
        str | None,
        typer.Argument(help="A recipe's or run's name or file, a specification, or a checkpoint.", show_default=False),
    ] = None,
    batch: Annotated[
        int | None, typer.Option(help="Rows of a batch.", min=1, show_default="the run's rows at a time, or 8")
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(help="Tokens a row.", min=1, show_default="the run's, else the model's, else 1024"),
    ] = None,
    source: Annotated[
        int | None,
        typer.Option(
            help="Source tokens a row of an encoder–decoder.", min=1, show_default="the encoder's, else the context"
        ),
    ] = None,
    prefix: Annotated[int, typer.Option(help="Leading tokens that a prefix mask shows to all.", min=0)] = 0,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or float64.")] = "float32",
    optimizer: Annotated[
        str | None,
        typer.Option(help="adamw, muon, sgd, or none for inference.", show_default="the run's, or adamw"),
    ] = None,
    memory: Annotated[
        str | None, typer.Option(help="Say the largest batch that fits, such as 16GiB.", show_default=False)
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change the recipe or run; may be repeated."),
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="Name the shipped recipes and runs.")] = False,
    quantize: Annotated[
        str | None,
        typer.Option(help="For a GGUF file: keep its quantised values, or none: make floats.", show_default="keep"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Parameters, FLOPs and memory of a model, from its specification alone.

    A run description is planned as `anyformer train` would run it, a micro-batch at a time.
    """
    from anyformer.planning import largest_batch
    from anyformer.planning import plan as make_plan

    if list_:
        names = shipped()
        typer.echo(json.dumps(names) if as_json else _listed(names))
        return
    if spec is None:
        raise UserError(
            "nothing to plan", remedy="give a recipe's name (`anyformer plan --list`), a file or a checkpoint"
        )
    loaded, usual = _what(spec, set_ or [])
    rows, length, optimizer = batch or usual.rows, context or usual.context, optimizer or usual.optimizer
    lengths = {"context": length, "source": source}
    made = make_plan(loaded, batch=rows, **lengths, prefix=prefix, dtype=dtype, optimizer=optimizer)
    made = replace(made, facts={**made.facts, **usual.facts})
    file = _gguf_file(spec)
    if file is None and quantize is not None:
        raise UserError("only a GGUF file says what it holds quantised", where="--quantize", got=quantize)
    placed: list[Any] = []
    if file is not None and not set_:
        placed, placement = _placed(file, quantize_of(quantize or "keep"), dtype)
        made = replace(made, memory=replace(made.memory, weights=sum(each.n_bytes for each in placed)))
    table, text = made.to_dict(), made.table()
    if placed:
        table["tensors"] = [asdict(each) for each in placed]
        text += f"\n\n{placement}"
    if memory is not None:
        fits = largest_batch(loaded, parse_bytes(memory), **lengths, dtype=dtype, optimizer=optimizer)
        table["largest_batch"] = {"memory": parse_bytes(memory), "rows": fits}
        text += f"\n\nin {memory} fit {fits:,} rows of {made.context:,} tokens"
        text += f" from {made.source:,}" if made.source else ""
    typer.echo(json.dumps(table, indent=1) if as_json else text)


def _gguf_file(source: str) -> Path | None:
    """The GGUF file that a source means, itself or the one of a folder."""
    from anyformer.spec.folder import is_gguf, resolve

    path = Path(source)
    found = resolve(path) if path.is_dir() else path
    return found if is_gguf(found) else None


def _placed(file: Path, quantize: str | None, dtype: str) -> tuple[list[Any], str]:
    """What becomes of each tensor of a GGUF file in memory, and a table of it."""
    from anyformer.weights.gguf.format import read_gguf
    from anyformer.weights.gguf.placement import placements, table
    from anyformer.weights.gguf.reading import Understood, matched, read_place

    said = read_gguf(file)
    place = read_place(said)
    model = Understood(said, place, matched(place, said).taken)
    placed = placements(model, quantize=quantize, dtype=dtype)
    return placed, table(placed)


class _Usual(NamedTuple):
    """What holds where an option is not given, and what else a run says of itself."""

    rows: int = 8
    context: int | None = None
    optimizer: str = "adamw"
    facts: Mapping[str, str] = {}


def _what(source: str, overrides: list[str]) -> "tuple[ModelSpec, _Usual]":
    """The model to plan, and what its run says of how it is trained."""
    from anyformer.weights.source import load_spec

    if _gguf_file(source) is not None:
        return load_spec(source, overrides), _Usual(rows=1, optimizer="none")
    if not is_run(source):
        return load_spec(source, overrides), _Usual()
    from anyformer.train.planned import expected_spec, planned
    from anyformer.train.run import load_run

    run = load_run(source, overrides)
    spec = expected_spec(run)
    return spec, _Usual(run.rows_per_forward(), run.data.context, run.optimizer.kind, planned(run, spec).facts)


def _listed(names: dict[str, list[str]]) -> str:
    words = {"models": "models", "runs": "runs, for `anyformer train` too"}
    return "\n".join(line for key, group in names.items() for line in (f"{words[key]}:", *(f"  {n}" for n in group)))
