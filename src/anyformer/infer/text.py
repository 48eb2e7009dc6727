"""Text in, text out: prompts are encoded, replies are decoded as they grow and end at stop strings."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from anyformer.errors import UserError
from anyformer.infer.decode import FinishReason, Step, generate_ids, per_row, reads_source
from anyformer.infer.generation import UNSAID, Generation
from anyformer.infer.sampling import Sampling
from anyformer.text.stream import StopMatcher

if TYPE_CHECKING:
    from anyformer.nn.model import Model
    from anyformer.text import Tokenizer

Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished reply.

    Attributes:
        text: the continuation alone (empty without a tokenizer), without the end-of-sequence token and
            without the stop string that ended it.
        ids: the tokens generated, without the end-of-sequence token; those that spell the stop string are
            among them.
        finish_reason: "stop" (an end-of-sequence token or a stop string) or "length" (max_new_tokens or the
            context).
        n_prompt_tokens: the prompt's length, BOS included; of an encoder–decoder, the source's.
        n_new_tokens: the length of `ids`.
    """

    text: str
    ids: tuple[int, ...]
    finish_reason: FinishReason
    n_prompt_tokens: int
    n_new_tokens: int


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of one row's text; the last one brings the `completion`, whose text is all pieces joined."""

    row: int
    text: str
    completion: Completion | None = None


class _Row:
    """The text of one reply.

    Its stream reads first what it goes on from, `before`, which keeps a space between the two; an encoder–decoder's
    reply is a text of its own.
    """

    def __init__(
        self, tokenizer: "Tokenizer | None", before: Sequence[int], n_prompt: int, stop: Sequence[str]
    ) -> None:
        self._tokenizer, self._before, self._n_prompt = tokenizer, before, n_prompt
        self._stream = None if tokenizer is None else tokenizer.stream()
        self._silent = "".join([self._read(token) for token in before]) == ""
        self._matcher = StopMatcher(stop)
        self._pending = ""
        self._text: list[str] = []
        self._ids: list[int] = []

    def _read(self, token: int) -> str:
        return "" if self._stream is None else self._stream.push(token)

    def push(self, token: int) -> bool:
        """Adds a token; True when the text has reached a stop string."""
        self._ids.append(token)
        text = self._read(token)
        self._silent = self._silent and not text
        self._pending += self._matcher.push(text)
        return self._matcher.stopped is not None

    def take(self) -> str:
        """The text that is certain since the last call."""
        text, self._pending = self._pending, ""
        self._text.append(text)
        return text

    def finish(self, reason: FinishReason) -> tuple[str, Completion]:
        """The rest of the text, held back until now, and the reply as a whole."""
        if self._matcher.stopped is None and self._stream is not None and self._tokenizer is not None:
            rest = self._stream.finish()
            if self._silent:  # a decoder that gives everything at the end gives the prompt too
                rest = rest.removeprefix(self._tokenizer.decode(self._before))
            self._pending += self._matcher.push(rest)
            self._pending += self._matcher.finish()
        last = self.take()
        reason = reason if self._matcher.stopped is None else "stop"
        return last, Completion("".join(self._text), tuple(self._ids), reason, self._n_prompt, len(self._ids))


def encode_prompt(
    tokenizer: "Tokenizer | None", prompt: Prompt, where: str = "prompt", *, whole: bool = False
) -> list[int]:
    """The prompt's ids, by the tokenizer's own rule of BOS; an empty text is BOS alone where there is one.

    What the tokenizer puts at the end of a text (T5 and others write EOS there) is left out: this text goes
    on. It stays where the text is `whole`, as an encoder–decoder's source is.

    Raises:
        UserError: text that is not valid Unicode, or an empty prompt without a beginning-of-sequence token.
    """
    if not isinstance(prompt, str):
        given: Any = prompt.tolist() if hasattr(prompt, "tolist") else prompt  # arrays of ids
        if not isinstance(given, Sequence) or isinstance(given, bytes):
            raise UserError(
                "this is not a prompt", where=where, got=repr(prompt), expected="text, or a list of token ids"
            )
        return list(given)
    if tokenizer is None:
        remedy = "give token ids, or a checkpoint with a tokenizer"
        raise UserError("text needs a tokenizer, and this checkpoint has none", where=where, remedy=remedy)
    ids = tokenizer.encode(prompt)
    n_end = len(tokenizer.suffix)
    if not whole and n_end and tuple(ids[-n_end:]) == tokenizer.suffix:
        ids = ids[:-n_end]
    if ids:
        return ids
    if tokenizer.bos_id is None:
        what = "the prompt is empty, and this tokenizer has no beginning-of-sequence token to start from"
        remedy = "give at least one character"
        raise UserError(what, where=where, got=repr(prompt), expected="text to continue", remedy=remedy)
    return [tokenizer.bos_id]


