"""What to draw next: the parameters of sampling and the pure functions that apply them, in one stated order.

repetition penalty → presence, frequency → temperature → top-k → top-p → min-p → renormalise → draw.

Every entry point (Python, command line, streaming, batches) runs exactly these functions.
`docs/generation.md` gives each step's equation and paper.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from anyformer.errors import UserError

# Ranks looked at before a nucleus that is wider still pays for sorting the whole vocabulary.
NUCLEUS_GUESS = 1024
_SMALLEST_TEMPERATURE = torch.finfo(torch.float32).tiny


class LogitsError(UserError):
    """The model's scores leave nothing that can be drawn: NaN, +inf, or every token at -inf."""


def _refuse(name: str, value: object, expected: str) -> UserError:
    shown = repr(value) if len(repr(value)) <= 80 else f"{repr(value)[:77]}..."
    return UserError(f"{name} is not usable for sampling", where=name, got=shown, expected=expected)


def _number(name: str, value: Any, expected: str) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise _refuse(name, value, expected)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise _refuse(name, value, expected)
    return number


def _whole(name: str, value: Any, least: int, expected: str) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < least:
        raise _refuse(name, value, expected)
    return int(value)


def _stop_strings(value: Any) -> tuple[str, ...]:
    expected = "a string that is not empty, or several of them"
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, Iterable):
        raise _refuse("stop", value, expected)
    strings = tuple(value)
    for text in strings:
        if not isinstance(text, str) or not text:
            raise _refuse("stop", text, expected)
    return strings


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How one row is continued. Checked in construction; a value that cannot work raises `UserError`.

    Args:
        temperature: divides the logits; 0 is greedy (the first of equal maxima; no randomness is drawn).
        top_k: keep the k most probable tokens (Fan et al. 2018); None keeps all.
        top_p: keep the smallest set of most probable tokens whose mass reaches p (Holtzman et al. 2020), in
            (0, 1]; 1 or None keeps all.
        min_p: keep tokens at least min_p times as probable as the most probable one (Nguyen et al. 2024), in
            [0, 1]; 0 or None keeps all, 1 keeps the maxima.
        repetition_penalty: theta of Keskar et al. 2019 (CTRL): once for every distinct token of the prompt
            and the reply, a positive logit is divided by it and a negative one multiplied; 1 changes nothing.
            Of an encoder–decoder, the start tokens and the reply count, not the source.
        presence_penalty: subtracted once from the logit of every token that the reply already holds.
        frequency_penalty: subtracted from a token's logit once for each time the reply already holds it.
        seed: of this row's own generator. Equal prompt, parameters and seed give equal text, whatever the
            global random state and whatever other rows share the batch; give rows different seeds for
            different texts.
        max_new_tokens: the most tokens to generate; the context may end a reply earlier.
        min_new_tokens: no end-of-sequence token can be drawn before the reply holds this many tokens.
        stop: strings that end the reply; they are not part of its text. One string stands for itself; kept as
            a tuple.
        ignore_eos: do not end at end-of-sequence tokens; they then count as tokens of the reply.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    max_new_tokens: int = 128
    min_new_tokens: int = 0
    stop: Sequence[str] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name, value in self._checked().items():
            object.__setattr__(self, name, value)

    def _checked(self) -> dict[str, Any]:
        values: dict[str, Any] = {}
        finite = "a finite number"
        values["temperature"] = _number("temperature", self.temperature, "a finite number of at least 0; 0 is greedy")
        if values["temperature"] < 0:
            raise _refuse("temperature", self.temperature, "a finite number of at least 0; 0 is greedy")
        if self.top_k is not None:
            values["top_k"] = _whole("top_k", self.top_k, 1, "a whole number of at least 1, or None for no limit")
        if self.top_p is not None:
            expected = "a number above 0 and at most 1, or None for no limit"
            values["top_p"] = _number("top_p", self.top_p, expected)
            if not 0 < values["top_p"] <= 1:
                raise _refuse("top_p", self.top_p, expected)
        if self.min_p is not None:
            expected = "a number from 0 to 1, or None for no limit"
            values["min_p"] = _number("min_p", self.min_p, expected)
            if not 0 <= values["min_p"] <= 1:
                raise _refuse("min_p", self.min_p, expected)
        expected = "a number from 0.01 to 100; 1 changes nothing"
        values["repetition_penalty"] = _number("repetition_penalty", self.repetition_penalty, expected)
        if not 0.01 <= values["repetition_penalty"] <= 100:
            raise _refuse("repetition_penalty", self.repetition_penalty, expected)
        values["presence_penalty"] = _number("presence_penalty", self.presence_penalty, finite)
        values["frequency_penalty"] = _number("frequency_penalty", self.frequency_penalty, finite)
        values["seed"] = _whole("seed", self.seed, 0, "a whole number from 0 to 2**64 - 1")
        if values["seed"] >= 2**64:
            raise _refuse("seed", self.seed, "a whole number from 0 to 2**64 - 1")
        values["max_new_tokens"] = _whole("max_new_tokens", self.max_new_tokens, 0, "a whole number of at least 0")
        values["min_new_tokens"] = _whole("min_new_tokens", self.min_new_tokens, 0, "a whole number of at least 0")
        if values["min_new_tokens"] > values["max_new_tokens"]:
            raise _refuse("min_new_tokens", self.min_new_tokens, f"at most max_new_tokens ({self.max_new_tokens})")
        values["stop"] = _stop_strings(self.stop)
        if not isinstance(self.ignore_eos, bool):
            raise _refuse("ignore_eos", self.ignore_eos, "True or False")
        return values

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is taken and nothing is drawn."""
        return self.temperature == 0

    @property
    def penalised(self) -> bool:
        """Whether any penalty changes the logits."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)


