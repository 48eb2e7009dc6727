"""The KV cache: state that is passed to a call, never attached to a module.

Each row stores its real tokens one after another from slot 0, whatever padding they came with, so that the slot of a
token is its place in the sequence and visibility is causality over slots.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from anyformer.nn.attend.masks import All, Causal, Everything, Visible

Stored = Mapping[str, Tensor]
"""What one layer keeps, by name, each [B, capacity, …]."""


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

    @property
    def visible(self) -> Visible:
        """What the new queries see of the slots (of the new keys, when fresh)."""
        if self.fresh:
            return Causal()
        if self.start is not None:
            return Everything() if self.slots.shape[1] == 1 else Causal()
        keys = torch.arange(self.n_keys, device=self.slots.device)
        return All((Causal(),), queries=self.slots, keys=keys)


class StaticCache:
    """Room for `capacity` tokens a row, allocated once.

    Args:
        layout: for each layer, the shape of what it stores for one token, by name.
        batch: rows.
        capacity: tokens a row.
    """

    def __init__(
        self,
        layout: Sequence[Mapping[str, tuple[int, ...]]],
        batch: int,
        capacity: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        if batch < 1 or capacity < 1:
            raise ValueError(f"a cache needs batch ≥ 1 and capacity ≥ 1; got batch={batch}, capacity={capacity}")
        self.layers: list[dict[str, Tensor]] = [
            {name: torch.zeros(batch, capacity, *shape, dtype=dtype, device=device) for name, shape in layer.items()}
            for layer in layout
        ]
        self.batch, self.capacity = batch, capacity
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)
        # Known on the host, so that a step waits for no device: an upper bound, exact while all rows are equally long.
        self._longest, self._even = 0, True

    @property
    def nbytes(self) -> int:
        """Bytes of everything stored."""
        return sum(tensor.nbytes for layer in self.layers for tensor in layer.values())

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

    def begin(self, n_tokens: int, padding: Tensor | None) -> Step:
        """Where the next `n_tokens` [B, n_tokens] go. Raises `ValueError` when they do not fit; changes nothing."""
        if padding is not None and bool(padding.all()):
            padding = None
        stored = self._longest
        if padding is None and self._even:
            self._fits(stored, n_tokens)
            slots = torch.arange(stored, stored + n_tokens, device=self.lengths.device)[None]
            return Step(slots, stored, stored + n_tokens, stored == 0, None)
        real = padding
        if real is None:
            real = torch.ones(self.batch, n_tokens, dtype=torch.bool, device=self.lengths.device)
        needed = int((self.lengths + real.sum(1)).max())
        if needed > self.capacity:
            self._fits(int(self.lengths.max()), needed - int(self.lengths.max()))
        slots = torch.where(real, self.lengths[:, None] + real.cumsum(1) - 1, -1)
        return Step(slots, None, needed, stored == 0, real)

    def _fits(self, stored: int, new: int) -> None:
        if stored + new > self.capacity:
            raise ValueError(
                f"the cache is full: {stored} tokens are stored, {new} come, and its capacity is {self.capacity}; "
                "make it larger (model.new_cache(capacity=…)) or give fewer tokens"
            )

    def extend(self, layer: int, step: Step, new: Stored) -> Stored:
        """Stores a layer's new keys and values and gives all that its queries attend over, each [B, S, …]."""
        kept: dict[str, Tensor] = {}
        for name, value in new.items():
            buffer = self.layers[layer][name]
            if torch.is_grad_enabled() and value.requires_grad:
                kept[name] = value if step.fresh else self._joined(buffer, step, value)
                self._write(buffer, step, value.detach())
            else:
                self._write(buffer, step, value)
                kept[name] = value if step.fresh else buffer[:, : step.n_keys]
        return kept

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

    def advance(self, step: Step) -> None:
        """Counts the step's tokens as stored: the model's last act of a call, so that a failed one leaves no trace."""
        if step.start is not None:
            self._longest = step.n_keys
            self.lengths.fill_(step.n_keys)
            return
        assert step.real is not None
        self.lengths += step.real.sum(1)
        self._longest = step.n_keys
        self._even = bool((self.lengths == self._longest).all())

    def select(self, rows: Tensor) -> None:
        """Keeps the rows at the given indices [N], in that order; a row may be taken twice."""
        self.layers = [{name: tensor[rows] for name, tensor in layer.items()} for layer in self.layers]
        self.lengths = self.lengths[rows]
        self.batch = len(rows)
        self._longest = int(self.lengths.max()) if len(rows) else 0
        self._even = bool((self.lengths == self._longest).all())
