"""Mutants that the laws about tokens, rows and calls must notice."""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from anyformer.laws.mutant import (
    BOTH,
    ENCODER,
    EXPERTS,
    LATENT,
    LEARNED,
    POOLED,
    RELATIVE,
    WINDOW,
    Mutant,
    attention,
    recipe,
    swapped,
)
from anyformer.nn import attention as grouped
from anyformer.nn import frame, latent, model
from anyformer.nn.attend import masks
from anyformer.nn.attend.bias import Bias
from anyformer.nn.cache import Cache, RingShelf
from anyformer.nn.frame import Frame, Memory
from anyformer.nn.latent import LatentAttention
from anyformer.nn.layers import NormLayer
from anyformer.nn.model import Model
from anyformer.nn.moe import Router


def _one_too_far(before: Any) -> Any:
    return lambda self, q, k: k <= q + 1


def _window_too_large(before: Any) -> Any:
    return lambda self, q, k: ((q - k).abs() <= self.size) | (k < self.first)


def _no_first_tokens(before: Any) -> Any:
    return lambda self, q, k: (q - k).abs() < self.size


def _all_seen(before: Any) -> Any:
    return lambda self, q, k: torch.ones_like(before(self, q, k))


def _longer_prefix(before: Any) -> Any:
    return lambda prefix, *rest: before(prefix + 1, *rest)


def _seen_as_causal(before: Any) -> Any:
    return lambda self, mask: masks.Causal()


def _offset_forgotten(before: Any) -> Any:
    def begin(self: Cache, n_tokens: int, padding: Tensor | None) -> Any:
        step = before(self, n_tokens, padding)
        return dataclasses.replace(step, slots=torch.arange(n_tokens)[None]) if step.start else step

    return begin


def _slot_too_few(before: Any) -> Any:
    def init(self: RingShelf, layout: Any, *rest: Any) -> None:
        before(self, layout._replace(window=layout.window - 1), *rest)

    return init


def _nothing(before: Any) -> Any:
    return lambda *given: None


def _never(before: Any) -> Any:
    return lambda *given: False


def _no_turning_part(before: Any) -> Any:
    def mixed(self: LatentAttention, q_nope: Tensor, q_rope: Tensor, attended: Any, frame: Frame, tap: Any) -> Any:
        continues = frame.step is not None and not frame.step.fresh
        absorbed = continues and latent.absorbs(self.spec, q_nope.shape[1], attended.keys.shape[1])
        return before(self, q_nope, q_rope * 0 if absorbed else q_rope, attended, frame, tap)

    return mixed


def _counted_from_padding(before: Any) -> Any:
    return lambda batch, n, padding, segments, device: before(batch, n, None, segments, device)


def _not_counted_anew(before: Any) -> Any:
    return lambda batch, n, padding, segments, device: before(batch, n, padding, None, device)


def _longest_of_batch(before: Any) -> Any:
    return lambda self: before(self).amax(0, keepdim=True)


def _padding_pooled(before: Any) -> Any:
    return lambda hidden, padding, how: before(hidden, None, how)


def _capacity(before: Any) -> Any:
    """No expert takes more than its share and a quarter; who comes later is left out."""

    def forward(self: Router, x: Tensor) -> Any:
        choice = before(self, x)
        chosen = torch.nn.functional.one_hot(choice.experts.flatten(), self.spec.n_experts)
        place = (chosen.cumsum(0) * chosen).sum(-1).view_as(choice.experts)
        room = 1 + int(1.25 * choice.experts.numel() / self.spec.n_experts)
        return choice._replace(weights=choice.weights * (place <= room))

    return forward


def _biased_steps(before: Any) -> Any:
    """The choice bias enters the weights, as it must not, where tokens come one by one."""

    def forward(self: Router, x: Tensor) -> Any:
        choice = before(self, x)
        if x.shape[1] > 1:
            return choice
        weights = (choice.scores + self.choice_bias).gather(-1, choice.experts)
        return choice._replace(weights=weights / weights.sum(-1, keepdim=True))

    return forward


def _raw_steps(before: Any) -> Any:
    """Weights are divided by their sum everywhere but where tokens come one by one."""

    def forward(self: Router, x: Tensor) -> Any:
        choice = before(self, x)
        raw = choice.scores.gather(-1, choice.experts) * self.spec.scale
        return choice._replace(weights=raw) if x.shape[1] == 1 else choice

    return forward