class History(NamedTuple):
    """One row's tokens so far. The repetition penalty reads both parts, the others the reply alone."""

    prompt: Sequence[int] = ()
    reply: Sequence[int] = ()


class Penalties(NamedTuple):
    """The penalties of B rows as columns `[B, 1]` of float32."""

    repetition: Tensor
    presence: Tensor
    frequency: Tensor

    @classmethod
    def of(cls, samplings: Sequence[Sampling], device: torch.device) -> "Penalties":
        """The columns of `samplings`, one row each."""

        def column(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device)[:, None]

        return cls(
            column([s.repetition_penalty for s in samplings]),
            column([s.presence_penalty for s in samplings]),
            column([s.frequency_penalty for s in samplings]),
        )


class Truncation(NamedTuple):
    """Temperature and truncation of B rows as columns `[B, 1]`, and what the host must know to skip work."""

    temperature: Tensor
    top_k: Tensor  # 0 where off
    top_p: Tensor  # 1 where off
    min_p: Tensor  # 0 where off
    widest_k: int  # the largest top_k among the rows, 0 where none has one
    any_p: bool
    any_open_p: bool  # some row has top_p without top_k
    any_min_p: bool

    @classmethod
    def of(cls, samplings: Sequence[Sampling], device: torch.device) -> "Truncation":
        """The columns of `samplings`, one row each; greedy rows, which draw nothing, do not belong here."""
        top_k = [s.top_k or 0 for s in samplings]
        top_p = [1.0 if s.top_p is None else s.top_p for s in samplings]
        min_p = [s.min_p or 0.0 for s in samplings]
        # A temperature below float32's normal range would round to 0, and 0/0 is NaN.
        temperature = [max(s.temperature, _SMALLEST_TEMPERATURE) for s in samplings]
        return cls(
            torch.tensor(temperature, dtype=torch.float32, device=device)[:, None],
            torch.tensor(top_k, dtype=torch.int64, device=device)[:, None],
            torch.tensor(top_p, dtype=torch.float64, device=device)[:, None],
            torch.tensor(min_p, dtype=torch.float64, device=device)[:, None],
            max(top_k, default=0),
            any(p < 1 for p in top_p),
            any(p < 1 and k == 0 for p, k in zip(top_p, top_k, strict=True)),
            any(m > 0 for m in min_p),
        )


def penalise(logits: Tensor, penalties: Penalties, seen: Tensor, counts: Tensor) -> Tensor:
    """Logits after the repetition, presence and frequency penalties; a new tensor.

    Args:
        logits: `[B, V]` float32.
        penalties: columns `[B, 1]`; a row at (1, 0, 0) keeps every bit.
        seen: `[B, V]` bool, True for tokens of the prompt or the reply (padding is neither).
        counts: `[B, V]` float32, how often the reply holds each token.
    """
    theta = penalties.repetition
    logits = torch.where(seen, torch.where(logits > 0, logits / theta, logits * theta), logits)
    return logits - penalties.presence * (counts > 0) - penalties.frequency * counts


def _highest(scores: Tensor, width: int) -> Tensor:
    """Each row's `width` highest scores in descending order; sorting is faster than selecting nearly all of them."""
    if width > scores.shape[-1] // 8:
        return scores.sort(dim=-1, descending=True).values[:, :width]
    return scores.topk(width, dim=-1).values


def _first_ranked(scores: Tensor, ranked: Tensor, n: Tensor) -> Tensor:
    """True for each row's `n [B, 1]` highest scores, equal ones by lowest id; `ranked` is sorted `scores`."""
    threshold = ranked.gather(-1, n - 1)
    above = scores > threshold
    level = scores == threshold
    room = n - above.sum(-1, keepdim=True)
    return above | (level & (level.cumsum(-1) <= room))


def _top_k(scores: Tensor, rules: Truncation) -> Tensor:
    """True `[B, V]` for the tokens that top-k keeps."""
    off = rules.top_k == 0
    width = min(rules.widest_k, scores.shape[-1])
    ranked = _highest(scores, width)
    return _first_ranked(scores, ranked, torch.where(off, 1, rules.top_k.clamp(max=width))) | off


