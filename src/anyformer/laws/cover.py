"""Pairwise cover: few recipes that show every pair of levels of two axes that any recipe of the space can show.

`python -m anyformer.laws.cover` finds them anew, which every change of the space makes needed.
"""

import heapq
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anyformer.laws.axes import points
from anyformer.laws.space import sample
from anyformer.spec import expand

FILE = Path(__file__).with_name("cover.json")
POOL = 12_000
"""Recipes that are looked at for the pairs there are."""

Levels = tuple[tuple[str, ...], ...]
"""For each layer that differs, its level of every axis, in the order of `axes`."""
Pairs = NDArray[np.int64]
"""Numbers of pairs, each once."""


def levels(seed: int) -> Levels:
    """The levels that the recipe of a seed shows."""
    return tuple(tuple(point.values()) for point in points(expand(sample(seed))))


class Numbering:
    """Numbers for levels and for pairs of them, given as they come."""

    # Two levels make one number; there are far fewer levels than this.
    _ROOM = 1 << 12

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, str], int] = {}

    def pairs(self, shown: Levels) -> Pairs:
        """The pairs that some layer shows."""
        numbers = self._numbers
        rows = [[numbers.setdefault((axis, level), len(numbers)) for axis, level in enumerate(row)] for row in shown]
        assert len(numbers) < self._ROOM
        table = np.array(rows, dtype=np.int64)
        first, second = np.triu_indices(table.shape[1], 1)
        found: Pairs = np.unique(table[:, first] * self._ROOM + table[:, second])
        return found

    def words(self, pairs: Iterable[int]) -> list[str]:
        """Pairs as people read them: axis = level, axis = level."""
        names = list(points(expand(sample(0)))[0])
        levels = [f"{names[axis]} = {level}" for axis, level in self._numbers]
        return [f"{levels[pair // self._ROOM]}, {levels[pair % self._ROOM]}" for pair in pairs]


def greedy(shown: Mapping[int, Pairs]) -> list[int]:
    """Seeds whose recipes show every pair that any shows; each is the one that adds most, the first of equals."""
    missing = {int(pair) for pairs in shown.values() for pair in pairs}
    # What a recipe adds only shrinks, so a stale count is a bound, and few are counted anew.
    heap = [(-len(pairs), seed) for seed, pairs in shown.items()]
    heapq.heapify(heap)
    chosen: list[int] = []
    while missing:
        _, seed = heapq.heappop(heap)
        adds = missing.intersection(shown[seed].tolist())
        if heap and (-len(adds), seed) > heap[0]:
            heapq.heappush(heap, (-len(adds), seed))
            continue
        chosen.append(seed)
        missing -= adds
    return chosen


def _needed(chosen: list[int], shown: Mapping[int, Pairs]) -> list[int]:
    """The chosen without those whose every pair another shows."""
    counts: dict[int, int] = {}
    for seed in chosen:
        for pair in shown[seed].tolist():
            counts[pair] = counts.get(pair, 0) + 1
    kept = []
    for seed in sorted(chosen, key=lambda seed: len(shown[seed])):
        pairs = shown[seed].tolist()
        if all(counts[pair] > 1 for pair in pairs):
            for pair in pairs:
                counts[pair] -= 1
        else:
            kept.append(seed)
    return sorted(kept)


def _many(seeds: range) -> list[Levels]:
    return [levels(seed) for seed in seeds]


def _pool(size: int, processes: int) -> Iterator[tuple[int, Levels]]:
    step = 200
    parts = [range(start, min(start + step, size)) for start in range(0, size, step)]
    with ProcessPoolExecutor(processes, get_context("spawn")) as workers:
        for seeds, found in zip(parts, workers.map(_many, parts), strict=True):
            yield from zip(seeds, found, strict=True)


def find(size: int = POOL, processes: int | None = None) -> dict[str, Any]:
    """What the cover's file says, found in recipes of the seeds below `size`."""
    numbering = Numbering()
    shown: dict[int, Pairs] = {}
    for seed, found in _pool(size, processes or os.cpu_count() or 1):
        shown[seed] = numbering.pairs(found)
        if seed % 2000 == 1999:
            sys.stderr.write(f"{seed + 1:,} of {size:,} recipes looked at\n")
    chosen = _needed(greedy(shown), shown)
    every = np.unique(np.concatenate([shown[seed] for seed in chosen]))
    return {"pool": size, "pairs": len(every), "seeds": chosen}


@cache
def seeds() -> tuple[int, ...]:
    """The seeds of the recipes of the cover."""
    return tuple(json.loads(FILE.read_text(encoding="utf-8"))["seeds"])


def missing(shown: Iterable[Levels], covered: Iterable[Levels]) -> list[str]:
    """The pairs that `shown` has and `covered` has not, in words."""
    numbering = Numbering()
    have = {pair for each in covered for pair in numbering.pairs(each).tolist()}
    want = {pair for each in shown for pair in numbering.pairs(each).tolist()}
    return numbering.words(sorted(want - have))


if __name__ == "__main__":
    text = json.dumps(find())
    FILE.write_text(text + "\n", encoding="utf-8")
    sys.stderr.write(f"{FILE}: {len(seeds())} recipes\n")
