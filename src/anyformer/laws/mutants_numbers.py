"""Mutants that the laws about backends, files, plans, updates, the compiler and precision must notice."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from anyformer import checkpoint
from anyformer.laws import accumulation, planned, roundtrip
from anyformer.laws.mutant import EXPERTS, RELATIVE, WINDOW, Mutant, attention, entry, recipe, swapped
from anyformer.nn import layers, position
from anyformer.nn.attend import BACKENDS, reference
from anyformer.nn.attend.bias import DenseBias
from anyformer.nn.attend.call import Call
from anyformer.nn.attend.masks import All, Segments
from anyformer.nn.layers import NormLayer
from anyformer.nn.model import Model
from anyformer.nn.moe import Experts, Router, Routing
from anyformer.spec.parts import ModelSpec
from anyformer.weights import own


def _without(**changed: Any) -> Any:
    """A backend that reads a call without something."""
    return lambda before: lambda call: before(dataclasses.replace(call, **changed))


def _heads_tiled(before: Any) -> Any:
    def attend(call: Call) -> Tensor:
        times = call.q.shape[2] // call.k.shape[2]
        k, v = (x.repeat(1, 1, times, 1) for x in (call.k, call.v))
        out: Tensor = before(dataclasses.replace(call, k=k, v=v))
        return out

    return attend


def _segments_dropped(before: Any) -> Any:
    def attend(call: Call) -> Tensor:
        whole = All.of(call.visible)
        kept = All(tuple(t for t in whole.terms if not isinstance(t, Segments)), whole.queries, whole.keys)
        out: Tensor = before(dataclasses.replace(call, visible=kept))
        return out

    return attend


def _capped_with_the_bias(before: Any) -> Any:
    """softcap · tanh((score + bias) / softcap)."""

    def attend(call: Call) -> Tensor:
        assert call.softcap is not None
        assert call.bias is not None
        k = call.k.repeat_interleave(call.q.shape[2] // call.k.shape[2], 2)
        scores = torch.einsum("bthd,bshd->bhts", call.q, k) * call.scale
        scores = scores + call.bias.added(scores.shape[2], scores.shape[3])
        bias = DenseBias(call.softcap * torch.tanh(scores / call.softcap))
        out: Tensor = before(dataclasses.replace(call, q=call.q * 0, softcap=None, bias=bias))
        return out

    return attend


def _bias_turned(before: Any) -> Any:
    return lambda call: before(dataclasses.replace(call, bias=call.bias.of(-call.bias.tensor)))


def _sides_swapped(before: Any) -> Any:
    return lambda call: before(dataclasses.replace(call, bias=dataclasses.replace(call.bias, bidirectional=True)))


def _padding_counted(before: Any) -> Any:
    return lambda self, layer, choice, real: before(self, layer, choice, None)


def _softcap_lost(before: Any) -> Any:
    def condense(spec: ModelSpec) -> dict[str, Any]:
        table: dict[str, Any] = before(spec)
        attention = {key: value for key, value in table["attention"].items() if key != "softcap"}
        return table | {"attention": attention}

    return condense


def _stored_in_half(before: Any) -> Any:
    def save_file(tensors: dict[str, Tensor], *rest: Any, **more: Any) -> None:
        before({name: x.bfloat16().to(x.dtype) for name, x in tensors.items()}, *rest, **more)

    return save_file


def _buffers_forgotten(before: Any) -> Any:
    def read_weights(*given: Any, **more: Any) -> Model:
        model: Model = before(*given, **more)
        for buffer in model.buffers():
            buffer.zero_()
        return model

    return read_weights


def _bias_forgotten(before: Any) -> Any:
    return lambda spec: (p for p in before(spec) if not p.name.endswith("attention.q.bias"))


def _scores_forgotten(before: Any) -> Any:
    return lambda spec, row: dataclasses.replace(before(spec, row), scores=0)


def _no_ring(before: Any) -> Any:
    return lambda spec, batch, capacity, kind, source, dtype: before(spec, batch, capacity, "static", source, dtype)


@contextmanager
def _head_copied(model: Model) -> Iterator[None]:
    """A tied head that has a copy of the table."""
    head: Any = model.head
    table: Any = model.token_table("decoder")
    head.weight = nn.Parameter(table.detach().clone())
    try:
        yield
    finally:
        head.weight = None


def _mean_of_means(before: Any) -> Any:
    def accumulate(model: nn.Module, batches: Any, n_targets: int, **more: Any) -> Tensor:
        parts = [before(model, [batch], batch.n_targets * len(batches), **more) for batch in batches]
        return torch.stack(parts).sum()

    return accumulate


def _sequences_of_the_part(before: Any) -> Any:
    return lambda self, n_sequences=None, n_tokens=None: before(self, None, n_tokens)


def _wrong_when_compiled(before: Any) -> Any:
    def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        normed: Tensor = before(x, weight, eps + 0.1 if torch.compiler.is_compiling() else eps)
        return normed

    return rms_norm


def _experts_together(before: Any) -> Any:
    def together(self: Experts, x: Tensor, expert: Tensor, counts: Tensor) -> Tensor:
        out: Tensor = before(self, x, (expert + 1) % counts.shape[0], counts)
        return out

    return together


def _norm_in_half(before: Any) -> Any:
    def forward(self: NormLayer, x: Tensor) -> Tensor:
        weight = None if self.weight is None else self.weight + self.offset
        scaled = x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return scaled if weight is None else scaled * weight

    return forward


def _as_it_comes(before: Any) -> Any:
    return lambda dtype: dtype


def _router_in_half(before: Any) -> Any:
    def forward(self: Router, x: Tensor) -> Any:
        choice = before(self, x)
        rounded = choice.logits.to(x.dtype).to(choice.logits.dtype)
        return choice._replace(logits=rounded)

    return forward


_GELU = recipe(ffn={"kind": "dense", "activation": "gelu", "d_ff": 21})

MUTANTS = (
    Mutant(
        "sink logits dropped", ("backends",), attention(sink_logit=True), entry(BACKENDS, "tiled", _without(sinks=None))
    ),
    Mutant(
        "the soft-cap dropped", ("backends",), attention(softcap=2.0), entry(BACKENDS, "tiled", _without(softcap=None))
    ),
    Mutant("a bias dropped", ("backends",), WINDOW, entry(BACKENDS, "fused", _without(bias=None))),
    Mutant("ALiBi's sign turned", ("backends",), WINDOW, entry(BACKENDS, "tiled", _bias_turned)),
    Mutant("buckets of both sides for one", ("backends",), RELATIVE, entry(BACKENDS, "tiled", _sides_swapped)),
    Mutant(
        "the soft-cap after the bias",
        ("backends",),
        attention(softcap=2.0, position="alibi"),
        entry(BACKENDS, "tiled", _capped_with_the_bias),
    ),
    Mutant("key/value heads tiled", ("backends",), recipe(), entry(BACKENDS, "fused", _heads_tiled)),
    Mutant("segments dropped by one backend", ("backends",), RELATIVE, entry(BACKENDS, "tiled", _segments_dropped)),
    Mutant(
        "a recipe without its soft-cap",
        ("round trip",),
        attention(softcap=2.0),
        swapped(roundtrip, "condense", _softcap_lost),
    ),
    Mutant("weights stored in half precision", ("round trip",), recipe(), swapped(own, "save_file", _stored_in_half)),
    Mutant(
        "choice biases not loaded", ("round trip",), EXPERTS, swapped(checkpoint, "read_weights", _buffers_forgotten)
    ),
    Mutant(
        "a plan without a bias", ("plan",), attention(qkv_bias=True), swapped(planned, "parameters", _bias_forgotten)
    ),
    Mutant("a plan without scores", ("plan",), recipe(), swapped(planned, "forward_flops", _scores_forgotten)),
    Mutant("a plan without rings", ("plan",), WINDOW, swapped(planned, "cache_bytes", _no_ring)),
    Mutant("a tied head with a table of its own", ("plan",), recipe(tie=True), _head_copied),
    Mutant(
        "micro-batches weighed alike", ("accumulation",), recipe(), swapped(accumulation, "accumulate", _mean_of_means)
    ),
    Mutant(
        "a balance loss by micro-batch", ("accumulation",), EXPERTS, swapped(Routing, "losses", _sequences_of_the_part)
    ),
    Mutant("padding counted by a router", ("accumulation",), EXPERTS, swapped(Routing, "add", _padding_counted)),
    Mutant("another norm when compiled", ("compile",), _GELU, swapped(layers, "rms_norm", _wrong_when_compiled)),
    Mutant(
        "other experts' biases when compiled", ("compile",), EXPERTS, swapped(Experts, "together", _experts_together)
    ),
    Mutant("a norm in half precision", ("precision",), recipe(), swapped(NormLayer, "forward", _norm_in_half)),
    Mutant("rotary tables in half precision", ("precision",), recipe(), swapped(position, "exact", _as_it_comes)),
    Mutant("a softmax in half precision", ("precision",), recipe(), swapped(reference, "exact", _as_it_comes)),
    Mutant("a router in half precision", ("precision",), EXPERTS, swapped(Router, "forward", _router_in_half)),
)
