"""What is added to the scores: ALiBi, T5's buckets, or any tensor, said over positions like the masks.

ALiBi (Press et al. 2022) and T5's buckets (Raffel et al. 2020) are functions of key − query, so that cached decoding
and chunked prefill read the same numbers as a whole pass, and nothing of T×S needs to exist.
"""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from anyformer.nn.attend.shapes import (
    Cut,
    Scores,
    check_broadcast,
    check_exact,
    check_positions,
    four,
    placed,
    whole_number,
)
from anyformer.nn.precision import exact


@dataclass(frozen=True, eq=False)
class Bias:
    """A description of what is added to the scores; without `.at` keys stand at 0 … S−1, queries are the last T."""

    queries: Tensor | None = field(default=None, kw_only=True)
    keys: Tensor | None = field(default=None, kw_only=True)

    def at(self, *, queries: Tensor | None = None, keys: Tensor | None = None) -> Self:
        """The same bias with queries [T] or [B or 1, T] and keys [S] or [B or 1, S] (int64) at given positions."""
        if (queries is not None and self.queries is not None) or (keys is not None and self.keys is not None):
            raise ValueError("this bias says already where queries or keys are; give its positions once")
        return dataclasses.replace(
            self,
            queries=self.queries if queries is None else queries,
            keys=self.keys if keys is None else keys,
        )

    @property
    def tensor(self) -> Tensor:
        """What the bias is made of, to which gradients flow."""
        raise NotImplementedError

    def of(self, tensor: Tensor) -> Self:
        """The same kind of bias made of another tensor."""
        raise NotImplementedError

    def check(self, shape: Scores) -> None:
        """Raises `ValueError` where the bias is not one for scores of a shape [B, H, T, S]."""
        check_positions(self.queries, self.keys, shape)

    def part(self, cut: Cut) -> Self:
        """The bias of a part of the scores, whose positions the caller knows; its `tensor` is a view of this one's."""
        return self

    def between(self, q: Tensor, k: Tensor) -> Tensor:
        """The bias [B or 1, H or 1, T, S] of queries at q [B or 1, 1, T, 1] and keys at k [B or 1, 1, 1, S]."""
        raise NotImplementedError

    def pull(self, q: Tensor, k: Tensor, grad: Tensor) -> Tensor:
        """The gradient of `between` into `tensor`, in the dtype of the gradient [B, H, T, S] that is given."""
        raise NotImplementedError

    def added(self, n_queries: int, n_keys: int) -> Tensor:
        """The bias written out: [B or 1, H or 1, T or 1, S or 1]."""
        q, k = placed(self.queries, self.keys, n_queries, n_keys, self.tensor.device)
        return self.between(q[:, None, :, None], k[:, None, None, :])


@dataclass(frozen=True, eq=False)
class DenseBias(Bias):
    """Any values, float, broadcastable to [B, H, T, S] ([T, S] and [B, T, S] too); −inf hides a key.

    Values go by place and not by position.
    """

    values: Tensor

    @property
    def tensor(self) -> Tensor:  # noqa: D102
        return self.values

    def of(self, tensor: Tensor) -> Self:  # noqa: D102
        return dataclasses.replace(self, values=tensor)

    def check(self, shape: Scores) -> None:
        """Raises `ValueError` where the values are not floats for scores of a shape [B, H, T, S]."""
        super().check(shape)
        if not self.values.is_floating_point():
            raise ValueError(f"a dense bias is float; got {self.values.dtype}: a mask is a Dense")
        check_broadcast("a dense bias", self.values, shape)

    def part(self, cut: Cut) -> "DenseBias":  # noqa: D102
        return DenseBias(cut.of(self.values))

    def between(self, q: Tensor, k: Tensor) -> Tensor:  # noqa: D102
        return four(self.values)

    def pull(self, q: Tensor, k: Tensor, grad: Tensor) -> Tensor:  # noqa: D102
        return grad.sum_to_size(four(self.values).shape).reshape(self.values.shape)


@dataclass(frozen=True, eq=False)
class DistanceBias(Bias):
    """A bias that depends on key − query alone."""

    def by_distance(self, distance: Tensor) -> Tensor:
        """The bias [H, …] at distances key − query […], int64."""
        raise NotImplementedError

    def of_head(self, head: Tensor, distance: Tensor) -> Tensor:
        """The bias of one head (an index) at one distance, as a kernel asks for it."""
        raise NotImplementedError

    def pull_distance(self, distance: Tensor, grad: Tensor) -> Tensor:
        """The gradient of `by_distance` into `tensor`, from a gradient [H, …]."""
        raise NotImplementedError

    def between(self, q: Tensor, k: Tensor) -> Tensor:  # noqa: D102
        return self.by_distance((k - q).squeeze(1)).transpose(0, 1)

    def pull(self, q: Tensor, k: Tensor, grad: Tensor) -> Tensor:  # noqa: D102
        distance = (k - q).squeeze(1)
        grad = grad.transpose(0, 1)
        if distance.shape[0] == 1:
            grad = grad.sum(1, keepdim=True)
        return self.pull_distance(distance, grad)


