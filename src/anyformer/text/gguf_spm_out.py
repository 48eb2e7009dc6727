"""GGUF metadata of the SentencePiece kinds, from a tokenizer: the inverse of `text.gguf_spm`.

llama.cpp derives the merges of a "llama" vocabulary from scores, and has fixed rules for spaces. A tokenizer is
written when its merges come back from the scores that their order gives, and its rules for spaces are among those.
"""

import base64
import json
import warnings
from collections.abc import Iterable
from typing import Any, NoReturn

from tokenizers import Tokenizer as Library

from anyformer.errors import UserError
from anyformer.text.spm import (
    BYTE,
    BYTES,
    CONTROL,
    NORMAL,
    SPACE,
    UNKNOWN,
    UNREACHED,
    UNUSED,
    USER_DEFINED,
    Pair,
    merges,
)

Step = dict[str, Any]
_REMEDY = "save it as a tokenizer.json beside the model instead"
# A token beyond the vocabulary's own, as llama.cpp's converter scores it.
_ADDED = -1000.0
_COLLAPSE = {"Regex": " {2,}"}


def metadata_of(library: Library) -> dict[str, Any] | None:
    """The keys `tokenizer.ggml.…` of a SentencePiece vocabulary: model, pre, tokens, scores, token_type,
    unknown_token_id, add_space_prefix, remove_extra_whitespaces and precompiled_charsmap, as far as each applies.

    None for a tokenizer of another kind, such as a byte-level one. Warns, naming it, where a rule of the tokenizer has
    no place in GGUF and some texts get other ids there. Ids that the vocabulary leaves out become unused tokens.

    Raises:
        UserError: the tokenizer is of this kind, and llama.cpp would split most texts otherwise.
    """
    state = json.loads(library.to_str())
    model = state["model"]
    unigram = model["type"] == "Unigram"
    if not unigram and not (model["type"] == "BPE" and _escapes(state)):
        return None
    rules = _Rules(state, unigram)
    tokens, types = _tokens(library, model, rules)
    found: dict[str, Any] = {
        "tokenizer.ggml.model": "t5" if unigram else "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": _of_unigram(model, tokens) if unigram else _of_bpe(model, tokens, types, rules),
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.add_space_prefix": rules.prefix,
    }
    if UNKNOWN in types:
        found["tokenizer.ggml.unknown_token_id"] = types.index(UNKNOWN)
    if unigram:
        found["tokenizer.ggml.remove_extra_whitespaces"] = rules.squeeze
        if rules.charsmap:
            found["tokenizer.ggml.precompiled_charsmap"] = bytes(rules.charsmap)
    if rules.differences:
        what = "GGUF has no place for some rules of this tokenizer, and llama.cpp gives other ids for "
        warnings.warn(what + "; ".join(rules.differences), stacklevel=2)
    return found


