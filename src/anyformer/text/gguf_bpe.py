"""Byte-level BPE in GGUF metadata (`tokenizer.ggml.model` = "gpt2"), as a tokenizer of the library and back.

Three of our own kinds fit into the same form: single bytes are a BPE without merges; characters are a BPE whose merges
join the bytes of each character; and a pattern that cuts long runs is written as the published one without cuts. The
last two carry a key of our own, which other readers pass over: `tokenizer.anyformer.characters` says that the tokens
are whole characters, with an unknown token for every other (llama.cpp leaves other characters out);
`tokenizer.anyformer.longest_run` says that runs are cut (llama.cpp does not cut them, and its ids differ there).
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Library

from anyformer.errors import UserError
from anyformer.text.pieces import byte_characters
from anyformer.text.pretokenizers import LLAMA3, RULES, apply, canonical, names_of, patterns_of, rules_of
from anyformer.text.trained import WORDS

PRE = "tokenizer.ggml.pre"
TOKENS, TYPES, MERGES = (f"tokenizer.ggml.{name}" for name in ("tokens", "token_type", "merges"))
CHARACTERS, LONGEST_RUN = "tokenizer.anyformer.characters", "tokenizer.anyformer.longest_run"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5
_ADDED = (CONTROL, UNKNOWN, USER_DEFINED)
_RUN = 128
_CHARACTER_OF = {byte: character for character, byte in byte_characters().items()}
# Bytes that begin or continue no character of UTF-8 need no token.
_NO_UTF8 = frozenset({0xC0, 0xC1, *range(0xF5, 0x100)})


def library_of(
    tokens: Sequence[str],
    types: Sequence[int],
    merges: Sequence[str],
    *,
    metadata: Mapping[str, Any],
    where: object,
) -> Library:
    """The tokenizer of a vocabulary, with its control and user-defined tokens as added tokens.

    Args:
        tokens: the token of each id, all different.
        types: GGUF's type of each; unused ones (5) get no place in the vocabulary unless a merge names them.
        merges: pairs, each with a space between, the first to be merged first.
        metadata: all metadata; read here are `tokenizer.ggml.pre` and the keys of our own named above.
        where: the file, for messages.

    Raises:
        UserError: an unknown pre-tokeniser, or merges that do not fit the tokens.
    """
    if metadata.get(CHARACTERS) is True:
        library = _of_characters(tokens, types, metadata, where)
    else:
        library = _of_bytes(tokens, types, merges, metadata, where)
    _add(library, tokens, types)
    return library


def _of_bytes(
    tokens: Sequence[str], types: Sequence[int], merges: Sequence[str], metadata: Mapping[str, Any], where: object
) -> Library:
    name = metadata.get(PRE)
    if name is None:
        raise UserError(
            "this file does not say how its tokenizer cuts text",
            where=f"{where}, {PRE}",
            expected="the name of a published pre-tokeniser",
            remedy="it is an old file: convert the model again, or set the key with gguf_new_metadata.py of llama.cpp",
        )
    if not isinstance(name, str):
        raise UserError("the name of a pre-tokeniser is text", where=f"{where}, {PRE}", got=repr(name))
    rules = rules_of(name, f"{where}, {PRE}")
    library = Library(_model(tokens, types, merges, rules.ignore_merges, where))
    apply(rules, library)
    run = metadata.get(LONGEST_RUN)
    if run is not None:
        if run != _RUN or rules.patterns != (LLAMA3,):
            raise UserError("runs cannot be cut so", where=f"{where}, {LONGEST_RUN}", got=run, expected=_RUN)
        library.pre_tokenizer = _byte_level(WORDS)
    library.decoder = decoders.ByteLevel()
    return library


def _byte_level(pattern: str) -> pre_tokenizers.PreTokenizer:
    bytes_alone = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), bytes_alone])


def _model(
    tokens: Sequence[str], types: Sequence[int], merges: Sequence[str], ignore_merges: bool, where: object
) -> models.BPE:
    vocab = {token: index for index, token in enumerate(tokens[: _tail(types)]) if types[index] != UNUSED}
    if not vocab:
        raise UserError("this vocabulary has no ordinary token", where=f"{where}, {TOKENS}")
    pairs = _pairs(merges, where)
    if _longest(merges) > _longest(vocab) + 1:
        # The library panics, and writes so, where a merge makes what is longer than any token.
        vocab = _with_needed(vocab, tokens, types, pairs, where)
    try:
        return models.BPE(vocab=vocab, merges=pairs, ignore_merges=ignore_merges)
    except Exception:  # The library's own, for merges that name or make what is not in the vocabulary.
        vocab = _with_needed(vocab, tokens, types, pairs, where)
        return models.BPE(vocab=vocab, merges=pairs, ignore_merges=ignore_merges)


def _longest(texts: Iterable[str]) -> int:
    return max(map(len, map(str.encode, texts)), default=0)


def _pairs(merges: Sequence[str], where: object) -> list[tuple[str, str]]:
    pairs: list[Any] = [tuple(merge.split(" ")) for merge in merges]
    if {*map(len, pairs)} - {2}:
        index = next(index for index, pair in enumerate(pairs) if len(pair) != 2)
        what = "a merge is two tokens with a space between"
        raise UserError(what, where=f"{where}, {MERGES}[{index}]", got=repr(merges[index][:80]))
    return pairs


def _with_needed(
    vocab: dict[str, int],
    tokens: Sequence[str],
    types: Sequence[int],
    pairs: Sequence[tuple[str, str]],
    where: object,
) -> dict[str, int]:
    """`vocab` with the tokens that merges need, and all added ones with them, so that they keep their ids."""
    rest = {token: index for index, token in enumerate(tokens) if token and token not in vocab}
    needed = {part for pair in pairs for part in (*pair, "".join(pair)) if part not in vocab}
    if not needed <= rest.keys():
        strange = next(pair for pair in pairs if not {*pair, "".join(pair)} <= vocab.keys() | rest.keys())
        raise UserError(
            "a merge joins, or gives, what is no token",
            where=f"{where}, {MERGES}",
            got=" + ".join(map(repr, strange)),
            expected=f"tokens of {TOKENS}",
        )
    return vocab | {token: index for token, index in rest.items() if token in needed or types[index] != UNUSED}


def _tail(types: Sequence[int]) -> int:
    """Where the added tokens begin that the library will number as the file does without finding them in the model."""
    last = len(types)
    while last > 0 and types[last - 1] == UNUSED:
        last -= 1
    first = last
    while first > 0 and types[first - 1] in _ADDED:
        first -= 1
    return last if UNUSED in types[:first] else first


def _of_characters(tokens: Sequence[str], types: Sequence[int], metadata: Mapping[str, Any], where: object) -> Library:
    byte_of = byte_characters()
    added = {token: index for index, token in enumerate(tokens[: _tail(types)]) if types[index] in _ADDED}
    vocab: dict[str, int] = {}
    for index, token in enumerate(tokens):
        if types[index] != NORMAL:
            continue
        try:
            character = bytes(byte_of[stand_in] for stand_in in token).decode("utf-8")
        except (KeyError, ValueError):
            character = ""
        if len(character) != 1:
            what = "in a tokenizer of characters every token is one character"
            raise UserError(what, where=f"{where}, {TOKENS}[{index}]", got=repr(token[:80]))
        vocab[character] = index
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    mark = next((character for character, index in vocab.items() if index == unknown), None)
    if mark is None:
        what = "a tokenizer of characters needs one that stands for all others"
        raise UserError(what, where=f"{where}, tokenizer.ggml.unknown_token_id", got=unknown)
    library = Library(models.BPE(vocab={**added, **vocab}, merges=[], unk_token=mark))
    library.decoder = decoders.Fuse()
    return library


def _add(library: Library, tokens: Sequence[str], types: Sequence[int]) -> None:
    """Adds the control and user-defined tokens under their ids."""
    kinds = {index: kind for index, kind in enumerate(types) if kind in _ADDED}
    library.add_tokens(
        [AddedToken(tokens[index], special=kind != USER_DEFINED, normalized=False) for index, kind in kinds.items()]
    )
    # It takes the id of a token that the model has, and counts on from the size of its vocabulary for the others.
    assert all(library.token_to_id(tokens[index]) == index for index in kinds)


def metadata_of(library: Library) -> dict[str, Any] | None:
    """The metadata of a byte-level BPE or a tokenizer of characters, from `tokenizer.ggml.model` to its merges.

    Returns:
        `tokens` and `token_type` for every id up to the largest, unused where the vocabulary leaves one out; None for
        a tokenizer of another kind.

    Raises:
        UserError: it is a byte-level BPE that GGUF has no words for.
    """
    if not isinstance(library.model, models.BPE):
        return None
    state = json.loads(library.model.__getstate__())
    if library.pre_tokenizer is None and library.normalizer is None and _is_of_characters(library, state):
        return _characters_metadata(library, state)
    if not (_of_bytes_alone(library.decoder) and _of_bytes_alone(library.pre_tokenizer)):
        return None
    _require_plain(state)
    merges = [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in state["merges"]]
    strange = next((pair for pair in merges if any(" " in part for part in pair)), None)
    if strange is not None:
        raise _homeless("merges of tokens with spaces", strange)
    found = {"tokenizer.ggml.model": "gpt2", **_name(library, state), **_table(library, dict(state["vocab"]))}
    return {**found, MERGES: [" ".join(pair) for pair in merges]}


def _of_bytes_alone(part: Any) -> bool:
    """Whether a decoder or pre-tokeniser works on bytes. What it prints of itself is cut short, within characters."""
    return part is not None and b'"ByteLevel"' in part.__getstate__()


def _require_plain(state: Mapping[str, Any]) -> None:
    for key in ("continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "dropout"):
        if state.get(key):
            raise _homeless(f"{key} of a byte-level BPE", state[key])
    lacking = [byte for byte in range(256) if _CHARACTER_OF[byte] not in state["vocab"] and byte not in _NO_UTF8]
    if state.get("unk_token") is not None and lacking:
        raise _homeless("an unknown token of a byte-level BPE", state["unk_token"])


def _homeless(what: str, got: object) -> UserError:
    remedy = "save it in the format of Hugging Face or of anyformer, or give the model another tokenizer"
    return UserError(f"GGUF has no place for {what}", where="tokenizer", got=got, remedy=remedy)


def _name(library: Library, state: Mapping[str, Any]) -> dict[str, Any]:
    """The name of the library's rules, and our own key where they cut long runs."""
    read = patterns_of(library)
    if read is None:
        raise _homeless("the way this tokenizer normalises or cuts text", library.pre_tokenizer)
    patterns, nfc = read
    if not state["merges"] and not nfc:
        # Single bytes: where text is cut makes no difference.
        return {PRE: "gpt-2"}
    cut = patterns == (canonical(WORDS),)
    if cut:
        patterns = (canonical(LLAMA3),)
    names = names_of(patterns, nfc)
    wanted = bool(state.get("ignore_merges"))
    name = next((name for name in names if RULES[name].ignore_merges == wanted), None)
    if name is None and names and _merges_reach_all(library):
        name = names[0]
    if name is None:
        raise _homeless("the way this tokenizer normalises or cuts text", library.pre_tokenizer)
    return {PRE: name, **({LONGEST_RUN: _RUN} if cut else {})}


