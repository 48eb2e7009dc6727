"""What the layers of one call share: positions, visibility, the cache's step, the source, tables made once."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from anyformer.nn.attend.bias import AlibiBias, Bias, BucketBias, alibi_slopes
from anyformer.nn.attend.masks import Causal, Everything, Padding, PrefixKeys, Segments, Visible, Window
from anyformer.nn.attend.shapes import said
from anyformer.nn.cache import EMPTY, Cache, Kept, Step
from anyformer.nn.position import Rotation, rotation
from anyformer.spec.attention import Bidirectional, Mask, Prefix
from anyformer.spec.positions import Alibi, Position, RelativeBias, Rope

if TYPE_CHECKING:
    from anyformer.nn.moe import Routing


class Memory(NamedTuple):
    """An encoder's output [B, S, C] as cross-attention reads it: which tokens are real, which document they are of."""

    states: Tensor | None
    real: Tensor | None = None
    segments: Tensor | None = None


class Attended(NamedTuple):
    """What a layer's queries attend over: `kept` [B, S, …] by name, what of it they see, and all positions."""

    kept: dict[str, Tensor]
    visible: Visible
    queries: Tensor
    """[B or 1, T] int64."""
    keys: Tensor
    """[B or 1, S] int64."""
    place: tuple[object, ...] = ("call",)
    """Names the keys, for what is made once for all layers that attend over the same ones."""


