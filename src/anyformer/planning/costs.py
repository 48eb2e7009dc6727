"""The plan of a specification: every cost of a batch in one place."""

from dataclasses import asdict, dataclass
from typing import Any

from anyformer.errors import UserError
from anyformer.planning.cache import BYTES, cache_bytes, cache_bytes_per_token
from anyformer.planning.flops import Lengths, forward_flops
from anyformer.planning.memory import OPTIMIZER_COPIES, Memory, memory_of
from anyformer.planning.weights import idle_parameters, parameters
from anyformer.planning.words import binary, facts_of, si
from anyformer.spec.parts import Learned, ModelSpec, Prefix


@dataclass(frozen=True)
class Plan:
    """The costs of a model for a batch of B rows of T tokens. `to_dict()` is JSON-ready, `table()` is for people.

    FLOPs are those of a whole row divided by its `context` tokens: in an encoder–decoder a target token carries its
    share of the `source` tokens.
    """

    parameters: int
    embedding_parameters: int
    active_parameters: int
    parameters_by_role: dict[str, int]
    batch: int
    context: int
    source: int
    flops_forward_per_token: float
    flops_forward_per_token_visible: float
    flops_training_per_token: float
    visible_share: float
    cache_bytes_per_token: int
    cache_bytes: int
    cache_bytes_ring: int
    memory: Memory
    dtype: str
    optimizer: str
    facts: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain numbers and words."""
        table = asdict(self)
        table["memory"] |= {"live": self.memory.live, "peak": self.memory.peak}
        return table

    def table(self) -> str:
        """A table to read, as text."""
        rows = [("" if index else "model", key, value) for index, (key, value) in enumerate(self.facts.items())]
        at = f"T = {self.context:,}" + (f" from S = {self.source:,}" if self.source else "")
        rows += [
            ("parameters", "total", f"{self.parameters:,}"),
            ("", "embedding", f"{self.embedding_parameters:,}"),
            ("", "active for a token", f"{self.active_parameters:,}"),
            ("FLOPs a token", f"forward, all of T×S at {at}", si(self.flops_forward_per_token)),
            ("", f"forward, the visible {self.visible_share:.0%} of T×S", si(self.flops_forward_per_token_visible)),
            ("", "training, all of T×S", si(self.flops_training_per_token)),
            *self._cache_rows(),
            *self._memory_rows(),
        ]
        first, second = (max(len(row[i]) for row in rows) for i in (0, 1))
        return "\n".join(f"{a:{first}}  {b:{second}}  {c}".rstrip() for a, b, c in rows)

    @property
    def _where(self) -> str:
        return f"batch {self.batch:,} × {self.context:,}" + (f" from {self.source:,}" if self.source else "")

    def _cache_rows(self) -> list[tuple[str, str, str]]:
        if not self.cache_bytes:
            return []
        token = "a target token" if self.source else "a token"
        rows = [
            ("KV cache", f"{token}, {self.dtype}", binary(self.cache_bytes_per_token)),
            ("", f"{self._where} tokens", binary(self.cache_bytes)),
        ]
        if self.cache_bytes_ring != self.cache_bytes:
            rows.append(("", "the same, windows in rings", binary(self.cache_bytes_ring)))
        return rows

    def _memory_rows(self) -> list[tuple[str, str, str]]:
        m, where = self.memory, self._where
        trains = self.optimizer != "none"
        rows = [
            ("weights", m.weights),
            ("gradients", m.gradients),
            (f"{self.optimizer} state", m.optimizer),
            ("KV cache", m.cache),
            (f"activations, {where}", m.activations),
            (f"logits{' and their gradient' if trains else ''}, {where}", m.logits),
            (f"{'gradients' if trains else 'tensors'} inside a block", m.working),
            ("peak, the allocator's share included", m.peak),
        ]
        title = "training memory" if trains else "memory"
        shown = [(name, size) for name, size in rows if size]
        return [("" if index else title, name, binary(size)) for index, (name, size) in enumerate(shown)]


def _row(spec: ModelSpec, context: int | None, source: int | None, prefix: int) -> Lengths:
    """The lengths to plan for: the given ones, else the model's."""
    if context is None:
        context = spec.last.max_positions or 1024
    both = spec.encoder is not None and spec.decoder is not None
    if source is not None and not both:
        raise UserError("only an encoder–decoder reads a source", where="source", got=source, remedy="leave it out")
    if source is None:
        source = (spec.encoder.max_positions or context) if both and spec.encoder is not None else 0
    if context < 1 or (both and source < 1):
        raise UserError("a plan needs at least one row of one token", got=f"context={context}, source={source}")
    if not 0 <= prefix <= context:
        raise UserError("a prefix is within the context", where="prefix", got=prefix, expected=f"0 … {context}")
    if prefix:
        _require_prefix_masks(spec, prefix)
    for name, stack in spec.stacks.items():
        word, length = ("source", source) if both and name == "encoder" else ("context", context)
        rows = stack.max_positions
        if isinstance(stack.embed.position, Learned) and rows is not None and length > rows:
            raise UserError(f"the {word} is past the learned positions", where=word, got=length, expected=f"≤ {rows}")
    return Lengths(context, source, prefix)


