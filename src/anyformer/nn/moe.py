"""Mixtures of experts (Shazeer et al. 2017): a router, experts on the tokens that chose them, and what training asks.

Token–expert pairs are sorted by expert, so that each expert is a few products over neighbouring rows; no pair is ever
dropped. On the CPU that is a loop over the experts that were chosen, which reads each expert's matrices once and is
faster than gathering matrices for a single token, too. Under `torch.compile` and on other devices the same products are
one operation whose shapes do not depend on how many tokens an expert has.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anyformer.nn.ffn import feed_forward, inner
from anyformer.nn.layers import Linear
from anyformer.nn.precision import exact
from anyformer.nn.quantised import Quantised, product
from anyformer.nn.roles import Role
from anyformer.spec.ffn import Gated, MoE, SingleFeedForward

_LEAST_SUM = 1e-20
"""Keeps the division by the chosen scores' sum finite where all of them have underflowed."""

_HALVES = (torch.float16, torch.bfloat16)


class Choice(NamedTuple):
    """What a router decided, in float32 at least: logits and scores [B, T, E]; experts int64 and weights [B, T, K]."""

    logits: Tensor
    scores: Tensor
    experts: Tensor
    weights: Tensor


class Router(nn.Module):
    """Chooses `top_k` experts for each token and says how much each weighs.

    `choice_bias` [E] is a buffer: checkpoints hold it, gradients do not reach it, and it stays in float32 at least.
    """

    choice_bias: Tensor | None

    def __init__(self, spec: MoE, d_model: int) -> None:
        super().__init__()
        self.spec = spec
        self.roles: dict[str, Role] = {"weight": "router", "bias": "bias"}
        self.starts = {"choice_bias": 0.0}
        self.weight = nn.Parameter(torch.empty(spec.n_experts, d_model))
        self.bias = nn.Parameter(torch.empty(spec.n_experts)) if spec.router_bias else None
        self.register_buffer("choice_bias", torch.zeros(spec.n_experts) if spec.choice_bias else None)

    def _apply(self, fn: Any, recurse: bool = True) -> "Router":
        before = self.choice_bias
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if before is not None and self.choice_bias is not None and self.choice_bias.dtype in _HALVES:
            self.choice_bias = before.to(self.choice_bias.device)
        return self

    def forward(self, x: Tensor) -> Choice:
        """x [B, T, C] of any floating type."""
        wide = exact(x.dtype)
        with _unrounded(x):
            bias = None if self.bias is None else self.bias.to(wide)
            logits = F.linear(x.to(wide), self.weight.to(wide), bias)
        scores = logits.softmax(-1) if self.spec.scoring == "softmax" else logits.sigmoid()
        experts = self._best(scores.detach())
        weights = scores.gather(-1, experts)
        if self.spec.normalise:
            weights = weights / (weights.sum(-1, keepdim=True) + _LEAST_SUM)
        return Choice(logits, scores, experts, weights * self.spec.scale if self.spec.scale != 1 else weights)

    def _best(self, scores: Tensor) -> Tensor:
        """The chosen experts, best first; of equals the lower number. [B, T, E] -> int64 [B, T, K]."""
        if self.choice_bias is not None:
            scores = scores + self.choice_bias
        groups = self.spec.groups
        if groups is not None:
            grouped = scores.view(*scores.shape[:-1], groups.n_groups, -1)
            n_counted = min(2, grouped.shape[-1]) if groups.score == "top2" else 1
            best = _first(grouped.topk(n_counted, -1).values.sum(-1), groups.top_groups)
            closed = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(-1, best, False)
            scores = grouped.masked_fill(closed[..., None], -torch.inf).flatten(-2)
        return _first(scores, self.spec.top_k)


def _unrounded(x: Tensor) -> torch.autocast | nullcontext[None]:
    """Without autocast, which the meta device does not know."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


def _first(scores: Tensor, n: int) -> Tensor:
    """Where the `n` largest of the last dimension are. `topk` leaves open which of equals it takes."""
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., :n]


def _ends(counts: Tensor) -> list[tuple[int, int, int]]:
    """Every expert that has rows, the first of them, and the one after the last."""
    found, start = [], 0
    for expert, count in enumerate(counts.tolist()):
        if count:
            found.append((expert, start, start + count))
        start += count
    return found


def _by_kernel(a: Tensor, b: Tensor) -> bool:
    """Whether torch's grouped product takes two matrices: bfloat16 on CUDA, rows of whole 16-byte words."""
    return (
        a.is_cuda
        and a.dtype == b.dtype == torch.bfloat16
        and a.shape[-1] % 8 == 0
        and b.shape[-1] % 8 == 0
        and b.shape[-2] % 8 == 0
        and hasattr(F, "grouped_mm")
        and torch.cuda.get_device_capability(a.device) >= (8, 0)
    )


