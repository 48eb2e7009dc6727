"""Texts to sentence vectors, by the rules of a folder of sentence-transformers (Reimers & Gurevych 2019)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn

import torch
import torch.nn.functional as F
from tokenizers.normalizers import Lowercase
from torch import Tensor

from anyformer.errors import UserError
from anyformer.infer.decode import evaluating
from anyformer.infer.embed_files import read_files, write_files
from anyformer.infer.pooling import MODES, Dense, pool

if TYPE_CHECKING:
    from anyformer.nn.model import Model
    from anyformer.text import Tokenizer


@dataclass(frozen=True)
class Embedding:
    """How a sentence vector is made of the states of a text's tokens.

    A model without `modules.json` says nothing about it. `Embedding()` is the rule then: the mean over the real tokens,
    not normalised, even where the model has a pooler (that of BERT was trained to tell whether one sentence follows
    another). `Embedding(pooling=("last",))` is for a decoder that sums a text up in its last token.

    Attributes:
        pooling: one or more of "cls" (the first token), "max", "mean", "mean_sqrt_len", "weighted_mean", "last";
            several are put side by side.
        normalise: divide the vector by its length, last of all; a zero vector stays zero.
        max_length: the most tokens of a text, those that the tokenizer puts around it included; None is the model's
            context.
        truncation: the end at which a longer text is cut off, "right" or "left"; the tokens around it stay.
        lower: make texts lower-case before they are tokenised.
        dense: layers between pooling and normalisation.
        prompts: by name, what goes in front of a text ("query: ").
        default_prompt: the name of the prompt where a call names none; None for no prompt.
        pool_prompt: whether the tokens up to the end of the prompt count in pooling.
        similarity: what the vectors were trained to be compared by ("cosine", "dot", "euclidean", "manhattan"); it
            changes nothing here.
        d_model: the width C of the states; None for that of the model in use.

    Raises `UserError` for values outside these, and for dense layers whose widths do not follow one another.
    """

    pooling: tuple[str, ...] = ("mean",)
    normalise: bool = False
    max_length: int | None = None
    truncation: Literal["right", "left"] = "right"
    lower: bool = False
    dense: tuple[Dense, ...] = ()
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    pool_prompt: bool = True
    similarity: str | None = None
    d_model: int | None = None

    def __post_init__(self) -> None:
        if not self.pooling or any(mode not in MODES for mode in self.pooling):
            expected = f"a tuple of some of {', '.join(MODES)}"
            raise UserError("unknown pooling", where="pooling", got=repr(self.pooling), expected=expected)
        for name, value in (("max_length", self.max_length), ("d_model", self.d_model)):
            if value is not None and value < 1:
                raise UserError(f"{name} is at least 1", where=name, got=value)
        if self.truncation not in ("right", "left"):
            raise UserError("unknown side", where="truncation", got=repr(self.truncation), expected="right or left")
        if self.default_prompt is not None and self.default_prompt not in self.prompts:
            _no_prompt("default_prompt", self.default_prompt, self.prompts)
        width = None if self.d_model is None else self.d_model * len(self.pooling)
        for layer in self.dense:
            taken, given = layer.widths
            if width not in (None, taken):
                what = "a dense layer takes another width than it is given"
                raise UserError(what, where="dense", got=f"{width} numbers", expected=taken)
            width = given

    @classmethod
    def read(cls, folder: str | Path) -> "Embedding | None":
        """What the files of sentence-transformers in `folder` say; None where there is no `modules.json`.

        The model comes first and lies in the folder itself; one pooling, dense layers and normalisation follow, in this
        order. `max_length` is their max_seq_length, or else model_max_length of tokenizer_config.json, which gives
        `truncation` too. Dense layers are read from safetensors alone and kept in float32.

        Raises:
            UserError: a module or setting that changes vectors in a way that is not known here, by its name; a missing
                or broken file; a path that leaves the folder; weights that do not fit.
        """
        found = read_files(Path(folder))
        if found is None:
            return None
        try:
            return cls(**found)
        except UserError as error:
            where = f"{folder}, {error.where}"
            raise UserError(
                error.what, where=where, got=error.got, expected=error.expected, remedy=error.remedy
            ) from None

    def write(self, folder: str | Path) -> None:
        """Writes these files into `folder`, beside a model's own, each whole or not at all.

        `truncation` is not among them: it is a setting of the tokenizer's own file.

        Raises `UserError` where `d_model` is None, and for a place that cannot be written to.
        """
        if self.d_model is None:
            remedy = "dataclasses.replace(embedding, d_model=…) names it"
            raise UserError(
                "the files name the width of the states, and it is not known", where="d_model", remedy=remedy
            )
        write_files(
            Path(folder),
            pooling=self.pooling,
            d_model=self.d_model,
            pool_prompt=self.pool_prompt,
            dense=self.dense,
            normalise=self.normalise,
            max_length=self.max_length,
            lower=self.lower,
            prompts=self.prompts,
            default_prompt=self.default_prompt,
            similarity=self.similarity,
        )

    def width(self, d_model: int) -> int:
        """The width of a sentence vector of states of width `d_model`."""
        return self.dense[-1].widths[1] if self.dense else d_model * len(self.pooling)

    def prompt(self, name: str | None = None) -> str:
        """The prompt of this name, the default one for None. Raises `UserError` for one that is not there."""
        name = self.default_prompt if name is None else name
        if name is None:
            return ""
        return self.prompts[name] if name in self.prompts else _no_prompt("prompt", name, self.prompts)


def embed(
    model: "Model",
    tokenizer: "Tokenizer | None",
    texts: Sequence[str],
    embedding: Embedding,
    *,
    batch_size: int = 32,
    prompt: str | None = None,
) -> Tensor:
    """Sentence vectors, float32 [n, d] on the CPU, d = `embedding.width(C)`; [0, d] for no texts.

    A text is tokenised with the tokens that the tokenizer puts around it, and cut to `max_length` or the model's
    context, whichever is less. The spelling of a control token stays text. The states are those after the final norm:
    the encoder's, or the decoder's of a model without encoder. A vector does not depend on the other texts (up to
    rounding). An empty text is the tokens around it; where there are none, its states count as zeros.

    Args:
        model: any model; in evaluation mode during the call, and then in its own again.
        tokenizer: the model's.
        texts: any number of texts.
        embedding: how the vectors are made.
        batch_size: how many texts the model reads at once, those of like length together.
        prompt: the name of the prompt in front of each text, None for the default one.

    Raises:
        UserError: no tokenizer; what is no list of texts; a prompt that is not there; a model of another width, or
            without some of the tokenizer's ids; a limit that leaves no token of a text.
    """
    if tokenizer is None:
        remedy = "load a checkpoint that has one"
        raise UserError("sentence vectors need a tokenizer, and there is none", where="tokenizer", remedy=remedy)
    if batch_size < 1:
        raise UserError("a batch has at least one text", where="batch_size", got=batch_size)
    stack = next(iter(model.spec.stacks.values()))
    _check_width(embedding, stack.d_model)
    _check_texts(texts)
    rows, skip = _encoded(tokenizer, texts, embedding, embedding.prompt(prompt), stack.max_positions)
    _check_ids(rows, model.spec.vocab_size)
    run = model.hidden if len(model.spec.stacks) == 1 else model.encode
    device = next(model.parameters()).device
    vectors = torch.empty(len(rows), embedding.width(stack.d_model))
    longest_first = sorted(range(len(rows)), key=lambda row: len(rows[row]), reverse=True)
    with evaluating(list(model.modules())):
        for start in range(0, len(rows), batch_size):
            places = longest_first[start : start + batch_size]
            tokens, real = _padded([rows[place] for place in places], device)
            vector = pool(run(tokens, padding=real), real, embedding.pooling, skip)
            for layer in embedding.dense:
                vector = layer(vector)
            if embedding.normalise:
                vector = F.normalize(vector, dim=-1)
            vectors[places] = vector.to(vectors)
    return vectors


def _encoded(
    tokenizer: "Tokenizer", texts: Sequence[str], embedding: Embedding, prompt: str, context: int | None
) -> tuple[list[list[int]], int]:
    """The ids of every text behind the prompt, and how many at the start of each row do not count."""
    head, tail = len(tokenizer.prefix), len(tokenizer.suffix)
    most = min((limit for limit in (embedding.max_length, context) if limit is not None), default=None)
    if most is not None and most <= head + tail:
        what = "no token of a text has room beside those that the tokenizer puts around it"
        raise UserError(what, where="max_length", got=most, expected=f"at least {head + tail + 1}")
    change = _lowered if embedding.lower else str
    rows = tokenizer.encode_batch([change(prompt + text) for text in texts])
    skip = len(tokenizer.encode(change(prompt))) - tail if prompt and not embedding.pool_prompt else 0
    return [_cut(row, most, head, tail, embedding.truncation) for row in rows], skip


def _cut(row: list[int], most: int | None, head: int, tail: int, side: str) -> list[int]:
    """At most so many ids; the first `head` and the last `tail` of them stay."""
    if most is None or len(row) <= most:
        return row
    if side == "left":
        return row[:head] + row[len(row) - (most - head) :]
    return row[: most - tail] + row[len(row) - tail :]


def _lowered(text: str) -> str:
    # As the tokenizers library does it: by its version of Unicode, and a sigma that ends a word is σ.
    try:
        lowered: str = Lowercase().normalize_str(text)
    except UnicodeEncodeError:
        return text  # No valid Unicode, which the tokenizer says better.
    return lowered


def _padded(rows: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens [B, T], T at least 1, padded on the right, and which of them are real."""
    width = max(1, *map(len, rows))
    tokens = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=device)
    lengths = torch.tensor([len(row) for row in rows], device=device)
    return tokens, torch.arange(width, device=device) < lengths[:, None]


