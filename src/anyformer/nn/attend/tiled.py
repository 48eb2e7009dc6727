"""Attention over tiles with an online softmax: FlashAttention (Dao et al. 2022; Dao 2023) in plain PyTorch operations.

No T×S tensor exists in either pass, whatever the mask, bias, soft-cap, sink or dropout: a tile of scores is made, used
and overwritten, and the backward pass makes it again from q, k and each row's log-sum-exp. Tiles that no query sees are
skipped, tiles that are seen whole are not masked.

The two passes are operators of torch's library, so that a compiler calls them as they are.
"""

from typing import Any

import torch
from torch import Tensor

from anyformer.nn.attend.bias import Bias
from anyformer.nn.attend.call import Call
from anyformer.nn.attend.coded import code, decode
from anyformer.nn.attend.grid import Grid, Problem
from anyformer.nn.attend.masks import All
from anyformer.nn.precision import exact

Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""Of q, k, v, the sink logits and the bias; the last two are empty where there are none."""


def attend(call: Call) -> Tensor:
    """The output [B, T, H, Dv] in q's dtype. It has a first derivative only: differentiating twice raises."""
    text, tensors, bias = code(All.of(call.visible), call.bias)
    # On the host, so that the generator that dropout follows is the same for every device.
    seed = torch.randint(1 << 62, (), dtype=torch.int64) if call.dropout else None
    softcap = call.softcap or 0.0
    out: Tensor
    out, _ = _forward(call.q, call.k, call.v, call.sinks, bias, tensors, text, call.scale, softcap, call.dropout, seed)
    return out