def _mean_of_batch(before: Any) -> Any:
    return lambda self, x, weight, bias: before(self, x - 0.1 * x.mean(0, keepdim=True), weight, bias)


def _angles_squared(before: Any) -> Any:
    return lambda rope, d, positions, dtype, lengths=None: before(rope, d, positions.square(), dtype, lengths)


def _queries_unplaced(before: Any) -> Any:
    return lambda self, *, queries=None, keys=None: before(self, keys=keys)


def _source_all_real(before: Any) -> Any:
    def memory(self: Model, source: Any, padding: Any, *rest: Any) -> Memory | None:
        found: Memory | None = before(self, source, padding, *rest)
        return found if found is None or found.states is None else found._replace(real=None)

    return memory


def _source_padding_lost(before: Any) -> Any:
    def memory(self: Model, *given: Any) -> Memory | None:
        found: Memory | None = before(self, *given)
        return found if found is None or found.states is not None else Memory(None, None)

    return memory


_DYNAMIC = attention(position={"kind": "rope", "scaling": {"kind": "dynamic", "factor": 3.0, "original": 9}})

MUTANTS = (
    Mutant(
        "a causal mask off by one", ("causality",), attention(softcap=3.0), swapped(masks.Causal, "sees", _one_too_far)
    ),
    Mutant("a window off by one", ("causality",), WINDOW, swapped(masks.Window, "sees", _window_too_large)),
    Mutant("a window loses the first tokens", ("causality",), WINDOW, swapped(masks.Window, "sees", _no_first_tokens)),
    Mutant("a prefix too long", ("causality",), attention(mask="prefix"), swapped(frame, "_prefix", _longer_prefix)),
    Mutant(
        "an encoder that looks back alone",
        ("causality", "shift"),
        ENCODER,
        swapped(Frame, "_described", _seen_as_causal),
    ),
    Mutant("a cache forgets its offset", ("cache",), recipe(), swapped(Cache, "begin", _offset_forgotten)),
    Mutant("a ring with a slot too few", ("cache",), WINDOW, swapped(RingShelf, "__init__", _slot_too_few)),
    Mutant("positions of stored keys lost", ("cache",), RELATIVE, swapped(Cache, "place", _nothing)),
    Mutant(
        "stored keys not turned anew",
        ("cache",),
        _DYNAMIC | {"n_layers": 1},
        swapped(grouped.GroupedAttention, "_turns_late", _never),
    ),
    Mutant(
        "absorbed keys without their turning part",
        ("cache",),
        LATENT,
        swapped(LatentAttention, "_mixed", _no_turning_part),
    ),
    Mutant(
        "a choice bias in the weights of single steps",
        ("cache", "packing"),
        EXPERTS,
        swapped(Router, "forward", _biased_steps),
    ),
    Mutant(
        "routing weights normalised in one path alone",
        ("cache", "packing"),
        EXPERTS,
        swapped(Router, "forward", _raw_steps),
    ),
    Mutant("padding ignored", ("padding",), LEARNED, swapped(masks.Padding, "sees", _all_seen)),
    Mutant(
        "positions counted from the padding",
        ("padding",),
        LEARNED,
        swapped(frame, "default_positions", _counted_from_padding),
    ),
    Mutant("a row as long as the longest", ("padding",), _DYNAMIC, swapped(Frame, "lengths", _longest_of_batch)),
    Mutant("a mean over padding", ("padding",), POOLED, swapped(model, "pooled", _padding_pooled)),
    Mutant("segments ignored", ("packing",), recipe(), swapped(masks.Segments, "sees", _all_seen)),
    Mutant(
        "positions not counted anew in a document",
        ("packing",),
        LEARNED,
        swapped(frame, "default_positions", _not_counted_anew),
    ),
    Mutant("experts of limited capacity", ("batch",), EXPERTS, swapped(Router, "forward", _capacity)),
    Mutant("a norm over the batch", ("batch", "padding"), recipe(), swapped(NormLayer, "_normed", _mean_of_batch)),
    Mutant("angles that grow faster than positions", ("shift",), recipe(), swapped(frame, "rotation", _angles_squared)),
    Mutant("ALiBi counts queries by their place", ("shift",), WINDOW, swapped(Bias, "at", _queries_unplaced)),
    Mutant("source padding ignored", ("cross",), BOTH, swapped(Model, "_memory", _source_all_real)),
    Mutant(
        "source padding lost after the first call", ("cross",), BOTH, swapped(Model, "_memory", _source_padding_lost)
    ),
)
