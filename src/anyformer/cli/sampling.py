"""The options of sampling that `generate` and `chat` share, and the `Sampling` that they make."""

from typing import TYPE_CHECKING, Annotated

import typer

from anyformer.errors import UserError

if TYPE_CHECKING:
    from anyformer.infer import Sampling

MaxNewTokens = Annotated[int, typer.Option(help="The most tokens of a reply.")]
Temperature = Annotated[float, typer.Option(help="0 takes the most probable token each time.")]
TopK = Annotated[int | None, typer.Option(help="Draw from the k most probable tokens.", show_default="all")]
TopP = Annotated[float | None, typer.Option(help="Draw from the most probable tokens of mass p.", show_default="all")]
MinP = Annotated[
    float | None,
    typer.Option(help="Draw from tokens at least this share as probable as the first.", show_default="all"),
]
RepetitionPenalty = Annotated[
    float, typer.Option(help="Above 1 makes tokens of the prompt and the reply less probable.")
]
Stop = Annotated[
    list[str] | None,
    typer.Option(help="A text that ends a reply; may be given several times.", show_default="none"),
]
Device = Annotated[str, typer.Option(help="cpu, cuda, or auto.")]
Quantize = Annotated[
    str, typer.Option(help="keep: weights that a file holds quantised stay so; none: they become float32.")
]


def quantize_of(word: str) -> str | None:
    """What `--quantize` says to `load`. Raises `UserError`."""
    from anyformer.spec.problems import did_you_mean

    if word not in ("keep", "none"):
        near = did_you_mean(word, ("keep", "none"))
        remedy = f"did you mean `{near}`?" if near else "int8 and int4 of our own are not there yet"
        raise UserError(
            "weights cannot be held so", where="--quantize", got=word, expected="keep or none", remedy=remedy
        )
    return None if word == "none" else word


def may_pack(held: str | None, device: str) -> bool:
    """Whether a GGUF file's matrices may be packed before torch has said where the model goes."""
    return held == "keep" and device in ("auto", "cpu")


def sampling_of(
    *,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    repetition_penalty: float,
    seed: int,
    stop: list[str] | None,
) -> "Sampling":
    """The options as `infer.Sampling`. Raises `UserError` for one that cannot be used."""
    from anyformer.infer import Sampling

    return Sampling(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=tuple(stop or ()),
    )
