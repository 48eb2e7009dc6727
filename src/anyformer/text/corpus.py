"""A corpus: text, split, tokenised and sharded on disk, with its tokenizer.

    OUT/corpus.json                    what this is: counts, types, hashes, sources
    OUT/tokenizer/                     tokenizer.json, tokenizer_config.json
    OUT/train/tokens-00000.bin …       and documents.bin; OUT/val/ likewise

The split never leaks: documents go to one side by a hash of their content, and a tokenizer that is trained
here learns from the training side alone.

Bits per byte. With L the summed loss in nats over predicted tokens, and N the bytes of the text these
tokens stand for, bits per byte = L / (ln 2 · N). Three rules make N exact:

* Bytes are counted in the source text (UTF-8), not by adding up tokens.
* EOS and other control tokens are predicted, so their loss is part of L; they stand for no text, so they add nothing to
  N. The figure is thus the length of a code from which the texts and their ends can be recovered.
* A token that nothing precedes is not predicted, and its bytes are left out of N: for a split read as one stream this
  is its very first token (`Split.predicted_bytes`).
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from anyformer.errors import UserError
from anyformer.files import atomic_folder, recover
from anyformer.text.encoding import Progress, encode_parts
from anyformer.text.settings import CONFIG_FILE, TOKENIZER_FILE
from anyformer.text.shards import Ids, ShardWriter, Tokens, open_shards, token_dtype
from anyformer.text.sources import Listing, list_documents
from anyformer.text.split import Part, sample_texts, split_documents
from anyformer.text.tokenizer import Tokenizer
from anyformer.text.trained import END_OF_TEXT, KINDS

FORMAT = "anyformer corpus"
FORMAT_VERSION = 1
CORPUS_FILE = "corpus.json"
# A vocabulary of a few thousand merges settles well before this much text; more would only take longer.
_BPE_SAMPLE = 4 << 20
_SHARD_TOKENS = 1 << 26


def bits_per_byte(nats: float, n_bytes: int) -> float:
    """The loss `nats`, summed over predicted tokens, per byte of the text they stand for, in bits."""
    if n_bytes <= 0:
        raise UserError("bits per byte needs at least one predicted byte", where="n_bytes", got=n_bytes)
    return nats / (math.log(2) * n_bytes)


class Split:
    """One side of a corpus.

    Attributes:
        tokens: all tokens; `len`, slices and integer arrays work across shards and give int64.
        documents: int64 [D], the index in `tokens` at which each document starts.
        document_bytes: int64 [D], the bytes of UTF-8 of each document's text.
        n_tokens, n_bytes, n_documents: their totals; a part of a document counts as one.
    """

    def __init__(self, name: str, tokens: Tokens, index: Ids, tokenizer: Tokenizer) -> None:
        self.name = name
        self.tokens = tokens
        self.documents: Ids = np.ascontiguousarray(index[:, 0])
        self.document_bytes: Ids = np.ascontiguousarray(index[:, 1])
        self.n_tokens, self.n_documents = len(tokens), len(index)
        self.n_bytes = int(self.document_bytes.sum())
        self._tokenizer = tokenizer

    def segments(self, start: int, stop: int) -> Ids:
        """The number of the document that each token of [start, stop) belongs to: int64 [stop - start]."""
        return np.searchsorted(self.documents, np.arange(start, stop), side="right").astype(np.int64) - 1

    def bytes_of(self, start: int, stop: int) -> int:
        """The bytes of text that tokens [start, stop) stand for; control tokens stand for none.

        Exact for every document that its tokens spell exactly (`Corpus.inexact_documents` counts the
        others).
        """
        ids = self.tokens[start:stop]
        total = int(self._lengths[ids].sum())
        first, last = np.searchsorted(self._beginnings, [start, start + len(ids)])
        for at in self._beginnings[first:last]:
            index = int(ids[at - start])
            total += len(self._tokenizer.token_bytes(index, first=True)) - int(self._lengths[index])
        return total

    @property
    def predicted_bytes(self) -> int:
        """The bytes of all tokens but the first, which nothing precedes: the N of bits per byte for one stream."""
        return self.n_bytes - self.bytes_of(0, 1)

    @cached_property
    def _beginnings(self) -> Ids:
        """Where the text of each document begins, after what the model's rule puts before it."""
        return self.documents + len(self._tokenizer.prefix)

    @cached_property
    def _lengths(self) -> Ids:
        tokenizer = self._tokenizer
        known = (index for index in range(tokenizer.vocab_size) if tokenizer.token(index) is not None)
        lengths = np.zeros(tokenizer.vocab_size, dtype=np.int64)
        for index in known:
            lengths[index] = len(tokenizer.token_bytes(index))
        return lengths

    def require(self, context: int) -> None:
        """`UserError` when there are too few tokens for one window of `context` and the token after it."""
        if self.n_tokens <= context:
            raise UserError(
                f"the {self.name} text is shorter than the context",
                where=self.name,
                got=f"{self.n_tokens} tokens",
                expected=f"at least {context + 1}",
                remedy="give more text, or choose a shorter context",
            )