class _Rules:
    """How a tokenizer treats spaces, in the terms of GGUF, and where those terms fall short of it."""

    def __init__(self, state: Step, unigram: bool) -> None:
        self.prefix = self.squeeze = self.escape = self.splits = False
        self.charsmap = b""
        self.differences: list[str] = []
        self._ends = False
        steps = list(_flat(state["normalizer"], "normalizers"))
        if [step["type"] for step in steps[:2]] == ["NFC", "Precompiled"]:
            del steps[0]
        for step in steps:
            self._normaliser(step)
        for step in _flat(state["pre_tokenizer"], "pretokenizers"):
            self._pre_tokenizer(step)
        if not unigram and (self.squeeze or self.charsmap):
            _refuse("llama.cpp leaves spaces and characters of such a vocabulary as they are", "normalizer", "")
        if not self.escape:
            _refuse("a space must become ▁ before a text is split", "normalizer", state["normalizer"])
        if self.squeeze and not self._ends:
            self.differences.append("a text that ends with a space")
        if self.squeeze and not self.prefix:
            self.differences.append("every text, which gets a space before it")

    def _normaliser(self, step: Step) -> None:
        kind, pattern, content = step["type"], step.get("pattern") or {}, step.get("content")
        regex = str(pattern.get("Regex", ""))
        if kind == "Precompiled":
            self.charsmap = base64.b64decode(step["precompiled_charsmap"] or "")
        elif kind == "Prepend" and step["prepend"] == SPACE:
            self.prefix = True
        elif kind == "Strip":
            self._ends = bool(step["strip_right"])
        elif kind != "Replace":
            _refuse("this way to normalise a text has no place in GGUF", "normalizer", step)
        elif pattern == {"String": " "} and content == SPACE:
            self.escape = True
        elif pattern == _COLLAPSE and content in (" ", SPACE):
            self.squeeze = True
        elif content == "" and regex and _only_spaces(regex):
            self._ends |= regex.endswith(r"\z")
        elif content == "" and regex.startswith(rf"\A{SPACE}(?="):
            self.differences.append("a text with a user-defined token, which gets a space after that")
        elif not (content == SPACE * 2 and pattern == {"Regex": rf"\A{SPACE}"}):
            _refuse("this way to normalise a text has no place in GGUF", "normalizer", step)

    def _pre_tokenizer(self, step: Step) -> None:
        kind = step["type"]
        if kind == "Metaspace" and step["replacement"] == SPACE:
            self.escape = True
            self.splits |= bool(step.get("split", True))
            if step["prepend_scheme"] != "never":
                self.prefix = True
                if not self.squeeze:
                    self.differences.append("a text that begins with a space")
            if step["prepend_scheme"] == "first":
                self.differences.append("text after a control token, which gets a space before it")
        elif kind == "WhitespaceSplit":
            self.squeeze = self._ends = True
        elif not (kind == "Split" and step["pattern"] == {"String": " "} and self.escape):
            _refuse("this way to cut a text into words has no place in GGUF", "pre_tokenizer", step)


def _refuse(what: str, where: str, got: object) -> NoReturn:
    raise UserError(what, where=f"tokenizer, {where}", got=str(got)[:200] or None, remedy=_REMEDY)


def _only_spaces(pattern: str) -> bool:
    return not set(pattern) - set(r"\Az+ |?<!()" + SPACE)


def _flat(step: Step | None, inner: str) -> Iterable[Step]:
    if step is None:
        return
    if step["type"] != "Sequence":
        yield step
        return
    for each in step[inner]:
        yield from _flat(each, inner)


def _escapes(state: Step) -> bool:
    """Whether a BPE is one of SentencePiece's: it writes a space as ▁."""
    steps = [*_flat(state["normalizer"], "normalizers"), *_flat(state["pre_tokenizer"], "pretokenizers")]
    return any(SPACE in (step.get("content"), step.get("replacement"), step.get("prepend")) for step in steps)


def _tokens(library: Library, model: Step, rules: _Rules) -> tuple[list[str], list[int]]:
    """The token of each id and its type."""
    known = library.get_vocab(with_added_tokens=True)
    tokens = [""] * (max(known.values()) + 1)
    types = [UNUSED] * len(tokens)
    falls_back = bool(model.get("byte_fallback"))
    for token, index in known.items():
        tokens[index], types[index] = token, BYTE if falls_back and token in BYTES else NORMAL
    if model["type"] == "Unigram":
        for index, (_, score) in enumerate(model["vocab"]):
            if score <= UNREACHED and types[index] == NORMAL:
                types[index] = UNUSED
    made = {"".join(_pair(merge)) for merge in model.get("merges", ())}
    for index, entry in library.get_added_tokens_decoder().items():
        # llama.cpp looks for a user-defined token in the text as it was given.
        spaced = entry.normalized and not entry.special and entry.content.replace(SPACE, " ") not in known
        tokens[index] = entry.content.replace(SPACE, " ") if spaced else entry.content
        # Where spaces are joined by merges, the token finds only a text that has ▁ itself.
        if entry.special or entry.content not in made or SPACE not in entry.content:
            types[index] = CONTROL if entry.special else USER_DEFINED
    unknown = model.get("unk_id") if "unk_id" in model else known.get(model.get("unk_token") or "")
    if unknown is not None:
        types[unknown] = UNKNOWN
    _check_reach(model, tokens, types, rules)
    taken = set(tokens)
    for index in [index for index, token in enumerate(tokens) if not token]:
        name = f"[PAD{index}]"
        while name in taken:
            name += "_"
        tokens[index] = name
        taken.add(name)
    return tokens, types


