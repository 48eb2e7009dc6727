"""Which attention backend each layer would take, without computing anything."""

from collections.abc import Iterable
from typing import NamedTuple

import torch

from anyformer.nn.attend import choose, refusal
from anyformer.nn.attend.bias import AlibiBias, Bias, BucketBias
from anyformer.nn.attend.call import checked
from anyformer.nn.attend.masks import Causal, Everything, Visible, Window
from anyformer.nn.block import Block
from anyformer.nn.latent import absorbs
from anyformer.spec.attention import Attention, Bidirectional, Latent
from anyformer.spec.positions import Alibi, RelativeBias


class Choice(NamedTuple):
    """A layer's attention backend and the reason for it."""

    layer: str
    backend: str
    why: str


def choices(
    stack: str, blocks: Iterable[Block], batch: int, context: int, cached: int, source: int, *, training: bool
) -> list[Choice]:
    """The choice of every attention of a stack for `batch` rows of `context` new tokens after `cached` stored ones."""
    name = "encoder.blocks" if stack == "encoder" else "blocks"
    found: list[Choice] = []
    for index, block in enumerate(blocks):
        own = (batch, context, cached + context)
        found.append(_choice(f"{name}.{index}", block.spec.attention, block.attention.backend, own, training))
        if block.cross is not None and block.spec.cross is not None:
            other = (batch, context, source)
            found.append(_choice(f"{name}.{index}.cross", block.spec.cross, block.cross.backend, other, training))
    return found


def _choice(layer: str, spec: Attention, asked: str, sizes: tuple[int, int, int], training: bool) -> Choice:
    b, t, s = sizes
    if isinstance(spec, Latent) and s > t and absorbs(spec, t, s):
        width = spec.kv_rank + spec.d_rope
        heads, widths = (spec.n_heads, 1, 1), (width, width, width)
    else:
        heads, widths = (spec.n_heads, spec.n_kv_heads, spec.n_kv_heads), (spec.d_head, spec.d_head, spec.d_value)
    shapes = ((b, n, h, d) for n, h, d in zip((t, s, s), heads, widths, strict=True))
    q, k, v = (torch.empty(shape, device="meta", requires_grad=training) for shape in shapes)
    sinks = torch.empty(spec.n_heads, device="meta") if spec.sink_logit else None
    dropout = spec.dropout if training else 0.0
    call = checked(q, k, v, _visible(spec), _bias(spec), spec.scale, spec.softcap, sinks, dropout)
    if asked == "auto":
        return Choice(layer, *choose(call))
    return Choice(layer, asked, refusal(call, asked) or "asked for")


def _visible(spec: Attention) -> Visible:
    visible: Visible = Everything() if isinstance(spec.mask, Bidirectional) else Causal()
    return visible if spec.mask.window is None else visible & Window(spec.mask.window, spec.mask.sinks)


def _bias(spec: Attention) -> Bias | None:
    position = spec.position
    if isinstance(position, Alibi):
        return AlibiBias(torch.empty(spec.n_heads, device="meta"), position.symmetric)
    if isinstance(position, RelativeBias):
        table = torch.empty(position.n_buckets, spec.n_heads, device="meta")
        return BucketBias(table, position.max_distance, position.bidirectional)
    return None