class Corpus:
    """A prepared corpus; made by `prepare`, opened by `Corpus.open`.

    Attributes:
        folder: where it lies.
        tokenizer: the tokenizer its tokens are of.
        train, val: its two sides; `val` is empty when the corpus was prepared with val_fraction=0.
        info: the content of corpus.json.
    """

    def __init__(self, folder: Path, tokenizer: Tokenizer, train: Split, val: Split, info: dict[str, Any]) -> None:
        self.folder, self.tokenizer, self.train, self.val, self.info = folder, tokenizer, train, val, info

    @property
    def inexact_documents(self) -> int:
        """How many documents hold text that the tokenizer cannot write exactly."""
        return int(self.info["inexact_documents"])

    @classmethod
    def open(cls, folder: str | Path) -> "Corpus":
        """The corpus in `folder`; `UserError` for one that is absent, foreign, of another version, or cut short."""
        folder = Path(folder)
        recover(folder)
        info = _read_info(folder)
        tokenizer = Tokenizer.load(folder / "tokenizer")
        if not (folder / "tokenizer" / CONFIG_FILE).is_file():
            _corrupt(folder / "tokenizer" / CONFIG_FILE, "missing")
        if tokenizer.vocabulary_hash != info["vocabulary_hash"]:
            raise UserError(
                "the tokenizer here is not the one that this corpus was made with",
                where=folder / "tokenizer" / TOKENIZER_FILE,
                remedy="prepare the corpus again",
            )
        dtype = token_dtype(tokenizer.vocab_size)
        sides = [Split(name, *open_shards(folder / name, dtype, info[name]), tokenizer) for name in ("train", "val")]
        return cls(folder, tokenizer, sides[0], sides[1], info)