@dataclass(frozen=True, eq=False)
class AlibiBias(DistanceBias):
    """−slope · distance for each head (Press et al. 2022, section 3).

    Args:
        slopes: [H], as `alibi_slopes` gives them.
        symmetric: keys after the query are lowered like those before; otherwise they get 0.
    """

    slopes: Tensor
    symmetric: bool

    @property
    def tensor(self) -> Tensor:  # noqa: D102
        return self.slopes

    def of(self, tensor: Tensor) -> Self:  # noqa: D102
        return dataclasses.replace(self, slopes=tensor)

    def check(self, shape: Scores) -> None:
        """Raises `ValueError` where there is not one slope a head, or positions are not those of the scores."""
        super().check(shape)
        if not self.slopes.is_floating_point() or tuple(self.slopes.shape) != (shape[1],):
            got = f"{self.slopes.dtype} {list(self.slopes.shape)}"
            raise ValueError(f"ALiBi has one float slope a head, [{shape[1]}] here; got {got}")

    def part(self, cut: Cut) -> "AlibiBias":  # noqa: D102
        return AlibiBias(self.slopes[cut.heads], self.symmetric)

    def _lowered(self, distance: Tensor) -> Tensor:
        """−|distance|, or 0 after the query, in at least float32."""
        lowered = -distance.abs() if self.symmetric else distance.clamp(max=0)
        return lowered.to(exact(self.slopes.dtype))

    def by_distance(self, distance: Tensor) -> Tensor:  # noqa: D102
        lowered = self._lowered(distance)
        return self.slopes.to(lowered.dtype).reshape(-1, *(1,) * distance.dim()) * lowered

    def of_head(self, head: Tensor, distance: Tensor) -> Tensor:  # noqa: D102
        return self.slopes[head] * self._lowered(distance)

    def pull_distance(self, distance: Tensor, grad: Tensor) -> Tensor:  # noqa: D102
        lowered = self._lowered(distance).to(grad.dtype)
        return (grad * lowered).flatten(1).sum(1)


@dataclass(frozen=True, eq=False)
class BucketBias(DistanceBias):
    """A trained bias for each head and bucket of key − query (Raffel et al. 2020, section 2.1).

    Args:
        table: [n_buckets, H].
        max_distance: from here on all distances share the last bucket of their side.
        bidirectional: each side has half of the buckets; otherwise keys after the query share bucket 0.
    """

    table: Tensor
    max_distance: int
    bidirectional: bool

    def __post_init__(self) -> None:
        side = self.table.shape[0] // 2 if self.bidirectional else self.table.shape[0]
        if self.table.dim() != 2 or not self.table.is_floating_point() or side < 2:
            least = 4 if self.bidirectional else 2
            got = f"{self.table.dtype} {list(self.table.shape)}"
            raise ValueError(f"a table of buckets is float [n_buckets, H] with n_buckets ≥ {least}; got {got}")
        if self.max_distance <= side // 2:
            raise ValueError(
                f"max_distance={self.max_distance} leaves no room for the logarithmic buckets: "
                f"the first {side // 2} distances have one each; make it at least {side // 2 + 1}"
            )

    @property
    def tensor(self) -> Tensor:  # noqa: D102
        return self.table

    def of(self, tensor: Tensor) -> Self:  # noqa: D102
        return dataclasses.replace(self, table=tensor)

    def check(self, shape: Scores) -> None:
        """Raises `ValueError` where the table is not one for H heads, or positions are not those of the scores."""
        super().check(shape)
        check_exact("a table of buckets", self.table, self.table.dtype, (self.table.shape[0], shape[1]))

    def part(self, cut: Cut) -> "BucketBias":  # noqa: D102
        return BucketBias(self.table[:, cut.heads], self.max_distance, self.bidirectional)

    def buckets(self, distance: Tensor) -> Tensor:
        """The bucket of each key − query, int64 of the same shape.

        Half of a side's buckets hold one distance each; distance n of the others goes to bucket
        h + ⌊ln(n/h) / ln(max_distance/h) · (side − h)⌋ with h that half, the logarithm in float32 as published.
        """
        side = self.table.shape[0] // 2 if self.bidirectional else self.table.shape[0]
        n = distance.abs() if self.bidirectional else (-distance).clamp(min=0)
        half = side // 2
        grown = torch.log(n.float() / half) / math.log(self.max_distance / half) * (side - half)
        # Small distances are clamped away before the cast: log(0) has no integer.
        large = (half + grown.clamp(min=0.0).long()).clamp(max=side - 1)
        bucket = torch.where(n < half, n, large)
        return bucket + side * (distance > 0) if self.bidirectional else bucket

    def by_distance(self, distance: Tensor) -> Tensor:  # noqa: D102
        return self.table.t()[:, self.buckets(distance)]

    def of_head(self, head: Tensor, distance: Tensor) -> Tensor:  # noqa: D102
        return self.table[self.buckets(distance), head]

    def pull_distance(self, distance: Tensor, grad: Tensor) -> Tensor:  # noqa: D102
        total = grad.new_zeros(self.table.shape)
        total.index_add_(0, self.buckets(distance).flatten(), grad.flatten(1).t())
        return total


def alibi_slopes(n_heads: int, max_bias: float = 8.0, device: torch.device | str = "cpu") -> Tensor:
    """A slope for each head, float32 [H] (Press et al. 2022, section 3 and their code for other head counts).

    2^(−max_bias·i/H) for i = 1 … H where H is a power of two; otherwise those of the power below, followed by every
    other one of the power above.
    """
    if not whole_number(n_heads) or n_heads < 1 or not (math.isfinite(max_bias) and max_bias > 0):
        raise ValueError(f"slopes need n_heads ≥ 1 and max_bias > 0; got n_heads={n_heads}, max_bias={max_bias}")
    power = 1 << (n_heads.bit_length() - 1)
    slopes = [2.0 ** (-max_bias * i / power) for i in range(1, power + 1)]
    slopes += [2.0 ** (-max_bias * i / (2 * power)) for i in range(1, 2 * (n_heads - power), 2)]
    return torch.tensor(slopes, device=device, dtype=torch.float32)


__all__ = ["AlibiBias", "Bias", "BucketBias", "DenseBias", "DistanceBias", "alibi_slopes"]