def _merges_reach_all(library: Library) -> bool:
    """Whether the merges alone make every token out of its own text, so that ignoring them changes nothing."""
    state = json.loads(library.model.__getstate__())
    alone = Library(models.BPE(vocab=dict(state["vocab"]), merges=[tuple(pair) for pair in state["merges"]]))
    added = {entry.content for entry in library.get_added_tokens_decoder().values()}
    tokens = [token for token in state["vocab"] if token not in added]
    return all(len(each.ids) == 1 for each in alone.encode_batch_fast(tokens, add_special_tokens=False))


def _table(library: Library, spelled: Mapping[str, int]) -> dict[str, Any]:
    """`tokens` and `token_type` of the ordinary tokens as `spelled`, and of the added ones."""
    added = library.get_added_tokens_decoder()
    largest = max([*spelled.values(), *added], default=-1)
    tokens, types = [""] * (largest + 1), [UNUSED] * (largest + 1)
    for token, index in spelled.items():
        tokens[index], types[index] = token, NORMAL
    for index, entry in added.items():
        tokens[index], types[index] = entry.content, CONTROL if entry.special else USER_DEFINED
    known = set(tokens)
    for index, token in enumerate(tokens):
        tokens[index] = token or unused_name(index, known)
    if len(set(tokens)) != len(tokens):
        twice = next(token for token in tokens if tokens.count(token) > 1)
        raise _homeless("two tokens that are written alike", twice)
    return {TOKENS: tokens, TYPES: types}


