"""SentencePiece vocabularies as tokenizers of the library: BPE by scores, and unigram (Kudo and Richardson, 2018).

Where a text is split:

* **BPE.** SentencePiece joins, of all neighbours whose joined text is a piece, those of the highest score, the leftmost
  first. The library joins by the rank of a pair. A piece of the n-th highest score therefore gives its pairs the n-th
  ranks. Between pieces of one score no order of ranks says "the leftmost first" in every text; `merges` comes as near
  as one can, and warns where a text could tell the difference.
* **Unigram.** The same search over the same scores. What is never reached by a text (bytes, unused pieces) is kept out
  by a score that no segmentation can prefer.
* **Spaces.** Normalised as the model says (`Spaces`), once for a text, and again after each control token in it, as
  llama.cpp does.
* **Pieces that a user defined** are found before everything else, the longest first at each place; in a unigram
  vocabulary, by a score that a search prefers to any other pieces, as SentencePiece does.
"""

import re
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from math import isfinite
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers
from tokenizers import Tokenizer as Library

from anyformer.errors import UserError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""The types of a piece, numbered as SentencePiece's ModelProto and GGUF number them."""
SPACE = "\u2581"
"""The character that stands for a space within pieces."""
BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
UNREACHED = -10_000.0
"""The score of a piece that no text reaches: below any sum of scores that a search compares it with."""
Pair = tuple[str, str]
_TRAILING = rf"(?<!{SPACE}){SPACE}++\z"


@dataclass(frozen=True)
class Spaces:
    """What happens to a text before it is split.

    Attributes:
        prefix: put one space before it (`add_dummy_prefix`).
        squeeze: make one space of several, and none of those at either end (`remove_extra_whitespaces`).
        escape: write a space as ▁ (`escape_whitespaces`).
        charsmap: SentencePiece's compiled table of characters; empty for none.
    """

    prefix: bool = True
    squeeze: bool = False
    escape: bool = True
    charsmap: bytes = b""


@dataclass(frozen=True)
class Vocabulary:
    """The pieces of a SentencePiece model, the index of each being its id.

    Attributes:
        kind: "bpe" or "unigram".
        tokens, scores, types: one of each for every piece.
        spaces: how a text is normalised.
        raw: user-defined pieces are looked for in the text as it was given, as llama.cpp does, rather than in the
            normalised text.
    """

    kind: str
    tokens: Sequence[str]
    scores: Sequence[float]
    types: Sequence[int]
    spaces: Spaces = Spaces()
    raw: bool = False


def build(vocabulary: Vocabulary, where: object) -> Library:
    """The tokenizer of `vocabulary`, its control tokens, unknown token and user-defined pieces added as such.

    Warns where equal scores leave the ids of some texts open. Raises `UserError`, naming `where`, for a vocabulary
    that cannot be meant.
    """
    check(vocabulary, where)
    unknown = vocabulary.types.index(UNKNOWN) if UNKNOWN in vocabulary.types else None
    bytes_fall_back = BYTE in vocabulary.types
    if unknown is None and not (vocabulary.kind == "bpe" and set(BYTES) <= set(vocabulary.tokens)):
        raise UserError("no piece stands for what the vocabulary cannot write", where=where)
    library = Library(_model(vocabulary, unknown, bytes_fall_back, where))
    steps = _normaliser(vocabulary.spaces, where)
    defined = [token for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True) if kind == USER_DEFINED]
    if vocabulary.kind == "bpe" and vocabulary.spaces.prefix and defined and not vocabulary.raw:
        # The library normalises what it looks for as well, and would look for "▁piece".
        named = "|".join(re.escape(_normal(token, steps[:-1])) for token in defined)
        steps.append(normalizers.Replace(Regex(rf"\A{steps[-1].prepend}(?=(?:{named})\z)"), ""))
    library.normalizer = normalizers.Sequence(steps)
    library.decoder = _decoder(vocabulary.spaces, bytes_fall_back)
    library.add_tokens(added(vocabulary))
    return library


