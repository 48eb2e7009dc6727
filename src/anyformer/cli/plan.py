"""`anyformer plan`: what a model costs, before any compute."""

import json
from typing import Annotated

import typer

from anyformer.errors import UserError

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


def plan(
    spec: Annotated[
        str | None,
        typer.Argument(help="A recipe's name or file, a specification, or a checkpoint.", show_default=False),
    ] = None,
    batch: Annotated[int, typer.Option(help="Rows of a batch.", min=1)] = 8,
    context: Annotated[
        int | None, typer.Option(help="Tokens a row.", min=1, show_default="the model's context, or 1024")
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or float64.")] = "float32",
    optimizer: Annotated[str, typer.Option(help="adamw, muon, sgd, or none for inference.")] = "adamw",
    memory: Annotated[
        str | None, typer.Option(help="Say the largest batch that fits, such as 16GiB.", show_default=False)
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change the recipe; may be repeated.")
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="Name the shipped recipes.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Parameters, FLOPs and memory of a model, from its specification alone."""
    from anyformer.planning import largest_batch
    from anyformer.planning import plan as make_plan
    from anyformer.spec import load_spec, recipe_names

    if list_:
        typer.echo(json.dumps(recipe_names()) if as_json else "\n".join(recipe_names()))
        return
    if spec is None:
        raise UserError(
            "nothing to plan", remedy="give a recipe's name (`anyformer plan --list`), a file or a checkpoint"
        )
    loaded = load_spec(spec, set_ or [])
    made = make_plan(loaded, batch=batch, context=context, dtype=dtype, optimizer=optimizer)
    table, text = made.to_dict(), made.table()
    if memory is not None:
        fits = largest_batch(loaded, parse_bytes(memory), context=context, dtype=dtype, optimizer=optimizer)
        table["largest_batch"] = {"memory": parse_bytes(memory), "rows": fits}
        text += f"\n\nin {memory} fit {fits} rows of {made.context} tokens"
    typer.echo(json.dumps(table, indent=1) if as_json else text)
