"""The decoding loop: one padded prefill for the batch, then one cached step per token; rows as if alone."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from anyformer.errors import UserError
from anyformer.infer.generation import UNSAID, Generation
from anyformer.infer.sampler import Sampler
from anyformer.infer.sampling import Sampling
from anyformer.spec.parts import ModelSpec, StackSpec

if TYPE_CHECKING:
    from anyformer.nn.cache import Cache
    from anyformer.nn.model import Model

FinishReason = Literal["stop", "length"]
Halt = Callable[[int, int], bool]


@dataclass(frozen=True, slots=True)
class Step:
    """One event of one row.

    Attributes:
        row: which prompt.
        token: the new token; None when the row ends without one (an end-of-sequence token, or no room for
            any).
        finish_reason: "stop" (an end-of-sequence token, or `halt` said so), "length" (max_new_tokens or the
            context is used up), None while the row goes on.
    """

    row: int
    token: int | None
    finish_reason: FinishReason | None = None


@contextmanager
def evaluating(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Evaluation mode without gradients for one call; every module then has its own mode again."""
    training = [module for module in modules if module.training]
    for module in training:
        module.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


def decoder_of(spec: ModelSpec, *, source: bool = False) -> StackSpec:
    """The decoder of a model that continues its own input; `source` allows an encoder–decoder too.

    Raises `UserError` for a model of another kind.
    """
    if spec.head is None:
        what = "this model has no head, so it cannot generate"
    elif spec.encoder is not None and spec.decoder is not None and not source:
        what = "this model reads a source, and only models that continue a text can be used here"
    elif spec.decoder is None or not spec.generates:
        what = "this model predicts no next token"
    else:
        return spec.decoder
    expected = f"{'a decoder or an encoder–decoder' if source else 'a decoder alone'} with a language head"
    remedy = None if spec.decoder is not None else "an encoder gives vectors: checkpoint.embed(texts) in Python"
    raise UserError(what, expected=expected, remedy=remedy)


def reads_source(spec: ModelSpec) -> bool:
    """Whether the prompt is a source that an encoder reads, and the reply a text of its own."""
    return spec.encoder is not None and spec.decoder is not None


def room(n_prompt: int, max_new_tokens: int, context: int | None) -> int:
    """How many tokens a reply may have: prompt and reply together fill at most the context.

    Of an encoder–decoder, the start tokens stand in the place of the prompt.

    A prompt that fills the context exactly still gets one token, which is predicted but never read.
    """
    return max_new_tokens if context is None else min(max_new_tokens, max(context - n_prompt, 1))


def _check_prompt(row: int, prompt: Any, n_tokens: int, context: int | None) -> list[int]:
    where = f"prompt {row}"
    if isinstance(prompt, str):
        raise UserError(
            "a prompt of token ids is needed here",
            where=where,
            got="text",
            expected="a list of whole numbers",
        )
    ids = list(prompt)
    if not ids:
        raise UserError("the prompt has no tokens", where=where, expected="at least one token")
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, Integral) or not 0 <= int(token) < n_tokens:
            what = "the prompt holds a token id outside the vocabulary"
            raise UserError(what, where=where, got=repr(token), expected=f"whole numbers from 0 to {n_tokens - 1}")
    if context is not None and len(ids) > context:
        raise UserError(
            f"the prompt is longer than the model's context: {len(ids)} tokens, context {context}",
            where=where,
            got=f"{len(ids)} tokens",
            expected=f"at most {context} tokens",
            remedy="shorten the prompt; nothing is cut silently",
        )
    return [int(token) for token in ids]


def _check_start(start: Sequence[int], n_tokens: int, context: int | None) -> list[int]:
    """The ids that every target of an encoder–decoder begins with."""
    key = "decoder_start_token_id"
    if not start:
        raise UserError(
            "this model writes a text of its own, and nothing says with which token that begins",
            where=key,
            expected=f"a token id from 0 to {n_tokens - 1}",
            remedy="name it in the checkpoint's generation_config.json, or pass generation=Generation(start=(ID,))",
        )
    for place, token in enumerate(start):
        if token >= n_tokens:
            what, where = "a start token is outside the vocabulary", "forced_bos_token_id" if place else key
            raise UserError(what, where=where, got=token, expected=f"whole numbers from 0 to {n_tokens - 1}")
    if context is not None and len(start) > context:
        what = f"the start tokens are more than the model's context: {len(start)} tokens, context {context}"
        raise UserError(what, where=key, got=f"{len(start)} tokens", expected=f"at most {context} tokens")
    return list(start)