def check(vocabulary: Vocabulary, where: object) -> None:
    """`UserError` for lists of different lengths, a piece twice, a score that is no number, or an unknown type."""
    tokens, scores, types = vocabulary.tokens, vocabulary.scores, vocabulary.types
    if not len(tokens) == len(scores) == len(types):
        got = f"{len(tokens)} tokens, {len(scores)} scores, {len(types)} types"
        raise UserError("every token needs a score and a type", where=where, got=got)
    if not tokens:
        raise UserError("this tokenizer has an empty vocabulary", where=where)
    seen: dict[str, int] = {}
    for index, token in enumerate(tokens):
        if not token:
            raise UserError("a token is empty", where=f"{where}, token {index}")
        if token in seen:
            got = f"{token!r} as {seen[token]} and {index}"
            raise UserError("a token stands in the vocabulary twice", where=where, got=got)
        seen[token] = index
    for index, score in enumerate(scores):
        if not isfinite(score):
            raise UserError("a score is not a number", where=f"{where}, token {index}", got=score)
    for index, kind in enumerate(types):
        if not NORMAL <= kind <= BYTE:
            raise UserError("there is no such type of token", where=f"{where}, token {index}", got=kind, expected="1–6")
        if kind == BYTE and tokens[index] not in BYTES:
            got = repr(tokens[index])
            raise UserError("this is no byte", where=f"{where}, token {index}", got=got, expected="<0x00> to <0xFF>")
    if types.count(UNKNOWN) > 1:
        raise UserError("more than one token stands for what is unknown", where=where)


def added(vocabulary: Vocabulary) -> list[AddedToken]:
    """The control tokens, the unknown token, and the user-defined pieces that are found before everything else."""
    scored = vocabulary.kind == "unigram" and not vocabulary.raw
    return [
        AddedToken(
            token,
            special=kind != USER_DEFINED,
            normalized=kind == USER_DEFINED and not vocabulary.raw,
        )
        for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
        if kind in (UNKNOWN, CONTROL) or (kind == USER_DEFINED and not scored)
    ]


def _model(vocabulary: Vocabulary, unknown: int | None, bytes_fall_back: bool, where: object) -> models.Model:
    tokens, scores, types = vocabulary.tokens, vocabulary.scores, vocabulary.types
    if vocabulary.kind == "bpe":
        normal = {token: score for token, score, kind in zip(tokens, scores, types, strict=True) if kind == NORMAL}
        return models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=merges(normal, where),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=bytes_fall_back,
        )
    fixed = {USER_DEFINED: 0.0, UNUSED: UNREACHED, BYTE: UNREACHED}
    pieces = [(token, fixed.get(kind, score)) for token, score, kind in zip(tokens, scores, types, strict=True)]
    return models.Unigram(pieces, unknown, bytes_fall_back)


def merges(scores: dict[str, float], where: object) -> list[Pair]:
    """The pairs that the library joins, best first, for the normal pieces of a BPE and their scores.

    Warns where pieces of one score could be joined in another order than SentencePiece's. Raises `UserError` where
    all pieces share one score, and nothing says which to join.
    """
    ranked = sorted(scores, key=lambda piece: -scores[piece])
    pairs = [
        (left, right)
        for piece in ranked
        for cut in range(len(piece) - 1, 0, -1)
        if (left := piece[:cut]) in scores and (right := piece[cut:]) in scores
    ]
    shared = Counter(scores[piece] for piece in ranked if len(piece) > 1)
    return pairs if len(shared) == shared.total() else _settled(pairs, scores, shared, where)


