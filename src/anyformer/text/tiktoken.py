"""Vocabularies in tiktoken's form: a token in base64, a space and its rank on every line (`*.tiktoken`, Llama 3's
`tokenizer.model`).

tiktoken merges whichever neighbours make the token of lowest rank; a BPE merges the listed pair that comes first. Every
way to cut a token into two others is listed here, in the order of the ranks of the tokens they make, so that both come
to the same ids.

The file holds neither the pattern that text is cut at nor the control tokens. Both are known for OpenAI's and Qwen's
files by their names; for any other the pattern is asked for by a name of GGUF's, and the control tokens come from the
tokenizer_config.json beside the file.
"""

import base64
import binascii
from pathlib import Path

from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Library

from anyformer.errors import UserError
from anyformer.files import storage_errors
from anyformer.text.pieces import byte_characters
from anyformer.text.pretokenizers import GPT2, LLAMA3, O200K, RULES, Rules, apply, rules_of

SUFFIX = ".tiktoken"
_END = "<|endoftext|>"
_FILL = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")
_MOST_BYTES = 1 << 24
_MOST_LENGTH = 256
# OpenAI's cl100k is Llama 3's pattern but for white space at the end of a text, which stays in one part.
_CL100K = LLAMA3.replace(r"|\s*[\r\n]+", r"|\s+\z|\s*[\r\n]+")
_CHARACTER_OF = {byte: character for character, byte in byte_characters().items()}


def _known() -> dict[str, tuple[Rules, dict[str, int]]]:
    qwen = (_END, "<|im_start|>", "<|im_end|>", *(f"<|extra_{n}|>" for n in range(205)))
    cl100k = {_END: 100257, **{token: 100258 + n for n, token in enumerate(_FILL)}, "<|endofprompt|>": 100276}
    return {
        "r50k_base": (Rules((GPT2,)), {_END: 50256}),
        "p50k_base": (Rules((GPT2,)), {_END: 50256}),
        "cl100k_base": (Rules((_CL100K,)), cl100k),
        "o200k_base": (Rules((O200K,)), {_END: 199999, "<|endofprompt|>": 200018}),
        "qwen": (RULES["qwen2"], {token: 151643 + n for n, token in enumerate(qwen)}),
    }


_KNOWN = _known()


def is_vocabulary(path: Path) -> bool:
    """Whether the file at `path` is a vocabulary of tiktoken, by its name or by its first line."""
    if path.suffix == SUFFIX:
        return True
    with storage_errors(path), path.open("rb") as file:
        line = file.readline(2 * _MOST_LENGTH)
    try:
        _line(line)
    except ValueError:
        return False
    return True


def library_of(path: Path, pre: str | None = None) -> tuple[Library, str | None]:
    """The vocabulary at `path` as a tokenizer, and its end-of-text token if it is known to have one.

    Args:
        path: a file in tiktoken's form.
        pre: the name of the pre-tokeniser, as in `tokenizer.ggml.pre`; None to go by the file's own name.

    Raises:
        UserError: no vocabulary, or nothing says how it cuts text.
    """
    name = path.stem if path.suffix == SUFFIX else ""
    if pre is None and name not in _KNOWN:
        raise UserError(
            "a vocabulary of tiktoken does not say how it cuts text, and this file's name does not either",
            where=path,
            expected=f"{' | '.join(f'{known}{SUFFIX}' for known in _KNOWN)}, or pre=NAME",
            remedy='name the pre-tokeniser, for Llama 3 with pre="llama-bpe"',
        )
    rules, control = (rules_of(pre, "pre"), dict[str, int]()) if pre is not None else _KNOWN[name]
    ranks = _ranks(path)
    vocab = {_spelled(token): rank for token, rank in ranks.items()}
    taken = set(ranks.values())
    for token, index in control.items():
        if token in vocab or index in taken:
            what = "this vocabulary is not the published one of its name"
            raise UserError(what, where=path, got=f"{len(ranks)} tokens", expected=f"{token} with id {index}")
    # With the control tokens in it, they keep their ids where some in between stand for nothing.
    model = models.BPE(vocab={**vocab, **control}, merges=_merges(ranks), ignore_merges=True)
    library = Library(model)
    apply(rules, library)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return library, _END if _END in control else None


def _spelled(token: bytes) -> str:
    return "".join(map(_CHARACTER_OF.__getitem__, token))


def _line(line: bytes) -> tuple[bytes, int]:
    """The token and the rank on a line. ValueError where there are none."""
    token, rank = line.split()
    if not rank.isdigit() or len(rank) > 9:
        raise ValueError("no rank")
    try:
        return base64.b64decode(token, validate=True), int(rank)
    except binascii.Error as error:
        raise ValueError("no base64") from error


def _ranks(path: Path) -> dict[bytes, int]:
    """The rank of each token."""
    with storage_errors(path), path.open("rb") as file:
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise UserError("this file is larger than any vocabulary", where=path, expected=f"{_MOST_BYTES} bytes at most")
    ranks: dict[bytes, int] = {}
    taken: set[int] = set()
    for number, line in enumerate(data.splitlines(), 1):
        if not line:
            continue
        try:
            token, rank = _line(line)
        except ValueError as error:
            got, expected = repr(line[:40]), "a token in base64, a space and its rank"
            raise UserError(
                "this line holds no token", where=f"{path}, line {number}", got=got, expected=expected
            ) from error
        if not token or len(token) > _MOST_LENGTH or token in ranks or rank in taken or rank >= len(data):
            what = "a token is empty, too long or there twice, or its rank is taken or too large"
            raise UserError(what, where=f"{path}, line {number}", got=repr(line[:40]))
        ranks[token] = rank
        taken.add(rank)
    lacking = next((byte for byte in range(256) if bytes([byte]) not in ranks), None)
    if lacking is not None:
        what = "a vocabulary of tiktoken has a token for every byte"
        raise UserError(what, where=path, got=f"{len(ranks)} tokens, none for byte {lacking}")
    return ranks


def _merges(ranks: dict[bytes, int]) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for token in sorted(ranks, key=ranks.__getitem__):
        # Of two pairs that make the same token in a run of one character, tiktoken takes the one further left.
        for end in range(len(token) - 1, 0, -1):
            left, right = token[:end], token[end:]
            if left in ranks and right in ranks:
                found.append((_spelled(left), _spelled(right)))
    return found