def per_row(sampling: Sampling | Sequence[Sampling], n_rows: int) -> list[Sampling]:
    """One `Sampling` for each row; `UserError` when the numbers differ."""
    samplings = [sampling] * n_rows if isinstance(sampling, Sampling) else list(sampling)
    if len(samplings) != n_rows:
        expected = f"one for all prompts, or one for each of the {n_rows}"
        raise UserError("prompts and sampling parameters differ in number", got=len(samplings), expected=expected)
    return samplings


def generate_ids(
    model: "Model",
    prompts: Sequence[Sequence[int]],
    sampling: Sampling | Sequence[Sampling],
    eos_ids: Collection[int] = (),
    n_allowed: int | None = None,
    halt: Halt | None = None,
    excluded: Collection[int] = (),
    generation: Generation = UNSAID,
) -> Iterator[Step]:
    """Continues every prompt; yields a `Step` per new token as soon as it is known, rows in ascending order.

    The prompts of an encoder–decoder are its sources, read once; each reply is a text of its own, which goes on from
    `generation.start`. The arguments are checked at the call, the work happens as the steps are taken. A row's tokens
    do not depend on the other rows. The model is in evaluation mode during each of its calls and in its own mode
    between them; nothing is kept once the iteration ends, however it ends.

    Args:
        model: its `spec.decoder.max_positions` is the context (None: no limit), the encoder's that of a source.
        prompts: token ids, at least one each.
        sampling: for all rows, or one for each.
        eos_ids: tokens that end a row; they are not part of the reply. All of them count.
        n_allowed: ids from here up (padded embedding rows) are never generated; the vocabulary's size by default.
        halt: called with (row, token) for each new token; True ends the row with "stop", the token included.
            Stop strings are text, so they need this: `anyformer.infer.generate` supplies it.
        excluded: further ids that are never generated.
        generation: what the checkpoint says: start tokens, further `eos_ids`, further excluded ids.

    Raises:
        UserError: a model that is not for this, an empty prompt, an id outside the vocabulary, a prompt longer than
        the context, an encoder–decoder without start tokens, stop strings without `halt`.
        LogitsError: the model gives NaN or +inf.
    """
    n_tokens, decoder = model.spec.vocab_size, decoder_of(model.spec, source=True)
    n_allowed = n_tokens if n_allowed is None else n_allowed
    if not 1 <= n_allowed <= n_tokens:
        raise UserError("n_allowed does not fit the vocabulary", got=n_allowed, expected=f"from 1 to {n_tokens}")
    context, encoder = decoder.max_positions, model.spec.encoder
    limit = context if encoder is None else encoder.max_positions
    rows = [_check_prompt(row, prompt, n_tokens, limit) for row, prompt in enumerate(prompts)]
    targets = rows if encoder is None else [_check_start(generation.start, n_tokens, context)] * len(rows)
    samplings = per_row(sampling, len(rows))
    if halt is None and any(s.stop for s in samplings):
        raise UserError("stop strings need text", where="stop", remedy="use anyformer.infer.generate, or pass halt")
    parameter = next(model.parameters(), None)
    device = torch.device("cpu") if parameter is None else parameter.device
    ends = frozenset(eos_ids).union(generation.eos_ids)
    sampler = Sampler(samplings, targets, ends, n_allowed, device, {*excluded, *generation.suppressed})
    left = [room(len(ids), s.max_new_tokens, context) for ids, s in zip(targets, samplings, strict=True)]
    row_ends = [frozenset[int]() if s.ignore_eos else ends for s in samplings]
    return _Decoding(model, targets, None if encoder is None else rows, left, row_ends, sampler, halt, device).run()


