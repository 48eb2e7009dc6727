"""What every layer of one forward call shares: positions, visibility, the cache's step, and tables made once."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from anyformer.nn.attend.masks import Causal, Padding, Segments, Visible
from anyformer.nn.cache import StaticCache, Step
from anyformer.nn.position import Rotation, rotation
from anyformer.spec.parts import Rope


@dataclass
class Frame:
    """A call's frame. `positions`: [B or 1, T] int64."""

    positions: Tensor
    visible: Visible
    cache: StaticCache | None = None
    step: Step | None = None
    # Keyed by plain values: a compiler cannot trace the hash of a specification.
    _rotations: dict[tuple[float, float, str, int, torch.dtype], Rotation] = field(default_factory=dict)

    def rotation(self, rope: Rope, d_head: int, dtype: torch.dtype) -> Rotation:
        """The rotary tables of this call, made once for all layers that share them."""
        key = (rope.theta, rope.fraction, rope.layout, d_head, dtype)
        if key not in self._rotations:
            self._rotations[key] = rotation(rope, d_head, self.positions, dtype)
        return self._rotations[key]

    @staticmethod
    def of(
        x: Tensor,
        *,
        padding: Tensor | None = None,
        segments: Tensor | None = None,
        positions: Tensor | None = None,
        cache: StaticCache | None = None,
    ) -> "Frame":
        """The frame of a call on x [B, T, …]. Raises `ValueError` for what does not fit together.

        Args:
            x: what goes through the layers, for its shape and device.
            padding: bool [B, T], True = real, on either side.
            segments: int64 [B, T], the document of each token; positions start again in each.
            positions: int64 [T] or [B, T], instead of counting real tokens.
            cache: where to go on.
        """
        b, t = x.shape[:2]
        _check(padding, "padding", torch.bool, (b, t))
        _check(segments, "segments", torch.int64, (b, t))
        if cache is not None:
            if segments is not None:
                raise ValueError("segments and a cache do not go together: a cache continues one document a row")
            if cache.batch != b:
                raise ValueError(f"the cache has {cache.batch} rows and the input {b}")
        step = None if cache is None else cache.begin(t, padding)
        visible: Visible = Causal() if step is None else step.visible
        if padding is not None and (step is None or (step.fresh and step.real is not None)):
            visible = visible & Padding(padding)
        if segments is not None:
            visible = visible & Segments(segments)
        if positions is not None:
            if positions.dtype != torch.int64 or tuple(positions.shape) not in ((t,), (1, t), (b, t)):
                got = f"{positions.dtype} {list(positions.shape)}"
                raise ValueError(f"positions are int64 [{t}] or [{b}, {t}]; got {got}")
            positions = positions.reshape(-1, t)
        elif step is not None:
            positions = step.slots.clamp(min=0)
        else:
            positions = default_positions(b, t, padding, segments, x.device)
        return Frame(positions, visible, cache, step)


def _check(value: Tensor | None, name: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    if value is None:
        return
    if value.dtype != dtype or tuple(value.shape) != shape:
        raise ValueError(f"{name} is {dtype} {list(shape)} like the input; got {value.dtype} {list(value.shape)}")


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
