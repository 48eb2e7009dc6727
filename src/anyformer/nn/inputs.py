"""The arguments of a model's call beside its tokens."""

from collections.abc import Iterable
from typing import TypedDict

import torch
from torch import Tensor

from anyformer.nn.cache import Cache
from anyformer.nn.moe import Routing
from anyformer.nn.tap import Tap
from anyformer.spec.problems import did_you_mean


class Inputs(TypedDict, total=False):
    """The arguments of a call beside its tokens; `Model.forward` says what each is."""

    embeddings: Tensor | None
    padding: Tensor | None
    segments: Tensor | None
    positions: Tensor | None
    types: Tensor | None
    prefix: Tensor | None
    cache: Cache | None
    source: Tensor | None
    source_padding: Tensor | None
    source_segments: Tensor | None
    memory: Tensor | None
    routing: Routing | None
    tap: Tap | None


KNOWN = (*Inputs.__annotations__,)
_ELSEWHERE = {
    "input_ids": "tokens",
    "attention_mask": "padding",
    "mask": "padding",
    "position_ids": "positions",
    "token_type_ids": "types",
    "inputs_embeds": "embeddings",
    "past_key_values": "cache",
}
"""Names that other libraries have for ours."""


def check_names(call: str, names: Iterable[str]) -> None:
    """Raises `TypeError`, as Python does, for an argument that a call does not take, and names the nearest."""
    if torch.compiler.is_compiling():
        return
    for name in names:
        if name not in KNOWN:
            near = _ELSEWHERE.get(name) or did_you_mean(name, KNOWN)
            remedy = f"did you mean `{near}`?" if near else f"it takes tokens, {', '.join(KNOWN)}"
            raise TypeError(f"{call} takes no argument `{name}`; {remedy}")
