"""The KV cache: state that is passed to a call, never attached to a module.

Each row stores its real tokens one after another from slot 0, whatever padding they came with, so that the slot of a
token is its place in the sequence and visibility is causality over slots. A ring shelf keeps of them only the first
few and the last `window`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

Stored = Mapping[str, Tensor]
"""What one layer keeps, by name, each [B, slots, …]."""

EMPTY = 1 << 40
"""The slot number of a place that holds nothing: after every query, so that causality hides it."""


@dataclass(frozen=True)
class Step:
    """One forward call against a cache: where its tokens go and what they see."""

    slots: Tensor
    """[B or 1, T] int64: the slot of each new token, −1 for padding."""
    start: int | None
    """The first slot, where every row writes the same ones; None where rows differ."""
    n_keys: int
    """Slots to attend over, the new tokens included."""
    fresh: bool
    """Nothing was stored before: the new keys are all the keys."""
    real: Tensor | None
    """[B, T] bool, where rows are padded."""
    lengths: Tensor
    """[B] int64: tokens stored before."""

    @property
    def n_new(self) -> int:
        """T, the tokens of the call."""
        return self.slots.shape[1]


class Kept(NamedTuple):
    """All that a layer's queries attend over: values [B, S, …] by name, and the slots [B or 1, S] where they stand.

    Slots of None are 0 … S−1, or in a fresh step the new tokens as they came.
    """

    values: dict[str, Tensor]
    slots: Tensor | None


class Layout(NamedTuple):
    """What a layer keeps of a token, by name and shape; with a `window` only the last so many and the first `sinks`."""

    shapes: Mapping[str, tuple[int, ...]]
    window: int | None = None
    sinks: int = 0


def _wants_gradient(new: Stored) -> bool:
    return torch.is_grad_enabled() and any(value.requires_grad for value in new.values())


class Shelf:
    """One layer's room for every slot."""

    def __init__(self, layout: Layout, batch: int, capacity: int, dtype: torch.dtype, device: torch.device) -> None:
        self.buffers = {
            name: torch.zeros(batch, capacity, *shape, dtype=dtype, device=device)
            for name, shape in layout.shapes.items()
        }

    def extend(self, step: Step, new: Stored) -> tuple[Kept, Callable[[], None] | None]:
        """Stores what is new and gives all there is. What the second value does, if anything, ends the call."""
        kept: dict[str, Tensor] = {}
        gradient = _wants_gradient(new)
        for name, value in new.items():
            buffer = self.buffers[name]
            if gradient:
                kept[name] = value if step.fresh else self._joined(buffer, step, value)
                self._write(buffer, step, value.detach())
            else:
                self._write(buffer, step, value)
                kept[name] = value if step.fresh else buffer[:, : step.n_keys]
        return Kept(kept, None), None

    def _write(self, buffer: Tensor, step: Step, value: Tensor) -> None:
        if step.start is not None:
            buffer[:, step.start : step.n_keys] = value
            return
        assert step.real is not None
        rows, columns = step.real.nonzero(as_tuple=True)
        buffer[rows, step.slots[rows, columns]] = value[rows, columns].to(buffer.dtype)

    def _joined(self, buffer: Tensor, step: Step, value: Tensor) -> Tensor:
        """Stored and new in one tensor through which gradients reach the new."""
        if step.start is not None:
            return torch.cat([buffer[:, : step.start], value], 1)
        assert step.real is not None
        rows, columns = step.real.nonzero(as_tuple=True)
        old = buffer[:, : step.n_keys].clone()
        return old.index_put((rows, step.slots[rows, columns]), value[rows, columns].to(old.dtype))


