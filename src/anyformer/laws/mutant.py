"""What a mutant is: a model broken on purpose, to see that the laws would notice."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from anyformer.nn.model import Model

Break = Callable[[Model], AbstractContextManager[None]]
"""Breaks the code, or the model it is given, for as long as the context lasts."""


@dataclass(frozen=True)
class Mutant:
    """A fault, the laws of which each must notice it, and a recipe on which it shows.

    Attributes:
        name: what is wrong, in words.
        laws: that catch it.
        recipe: of the model.
        broken: brings the fault about.
    """

    name: str
    laws: tuple[str, ...]
    recipe: dict[str, Any]
    broken: Break


@contextmanager
def _patched(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    # As it stands in the owner: asking a class for it would bind class methods and unwrap static ones.
    before = vars(owner)[name]
    setattr(owner, name, make(before))
    try:
        yield
    finally:
        setattr(owner, name, before)


def swapped(owner: Any, name: str, make: Callable[[Any], Any]) -> Break:
    """`owner.name` is `make` of what it was; a class or a module."""
    return lambda model: _patched(owner, name, make)


def entry(table: dict[str, Any], name: str, make: Callable[[Any], Any]) -> Break:
    """`table[name]` is `make` of what it was."""

    @contextmanager
    def broken(model: Model) -> Iterator[None]:
        before = table[name]
        table[name] = make(before)
        try:
            yield
        finally:
            table[name] = before

    return broken


def recipe(**more: Any) -> dict[str, Any]:
    """A small decoder on which little hides, with some of its tables replaced."""
    return {
        "vocab_size": 19,
        "d_model": 20,
        "n_layers": 2,
        "ffn": {"kind": "swiglu", "d_ff": 21},
        "attention": {"n_heads": 6, "n_kv_heads": 3, "d_head": 6, "d_value": 5, "position": "rope"},
    } | more


def attention(**more: Any) -> dict[str, Any]:
    """That decoder with other words for its attention."""
    return recipe(attention=recipe()["attention"] | more)


LEARNED = recipe(
    max_positions=40, embed={"position": "learned"}, attention={"n_heads": 5, "d_head": 6, "position": "none"}
)
"""Positions on the embeddings."""
WINDOW = attention(position="alibi", mask={"kind": "causal", "window": 3, "sinks": 2})
"""A window and the first tokens, with ALiBi."""
RELATIVE = attention(position={"kind": "relative", "n_buckets": 8, "max_distance": 9})
"""T5's buckets."""
LATENT = recipe(
    attention={"kind": "latent", "n_heads": 5, "kv_rank": 4, "d_nope": 5, "d_rope": 4, "d_value": 3, "position": "rope"}
)
"""Latent attention."""
EXPERTS = recipe(
    ffn={
        "kind": "moe",
        "n_experts": 5,
        "top_k": 2,
        "choice_bias": True,
        "balance_loss": 0.3,
        "z_loss": 0.1,
        "expert": {"kind": "swiglu", "d_ff": 9, "bias": True},
    }
)
"""A mixture of experts."""
ENCODER = recipe(
    architecture="encoder",
    attention={"n_heads": 5, "d_head": 6, "position": "none"},
    head={"kind": "token", "n_labels": 3},
)
"""An encoder without positions."""
POOLED = ENCODER | {"head": {"kind": "sequence", "n_labels": 3, "pool": "mean"}}
"""An encoder that scores rows."""
BOTH = recipe(architecture="encoder-decoder")
"""An encoder and a decoder."""