@dataclass(slots=True)
class _Decoding:
    """The rows of one call to `generate_ids`; every list has one entry for each of the caller's rows."""

    model: "Model"
    targets: list[list[int]]  # what the replies go on from: the prompts, or an encoder–decoder's start tokens
    sources: list[list[int]] | None  # an encoder–decoder's prompts
    left: list[int]  # tokens that each row may still get
    ends: list[frozenset[int]]
    sampler: Sampler
    halt: Halt | None
    device: torch.device
    read: list[list[int]] = field(init=False)  # all that each row has read or is to read next

    def __post_init__(self) -> None:
        self.read = [list(ids) for ids in self.targets]

    def run(self) -> Iterator[Step]:
        rows = [row for row, left in enumerate(self.left) if left]  # the rows in the batch
        for row, left in enumerate(self.left):
            if not left:
                yield Step(row, None, "length")
        if not rows:
            return
        modules = list(self.model.modules())
        cache = self._cache(rows)
        tokens, padding = self._padded([self.read[row] for row in rows])
        first = self._first(rows)
        turns = decoder_of(self.model.spec, source=True).turning_lengths
        while True:
            with evaluating(modules):
                logits = self.model(tokens, padding=padding, cache=cache, last_only=True, **first)[:, -1]
                ids = self.sampler(logits, rows)
            steps = [self._step(row, token) for row, token in zip(rows, ids, strict=True)]
            yield from steps
            going = [place for place, step in enumerate(steps) if step.finish_reason is None]
            if not going:
                return
            if len(going) < len(rows):  # rows that have ended leave the batch and cost nothing more
                cache.select(torch.tensor(going, device=self.device))
                rows = [rows[place] for place in going]
            for place, row in zip(going, rows, strict=True):
                self.read[row].append(ids[place])
            if any(len(self.read[row]) - 1 in turns for row in rows):
                cache = self._cache(rows)
                tokens, padding = self._padded([self.read[row] for row in rows])
                first = self._first(rows)
            else:
                tokens, padding = torch.tensor([[ids[place]] for place in going], device=self.device), None
                first = {}

    def _first(self, rows: list[int]) -> dict[str, Tensor | None]:
        """What the first call alone takes: the sources; or the prompts as prefixes, where layers have prefix masks."""
        if self.sources is not None:
            source, real = self._padded([self.sources[row] for row in rows])
            return {"source": source, "source_padding": real}
        blocks = decoder_of(self.model.spec).blocks
        if not any(block.attention.mask.kind == "prefix" for block in blocks):
            return {}
        return {"prefix": torch.tensor([len(self.targets[row]) for row in rows], device=self.device)}

    def _cache(self, rows: list[int]) -> "Cache":
        # The last token of a row is never fed, so it needs no place.
        capacity = max(len(self.read[row]) + self.left[row] - 1 for row in rows)
        try:
            return self.model.new_cache(batch=len(rows), capacity=min(capacity, 2**62), kind="static")
        except RuntimeError as error:  # torch has no narrower class for it on the CPU
            raise UserError(
                "there is no memory for the key-value cache",
                where="max_new_tokens",
                got=f"{len(rows)} rows of {capacity} tokens",
                remedy="ask for fewer new tokens, or for fewer prompts at once",
            ) from error

    def _padded(self, rows: list[list[int]]) -> tuple[Tensor, Tensor | None]:
        """Rows of ids as `[B, T]`, padded on the right, and which of it is real (None: all)."""
        width = max(len(ids) for ids in rows)
        tokens = torch.tensor([ids + [0] * (width - len(ids)) for ids in rows], device=self.device)
        if all(len(ids) == width for ids in rows):
            return tokens, None
        lengths = torch.tensor([len(ids) for ids in rows], device=self.device)
        return tokens, torch.arange(width, device=self.device) < lengths[:, None]

    def _step(self, row: int, token: int) -> Step:
        """What the new token of a row means: one more, the end, or both."""
        if token in self.ends[row]:
            return Step(row, None, "stop")
        self.left[row] -= 1
        if self.halt is not None and self.halt(row, token):
            return Step(row, token, "stop")
        return Step(row, token, None if self.left[row] else "length")