def _settled(pairs: list[Pair], scores: dict[str, float], shared: Counter[float], where: object) -> list[Pair]:
    """`pairs`, best first, those of one score ranked so that the leftmost goes first."""
    found: list[Pair] = []
    parts: set[str] = set()
    clash: tuple[str, str] | None = None
    for score, group in groupby(pairs, key=lambda pair: scores[pair[0] + pair[1]]):
        tied = list(group)
        if shared[score] > 1:
            tied.sort(key=lambda pair: (_is_late(pair, scores, score), -len(pair[0])))
            here = _clash(tied, scores, score, parts)
            clash = clash or here
            if here and shared[score] == shared.total():
                what = "every token has the same score, so that nothing says which of two is joined first"
                raise UserError(what, where=where, remedy="convert the model again, from its own tokenizer files")
        found += tied
        parts.update(chain.from_iterable(tied))
    if clash:
        warnings.warn(
            f"{where}: tokens such as {clash[0]!r} and {clash[1]!r} have the same score; where both can be made of a"
            " text, its ids may differ from those of SentencePiece, which joins the leftmost first",
            stacklevel=2,
        )
    return found


def _is_late(pair: Pair, scores: dict[str, float], score: float) -> bool:
    """Whether the right part of a pair of this `score` would itself have been joined to what stands before it."""
    return len(pair[1]) > 1 and scores[pair[1]] <= score


def _clash(pairs: list[Pair], scores: dict[str, float], score: float, parts: set[str]) -> tuple[str, str] | None:
    """Two pieces of one `score` that `pairs`, as they are ranked, can join in another order than the leftmost first.

    Joining from the left, the left part of a pair has grown and its right part has not: long left parts rank first.
    That fails where a pair ranks before one that it overlaps on the left, or makes one of the `parts` of better pieces.
    """
    ranked: dict[str, set[str]] = {}
    made = ["".join(pair) for pair in pairs]
    for pair, piece in zip(pairs, made, strict=True):
        if piece in parts:
            return piece, next((other for other in made if other != piece), piece)
        if not _is_late(pair, scores, score):
            earlier = ranked.get(pair[1], set()) - {piece}
            if earlier:
                return piece, min(earlier)
            ranked.setdefault(pair[0], set()).add(piece)
    return None


def _normaliser(spaces: Spaces, where: object) -> list[Any]:
    """The steps before splitting; the last one puts the space before a text where there is one."""
    steps: list[Any] = []
    space = SPACE if spaces.escape else " "
    if spaces.charsmap:
        steps += _characters(spaces.charsmap, where)
    if spaces.squeeze:
        steps += [normalizers.Replace(Regex(r"\A +"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if spaces.escape:
        steps.append(normalizers.Replace(" ", SPACE))
    if spaces.squeeze:
        steps.append(normalizers.Replace(Regex(_TRAILING.replace(SPACE, space)), ""))
    if spaces.prefix:
        steps.append(normalizers.Prepend(space))
    return steps


def _characters(charsmap: bytes, where: object) -> list[Any]:
    """A compiled table of characters, applied as SentencePiece does, at each place to the longest entry.

    The library tries each letter with its marks as one, takes the shortest entry that begins it, and drops the rest. A
    table that composes letters therefore gets them composed. Its entries for one character with marks that compose
    with none are applied wrongly still: marks on ligatures and on letters of other widths.
    """
    try:
        table = normalizers.Precompiled(charsmap)
        composes = table.normalize_str("e\u0301") == "\u00e9"
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise UserError("the table of characters cannot be read", where=where, got=error) from error
    return [normalizers.NFC(), table] if composes else [table]


def _normal(token: str, steps: list[Any]) -> str:
    return str(normalizers.Sequence(steps).normalize_str(token))


def _decoder(spaces: Spaces, bytes_fall_back: bool) -> Any:
    steps: list[Any] = [decoders.Replace(SPACE, " ")]
    if bytes_fall_back:
        steps.append(decoders.ByteFallback())
    steps.append(decoders.Fuse())
    if spaces.prefix or spaces.squeeze:
        steps.append(decoders.Strip(" ", 1, 0))
    return decoders.Sequence(steps)