def _require_prefix_masks(spec: ModelSpec, prefix: int) -> None:
    """Raises `UserError` for a model in which no layer shows a prefix, whose length would then change nothing."""
    if any(isinstance(block.attention.mask, Prefix) for block in spec.last.blocks):
        return
    encoder = spec.decoder is None
    why = "a token of an encoder sees the whole row" if encoder else "no layer of this model has a prefix mask"
    remedy = "leave it out" + ("" if encoder else ', or plan a model with attention.mask = "prefix"')
    raise UserError(f"{why}, so that there is no prefix to show", where="prefix", got=prefix, remedy=remedy)


def plan(
    spec: ModelSpec,
    *,
    batch: int = 8,
    context: int | None = None,
    source: int | None = None,
    prefix: int = 0,
    dtype: str = "float32",
    optimizer: str = "adamw",
) -> Plan:
    """The costs of `spec` for `batch` rows of `context` tokens.

    Args:
        spec: the model.
        batch: rows of a (micro-)batch.
        context: tokens a row; the model's `max_positions`, or 1,024, where None.
        source: source tokens a row of an encoder–decoder; its encoder's `max_positions`, or `context`, where None.
        prefix: leading tokens of a row that prefix masks show to all; matters to the visible share alone.
        dtype: of weights, activations and cache.
        optimizer: "adamw", "muon" (with AdamW for what is no matrix), "sgd", or "none" for inference.

    Raises:
        UserError: a size or a word that no plan can be made for.
    """
    if not isinstance(spec, ModelSpec):
        raise UserError("plan takes a specification", got=repr(spec), remedy="af.load_spec(name or file) gives one")
    for name, number in (("batch", batch), ("context", context), ("source", source), ("prefix", prefix)):
        if number is not None and (isinstance(number, bool) or not isinstance(number, int)):
            raise UserError("a plan is for a whole number of rows and tokens", where=name, got=repr(number))
    if batch < 1:
        raise UserError("a plan needs at least one row of one token", got=f"batch={batch}")
    row = _row(spec, context, source, prefix)
    for word, known in ((dtype, BYTES), (optimizer, OPTIMIZER_COPIES)):
        if word not in known:
            raise UserError(
                f"unknown {'dtype' if known is BYTES else 'optimiser'}", got=word, expected=", ".join(known)
            )
    roles: dict[str, int] = {}
    for parameter in parameters(spec):
        roles[parameter.role] = roles.get(parameter.role, 0) + parameter.size
    total, flops = sum(roles.values()), forward_flops(spec, row)
    forward = (flops.products + flops.scores) / row.context
    return Plan(
        parameters=total,
        embedding_parameters=roles.get("embedding", 0) + roles.get("position", 0),
        active_parameters=total - idle_parameters(spec),
        parameters_by_role=roles,
        batch=batch,
        context=row.context,
        source=row.source,
        flops_forward_per_token=forward,
        flops_forward_per_token_visible=(flops.products + flops.visible) / row.context,
        flops_training_per_token=3 * forward,
        visible_share=flops.visible / flops.scores,
        cache_bytes_per_token=cache_bytes_per_token(spec, dtype),
        cache_bytes=cache_bytes(spec, batch, row.context, source=row.source, dtype=dtype),
        cache_bytes_ring=cache_bytes(spec, batch, row.context, "ring", source=row.source, dtype=dtype),
        memory=memory_of(spec, batch, row, dtype, optimizer),
        dtype=dtype,
        optimizer=optimizer,
        facts=facts_of(spec),
    )


def largest_batch(
    spec: ModelSpec,
    memory: int,
    *,
    context: int | None = None,
    source: int | None = None,
    dtype: str = "float32",
    optimizer: str = "adamw",
) -> int:
    """The most rows whose planned peak fits into `memory` bytes; 0 when not even one does."""

    def peak(batch: int) -> int:
        made = plan(spec, batch=batch, context=context, source=source, dtype=dtype, optimizer=optimizer)
        return made.memory.peak

    one, slope = peak(1), peak(2) - peak(1)
    return 0 if one > memory else 1 + (memory - one) // max(1, slope)