def unused_name(index: int, known: set[str]) -> str:
    """How an id without a token is written: as in llama.cpp's converters, unless a token is called so."""
    name = f"[PAD{index}]"
    while name in known:
        name = f"{name}_"
    return name


def _is_of_characters(library: Library, state: Mapping[str, Any]) -> bool:
    added = {entry.content for entry in library.get_added_tokens_decoder().values()}
    single = all(len(token) == 1 for token in state["vocab"] if token not in added)
    return single and not state["merges"] and not state["fuse_unk"] and state["unk_token"] in state["vocab"]


def _characters_metadata(library: Library, state: Mapping[str, Any]) -> dict[str, Any]:
    added = {entry.content for entry in library.get_added_tokens_decoder().values()}
    spelled: dict[str, int] = {}
    merges: dict[str, None] = {}
    for character, index in state["vocab"].items():
        if character in added:
            continue
        stand_ins = "".join(_CHARACTER_OF[byte] for byte in character.encode("utf-8"))
        spelled[stand_ins] = index
        merges.update({f"{stand_ins[:end]} {stand_ins[end]}": None for end in range(1, len(stand_ins))})
    return {
        "tokenizer.ggml.model": "gpt2",
        PRE: "gpt-2",
        CHARACTERS: True,
        **_table(library, spelled),
        MERGES: list(merges),
        "tokenizer.ggml.unknown_token_id": state["vocab"][state["unk_token"]],
    }