class RingShelf(Shelf):
    """One layer's room for the first `sinks` slots and the last `window`; later tokens take the place of the oldest.

    Slot s stands at place s while s < sinks, and at sinks + (s − sinks) mod window after that.
    """

    def __init__(self, layout: Layout, batch: int, capacity: int, dtype: torch.dtype, device: torch.device) -> None:
        assert layout.window is not None
        self.window, self.sinks = layout.window, layout.sinks
        self.size = self.window + self.sinks
        super().__init__(layout, batch, self.size, dtype, device)

    def extend(self, step: Step, new: Stored) -> tuple[Kept, Callable[[], None] | None]:
        """As for a shelf. Tokens that a failed call must not lose are overwritten only at its end."""
        if step.fresh:
            return Kept(dict(new), None), lambda: self._store(step, new)
        if step.n_new == 1 and step.start is not None and not _wants_gradient(new):
            # The place of the one new token holds the only stored token that it cannot see.
            place = step.start if step.start < self.sinks else self.sinks + (step.start - self.sinks) % self.window
            count = min(step.n_keys, self.size)
            for name, value in new.items():
                self.buffers[name][:, place : place + 1] = value
            values = {name: self.buffers[name][:, :count] for name in new}
            return Kept(values, self._held(step.lengths[:1] + 1)[:, :count]), None
        count = self.size if step.start is None else min(step.start, self.size)
        lengths = step.lengths if step.start is None else step.lengths[:1]
        after = step.slots if step.real is None else step.slots.masked_fill(~step.real, EMPTY)
        held = self._held(lengths)[:, :count]
        rows = max(held.shape[0], after.shape[0])
        slots = torch.cat([held.expand(rows, -1), after.expand(rows, -1)], 1)
        values = {n: torch.cat([self.buffers[n][:, :count].to(v.dtype), v], 1) for n, v in new.items()}
        return Kept(values, slots), lambda: self._store(step, new)

    def _held(self, lengths: Tensor) -> Tensor:
        """The slots [N, size] at the places of rows with `lengths` [N] tokens; EMPTY where nothing is."""
        place = torch.arange(self.size, device=lengths.device)[None]
        last = lengths[:, None] - 1 - self.sinks
        ring = last - (last - (place - self.sinks)).remainder(self.window)
        slots = torch.where(place < self.sinks, place, ring + self.sinks)
        there = torch.where(place < self.sinks, place < lengths[:, None], ring >= 0)
        return torch.where(there, slots, EMPTY)

    def _store(self, step: Step, new: Stored) -> None:
        slots = step.slots
        after = step.lengths + (step.n_new if step.real is None else step.real.sum(1))
        stays = (slots >= 0) & ((slots < self.sinks) | (slots >= after[:, None] - self.window))
        places = torch.where(slots < self.sinks, slots, self.sinks + (slots - self.sinks).remainder(self.window))
        batch = next(iter(new.values())).shape[0]
        rows, columns = stays.expand(batch, -1).nonzero(as_tuple=True)
        at = places.expand(batch, -1)[rows, columns]
        for name, value in new.items():
            buffer = self.buffers[name]
            buffer[rows, at] = value.detach()[rows, columns].to(buffer.dtype)


