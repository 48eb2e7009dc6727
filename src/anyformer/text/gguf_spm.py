"""Tokenizers of the SentencePiece kinds in GGUF metadata: "llama" (BPE by scores) and "t5" (unigram).

Texts are split as llama.cpp splits them, with what `text.spm` says, but for two cases in which llama.cpp loses or
invents something and the model's own SentencePiece does not: text never becomes a byte or control token by spelling it,
and a unigram vocabulary that has bytes uses them for what it cannot write. As in llama.cpp, a "llama" vocabulary has no
normalisation but that of spaces: `tokenizer.ggml.precompiled_charsmap` and `remove_extra_whitespaces` are for "t5".
"""

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer as Library

from anyformer.errors import UserError
from anyformer.text.gguf_spm_out import metadata_of
from anyformer.text.spm import BYTE, BYTES, UNKNOWN, UNUSED, Spaces, Vocabulary, build

__all__ = ["KINDS", "library_of", "metadata_of"]
KINDS = {"llama": "bpe", "t5": "unigram"}
_PREFIX = "tokenizer.ggml.add_space_prefix"
_SQUEEZE = "tokenizer.ggml.remove_extra_whitespaces"
_CHARSMAP = "tokenizer.ggml.precompiled_charsmap"
_UNKNOWN = "tokenizer.ggml.unknown_token_id"


def library_of(
    tokens: Sequence[str],
    scores: Sequence[float],
    types: Sequence[int],
    *,
    model: str,
    metadata: Mapping[str, Any],
    where: object,
) -> Library:
    """The tokenizer of a GGUF file.

    Control tokens (type 3), the unknown token (2) and user-defined tokens (4) are in it as added tokens, the first two
    as special ones, each with its own id. It puts no BOS or EOS around a text.

    Args:
        tokens, scores, types: `tokenizer.ggml.tokens`, `scores` and `token_type`, padding left out. The score of a
            token that is not normal says nothing.
        model: `tokenizer.ggml.model`, "llama" or "t5".
        metadata: the file's metadata, for the keys of normalisation and of the unknown token.
        where: the file, for messages.

    Raises:
        UserError: lists of different lengths, tokens that stand there twice, values of the wrong type.
    """
    if model not in KINDS:
        expected = " | ".join(KINDS)
        raise UserError("this is no SentencePiece vocabulary", where=where, got=model, expected=expected)
    tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(tokens)]
    kinds = _kinds(tokens, types, metadata.get(_UNKNOWN), where)
    unigram = model == "t5"
    spaces = Spaces(
        prefix=_flag(metadata, _PREFIX, not unigram, where),
        squeeze=unigram and _flag(metadata, _SQUEEZE, False, where),
        charsmap=_charsmap(metadata, where) if unigram else b"",
    )
    vocabulary = Vocabulary(
        KINDS[model],
        tokens,
        scores,
        kinds,
        spaces,
        raw=True,
    )
    return build(vocabulary, where)


def _kinds(tokens: Sequence[str], types: Sequence[int], unknown: object, where: object) -> list[int]:
    """The type of each token, with the unknown token where the file only names it, and bytes where all are spelled."""
    kinds = list(types)
    if len(kinds) != len(tokens):
        return kinds
    if unknown is None:
        known = [index for index, kind in enumerate(kinds) if kind == UNKNOWN]
        unknown = known[0] if known else tokens.index("<unk>") if "<unk>" in tokens else None
    elif isinstance(unknown, bool) or not isinstance(unknown, int) or not 0 <= unknown < len(tokens):
        got, expected = repr(unknown), f"0 to {len(tokens) - 1}"
        raise UserError("this is no token", where=f"{where}, {_UNKNOWN}", got=got, expected=expected)
    # Some files mark the padding of their vocabulary as unknown too.
    kinds = [UNUSED if kind == UNKNOWN else kind for kind in kinds]
    if unknown is not None:
        kinds[unknown] = UNKNOWN
    if BYTE not in kinds:
        spelled = {token: index for index, token in enumerate(tokens) if token.startswith("<0x")}
        for token in BYTES if set(BYTES) <= set(spelled) else ():
            kinds[spelled[token]] = BYTE
    return kinds


def _flag(metadata: Mapping[str, Any], key: str, usual: bool, where: object) -> bool:
    value = metadata.get(key, usual)
    if not isinstance(value, bool):
        raise UserError("this is either true or false", where=f"{where}, {key}", got=repr(value))
    return value


def _charsmap(metadata: Mapping[str, Any], where: object) -> bytes:
    value = metadata.get(_CHARSMAP)
    if value is None:
        return b""
    try:
        # Some files store these bytes as signed ones.
        return bytes(byte & 0xFF for byte in value)
    except TypeError as error:
        raise UserError("this is no list of bytes", where=f"{where}, {_CHARSMAP}", got=error) from error