def _read_prompt(tokenizer: "Tokenizer | None", prompt: Prompt, where: str, *, n_rows: int, whole: bool) -> list[int]:
    """`encode_prompt` for an embedding of `n_rows` rows, which may be fewer than the tokenizer's tokens."""
    ids = encode_prompt(tokenizer, prompt, where, whole=whole)
    if tokenizer is not None and isinstance(prompt, str):
        lost = next((index for index in ids if index >= n_rows), None)
        if lost is not None:
            raise UserError(
                "the model has no embedding for a token of this text",
                where=where,
                got=f"{tokenizer.token(lost)!r}, id {lost}, of a tokenizer of {tokenizer.vocab_size} ids",
                expected=f"ids from 0 to {n_rows - 1}",
                remedy="use the tokenizer that belongs to the model, or leave the token out",
            )
    return ids


def _require_tokens(tokenizer: "Tokenizer", prompt: Prompt, ids: Sequence[int], where: str) -> None:
    """Raises `UserError` for given ids that stand for no token: padded rows of an embedding, holes."""
    strange = None if isinstance(prompt, str) else next((i for i in ids if tokenizer.token(i) is None), None)
    if strange is not None:
        what, expected = "the prompt holds an id that stands for no token", "ids of the tokenizer's tokens, below"
        raise UserError(what, where=where, got=int(strange), expected=f"{expected} {tokenizer.vocab_size}")


def stream(
    model: "Model",
    tokenizer: "Tokenizer | None",
    prompts: str | Sequence[Prompt],
    sampling: Sampling | Sequence[Sampling],
    generation: Generation = UNSAID,
) -> Iterator[Delta]:
    """Continues every prompt and yields pieces of text as soon as they are certain.

    A piece never breaks a character. Text that may be the beginning of a stop string is held back until
    that is decided. The prompt of an encoder–decoder is its source, a whole text with what the tokenizer puts at its
    end, and the reply is a text of its own. The arguments are checked at the call; see `generate_ids` for what holds
    during and after the iteration.

    Args:
        model: a decoder, or an encoder–decoder.
        tokenizer: its tokenizer; all its `eos_ids` end a reply, and ids that it does not have are never
            generated. None for a model of token ids alone: the prompts are ids then, and there is no text.
        prompts: one text, or several texts or lists of token ids. A token that the model has no embedding for, or an
            id that the tokenizer has no token for, is refused.
        sampling: for all prompts, or one for each. Rows of one prompt and one seed get one text.
        generation: what the checkpoint says about starting and ending, beside the tokenizer.

    Raises:
        UserError: a prompt that cannot be continued; an encoder–decoder without start tokens.
        LogitsError: the model gives NaN or +inf.
    """
    if not isinstance(prompts, Sequence):
        raise UserError("prompts are a text, or several texts or lists of ids", where="prompts", got=repr(prompts))
    texts = [prompts] if isinstance(prompts, str) else list(prompts)
    n_rows, whole = model.spec.vocab_size, reads_source(model.spec)
    ids = [
        _read_prompt(tokenizer, prompt, f"prompt {row}", n_rows=n_rows, whole=whole) for row, prompt in enumerate(texts)
    ]
    samplings = per_row(sampling, len(ids))
    rows: list[_Row] = []
    if tokenizer is None and any(s.stop for s in samplings):
        raise UserError("stop strings are text, and there is no tokenizer", where="stop", remedy="leave them out")
    steps = generate_ids(
        model,
        ids,
        samplings,
        () if tokenizer is None else tokenizer.eos_ids,
        n_rows if tokenizer is None else min(tokenizer.vocab_size, n_rows),
        halt=lambda row, token: rows[row].push(token),
        excluded=() if tokenizer is None else tokenizer.holes,
        generation=generation,
    )
    for row, (prompt, found) in enumerate(zip(texts, ids, strict=True)):
        if tokenizer is not None:
            _require_tokens(tokenizer, prompt, found, f"prompt {row}")
        rows.append(_Row(tokenizer, () if whole else found, len(found), samplings[row].stop))
    return _deltas(steps, rows)


def _deltas(steps: Iterator[Step], rows: Sequence[_Row]) -> Iterator[Delta]:
    """The text that each step makes certain, and a row's completion with its last."""
    for step in steps:
        text = rows[step.row].take()
        completion = None
        if step.finish_reason is not None:
            rest, completion = rows[step.row].finish(step.finish_reason)
            text += rest
        if text or completion is not None:
            yield Delta(step.row, text, completion)


def generate(
    model: "Model",
    tokenizer: "Tokenizer | None",
    prompts: str | Sequence[Prompt],
    sampling: Sampling | Sequence[Sampling],
    generation: Generation = UNSAID,
) -> list[Completion]:
    """Continues every prompt; completions in their order. Arguments and errors are those of `stream`."""
    deltas = stream(model, tokenizer, prompts, sampling, generation)
    done = {delta.row: delta.completion for delta in deltas if delta.completion}
    return [done[row] for row in sorted(done)]