def _check_reach(model: Step, tokens: list[str], types: list[int], rules: _Rules) -> None:
    """Names, or refuses, what llama.cpp reaches otherwise: bytes, and tokens that go beyond one word."""
    if model["type"] == "BPE" and types.count(BYTE) < 256:
        _refuse("llama.cpp writes what it does not know in bytes, and this vocabulary lacks some", "model", "")
    if model["type"] == "Unigram" and BYTE in types:
        rules.differences.append("characters that it writes in bytes, which become the unknown token")
    if rules.splits and (
        word := next((t for t, k in zip(tokens, types, strict=True) if k == NORMAL and SPACE in t[1:]), 0)
    ):
        _refuse("words are split at spaces, and a token goes beyond one", "pre_tokenizer", repr(word))


def _of_unigram(model: Step, tokens: list[str]) -> list[float]:
    scores = [float(score) for _, score in model["vocab"]]
    return scores + [_ADDED] * (len(tokens) - len(scores))


def _pair(merge: str | list[str]) -> Pair:
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left, right


def _groups(pairs: list[Pair]) -> list[list[Pair]]:
    """`pairs` cut where no token has pairs on both sides: tokens that share a group must share a score."""
    last = {"".join(pair): at for at, pair in enumerate(pairs)}
    groups: list[list[Pair]] = []
    end = -1
    for at, pair in enumerate(pairs):
        if at > end:
            groups.append([])
        groups[-1].append(pair)
        end = max(end, last["".join(pair)])
    return groups


def _alike(group: list[Pair]) -> list[Pair]:
    one = len({"".join(pair) for pair in group}) == 1
    return sorted(group, key=lambda pair: -len(pair[0])) if one else group


def _of_bpe(model: Step, tokens: list[str], types: list[int], rules: _Rules) -> list[float]:
    """Scores that give the merges of `model` back: the first piece that is joined gets the highest."""
    for key in ("continuing_subword_prefix", "end_of_word_suffix", "ignore_merges", "dropout"):
        if model.get(key):
            _refuse("this rule of a BPE has no place in GGUF", f"model.{key}", model[key])
    normal = {token for token, kind in zip(tokens, types, strict=True) if kind == NORMAL}
    given = [_pair(merge) for merge in model["merges"]]
    # No text leads to the others: what makes or takes a token that is found before any merge.
    given = [pair for pair in given if normal.issuperset((*pair, "".join(pair)))]
    groups = _groups(given)
    rank = {"".join(pair): -at for at, group in enumerate(groups) for pair in group}
    scores = {token: float(rank.get(token, -len(groups))) for token in tokens if token in normal}
    # The pairs of one token can go in any order.
    ordered = [pair for group in groups for pair in _alike(group)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again = merges(scores, "tokenizer")
    if ordered != again:
        odd = next(iter(set(again) ^ set(given)), None) or given[0]
        what = "the merges of this tokenizer do not follow from an order of its tokens, as those of llama.cpp do"
        _refuse(what, "model.merges", f"{odd[0]!r} + {odd[1]!r}")
    return [
        scores.get(token, 0.0 if kind in (BYTE, CONTROL, UNKNOWN) else _ADDED)
        for token, kind in zip(tokens, types, strict=True)
    ]