@torch.library.custom_op("anyformer::tiled", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    bias: Tensor | None,
    tensors: list[Tensor],
    text: str,
    scale: float,
    softcap: float,
    dropout: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The output [B, T, H, Dv] and the log-sum-exp of each row, [B·G, T·H/G] in at least float32."""
    with torch.autocast(q.device.type, enabled=False):
        visible, added = decode(text, tensors, bias)
        return forward(Problem(q, k, v, visible, added, scale, softcap, sinks, dropout, _number(seed)))


@_forward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    bias: Tensor | None,
    tensors: list[Tensor],
    text: str,
    scale: float,
    softcap: float,
    dropout: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor]:
    (b, t, h, _), g = q.shape, k.shape[2]
    return q.new_empty(b, t, h, v.shape[3]), q.new_empty(b * g, t * (h // g), dtype=exact(q.dtype))


@torch.library.custom_op("anyformer::tiled_backward", mutates_args=())
def _backward(
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    bias: Tensor | None,
    tensors: list[Tensor],
    text: str,
    scale: float,
    softcap: float,
    dropout: float,
    seed: Tensor | None,
    into_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v, the sink logits and, where `into_bias`, the bias."""
    with torch.autocast(q.device.type, enabled=False):
        visible, added = decode(text, tensors, bias)
        problem = Problem(q, k, v, visible, added, scale, softcap, sinks, dropout, _number(seed))
        return backward(problem, out, lse, grad, into_bias)


@_backward.register_fake
def _(
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    bias: Tensor | None,
    tensors: list[Tensor],
    text: str,
    scale: float,
    softcap: float,
    dropout: float,
    seed: Tensor | None,
    into_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    into_sinks = q.new_empty(0) if sinks is None else torch.empty_like(sinks)
    of_bias = torch.empty_like(bias) if into_bias and bias is not None else q.new_empty(0)
    return (*(x.new_empty(x.shape) for x in (q, k, v)), into_sinks, of_bias)  # type: ignore[return-value]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sinks, bias, tensors, *ctx.plain, seed = inputs
    ctx.save_for_backward(*output, q, k, v, sinks, bias, seed, *tensors)


def _differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
    out, lse, q, k, v, sinks, bias, seed, *tensors = ctx.saved_tensors
    into_bias = bias is not None and ctx.needs_input_grad[4]
    *made, into_sinks, of_bias = _backward(
        grad, out, lse, q, k, v, sinks, bias, list(tensors), *ctx.plain, seed, into_bias
    )
    sides = (None if sinks is None else into_sinks, of_bias if into_bias else None)
    return (*made, *sides, [None] * len(tensors), *(None,) * (len(ctx.plain) + 1))


def _refuse_twice(ctx: Any, *grads: Tensor) -> None:
    raise RuntimeError(
        "the tiled attention backend has no second derivative; "
        'use backend="reference" (model.use_backend("reference")) to differentiate twice'
    )


_forward.register_autograd(_differentiate, setup_context=_keep)
_backward.register_autograd(_refuse_twice)


def _number(seed: Tensor | None) -> int:
    return 0 if seed is None else int(seed)


def forward(problem: Problem) -> tuple[Tensor, Tensor]:
    """The output [B, T, H, Dv] and each row's log-sum-exp (Dao 2023, algorithm 1)."""
    grid = Grid(problem)
    wide, width = grid.dtype, problem.v.shape[3]
    q = grid.queries(problem.q) * (problem.scale / (problem.softcap or 1.0))
    k = grid.keys(problem.k)
    # A column of ones beside the values: the product that mixes them sums the weights, too.
    v = _beside(grid.keys(problem.v), 1.0)
    out = q.new_empty(*q.shape[:2], width)
    lse = q.new_empty(q.shape[:2])
    sinks = grid.sinks()
    for block in grid.blocks():
        at = block.at
        shape = (*q[at].shape[:2], 1)
        # The sink is a key that came first: score its logit, value 0.
        top = q.new_full(shape, torch.finfo(wide).min) if sinks is None else sinks[at].clone()
        acc = q.new_zeros(*shape[:2], width + 1)
        acc[..., width:] = 0.0 if sinks is None else 1.0
        total = acc[..., width:].clone() if problem.dropout else acc[..., width:]
        for tile in block.tiles:
            scores = tile.scores(q[at], k[tile.keys], None)[0]
            above = torch.maximum(top, scores.amax(-1, keepdim=True))
            weights = scores.sub_(above).exp_()
            decay = top.sub_(above).exp_()
            top = above
            acc.mul_(decay)
            if problem.dropout:
                total.mul_(decay).add_(weights.sum(-1, keepdim=True))
                weights.mul_(tile.kept())
            acc.baddbmm_(weights, v[tile.keys])
        empty = total == 0
        total = total.masked_fill(empty, 1.0)
        torch.div(acc[..., :width], total, out=out[at])
        lse[at] = (top.masked_fill(empty, 0.0) + total.log()).squeeze(-1)
    return grid.queries_back(out).to(problem.q.dtype), lse


def backward(problem: Problem, out: Tensor, lse: Tensor, grad: Tensor, into_bias: bool) -> Gradients:
    """The gradients, from tiles of scores made again (Dao 2023, algorithm 2)."""
    grid = Grid(problem)
    factor = problem.scale / (problem.softcap or 1.0)
    q, k, v = grid.queries(problem.q) * factor, grid.keys(problem.k), grid.keys(problem.v)
    up = grid.queries(grad)
    delta = (up * grid.queries(out)).sum(-1)
    # −lse and −delta ride in the products that make the scores and the weights' gradients, as channels of their own.
    q_on, k_on, up_on, v_on = q, k, up, v
    if not problem.softcap:
        q_on, k_on = torch.cat([q, -lse[..., None]], -1), _beside(k, 1.0)
        q, k = q_on[..., :-1], k_on[..., :-1]
    if not problem.dropout:
        up_on, v_on = torch.cat([up, -delta[..., None]], -1), _beside(v, 1.0)
        up, v = up_on[..., :-1], v_on[..., :-1]
    dq, dk, dv = (x.new_zeros(x.shape) for x in (q, k, v))
    gathered = None if problem.bias is None or not into_bias else _gatherer(problem.bias, grid.dtype)
    for block in grid.blocks():
        at = block.at
        for tile in block.tiles:
            scores, slope = tile.scores(q_on[at], k_on[tile.keys], lse[at] if problem.softcap else None)
            weights = scores.exp_()
            inner = tile.product(up_on[at], v_on[tile.keys])
            if problem.dropout:
                kept = tile.kept()
                inner.mul_(kept).sub_(delta[at][..., None])
                dv[tile.keys].baddbmm_((weights * kept).transpose(1, 2), up[at])
            else:
                dv[tile.keys].baddbmm_(weights.transpose(1, 2), up[at])
            inner.mul_(weights)
            if gathered is not None:
                tile.gather(gathered, inner)
            if slope is not None:
                inner.mul_(slope)
            dq[at].baddbmm_(inner, k[tile.keys])
            dk[tile.keys].baddbmm_(inner.transpose(1, 2), q[at])
    dq, dk, dv = grid.queries_back(dq.mul_(factor)), grid.keys_back(dk), grid.keys_back(dv)
    sinks, into_sinks, of_bias = problem.sinks, problem.q.new_empty(0), problem.q.new_empty(0)
    if sinks is not None:
        share = (grid.sinks()[..., 0] - lse).exp_()  # type: ignore[index]
        into_sinks = -grid.queries_back((share * delta)[..., None]).sum((0, 1, 3)).to(sinks.dtype)
    if gathered is not None:
        assert problem.bias is not None
        of_bias = gathered.tensor.to(problem.bias.tensor.dtype)
    return dq.to(problem.q.dtype), dk.to(problem.k.dtype), dv.to(problem.v.dtype), into_sinks, of_bias


def _beside(x: Tensor, value: float) -> Tensor:
    """One more channel that holds a number."""
    return torch.cat([x, x.new_full((*x.shape[:2], 1), value)], -1)


def _gatherer(bias: Bias, dtype: torch.dtype) -> Bias:
    """A bias whose tensor gathers the gradient of another's."""
    return bias.of(torch.zeros_like(bias.tensor, dtype=dtype, memory_format=torch.contiguous_format))