@dataclass
class Frame:
    """A call's frame for one stack. `positions`: [B or 1, T] int64, for the position encodings."""

    positions: Tensor
    real: Tensor | None = None
    segments: Tensor | None = None
    prefix: Tensor | None = None
    cache: Cache | None = None
    step: Step | None = None
    memory: Memory | None = None
    routing: "Routing | None" = None
    shared_table: Tensor | None = None
    """The stack's relative table [n_buckets, H]."""
    order: Tensor | None = None
    """[B, T]: real tokens counted from 0 in each row and document, where that is not their place in the row."""
    # Keyed by plain values: a compiler cannot trace the hash of a specification.
    _rotations: dict[tuple[object, ...], Rotation] = field(default_factory=dict)
    _visible: dict[tuple[object, ...], Visible] = field(default_factory=dict)
    _keys: dict[tuple[object, ...], Tensor] = field(default_factory=dict)
    _biases: dict[tuple[object, ...], Bias] = field(default_factory=dict)

    def rotation(self, rope: Rope, d_head: int, dtype: torch.dtype) -> Rotation:
        """The rotary tables of this call's tokens, made once for all layers that share them."""
        key = (*_key(rope), d_head, dtype)
        if key not in self._rotations:
            lengths = self.lengths() if rope.by_length else None
            self._rotations[key] = rotation(rope, d_head, self.positions, dtype, lengths)
        return self._rotations[key]

    def rotation_of_keys(self, rope: Rope, d_head: int, dtype: torch.dtype, attended: Attended) -> Rotation:
        """The tables that turn stored keys by the length that their row has now."""
        key = (*_key(rope), d_head, dtype, *attended.place)
        if key not in self._rotations:
            self._rotations[key] = rotation(rope, d_head, attended.keys, dtype, self.lengths())
        return self._rotations[key]

    def lengths(self) -> Tensor:
        """Each row's own length, [B or 1, 1], or each token's document's, [B, T]: its last position and 1."""
        positions = self.positions if self.real is None else self.positions.masked_fill(~self.real, -1)
        if self.segments is not None:
            document = torch.zeros_like(self.segments)
            document[:, 1:] = (self.segments[:, 1:] != self.segments[:, :-1]).cumsum(1)
            last = torch.zeros_like(document).scatter_reduce(1, document, positions.expand_as(document), "amax")
            return last.gather(1, document) + 1
        last = positions.amax(-1, keepdim=True)
        if self.cache is not None and self.step is not None and self.cache.positions is not None:
            places = torch.arange(self.cache.capacity, device=last.device)
            stored = torch.where(places < self.step.lengths[:, None], self.cache.positions, -1)
            last = torch.maximum(last, stored.amax(-1, keepdim=True))
        return last.clamp(min=0) + 1

    def attended(self, layer: int, mask: Mask, new: dict[str, Tensor]) -> Attended:
        """Stores a layer's new keys and values, [B, T, …] by name, if there is a cache; gives all to attend over."""
        if self.cache is None or self.step is None:
            return Attended(new, self._seen(mask), self.positions, self.positions)
        kept = self.cache.extend(layer, self.step, new)
        if self.step.fresh:
            return Attended(kept.values, self._seen(mask), self.positions, self.positions)
        return self._continued(mask, kept)

    def _seen(self, mask: Mask) -> Visible:
        """What this call's tokens see of each other."""
        key = (mask.kind, mask.window, mask.sinks)
        if key not in self._visible:
            self._visible[key] = self._described(mask)
        return self._visible[key]

    def _described(self, mask: Mask) -> Visible:
        visible: Visible = Everything() if isinstance(mask, Bidirectional) else Causal()
        if isinstance(mask, Prefix) and self.prefix is not None:
            visible = PrefixKeys(self.prefix)
        if mask.window is not None:
            visible = visible & Window(mask.window, mask.sinks)
            if self.order is not None:
                # Distances and first tokens are counted over real tokens of a document, not over places in the row.
                visible = visible.at(queries=self.order, keys=self.order)
        if self.real is not None:
            visible = visible & Padding(self.real)
        if self.segments is not None:
            visible = visible & Segments(self.segments)
        return visible

    def _continued(self, mask: Mask, kept: Kept) -> Attended:
        """New tokens after stored ones. A prefix is all before them, so that what they see is causal."""
        assert self.step is not None
        values, slots = kept
        one = self.step.n_new == 1 and self.step.start is not None
        if slots is None and one and mask.window is not None and not mask.sinks:
            first = max(0, self.step.n_keys - mask.window)
            values = {name: value[:, first:] for name, value in values.items()}
            key: tuple[object, ...] = ("last", first)
        else:
            key = ("all",) if slots is None else ("ring", mask.window, mask.sinks, slots.shape[1])
        if key not in self._keys:
            if slots is None:
                first = key[1] if key[0] == "last" and isinstance(key[1], int) else 0
                slots = torch.arange(first, self.step.n_keys, device=self.positions.device)[None]
            self._keys[key] = slots
            self._keys[(*key, "positions")] = self._positions_of(slots)
        named = (mask.kind, mask.window, mask.sinks, *key)
        if named not in self._visible:
            whole, kept_keys = key[0] == "all", self._keys[key].shape[1]
            # A ring that holds no more than window and sinks holds what its newest token sees.
            near = mask.window is None or (not whole and kept_keys <= mask.window + mask.sinks)
            if one and near:
                self._visible[named] = Everything()
            else:
                visible: Visible = Causal()
                if mask.window is not None:
                    visible = visible & Window(mask.window, mask.sinks)
                if not (whole and self.step.start is not None):
                    visible = visible.at(queries=self.step.slots, keys=self._keys[key])
                self._visible[named] = visible
        return Attended(values, self._visible[named], self.positions, self._keys[(*key, "positions")], key)

    def _positions_of(self, slots: Tensor) -> Tensor:
        """The positions of stored and new tokens at slots [B or 1, S]."""
        assert self.cache is not None
        if self.cache.positions is None:
            return slots
        there = slots.expand(self.cache.batch, -1)
        found = self.cache.positions.gather(1, torch.where(there == EMPTY, 0, there))
        return torch.where(there == EMPTY, EMPTY, found)

    def crossed(self, layer: int, make: Callable[[Tensor], dict[str, Tensor]]) -> Attended:
        """The source as a layer attends over it: `make` gives keys and values of the encoder's output, once a cache."""
        assert self.memory is not None
        if self.cache is not None and self.cache.has_source:
            kept = self.cache.source[layer]
        else:
            assert self.memory.states is not None
            kept = make(self.memory.states)
            if self.cache is not None:
                self.cache.source[layer] = {name: value.detach() for name, value in kept.items()}
        if ("source",) not in self._visible:
            visible: Visible = Everything()
            if self.memory.real is not None:
                visible = visible & Padding(self.memory.real)
            if self.memory.segments is not None and self.segments is not None:
                visible = visible & Segments(self.segments, self.memory.segments)
            self._visible[("source",)] = visible
            n_keys = next(iter(kept.values())).shape[1]
            self._keys[("source",)] = torch.arange(n_keys, device=self.positions.device)[None]
        return Attended(kept, self._visible[("source",)], self.positions, self._keys[("source",)], ("source",))

    def bias(
        self, position: Position, n_heads: int, table: Tensor | None, attended: Attended, dtype: torch.dtype
    ) -> Bias | None:
        """What a layer's position encoding adds to its scores, if anything. `table` is the layer's own, if any."""
        if isinstance(position, Alibi):
            settings = (position.max_bias, position.scale, position.symmetric)
            key: tuple[object, ...] = ("alibi", *settings, n_heads, *attended.place)
            if key not in self._biases:
                slopes = alibi_slopes(n_heads, position.max_bias, attended.keys.device).to(dtype) * position.scale
                made: Bias = AlibiBias(slopes, position.symmetric)
                self._biases[key] = made.at(queries=attended.queries, keys=attended.keys)
            return self._biases[key]
        if not isinstance(position, RelativeBias):
            return None
        key = ("shared", *attended.place)
        if table is not None or key not in self._biases:
            weights = self.shared_table if table is None else table
            if weights is None:
                raise ValueError(
                    "this block reads the relative table of its stack and has none by itself; "
                    "attention.position.shared = false gives the layer its own"
                )
            bias = BucketBias(weights, position.max_distance, position.bidirectional)
            placed = bias.at(queries=attended.queries, keys=attended.keys)
            if table is not None:
                return placed
            self._biases[key] = placed
        return self._biases[key]

    @staticmethod
    def of(
        x: Tensor,
        *,
        padding: Tensor | None = None,
        segments: Tensor | None = None,
        positions: Tensor | None = None,
        prefix: Tensor | None = None,
        cache: Cache | None = None,
        memory: Memory | None = None,
        routing: "Routing | None" = None,
        shared_table: Tensor | None = None,
    ) -> "Frame":
        """The frame of a call on x [B, T, …]. Raises `ValueError` for what does not fit together.

        Args:
            x: what goes through the layers, for its shape and device.
            padding: bool [B, T], True = real, on either side.
            segments: int64 [B, T], the document of each token; positions start again in each.
            positions: int64 [T] or [B, T], instead of counting real tokens.
            prefix: int64 [B], the first so many real tokens of each row are seen by all of it, or bool [B, T].
            cache: where to go on.
            memory: the encoder's output.
            routing: collects what mixtures of experts chose.
            shared_table: the stack's relative table.
        """
        b, t = x.shape[:2]
        check_like(padding, "padding", torch.bool, x)
        check_like(segments, "segments", torch.int64, x)
        if cache is not None:
            if segments is not None:
                raise ValueError("segments and a cache do not go together: a cache continues one document a row")
            if cache.batch != b:
                raise ValueError(f"the cache has {cache.batch} rows and the input {b}")
        step = None if cache is None else cache.begin(t, padding)
        if step is not None and step.real is None:
            padding = None
        if positions is not None:
            fits = isinstance(positions, Tensor) and tuple(positions.shape) in ((t,), (1, t), (b, t))
            if not fits or positions.dtype != torch.int64:
                raise ValueError(f"positions are int64 [{t}] or [{b}, {t}]; got {said(positions)}")
            positions = positions.reshape(-1, t)
        plain = padding is None and segments is None
        order = None if plain else default_positions(b, t, padding, segments, x.device)
        if positions is None:
            if step is not None:
                positions = step.slots.clamp(min=0)
            else:
                positions = torch.arange(t, device=x.device)[None] if order is None else order
        if prefix is not None:
            prefix = _prefix(prefix, (b, t), order, padding, segments, step)
        if cache is not None and step is not None:
            cache.place(step, positions)
        return Frame(positions, padding, segments, prefix, cache, step, memory, routing, shared_table, order)


