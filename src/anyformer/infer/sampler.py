"""The state that sampling keeps between steps: each row's generator, and each row's history as tensors."""

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from anyformer.infer.sampling import (
    History,
    Penalties,
    Sampling,
    Truncation,
    check_logits,
    distribution,
    draw,
    history_tensors,
    penalise,
)


class _Active(NamedTuple):
    """What a step needs about the rows that still generate; it changes only when one of them ends."""

    rows: list[int]
    places: Tensor  # [A] the rows' places in the histories
    penalties: Penalties
    sampled: list[int]  # places, among the active rows, of those that draw
    sampled_index: Tensor
    truncation: Truncation


class Sampler:
    """Chooses the next token of every row of a batch.

    Each row owns a generator on the CPU seeded with its `Sampling.seed` and takes exactly one number from it
    per drawn token, so that its choices depend neither on the global random state, nor on the other rows, nor
    on the device. Greedy rows have no generator.

    Args:
        samplings: one per row.
        prompts: what each row goes on from, which the repetition penalty counts as seen.
        eos_ids: never chosen before a row's `min_new_tokens`.
        n_allowed: ids from here up are never chosen.
        device: where the logits are.
        excluded: further ids that are never chosen.
    """

    def __init__(
        self,
        samplings: Sequence[Sampling],
        prompts: Sequence[Sequence[int]],
        eos_ids: Collection[int],
        n_allowed: int,
        device: torch.device,
        excluded: Collection[int] = (),
    ) -> None:
        self._samplings, self._n_allowed, self._device = samplings, n_allowed, device
        self._eos = self._ids(eos_ids)
        self._excluded = self._ids(excluded)
        self._least = [s.min_new_tokens for s in samplings]
        self._generators = [None if s.greedy else torch.Generator().manual_seed(s.seed) for s in samplings]
        self._n_chosen = [0] * len(samplings)
        self._seen: Tensor | None = None
        self._counts: Tensor | None = None
        if any(s.penalised for s in samplings):
            histories = [history_tensors(History(prompt), n_allowed, device) for prompt in prompts]
            self._seen = torch.stack([seen for seen, _ in histories])
            self._counts = torch.stack([counts for _, counts in histories])
        self._active: _Active | None = None

    def _ids(self, ids: Collection[int]) -> Tensor:
        known = sorted(index for index in set(ids) if 0 <= index < self._n_allowed)
        return torch.tensor(known, dtype=torch.int64, device=self._device)

    def _describe(self, rows: list[int]) -> _Active:
        if self._active is not None and self._active.rows == rows:
            return self._active
        chosen = [self._samplings[row] for row in rows]
        sampled = [place for place, sampling in enumerate(chosen) if not sampling.greedy]
        self._active = _Active(
            rows,
            torch.tensor(rows, dtype=torch.int64, device=self._device),
            Penalties.of(chosen, self._device),
            sampled,
            torch.tensor(sampled, dtype=torch.int64, device=self._device),
            Truncation.of([chosen[place] for place in sampled], self._device),
        )
        return self._active

    def __call__(self, logits: Tensor, rows: Sequence[int]) -> list[int]:
        """The next token of each of `rows`, whose logits are `logits [len(rows), V]`, any floating dtype.

        Raises:
            LogitsError: NaN or +inf among a row's logits, or no token left.
        """
        active = self._describe(list(rows))
        scores = self._scores(logits[:, : self._n_allowed], active, rows)
        # max tells everything in one reduction: NaN wins it, +inf is the largest, -inf says that no token is
        # left; of equal maxima it gives the first.
        best, chosen = scores.max(-1)
        if active.sampled:
            uniform = [self._uniform(rows[place]) for place in active.sampled]
            points = torch.tensor(uniform, dtype=torch.float64, device=self._device)[:, None]
            drawing = scores if len(active.sampled) == len(rows) else scores[active.sampled_index]
            chosen[active.sampled_index] = draw(distribution(drawing.float(), active.truncation), points)
        ids: list[int] = torch.where(best.isfinite(), chosen, -1).tolist()
        if min(ids) < 0:
            check_logits(scores, rows)
        self._record(active, rows, chosen)
        return ids

    def _scores(self, logits: Tensor, active: _Active, rows: Sequence[int]) -> Tensor:
        """The logits after the penalties; -inf for excluded ids and end-of-sequence tokens not due yet."""
        if self._seen is not None and self._counts is not None:
            seen, counts = self._seen[active.places], self._counts[active.places]
            logits = penalise(logits.float(), active.penalties, seen, counts)
        early = [place for place, row in enumerate(rows) if self._n_chosen[row] < self._least[row]]
        if early and len(self._eos):
            due = torch.tensor(early, dtype=torch.int64, device=self._device)
            logits = logits.clone()
            logits[due[:, None], self._eos] = -math.inf
        return logits.index_fill(-1, self._excluded, -math.inf) if len(self._excluded) else logits

    def _uniform(self, row: int) -> float:
        return float(torch.rand((), dtype=torch.float64, generator=self._generators[row]))

    def _record(self, active: _Active, rows: Sequence[int], chosen: Tensor) -> None:
        for row in rows:
            self._n_chosen[row] += 1
        if self._seen is not None and self._counts is not None:
            self._seen[active.places, chosen] = True
            self._counts[active.places, chosen] += 1
