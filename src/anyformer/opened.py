"""A GGUF file opened: all that it says, and its tokenizer. Imports no torch.

What a file is refused for is found here, but for its numbers. So a verb can open a file before it imports torch: a file
that cannot be used is refused at once, and torch moves into the memory that reading a vocabulary has left.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from anyformer.errors import UserError
from anyformer.spec.folder import is_gguf, resolve
from anyformer.text import Tokenizer
from anyformer.text.gguf import read_tokenizer
from anyformer.weights.gguf.ahead import Ahead, begin
from anyformer.weights.gguf.format import Gguf, read_gguf
from anyformer.weights.gguf.reading import Understood, understood

SUPPRESSED = "tokenizer.ggml.suppress_tokens"


@dataclass(frozen=True)
class Opened:
    """A file, understood.

    Attributes:
        model: its tensors, each with its place.
        tokenizer: None for a model of token ids alone.
        eos_ids: the ids that end a reply, beside what the tokenizer says.
        suppressed: the ids that no reply holds.
        ahead: its matrices being packed meanwhile.
    """

    model: Understood
    tokenizer: Tokenizer | None
    eos_ids: tuple[int, ...]
    suppressed: tuple[int, ...]
    ahead: Ahead | None = field(default=None, compare=False)


def open_gguf(file: Path, *, pack: bool = False) -> Opened:
    """Opens a file, the first of several. Raises `UserError` for whatever is wrong with what it says.

    Args:
        file: the file.
        pack: whether another process may begin to pack the matrices that can stay in the file's quantised values.
    """
    said = read_gguf(file)
    # A vocabulary's texts take as much as a tenth of a small model: they do not stay.
    rest = {name: value for name, value in said.metadata.items() if not name.startswith("tokenizer.")}
    model = understood(replace(said, metadata=rest))  # A model that is not known is refused before its tokenizer is.
    tokenizer = _tokenizer(said, model.place.reading.spec.vocab_size)
    end: Any = said.metadata.get("tokenizer.ggml.eos_token_id") if tokenizer is None else None
    suppressed = said.metadata.get(SUPPRESSED, [])
    if not isinstance(suppressed, list):
        raise UserError("this is no list of ids", where=f"{file}, {SUPPRESSED}", got=type(suppressed).__name__)
    ahead = begin(model) if pack else None
    return Opened(model, tokenizer, () if end is None else (end,), tuple(suppressed), ahead)


def opened(source: str | Path, *, pack: bool = False) -> Path | Opened:
    """What a checkpoint's path means: a GGUF file opened as `open_gguf` does, anything else as it is.

    Raises `UserError`.
    """
    path = resolve(source)
    return open_gguf(path, pack=pack) if is_gguf(path) else path


def _tokenizer(said: Gguf, rows: int) -> Tokenizer | None:
    if said.metadata.get("tokenizer.ggml.model") in (None, "none", "no_vocab"):
        return None
    tokenizer = read_tokenizer(said.metadata, said.path)
    if tokenizer.vocab_size > rows:
        what, expected = "the tokenizer has more tokens than the model has rows", f"at most {rows}"
        raise UserError(what, where=said.path, got=f"{tokenizer.vocab_size} tokens", expected=expected)
    return tokenizer