def _key(rope: Rope) -> tuple[object, ...]:
    return (rope.theta, rope.fraction, rope.layout, *vars(rope.scaling).values())


def check_like(value: Tensor | None, name: str, dtype: torch.dtype, like: Tensor, what: str = "the input") -> None:
    """Raises `ValueError` where `value` is given and is not `dtype` [B, T] on the device of `like` [B, T, …]."""
    if value is None:
        return
    shape = tuple(like.shape[:2])
    if not isinstance(value, Tensor) or value.dtype != dtype or tuple(value.shape) != shape:
        raise ValueError(f"{name} is {dtype} {list(shape)} like {what}; got {said(value)}")
    if value.device != like.device:
        raise ValueError(f"{name} is on {value.device} and {what} on {like.device}; {name}.to({str(like.device)!r})")


def _prefix(
    prefix: Tensor,
    shape: tuple[int, int],
    order: Tensor | None,
    padding: Tensor | None,
    segments: Tensor | None,
    step: Step | None,
) -> Tensor:
    """Which keys of the call are prefix, bool [B, T]."""
    b, t = shape
    if step is not None and not step.fresh:
        raise ValueError("a prefix comes with the first call of a cache: what is stored did not see it")
    given = isinstance(prefix, Tensor)
    if given and prefix.dtype == torch.bool and tuple(prefix.shape) == (b, t):
        return prefix
    if not given or prefix.dtype != torch.int64 or tuple(prefix.shape) != (b,):
        wanted = f"int64 [{b}], tokens at the front of each row, or bool [{b}, {t}]"
        raise ValueError(f"prefix is {wanted}; got {said(prefix)}")
    if segments is not None:
        raise ValueError(f"with segments the prefix of each document is marked: prefix is bool [{b}, {t}] there")
    _check_within(prefix, torch.full_like(prefix, t) if padding is None else padding.sum(1))
    places = torch.arange(t, device=prefix.device)[None] if order is None else order
    return places < prefix[:, None]


