"""FlexAttention (Dong et al. 2024): a kernel compiled for the mask and the scores of a description.

The blocks of keys that a block of queries sees come from the description's own bounds, without a T×S tensor.

FlexAttention brings torch's compiler, which takes as long to import as torch itself and 90 MB: it is imported by the
first call.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from anyformer.nn.attend.bias import Bias, DistanceBias
from anyformer.nn.attend.call import Call, Unsupported
from anyformer.nn.attend.masks import All, Dense, Padding, Prefix, PrefixKeys, Segments, Term, tiles
from anyformer.nn.attend.shapes import four, placed

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128
"""Queries and keys that the kernel takes or skips together."""

Place = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""The positions of a query and a key from the row of the batch and the two indexes."""


def attend(call: Call) -> Tensor:
    """The output [B, T, H, Dv] in q's dtype. Raises `Unsupported` with the reason."""
    refuse(call)
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    q, k, v = (x.transpose(1, 2) for x in (call.q, call.k, call.v))
    run: Any = flex_attention if torch.compiler.is_compiling() else _compiled(q.device.type)
    options: dict[str, Any] = {
        "score_mod": _score(call) if call.softcap is not None or call.bias is not None else None,
        "block_mask": _blocks(call),
        "scale": call.scale,
        "enable_gqa": q.shape[1] != k.shape[1],
    }
    if call.sinks is not None:
        options["return_aux"] = AuxRequest(lse=True)
    try:
        made = run(q, k, v, **options)
    except failures() as error:
        raise Unsupported(f"FlexAttention did not compile for this call here: {error}") from error
    if call.sinks is None:
        plain: Tensor = made.transpose(1, 2)
        return plain
    out, aux = made
    # A sink's share is what the softmax loses: out · e^lse / (e^lse + e^sink).
    share = torch.sigmoid(aux.lse - call.sinks[None, :, None].to(aux.lse.dtype))
    joined: Tensor = (out * share[..., None]).to(out.dtype).transpose(1, 2)
    return joined


def failures() -> tuple[type[Exception], ...]:
    """What the compiler raises where it cannot compile a call."""
    return (
        torch._dynamo.exc.TorchDynamoException,
        torch._dynamo.exc.FailOnRecompileLimitHit,
        torch._inductor.exc.InductorError,
    )


def refuse(call: Call) -> None:
    """Raises `Unsupported` for what FlexAttention cannot compute, without computing anything."""
    if call.dropout:
        raise Unsupported("FlexAttention has no dropout on the weights")
    if call.q.dtype == torch.float64:
        raise Unsupported("FlexAttention has no kernels in float64")
    inputs = [call.q, call.k, call.v, call.sinks, None if call.bias is None else call.bias.tensor]
    wanted = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    if call.q.device.type == "cpu" and wanted:
        raise Unsupported("FlexAttention has no backward pass on the CPU")
    if call.q.device.type == "cpu" and call.sinks is not None:
        raise Unsupported("FlexAttention on the CPU does not tell the log-sum-exp that a sink logit needs")


@functools.cache
def _compiled(device: str) -> Callable[..., Any]:
    # With lengths left open, the compiler of torch 2.13 writes C++ for the CPU that does not compile. A whole graph or
    # an error: without it, too many descriptions would go to an implementation that holds T×S.
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, fullgraph=True, dynamic=False if device == "cpu" else None)


def _placing(queries: Tensor, keys: Tensor) -> Place:
    """From positions [B or 1, T] and [B or 1, S]."""
    many_q, many_k = queries.shape[0] > 1, keys.shape[0] > 1

    def place(b: Tensor, i: Tensor, j: Tensor) -> tuple[Tensor, Tensor]:
        return queries[b if many_q else 0, i], keys[b if many_k else 0, j]

    return place


def _blocks(call: Call) -> "BlockMask | None":
    """Which blocks of keys each block of queries sees in part or whole, for each row of the batch or all."""
    visible = All.of(call.visible)
    if not visible.terms:
        return None
    t, s = call.q.shape[1], call.k.shape[1]
    queries, keys = placed(visible.queries, visible.keys, t, s, call.q.device)
    some, whole = visible.reach(tiles(queries, keys, BLOCK, BLOCK))
    whole = whole & some
    # A block that the sequence does not fill is masked at its end.
    part = some & ~whole
    mask = _mask(visible.terms, _placing(queries, keys))
    from torch.nn.attention.flex_attention import BlockMask

    return BlockMask.from_kv_blocks(*_ordered(part), *_ordered(whole), BLOCK, mask, (t, s))


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """bool [B or 1, n, m] as the number of blocks [B or 1, 1, n] and their indexes first [B or 1, 1, n, m], int32."""
    order = torch.argsort(blocks.int(), dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[:, None], order.to(torch.int32)[:, None].contiguous()


def _mask(terms: tuple[Term, ...], place: Place) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    conditions = [_condition(term) for term in terms]

    def mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        at = place(b, i, j)
        seen = conditions[0](b, h, i, j, *at)
        for condition in conditions[1:]:
            seen = seen & condition(b, h, i, j, *at)
        return seen

    return mask


def _condition(term: Term) -> Callable[..., Tensor]:
    """Whether a key is seen, from the batch's row, head, the two indexes and the two positions."""
    if isinstance(term, Segments):
        ids, others = term.queries, term.queries if term.keys is None else term.keys
        return lambda b, h, i, j, q, k: ids[b, i] == others[b, j]
    if isinstance(term, Padding):
        real = term.real
        return lambda b, h, i, j, q, k: real[b, j]
    if isinstance(term, PrefixKeys):
        marked = term.real
        return lambda b, h, i, j, q, k: (k <= q) | marked[b, j]
    if isinstance(term, Prefix) and isinstance(term.length, Tensor):
        lengths = term.length
        return lambda b, h, i, j, q, k: (k <= q) | (k < lengths[b])
    if isinstance(term, Dense):
        read = _reader(term.values)
        return lambda b, h, i, j, q, k: read(b, h, i, j)
    return lambda b, h, i, j, q, k: term.sees(q, k)


def _reader(values: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Elements of values that broadcast to [B, H, T, S]."""
    values = four(values)
    n_b, n_h, n_i, n_j = (size > 1 for size in values.shape)
    return lambda b, h, i, j: values[b if n_b else 0, h if n_h else 0, i if n_i else 0, j if n_j else 0]


def _score(call: Call) -> Callable[..., Tensor]:
    softcap, bias = call.softcap, call.bias
    add = None if bias is None else _adder(bias, call)

    def score(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        return score if add is None else score + add(b, h, i, j)

    return score


def _adder(bias: Bias, call: Call) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    if not isinstance(bias, DistanceBias):
        return _reader(bias.tensor)
    place = _placing(*placed(bias.queries, bias.keys, call.q.shape[1], call.k.shape[1], call.q.device))

    def add(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        q, k = place(b, i, j)
        return bias.of_head(h, k - q)

    return add