def _top_p(scores: Tensor, weights: Tensor, rules: Truncation) -> Tensor:
    """True `[B, V]` for the tokens that top-p keeps; `weights` are exp(scores), 0 where top-k removed one.

    A token stays while the mass of the tokens before it is below p, so the set is the smallest that reaches
    p.
    """
    n_tokens = scores.shape[-1]
    off = rules.top_p >= 1
    goal = rules.top_p * weights.sum(-1, keepdim=True)
    width = min(n_tokens, max(rules.widest_k, NUCLEUS_GUESS if rules.any_open_p else 0))
    while True:
        ranked = _highest(scores, width)
        mass = ranked.double().exp()
        inside = pad(mass.cumsum(-1)[:, :-1], (1, 0)) < goal
        n = inside.sum(-1, keepdim=True)
        wider = (n == width) & ~off & (rules.top_k == 0)
        if width == n_tokens or not rules.any_open_p or not bool(wider.any()):
            return _first_ranked(scores, ranked, n) | off
        width = n_tokens


def distribution(logits: Tensor, rules: Truncation) -> Tensor:
    """The probabilities `[B, V]` of the next token: float64, each row sums to 1, 0 outside the kept set.

    Temperature, top-k, top-p, min-p in this order, each on what the one before has left; then renormalised.

    Args:
        logits: `[B, V]` float32 after penalties; -inf removes a token, at least one must be finite.
        rules: the rows' parameters.
    """
    # The maximum goes first: the largest score is then 0 at any temperature, and half-precision logits cannot
    # overflow.
    scores = (logits - logits.amax(-1, keepdim=True)) / rules.temperature
    weights = scores.double().exp()
    if rules.widest_k:
        weights = weights * _top_k(scores, rules)
    if rules.any_p:
        weights = weights * _top_p(scores, weights, rules)
    if rules.any_min_p:
        weights = weights * (weights >= rules.min_p)  # the largest weight is exactly 1
    return weights / weights.sum(-1, keepdim=True)


def draw(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """Token ids `[B]`: the inverse of the cumulative distribution, over ids in ascending order.

    Args:
        probabilities: `[B, V]` float64.
        uniform: `[B, 1]` float64 in [0, 1), one number per row.
    """
    cumulative = probabilities.cumsum(-1)
    # right=True: the first id whose cumulative mass lies above the point, never one of probability 0.
    ids = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
    return ids.squeeze(-1).clamp(max=probabilities.shape[-1] - 1)


def check_logits(logits: Tensor, rows: Sequence[int]) -> None:
    """`LogitsError`, naming one of `rows`, when `logits [B, V]` hold NaN or +inf, or a row nothing finite."""
    expected = "finite scores, or -inf for tokens that are excluded"
    remedy = "the weights have probably diverged: use an earlier checkpoint, or a wider dtype"
    for name, found in (("NaN", logits.isnan()), ("+inf", logits == math.inf)):
        if bool(found.any()):
            place, token = (int(i) for i in found.nonzero()[0])
            where = f"row {rows[place]}, token id {token}"
            raise LogitsError(f"the logits hold {name}", where=where, got=name, expected=expected, remedy=remedy)
    empty = (logits == -math.inf).all(-1)
    if bool(empty.any()):
        where = f"row {rows[int(empty.nonzero()[0])]}"
        raise LogitsError(
            "the logits leave no token to choose",
            where=where,
            got="every score is -inf",
            expected="at least one finite score",
        )


def history_tensors(history: History, n_tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """`seen [V]` (bool) and `counts [V]` (float32) of one row; ids from `n_tokens` up are left out."""
    prompt = torch.tensor([i for i in history.prompt if i < n_tokens], dtype=torch.int64, device=device)
    reply = torch.tensor([i for i in history.reply if i < n_tokens], dtype=torch.int64, device=device)
    counts = torch.bincount(reply, minlength=n_tokens).float()
    seen = counts > 0
    seen[prompt] = True
    return seen, counts


def kept(
    logits: Tensor,
    sampling: Sampling,
    history: History | None = None,
    n_allowed: int | None = None,
    excluded: Collection[int] = (),
) -> tuple[list[int], list[float]]:
    """The tokens that can be drawn next and their probabilities, most probable first, ties by lowest id.

    Args:
        logits: `[V]`, any floating dtype.
        sampling: the parameters; greedy keeps one token.
        history: the prompt and the reply so far, for the penalties.
        n_allowed: ids from here up (padded embedding rows) are never kept.
        excluded: further ids that are never kept.

    Raises:
        LogitsError: NaN or +inf among the logits, or no finite score.
    """
    scores = logits[:n_allowed].float()[None]
    gone = [index for index in excluded if index < scores.shape[-1]]
    scores = scores.index_fill(-1, torch.tensor(gone, dtype=torch.int64, device=scores.device), -math.inf)
    if sampling.penalised:
        seen, counts = history_tensors(history or History(), scores.shape[-1], scores.device)
        scores = penalise(scores, Penalties.of([sampling], scores.device), seen[None], counts[None])
    check_logits(scores, [0])
    if sampling.greedy:
        return [int(scores.argmax())], [1.0]
    probabilities = distribution(scores, Truncation.of([sampling], scores.device))[0]
    ranked = probabilities.sort(descending=True, stable=True)
    n = int((probabilities > 0).sum())
    return ranked.indices[:n].tolist(), ranked.values[:n].tolist()