def _check_texts(texts: object) -> None:
    if isinstance(texts, str) or not isinstance(texts, Sequence):
        raise UserError("texts are given as a list", where="texts", got=type(texts).__name__, expected="[text, …]")
    for place, text in enumerate(texts):
        if not isinstance(text, str):
            raise UserError("this is not a text", where=f"text {place}", got=repr(text), expected="str")


def _check_width(embedding: Embedding, d_model: int) -> None:
    wanted = embedding.d_model
    if wanted is None and embedding.dense:
        wanted = embedding.dense[0].widths[0] // len(embedding.pooling)
    if wanted not in (None, d_model):
        what = "these sentence vectors are made of states of another width than the model's"
        raise UserError(what, where="d_model", got=d_model, expected=wanted)


def _check_ids(rows: list[list[int]], vocab_size: int) -> None:
    largest = max((max(row) for row in rows if row), default=0)
    if largest >= vocab_size:
        what = "the tokenizer gives ids that the model does not have"
        raise UserError(what, where="tokenizer", got=largest, expected=f"0 to {vocab_size - 1}")


def _no_prompt(where: str, name: str, prompts: Mapping[str, str]) -> NoReturn:
    expected = ", ".join(prompts) or "none, for there are no prompts"
    raise UserError("there is no prompt of this name", where=where, got=repr(name), expected=expected)


__all__ = ["Dense", "Embedding", "embed"]
