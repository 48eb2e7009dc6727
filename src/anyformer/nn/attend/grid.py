"""The scores of an attention call cut into tiles: which tiles anyone sees, and one tile's scores."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from anyformer.nn.attend.bias import Bias
from anyformer.nn.attend.masks import All, tiles
from anyformer.nn.attend.shapes import Cut, placed
from anyformer.nn.precision import exact


class Size(NamedTuple):
    """How large tiles are: rows (queries times query heads of a group), keys, and elements of all heads together."""

    rows: int
    columns: int
    elements: int


# On two cores of a 2.8 GHz Xeon, T = 4,096 and 8 heads × 64, tiles of 128–512 × 256–512 with 1–2 M elements are within
# a tenth of each other forward and backward; 1,024 columns or single heads are slower by half. Small tiles skip more.
CPU = Size(256, 256, 1 << 20)
# An accelerator wants few launches.
ACCELERATOR = Size(1024, 1024, 1 << 25)


@dataclass(frozen=True)
class Problem:
    """An attention call as an operator receives it: `Call` with a seed, and 0 for no soft-cap."""

    q: Tensor
    k: Tensor
    v: Tensor
    visible: All
    bias: Bias | None
    scale: float
    softcap: float
    sinks: Tensor | None
    dropout: float
    seed: int


@dataclass
class Tile:
    """Some queries against some keys, for some lanes."""

    grid: "Grid"
    cut: Cut
    masked: bool
    keys: tuple[slice, slice]
    """Where its keys are among [B·G, S]."""
    shape: tuple[int, int, int, int, int]
    """Rows of the batch, groups, queries, query heads of a group, keys."""
    number: int

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        """a · bᵀ for a [L, rows, N] and b [L, columns, N]."""
        return torch.bmm(a, b.transpose(1, 2))

    def scores(self, q: Tensor, k: Tensor, lse: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The scores [L, rows, columns], less `lse` where given, −inf where hidden; and the slope of the soft-cap."""
        scores = self.product(q, k)
        softcap, bias, slope = self.grid.problem.softcap, self.grid.problem.bias, None
        if softcap:
            scores.tanh_()
            if lse is not None:
                slope = scores.square().neg_().add_(1.0).mul_(softcap)
            scores.mul_(softcap)
        if lse is not None:
            scores.sub_(lse[..., None])
        if not self.masked and bias is None:
            return scores, slope
        if bias is not None:
            added = bias.part(self.cut).between(*self._positions(self.grid.bias_at))
            scores.view(self.shape).add_(self._spread(added.to(scores.dtype)))
        if self.masked:
            seen = self.grid.problem.visible.part(self.cut).seen(*self._positions(self.grid.at))
            scores.view(self.shape).masked_fill_(~self._spread(seen), float("-inf"))
        return scores, slope

    def kept(self) -> Tensor:
        """Dropout's factor on each weight, 0 or 1/(1 − rate): the same whenever the tile is made."""
        problem = self.grid.problem
        generator = torch.Generator(problem.q.device)
        # Weyl's sequence keeps the seeds of neighbouring tiles apart.
        generator.manual_seed((problem.seed + self.number * 0x9E3779B97F4A7C15) % (1 << 63))
        b, g, t, r, s = self.shape
        kept = torch.empty(b * g, t * r, s, dtype=self.grid.dtype, device=problem.q.device)
        return kept.bernoulli_(1 - problem.dropout, generator=generator).div_(1 - problem.dropout)

    def gather(self, total: Bias, grad: Tensor) -> None:
        """Adds to the tensor of `total` what a gradient of the scores, [L, rows, columns], sends into the bias."""
        b, g, t, r, s = self.shape
        part = total.part(self.cut)
        by_head = grad.view(self.shape).transpose(2, 3).reshape(b, g * r, t, s)
        part.tensor.add_(part.pull(*self._positions(self.grid.bias_at), by_head))

    def _positions(self, at: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        queries, keys = at
        return self.cut.of_rows(queries)[:, None, :, None], self.cut.of_columns(keys)[:, None, None, :]

    def _spread(self, values: Tensor) -> Tensor:
        """[B or 1, H or 1, T or 1, S or 1] of the tile beside scores [B, G, T, H/G, S]."""
        _, g, _, r, _ = self.shape
        if values.shape[1] == 1:
            return values[:, :, :, None]
        return values.reshape(values.shape[0], g, r, *values.shape[2:]).transpose(2, 3)


class Block(NamedTuple):
    """Some queries of some lanes with all the tiles that they see."""

    at: tuple[slice, slice]
    """Where its queries are among [B·G, T·H/G]."""
    tiles: list[Tile]


class Grid:
    """The tiles of a call. Lanes are batch × group; the query heads of a group stand beside each other as rows."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.dtype = exact(problem.q.dtype)
        self.b, self.t, h = problem.q.shape[:3]
        self.s, self.g = problem.k.shape[1:3]
        self.r = h // self.g
        size = CPU if problem.q.device.type == "cpu" else ACCELERATOR
        self.queries_each = max(1, min(self.t, size.rows // self.r))
        self.keys_each = max(1, min(self.s, size.columns))
        self.lanes = max(1, size.elements // (self.queries_each * self.r * self.keys_each))
        visible, bias, device = problem.visible, problem.bias, problem.q.device
        self.at = placed(visible.queries, visible.keys, self.t, self.s, device)
        self.bias_at = self.at if bias is None else placed(bias.queries, bias.keys, self.t, self.s, device)

    def queries(self, x: Tensor) -> Tensor:
        """[B, T, H, N] as lanes [B·G, T·H/G, N], at least float32."""
        return self._laned(x, self.r)

    def keys(self, x: Tensor) -> Tensor:
        """[B, S, G, N] as lanes [B·G, S, N], at least float32."""
        return self._laned(x, 1)

    def _laned(self, x: Tensor, r: int) -> Tensor:
        b, n, _, width = x.shape
        return x.to(self.dtype).reshape(b, n, self.g, r, width).transpose(1, 2).reshape(b * self.g, n * r, width)

    def queries_back(self, x: Tensor) -> Tensor:
        """Lanes [B·G, T·H/G, N] as [B, T, H, N]."""
        x = x.view(self.b, self.g, self.t, self.r, -1).transpose(1, 2)
        return x.reshape(self.b, self.t, self.g * self.r, -1)

    def keys_back(self, x: Tensor) -> Tensor:
        """Lanes [B·G, S, N] as [B, S, G, N]."""
        return x.view(self.b, self.g, self.s, -1).transpose(1, 2).contiguous()

    def sinks(self) -> Tensor | None:
        """The sink logits as lanes [B·G, T·H/G, 1], without memory of their own for each query."""
        if self.problem.sinks is None:
            return None
        sinks = self.problem.sinks.to(self.dtype).reshape(1, self.g, 1, self.r)
        return sinks.expand(self.b, self.g, self.t, self.r).reshape(self.b * self.g, -1, 1)

    def blocks(self) -> Iterator[Block]:
        """All queries in turn, each with the tiles that they see."""
        states = self._states()
        number = 0
        for batch, groups in self._chunks(len(states) > 1):
            lanes = slice(batch.start * self.g + groups.start, (batch.stop - 1) * self.g + groups.stop)
            ours = states[batch] if len(states) > 1 else states
            for i, t in enumerate(range(0, self.t, self.queries_each)):
                rows = slice(t, min(t + self.queries_each, self.t))
                found: list[Tile] = []
                for j, s in enumerate(range(0, self.s, self.keys_each)):
                    number += 1
                    columns = slice(s, min(s + self.keys_each, self.s))
                    states_here = [state[i][j] for state in ours]
                    if not any(states_here):
                        continue
                    shape = (
                        batch.stop - batch.start,
                        groups.stop - groups.start,
                        rows.stop - rows.start,
                        self.r,
                        columns.stop - columns.start,
                    )
                    cut = Cut(batch, slice(groups.start * self.r, groups.stop * self.r), rows, columns)
                    found.append(Tile(self, cut, min(states_here) < 2, (lanes, columns), shape, number))
                yield Block((lanes, slice(rows.start * self.r, rows.stop * self.r)), found)

    def _states(self) -> list[list[list[int]]]:
        """For each row (or one for all), stretch of queries and stretch of keys: 0 unseen, 1 seen in part, 2 whole."""
        reach = self.problem.visible.reach(tiles(*self.at, self.queries_each, self.keys_each))
        states: list[list[list[int]]] = (reach.some.int() + (reach.some & reach.whole).int()).tolist()
        return states

    def _chunks(self, rows_differ: bool) -> Iterator[tuple[slice, slice]]:
        """Rows of the batch and groups that fit into a tile together."""
        if self.lanes < self.g:
            for b in range(self.b):
                for g in range(0, self.g, self.lanes):
                    yield slice(b, b + 1), slice(g, min(g + self.lanes, self.g))
            return
        # Rows that see different tiles go one by one where there are tiles to skip.
        many = self.t > 2 * self.queries_each or self.s > 2 * self.keys_each
        each = 1 if rows_differ and many else self.lanes // self.g
        for b in range(0, self.b, each):
            yield slice(b, min(b + each, self.b)), slice(0, self.g)