def _check_within(prefix: Tensor, lengths: Tensor) -> None:
    """A prefix that is longer than its row would not reach the tokens that a cache is given later."""
    if torch.compiler.is_compiling():
        return
    broken = torch.nonzero((prefix < 0) | (prefix > lengths))
    if len(broken):
        row = int(broken[0, 0])
        raise ValueError(
            f"prefix is {int(prefix[row])} for row {row}, which has {int(lengths[row])} real tokens in this call; "
            "a number from 0 to that would do"
        )


def default_positions(
    batch: int, n_tokens: int, padding: Tensor | None, segments: Tensor | None, device: torch.device
) -> Tensor:
    """Positions [B or 1, T]: real tokens counted from 0, in each row and in each document of a row."""
    if segments is not None:
        fresh = torch.ones(batch, n_tokens, dtype=torch.bool, device=device)
        fresh[:, 1:] = segments[:, 1:] != segments[:, :-1]
        _check_contiguous(segments, fresh)
        counts = torch.ones_like(segments) if padding is None else padding.long()
        total = counts.cumsum(1)
        before = (total - counts).masked_fill(~fresh, 0).cummax(1).values
        return (total - before - 1).clamp(min=0)
    if padding is not None:
        return (padding.cumsum(1) - 1).clamp(min=0)
    return torch.arange(n_tokens, device=device)[None]


def _check_contiguous(segments: Tensor, fresh: Tensor) -> None:
    """A document that goes on after another would have its positions counted wrongly."""
    if torch.compiler.is_compiling():
        return
    ordered = segments.sort(1).values
    distinct = 1 + (ordered[:, 1:] != ordered[:, :-1]).sum(1)
    broken = torch.nonzero(fresh.sum(1) != distinct)
    if len(broken):
        row = int(broken[0, 0])
        raise ValueError(f"segments are stretches of equal ids; in row {row} a document goes on after another one")