class Cache:
    """Room for `capacity` tokens a row, allocated once.

    Args:
        layouts: what each layer keeps.
        batch: rows.
        capacity: tokens a row.
        positions: whether to keep the position of each token, for encodings that need that of every key.
        reads_source: whether the model attends over an encoder's output, which the first call then brings.
        made_for: what the model it is made for keeps, layer by layer; a call of another model is then refused.
    """

    def __init__(
        self,
        layouts: Sequence[Layout],
        batch: int,
        capacity: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        positions: bool = False,
        reads_source: bool = False,
        made_for: tuple[object, ...] | None = None,
    ) -> None:
        if any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in (batch, capacity)):
            raise ValueError(
                f"a cache needs whole numbers batch ≥ 1 and capacity ≥ 1; got batch={batch!r}, capacity={capacity!r}"
            )
        self.made_for, self.dtype = made_for, dtype
        self.shelves = [self._shelf(layout, batch, capacity, dtype, device) for layout in layouts]
        self.batch, self.capacity = batch, capacity
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)
        self.positions = torch.zeros(batch, capacity, dtype=torch.int64, device=device) if positions else None
        self.reads_source, self.has_source = reads_source, False
        self.source: dict[int, dict[str, Tensor]] = {}
        self.source_real: Tensor | None = None
        # Known on the host, so that a step waits for no device: an upper bound, exact while all rows are equally long.
        self._longest, self._even = 0, True
        self._at_the_end: list[Callable[[], None]] = []

    @staticmethod
    def _shelf(layout: Layout, batch: int, capacity: int, dtype: torch.dtype, device: torch.device) -> Shelf:
        ring = layout.window is not None and layout.window + layout.sinks < capacity
        return (RingShelf if ring else Shelf)(layout, batch, capacity, dtype, device)

    @property
    def nbytes(self) -> int:
        """Bytes of everything stored for attention; the source's once it came."""
        stores = [shelf.buffers for shelf in self.shelves] + list(self.source.values())
        kept = sum(tensor.nbytes for store in stores for tensor in store.values())
        return kept + (0 if self.positions is None else self.positions.nbytes)

    @property
    def longest(self) -> int:
        """The length of the longest row."""
        if not self._even:
            self._longest = int(self.lengths.max())
        return self._longest

    def reset(self) -> None:
        """Empties every row; the memory stays."""
        self.lengths.zero_()
        self._longest, self._even = 0, True
        self.has_source, self.source, self.source_real = False, {}, None

    def check(self, keeps: tuple[object, ...], dtype: torch.dtype, device: torch.device) -> None:
        """Raises `ValueError` where this is not a cache for a model that keeps `keeps`, in `dtype` and on `device`."""
        remedy = "model.new_cache(…) makes one for it"
        if self.made_for is not None and self.made_for is not keeps and self.made_for != keeps:
            raise ValueError(f"the cache is of another model, whose layers keep other keys and values; {remedy}")
        if self.dtype != dtype or self.lengths.device != device:
            mine, its = f"{self.dtype} on {self.lengths.device}", f"{dtype} on {device}"
            raise ValueError(f"the cache is {mine} and the model {its}; {remedy}")

    def begin(self, n_tokens: int, padding: Tensor | None) -> Step:
        """Where the next `n_tokens` [B, n_tokens] go. Raises `ValueError` when they do not fit; changes nothing."""
        self._at_the_end = []
        if padding is not None and bool(padding.all()):
            padding = None
        stored = self._longest
        before = self.lengths.clone()
        if padding is None and self._even:
            self._fits(stored, n_tokens)
            slots = torch.arange(stored, stored + n_tokens, device=self.lengths.device)[None]
            return Step(slots, stored, stored + n_tokens, stored == 0, None, before)
        real = padding
        if real is None:
            real = torch.ones(self.batch, n_tokens, dtype=torch.bool, device=self.lengths.device)
        needed = int((self.lengths + real.sum(1)).max())
        if needed > self.capacity:
            self._fits(int(self.lengths.max()), needed - int(self.lengths.max()))
        slots = torch.where(real, self.lengths[:, None] + real.cumsum(1) - 1, -1)
        return Step(slots, None, needed, stored == 0, real, before)

    def _fits(self, stored: int, new: int) -> None:
        if stored + new > self.capacity:
            raise ValueError(
                f"the cache is full: {stored} tokens are stored, {new} come, and its capacity is {self.capacity}; "
                "make it larger (model.new_cache(capacity=…)) or give fewer tokens"
            )

    def extend(self, layer: int, step: Step, new: Stored) -> Kept:
        """Stores a layer's new keys and values and gives all that its queries attend over."""
        kept, end = self.shelves[layer].extend(step, new)
        if end is not None:
            self._at_the_end.append(end)
        return kept

    def place(self, step: Step, positions: Tensor) -> None:
        """Notes the positions [B or 1, T] of a step's tokens."""
        if self.positions is None:
            return
        if step.start is not None:
            self.positions[:, step.start : step.n_keys] = positions
            return
        assert step.real is not None
        rows, columns = step.real.nonzero(as_tuple=True)
        self.positions[rows, step.slots[rows, columns]] = positions.expand(self.batch, -1)[rows, columns]

    def advance(self, step: Step) -> None:
        """Counts the step's tokens as stored: the model's last act of a call, so that a failed one leaves no trace."""
        for end in self._at_the_end:
            end()
        self._at_the_end = []
        self.has_source = self.reads_source
        if step.start is not None:
            self._longest = step.n_keys
            self.lengths.fill_(step.n_keys)
            return
        assert step.real is not None
        self.lengths += step.real.sum(1)
        self._longest = step.n_keys
        self._even = bool((self.lengths == self._longest).all())

    def select(self, rows: Tensor) -> None:
        """Keeps the rows at the given indices, int64 [N], in that order; a row may be taken twice."""
        if not isinstance(rows, Tensor) or rows.dtype != torch.int64 or rows.dim() != 1 or not len(rows):
            got = f"{rows.dtype} {list(rows.shape)}" if isinstance(rows, Tensor) else f"a {type(rows).__name__}"
            raise ValueError(f"rows are int64 indices [N], at least one; got {got}")
        low, high = (int(end) for end in rows.aminmax())
        if low < 0 or high >= self.batch:
            bad = low if low < 0 else high
            raise ValueError(f"there is no row {bad} in a cache of {self.batch} rows (0 … {self.batch - 1})")
        for shelf in self.shelves:
            shelf.buffers = {name: tensor[rows] for name, tensor in shelf.buffers.items()}
        self.source = {i: {name: tensor[rows] for name, tensor in kept.items()} for i, kept in self.source.items()}
        self.source_real = None if self.source_real is None else self.source_real[rows]
        self.positions = None if self.positions is None else self.positions[rows]
        self.lengths = self.lengths[rows]
        self.batch = len(rows)
        self._longest = int(self.lengths.max())
        self._even = bool((self.lengths == self._longest).all())