def is_corpus(folder: Path) -> bool:
    """Whether `folder` holds a corpus of this format, of whatever version and however whole."""
    try:
        info = json.loads((folder / CORPUS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(info, dict) and info.get("format") == FORMAT


def prepare(
    sources: Sequence[str | Path] | str | Path,
    out: str | Path,
    tokenizer: Tokenizer | str | Path = "bpe",
    vocab_size: int | None = None,
    val_fraction: float = 0.1,
    *,
    shard_tokens: int = _SHARD_TOKENS,
    progress: Progress | None = None,
    check: Callable[[Corpus], None] | None = None,
) -> Corpus:
    """Tokenises and shards a corpus; the same text and settings give the same bytes.

    Args:
        sources: files, folders, "python:stdlib", "python:docs".
        out: the folder to write, whole or not at all. A corpus that lies there is replaced; any other
            folder that holds something is refused.
        tokenizer: "byte", "char" or "bpe", trained here on the training side; or a tokenizer, or its
            folder.
        vocab_size: for "bpe", the most tokens it may have.
        val_fraction: about this share of the bytes is for validation; 0 for none.
        shard_tokens: the most tokens in one file.
        progress: called with bytes done and bytes in all.
        check: called with the finished corpus while it still lies aside; what it raises leaves `out` as it was.

    Memory: a few times the longest document, beside a fixed amount.
    """
    out = Path(out)
    sources = [sources] if isinstance(sources, str | Path) else list(sources)
    listing = list_documents(sources, exclude=out.resolve())
    _check_place(out, listing)
    train, val = split_documents(listing.documents, val_fraction)
    made = _tokenizer(tokenizer, vocab_size, train, alone=len({part.document.digest for part in train + val}) == 1)
    info: dict[str, Any] = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "tokenizer": "tokenizer",
        "vocab_size": made.vocab_size,
        "vocabulary_hash": made.vocabulary_hash,
        "dtype": token_dtype(made.vocab_size).name,
        "sources": [str(source) for source in sources],
        "split_by": "documents" if all(part.whole for part in train) else "position",
        "val_fraction": val_fraction,
        "skipped": dict(listing.skipped),
    }
    with atomic_folder(out) as partial:
        made.save(partial / "tokenizer")
        info |= _write_splits(partial, made, {"train": train, "val": val}, shard_tokens, progress)
        (partial / CORPUS_FILE).write_text(json.dumps(info, indent=2) + "\n", encoding="utf-8")
        if check is not None:
            check(Corpus.open(partial))
    return Corpus.open(out)


def _write_splits(
    folder: Path,
    tokenizer: Tokenizer,
    splits: Mapping[str, Sequence[Part]],
    shard_tokens: int,
    progress: Progress | None,
) -> dict[str, Any]:
    """Writes the token files of both sides; gives what corpus.json says of them."""
    total = sum(part.document.size for parts in splits.values() for part in parts if part.start == 0)
    done = 0

    def advance(size: int) -> None:
        nonlocal done
        done += size
        if progress is not None:
            progress(done, total)

    info: dict[str, Any] = {"inexact_documents": 0}
    for name, parts in splits.items():
        writer = ShardWriter(folder / name, token_dtype(tokenizer.vocab_size), shard_tokens)
        try:
            info["inexact_documents"] += encode_parts(tokenizer, parts, writer, advance)
        finally:
            writer.release()
        info[name] = writer.close()
    return info


def _tokenizer(wanted: Tokenizer | str | Path, vocab_size: int | None, train: Sequence[Part], alone: bool) -> Tokenizer:
    if isinstance(wanted, str) and wanted in KINDS:
        # Characters of a single text need no end mark; of several, each document's end is a token of its
        # own.
        control = (END_OF_TEXT,) if wanted == "char" and not alone else None
        texts = sample_texts(train, _BPE_SAMPLE) if wanted == "bpe" else (part.text() for part in train)
        return Tokenizer.train(wanted, texts, vocab_size, control_tokens=control)
    if vocab_size is not None:
        raise UserError("a finished tokenizer has its vocabulary size already", where="vocab_size", got=vocab_size)
    if isinstance(wanted, Tokenizer):
        return wanted
    if not Path(wanted).exists():
        raise UserError(
            "there is no such tokenizer", where="tokenizer", got=wanted, expected=f"{', '.join(KINDS)}, or a folder"
        )
    return Tokenizer.load(wanted)


def _check_place(out: Path, listing: Listing) -> None:
    if out.exists() and not out.is_dir():
        raise UserError("a file lies where the corpus should go", where=out, remedy="choose another folder")
    if out.is_dir() and any(out.iterdir()) and not is_corpus(out):
        raise UserError(
            "this folder holds something that is not a corpus, so it is left alone",
            where=out,
            remedy="choose a folder that is empty or does not exist",
        )
    place = out.resolve()
    inside = next((each.name for each in listing.documents if place in Path(each.name).resolve().parents), None)
    if inside is not None:
        raise UserError(
            "this text lies in the folder that the corpus would replace",
            where=inside,
            remedy="choose another folder for the corpus",
        )


def _read_info(folder: Path) -> dict[str, Any]:
    path = folder / CORPUS_FILE
    if not path.is_file():
        raise UserError(
            "there is no corpus here",
            where=folder,
            expected=f"a folder with {CORPUS_FILE}",
            remedy="make one with `anyformer prepare TEXT… --out FOLDER`",
        )
    try:
        info = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError("this file cannot be read as JSON", where=path, got=error) from error
    if not isinstance(info, dict) or info.get("format") != FORMAT:
        raise UserError("this folder was not made by `anyformer prepare`", where=path)
    if info.get("format_version") != FORMAT_VERSION:
        raise UserError(
            "this corpus is of a version that cannot be read here",
            where=path,
            got=info.get("format_version"),
            expected=FORMAT_VERSION,
            remedy="prepare the corpus again",
        )
    if not isinstance(info.get("vocabulary_hash"), str) or not isinstance(info.get("inexact_documents"), int):
        _corrupt(path, "not whole")
    for name in ("train", "val"):
        _check_counts(info.get(name), path)
    return info


def _check_counts(counts: object, path: Path) -> None:
    if not isinstance(counts, dict):
        _corrupt(path, "not whole")
    numbers = [counts.get(key) for key in ("n_tokens", "n_bytes", "n_documents")]
    shards = counts.get("shards")
    if not isinstance(shards, list) or not all(isinstance(each, int) and each >= 0 for each in [*numbers, *shards]):
        _corrupt(path, "not whole")


def _corrupt(path: Path, how: str) -> NoReturn:
    raise UserError(f"a file of this corpus is {how}", where=path, remedy="prepare the corpus again")