@torch.library.custom_op("anyformer::expert_products", mutates_args=())
def expert_products(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """x_e W_eᵀ for every expert e, [P, out].

    One kernel for bfloat16 on CUDA; elsewhere a product for each expert, which on a device waits for the counts.

    Args:
        x: [P, in], sorted by expert.
        weight: [E, out, in].
        counts: int64 [E], the rows of each expert.
    """
    if _by_kernel(x, weight):
        grouped: Tensor = F.grouped_mm(x, weight.mT, offs=counts.cumsum(0).int())
        return grouped
    out = x.new_empty(x.shape[0], weight.shape[1])
    for expert, start, stop in _ends(counts):
        torch.mm(x[start:stop], weight[expert].T, out=out[start:stop])
    return out


@torch.library.custom_op("anyformer::expert_outer_products", mutates_args=())
def expert_outer_products(grad: Tensor, x: Tensor, counts: Tensor) -> Tensor:
    """grad_eᵀ x_e for every expert e, zero where it has no rows. grad [P, out], x [P, in] -> [E, out, in]."""
    out = x.new_zeros(counts.shape[0], grad.shape[1], x.shape[1])
    for expert, start, stop in _ends(counts):
        torch.mm(grad[start:stop].T, x[start:stop], out=out[expert])
    return out


@expert_products.register_fake
def _(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@expert_outer_products.register_fake
def _(grad: Tensor, x: Tensor, counts: Tensor) -> Tensor:
    return x.new_empty(counts.shape[0], grad.shape[1], x.shape[1])


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, weight, counts = ctx.saved_tensors
    grad = grad.contiguous()
    to_x = expert_products(grad, weight.mT, counts) if ctx.needs_input_grad[0] else None
    to_weight = expert_outer_products(grad, x, counts) if ctx.needs_input_grad[1] else None
    return to_x, to_weight, None


expert_products.register_autograd(_backward, setup_context=_keep)


class ExpertLinear(nn.Module):
    """x Wᵀ + b with a matrix and a bias for each expert, [E, out, in] and [E, out]."""

    def __init__(self, n_experts: int, n_in: int, n_out: int, *, bias: bool, role: Role) -> None:
        super().__init__()
        self.roles: dict[str, Role] = {"weight": role, "bias": "bias"}
        self.keepable = True
        self.weight: nn.Parameter | Quantised = nn.Parameter(torch.empty(n_experts, n_out, n_in))
        self.bias = nn.Parameter(torch.empty(n_experts, n_out)) if bias else None

    def forward(self, x: Tensor, expert: Tensor, counts: Tensor) -> Tensor:
        """x [P, in] sorted by `expert` [P], of which there are `counts` [E] -> [P, out]."""
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if not x.is_meta and torch.is_autocast_enabled(kind) else x.dtype
        assert isinstance(self.weight, Tensor)
        out: Tensor = expert_products(x.to(dtype), self.weight.to(dtype), counts)
        return out if self.bias is None else out + self.bias.to(dtype).index_select(0, expert)

    def each(self) -> list[tuple[Tensor | Quantised, Tensor | None]]:
        """Each expert's matrix and bias. Taken apart once: a gradient then fills the stack once, not once an expert."""
        weights = self.weight.unbind()
        return list(zip(weights, self.bias.unbind() if self.bias is not None else [None] * len(weights), strict=True))


class Experts(nn.Module):
    """E feed-forward networks of one shape, their matrices stacked."""

    def __init__(self, spec: SingleFeedForward, n_experts: int, d_model: int) -> None:
        super().__init__()
        self.spec = spec
        wide, narrow = (n_experts, d_model, spec.d_ff), (n_experts, spec.d_ff, d_model)
        self.gate = ExpertLinear(*wide, bias=spec.bias, role="hidden") if isinstance(spec, Gated) else None
        self.up = ExpertLinear(*wide, bias=spec.bias, role="hidden")
        self.down = ExpertLinear(*narrow, bias=spec.bias, role="residual")

    def forward(self, x: Tensor, expert: Tensor, counts: Tensor) -> Tensor:
        """x [P, C] sorted by `expert` [P], of which there are `counts` [E] -> [P, C]."""
        kept = any(isinstance(module, Quantised) for module in self.modules())
        if (torch.compiler.is_compiling() or x.device.type != "cpu") and not kept:
            return self.together(x, expert, counts)
        return self.one_by_one(x, counts)

    def together(self, x: Tensor, expert: Tensor, counts: Tensor) -> Tensor:
        """All experts at once, in shapes that do not depend on the counts."""
        gate = None if self.gate is None else self.gate(x, expert, counts)
        hidden = inner(self.spec, self.up(x, expert, counts), gate, training=self.training)
        return self._dropped(self.down(hidden, expert, counts))

    def one_by_one(self, x: Tensor, counts: Tensor) -> Tensor:
        """Those experts that have tokens, in turn."""
        ups, downs = self.up.each(), self.down.each()
        gates = None if self.gate is None else self.gate.each()
        parts = []
        for expert, start, stop in _ends(counts):
            rows = x[start:stop]
            gate = None if gates is None else product(rows, *gates[expert])
            hidden = inner(self.spec, product(rows, *ups[expert]), gate, training=self.training)
            parts.append(product(hidden, *downs[expert]))
        return self._dropped(torch.cat(parts))

    def _dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.spec.out_dropout) if self.training and self.spec.out_dropout else x


class MoELayer(nn.Module):
    """Σ weight · expert(x) over a token's chosen experts, and the shared expert. Tokens do not depend on each other."""

    def __init__(self, spec: MoE, d_model: int) -> None:
        super().__init__()
        self.spec = spec
        self.router = Router(spec, d_model)
        self.experts = Experts(spec.expert, spec.n_experts, d_model)
        self.shared = None if spec.shared is None else feed_forward(spec.shared, d_model)
        self.shared_gate = Linear(d_model, 1, bias=False, role="router", keepable=False) if spec.shared_gate else None

    def forward(self, x: Tensor, real: Tensor | None = None, routing: "Routing | None" = None) -> Tensor:
        """[B, T, C] -> [B, T, C].

        Args:
            x: token vectors.
            real: bool [B, T], False = padding, which `routing` then does not count; None where all are real.
            routing: collects what was chosen.
        """
        b, t, c = x.shape
        choice: Choice = self.router(x)
        if routing is not None:
            routing.add(self, choice, real)
        expert, order = torch.sort(choice.experts.flatten(), stable=True)
        k = self.spec.top_k
        counts = _counts(expert[None], self.spec.n_experts)[0]
        # Each pair is moved once there and once back: the gradient of a token is then a sum in a fixed order on every
        # device, where adding pairs at their token's place would use atomics on a GPU.
        pairs = x.unsqueeze(2).expand(b, t, k, c).reshape(b * t * k, c).index_select(0, order)
        out: Tensor = self.experts(pairs, expert, counts)
        wide = exact(x.dtype)
        back = out.index_select(0, order.argsort()).view(b, t, k, c)
        mixed = (back.to(wide) * choice.weights.unsqueeze(-1)).sum(2)
        return (mixed + self._common(x).to(wide) if self.shared is not None else mixed).to(out.dtype)

    def _common(self, x: Tensor) -> Tensor:
        """What the shared expert gives, [B, T, C]."""
        assert self.shared is not None
        shared: Tensor = self.shared(x)
        if self.shared_gate is None:
            return shared
        wide = exact(x.dtype)
        with _unrounded(x):
            gate = F.linear(x.to(wide), self.shared_gate.weight.to(wide)).sigmoid()
        return shared.to(wide) * gate


def _counts(experts: Tensor, n_experts: int, real: Tensor | None = None) -> Tensor:
    """How often each expert is named in each row: int64 [R, N] -> int64 [R, E]. `real` [R, N] leaves some out."""
    ones = torch.ones_like(experts) if real is None else real.to(experts.dtype)
    return experts.new_zeros(experts.shape[0], n_experts).scatter_add(1, experts, ones)


def moe_layers(model: nn.Module) -> dict[str, MoELayer]:
    """The mixtures of experts in a model by their names; one that several layers share is there once."""
    return {path: module for path, module in model.named_modules() if isinstance(module, MoELayer)}


class _Part(NamedTuple):
    """A loss times its coefficient, summed over `n` sequences or tokens."""

    total: Tensor
    n: Tensor


class Routing:
    """Collects what the mixtures of experts of `model` chose in a call: `model(tokens, routing=routing)`.

    Losses come in sums and counts, so that micro-batches add up to the whole batch. A sequence is a row with a real
    token, and each weighs the same however long it is; the z loss weighs each real token the same. A balance loss over
    the "batch" is over the tokens of one call, weighted by their number: cut into micro-batches it is another loss.

    Args:
        model: gives the layers' names; the module itself where it is called through a compiled wrapper.

    Attributes:
        loads: for each layer by name the number of real tokens that chose each expert, int64 [E].
    """

    def __init__(self, model: nn.Module) -> None:
        self._names = {id(layer): name for name, layer in moe_layers(model).items()}
        self.loads: dict[str, Tensor] = {}
        self._by_sequence: list[_Part] = []
        self._by_batch: list[_Part] = []
        self._z: list[_Part] = []

    def add(self, layer: MoELayer, choice: Choice, real: Tensor | None) -> None:
        """What `layer` chose in a call; `real` [B, T] says which tokens count."""
        spec = layer.spec
        b, t, k = choice.experts.shape
        kept = torch.ones(b, t, dtype=torch.bool, device=choice.experts.device) if real is None else real.expand(b, t)
        repeated = kept[..., None].expand(b, t, k).reshape(b, t * k)
        counts = _counts(choice.experts.reshape(b, t * k), spec.n_experts, repeated)
        name = self._names[id(layer)]
        load = counts.sum(0)
        self.loads[name] = self.loads[name] + load if name in self.loads else load
        lengths = kept.sum(1)
        if spec.balance_loss:
            self._balance(spec, choice.scores, counts, kept, lengths)
        if spec.z_loss:
            squares = choice.logits.logsumexp(-1).square()
            self._z.append(_Part(spec.z_loss * squares.masked_fill(~kept, 0).sum(), lengths.sum()))

    def _balance(self, spec: MoE, scores: Tensor, counts: Tensor, kept: Tensor, lengths: Tensor) -> None:
        shares = scores if spec.scoring == "softmax" else scores / (scores.sum(-1, keepdim=True) + _LEAST_SUM)
        shares = shares.masked_fill(~kept[..., None], 0).sum(1)
        factor = spec.balance_loss * spec.n_experts / spec.top_k
        if spec.balance_over == "sequence":
            squared = lengths.clamp(min=1).to(shares.dtype)[:, None].square()
            total = factor * (counts * shares / squared).sum()
            self._by_sequence.append(_Part(total, (lengths > 0).sum()))
        else:
            n_tokens = lengths.sum()
            total = factor * (counts.sum(0) * shares.sum(0)).sum() / n_tokens.clamp(min=1)
            self._by_batch.append(_Part(total, n_tokens))

    def losses(self, n_sequences: int | None = None, n_tokens: int | None = None) -> tuple[Tensor, Tensor]:
        """The balance loss and the z loss, scalars: sums over layers, times their coefficients; 0 where there is none.

        Args:
            n_sequences: what to divide sums over sequences by; those of this call where None.
            n_tokens: what to divide sums over tokens by; those of this call where None.
        """
        by_tokens = _mean(self._by_batch, n_tokens)
        return _mean(self._by_sequence, n_sequences) + by_tokens, _mean(self._z, n_tokens)

    def loss(self) -> Tensor:
        """What a training objective adds for this call: all losses, a scalar."""
        balance, z = self.losses()
        return balance + z

    def metrics(self) -> dict[str, float]:
        """`expert_load`, the largest load over the mean load, in the worst layer; `idle_experts`, the share without."""
        return dict(zip(LOAD_METRICS, load_metrics(self.loads).tolist(), strict=True)) if self.loads else {}


def _mean(parts: list[_Part], count: int | None) -> Tensor:
    if not parts:
        return torch.zeros(())
    divided = (part.total / (part.n.clamp(min=1) if count is None else max(1, count)) for part in parts)
    return torch.stack(list(divided)).sum()


LOAD_METRICS = ("expert_load", "idle_experts")


def load_metrics(loads: Mapping[str, Tensor]) -> Tensor:
    """The numbers named in `LOAD_METRICS`, float64 [2]. `loads`: int64 [E] for each layer, at least one."""
    most = [load.max() / load.double().mean().clamp(min=1e-300) for load in loads.values()]
    idle = torch.cat([load == 0 for load in loads.values()])
    return torch.stack([torch.stack(most).max(), idle.double().mean()])


@torch.no_grad()
def update_choice_bias(model: nn.Module, loads: Mapping[str, Tensor]) -> None:
    """bias ← bias + rate · sign(mean load − load) for every layer with a `bias_rate` (DeepSeek-V3 2024, section 2.1.2).

    Args:
        model: whose layers `loads` names.
        loads: the tokens of each expert, int64 [E], over all micro-batches and processes of the update.
    """
    for name, layer in moe_layers(model).items():
        bias = layer.router.choice_bias
        if bias is not None and layer.spec.bias_rate and name in loads:
            load = loads[name].double()
            bias.add_((load.mean() - load).sign().to(bias.dtype), alpha=layer.spec.bias_rate)
