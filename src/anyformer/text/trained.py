"""Tokenizers trained here: bytes, characters and byte-level BPE, all as the `tokenizers` library's own objects."""

from collections.abc import Iterable

from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Library

from anyformer.errors import UserError
from anyformer.text.pieces import byte_characters

END_OF_TEXT = "<|endoftext|>"
KINDS = ("byte", "char", "bpe")
DEFAULT_CONTROL = {"byte": (END_OF_TEXT,), "char": (), "bpe": (END_OF_TEXT,)}
DEFAULT_BPE_VOCABULARY = 4096

# Where words may end: contractions, letters with one leading mark or space, digits by threes, punctuation
# with the line ends that follow it, line ends, other white space (the pattern of Llama 3, Grattafiori et
# al., 2024). Each run is cut at 128 characters, since the time to merge a word grows with the square of its length;
# longer runs than that are rules and tables at most, not words.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}{1,128}|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]{1,128}[\r\n]{0,128}|\s{0,128}[\r\n]{1,128}|\s{1,128}(?!\S)|\s{1,128}"
)


def train_library(kind: str, texts: Iterable[str], vocab_size: int | None, control: tuple[str, ...]) -> Library:
    """A trained tokenizer of the library, control tokens last.

    The same texts in the same order give the same tokenizer. `UserError` for an unknown kind, a vocabulary
    size that the kind cannot have, or texts without a character.
    """
    if kind not in KINDS:
        raise UserError("there is no such kind of tokenizer", where="tokenizer", got=kind, expected=" | ".join(KINDS))
    if kind != "bpe" and vocab_size is not None:
        raise UserError(
            f"the vocabulary size of a {kind} tokenizer follows from its text",
            where="vocab_size",
            got=vocab_size,
            remedy="leave vocab_size out, or train a bpe tokenizer",
        )
    if kind == "byte":
        library = _bytes()
    elif kind == "char":
        library = _characters(texts)
    else:
        library = _bpe(texts, vocab_size or DEFAULT_BPE_VOCABULARY, len(control))
    _append_control(library, control)
    return library


def _append_control(library: Library, control: tuple[str, ...]) -> None:
    ordinary = library.get_vocab()
    for token in control:
        if not token or token in ordinary:
            raise UserError(
                "a control token must be a text that no ordinary token has",
                where="control_tokens",
                got=repr(token),
                remedy=f"choose one such as {END_OF_TEXT}",
            )
    if len(set(control)) != len(control):
        raise UserError("a control token is named twice", where="control_tokens", got=control)
    library.add_special_tokens(list(control))


def _bytes() -> Library:
    """256 tokens, the id of each being its byte; any text can be written."""
    library = Library(models.BPE(vocab=byte_characters(), merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    return library


def _characters(texts: Iterable[str]) -> Library:
    """One token for each character of the texts, in the order of their code points.

    A character that the texts lack becomes the unknown token: "?", as Python's own `errors="replace"`
    writes it, or, in texts without a question mark, a space or else the first character.
    """
    seen: set[str] = set()
    for text in texts:
        seen.update(text)
    if not seen:
        raise UserError("a char tokenizer needs at least one character of text", where="texts")
    unknown = next((mark for mark in "? " if mark in seen), min(seen))
    vocab = {character: index for index, character in enumerate(sorted(seen))}
    library = Library(models.BPE(vocab=vocab, merges=[], unk_token=unknown))
    library.decoder = decoders.Fuse()
    return library


def _bpe(texts: Iterable[str], vocab_size: int, n_control: int) -> Library:
    """Byte-level BPE (Sennrich et al., 2016; Radford et al., 2019): all 256 bytes, then merges, most frequent first."""
    if vocab_size < 256 + n_control:
        raise UserError(
            "a byte-level BPE needs a token for every byte and every control token",
            where="vocab_size",
            got=vocab_size,
            expected=f"at least {256 + n_control}",
        )
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - n_control,
        initial_alphabet=sorted(byte_characters()),
        show_progress=False,
    )
    library.train_from_iterator(texts, trainer)
    return library
