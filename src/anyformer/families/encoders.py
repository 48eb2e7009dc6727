"""What published encoders have in common: the parts of BERT, names of norms, and what heads add."""

from typing import Any

from anyformer.families.common import LAYER
from anyformer.families.family import Rule

TOKENS = {"head": {"kind": "token"}}
ANSWERS = {"head": {"kind": "span"}}
STATES = {"head": None, "pooler": {"activation": "tanh"}}
ROWS = {"head": {"kind": "sequence"}, "pooler": {"activation": "tanh"}}
"""A row from its first token, through the pooler."""


def masked(norm: dict[str, Any] = LAYER, **transform: Any) -> dict[str, Any]:
    """The head of a masked language model, with a bias of its own and a transform."""
    return {"head": {"kind": "language", "bias": True, "transform": {"norm": norm, **transform}}}


def layer_norm(theirs: str, ours: str) -> tuple[Rule, ...]:
    """A norm under its names, and under the older gamma and beta."""
    return (
        (f"{theirs}.{{p}}", f"{ours}.{{p}}"),
        (f"{theirs}.gamma", f"{ours}.weight"),
        (f"{theirs}.beta", f"{ours}.bias"),
    )
