"""Tokenizers in GGUF metadata: read from the keys `tokenizer.…` of a file, and written into them.

What the keys leave open is settled as llama.cpp settles it: whether BOS comes first (yes for SentencePiece's BPE and
Llama 3's rules, no for other byte-level vocabularies), and which tokens end a text (`eos`, `eot` and `eom`, and those
with a name in `_ENDS`). A token that has a role or ends a text is a control token, so that no text can spell it. Only
what the merges make is ordinary text here whatever its name, such as Qwen's `</s>`, at which llama.cpp stops.

Ids up to a model's number of rows that stand for no token are written as unused tokens `[PAD…]`, as llama.cpp's
converters do; read, they are no part of the vocabulary, so that neither text nor sampling reaches them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Library

from anyformer.errors import UserError
from anyformer.text import gguf_bpe
from anyformer.text.gguf_bpe import CONTROL, MERGES, NORMAL, PRE, TOKENS, TYPES, UNKNOWN, UNUSED, USER_DEFINED
from anyformer.text.gguf_fields import MORE_ENDS, ROLES, SCORES, TEMPLATE, Fields
from anyformer.text.pretokenizers import RULES
from anyformer.text.settings import Settings
from anyformer.text.tokenizer import Tokenizer

MODEL, TEMPLATES = "tokenizer.ggml.model", "tokenizer.chat_templates"
_UNUSED_SCORE = -1000.0
# What a file of each kind leaves unsaid: the ids of its roles, and whether BOS and EOS are put around a text.
_UNSAID: dict[str, tuple[dict[str, int], bool, bool]] = {
    "llama": ({"bos": 1, "eos": 2, "unknown": 0}, True, False),
    "t5": ({"eos": 1, "unknown": 2, "padding": 0}, False, True),
}
# Where llama.cpp ends a text if no key says it.
_USUAL_END = {"gpt2": 11, "llama": 2, "t5": 1}
# llama.cpp ends a text at tokens of these names, whatever the metadata say.
_ENDS = frozenset(
    {
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"),
        *("<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<eos>"),
        *("<end_of_utterance>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~["),
        # Padding and the borders of files, for models that fill in the middle of one.
        *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|file_sep|>"),
        *("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    }
)
_FLAGS = ("lstrip", "rstrip", "single_word")


def read_tokenizer(metadata: Mapping[str, Any], where: object) -> Tokenizer:
    """The tokenizer that the metadata of a GGUF file describe.

    Args:
        metadata: every key of the file with its value; lists of texts and numbers as any sequence.
        where: the file, for messages.

    Raises:
        UserError: a key is missing or of the wrong type, lists do not fit each other, an id is none of a token, or the
            vocabulary is of a kind or with a pre-tokeniser that is not known here.
    """
    file = Fields(metadata, where)
    model = file.text(MODEL, needed=True)
    if model not in ("gpt2", *_UNSAID):
        what = "there is no reader for this kind of tokenizer"
        file.refuse(what, MODEL, repr(model), "gpt2 | llama | t5", "take the tokenizer.json of the original model")
    tokens = file.texts(TOKENS)
    types = file.types(tokens)
    ids = file.roles(tokens, types, _UNSAID[model][0] if model in _UNSAID else {})
    _drop_padding(tokens, types)
    ids = {role: index for role, index in ids.items() if types[index] != UNUSED}
    if model != "gpt2":
        while types and types[-1] == UNUSED:
            tokens.pop()
            types.pop()
    merges = file.texts(MERGES) if model == "gpt2" else []
    ends = _ends(tokens, types, ids)
    named = {*ends, *(index for role, index in ids.items() if role != "unknown")}
    ordinary = _ordinary([index for index in named if types[index] == NORMAL], tokens, merges)
    said = {ids[role] for role in ("eos", *MORE_ENDS) if role in ids}
    ends = [index for index in ends if index not in ordinary or index in said]
    for index in named - ordinary:
        types[index] = CONTROL if types[index] != UNKNOWN else UNKNOWN
    if model == "gpt2":
        library = gguf_bpe.library_of(tokens, types, merges, metadata=metadata, where=where)
    else:
        from anyformer.text import gguf_spm

        scores = file.scores(len(tokens))
        library = gguf_spm.library_of(tokens, scores, types, model=model, metadata=metadata, where=where)
    _flag(library, file, tokens)
    settings = Settings(
        named={
            ROLES[role]: tokens[index] for role, index in ids.items() if role in ROLES and _names(role, tokens[index])
        },
        add_bos=_adds(file, "bos", ids, _adds_bos(model, metadata)),
        add_eos=_adds(file, "eos", ids, model in _UNSAID and _UNSAID[model][2]),
        more_eos=tuple(ends),
        chat_templates=file.templates(),
    )
    return Tokenizer(library, settings)


def _names(role: str, token: str) -> bool:
    """Whether `token` is a control token for `role`; a tokenizer of characters writes what it lacks as one of them."""
    return role != "unknown" or len(token) > 1


def _adds_bos(model: str, metadata: Mapping[str, Any]) -> bool:
    if model in _UNSAID:
        return _UNSAID[model][1]
    rules = RULES.get(str(metadata.get(PRE)))
    return rules is not None and rules.add_bos


def _adds(file: Fields, role: str, ids: Mapping[str, int], unsaid: bool) -> bool:
    key = f"tokenizer.ggml.add_{role}_token"
    said = file.flag(key)
    if said and role not in ids:
        remedy = f"set tokenizer.ggml.{role}_token_id"
        file.refuse(f"a text is to get the {role} token, and there is none", key, said, None, remedy)
    return role in ids and (unsaid if said is None else said)


def _drop_padding(tokens: Sequence[str], types: list[int]) -> None:
    """Marks as unused what stands for no token: rows that only fill the embedding, and tokens without a text."""
    if "" not in tokens and USER_DEFINED not in types:
        return
    for index, token in enumerate(tokens):
        if not token or (types[index] == USER_DEFINED and token == f"[PAD{index}]"):
            types[index] = UNUSED


def _ordinary(ids: Sequence[int], tokens: Sequence[str], merges: Sequence[str]) -> set[int]:
    """Which of `ids` are text to the model, though they have a role or a name of `_ENDS`."""
    made = {merge.replace(" ", "") for merge in merges} if ids else set()
    return {index for index in ids if len(tokens[index]) == 1 or tokens[index] in made}


def _ends(tokens: Sequence[str], types: Sequence[int], ids: Mapping[str, int]) -> list[int]:
    """Every id that ends a text, those of the metadata first."""
    said = [ids[role] for role in ("eos", *MORE_ENDS) if role in ids]
    named = {token: index for index, token in enumerate(tokens) if token in _ENDS and types[index] != UNUSED}
    # Models with these tokens end a part of their answer with <|end|>, and write </s> as plain text.
    if "<|end|>" in named and {"<|call|>", "<|calls|>"} & named.keys() and {"<|return|>", "<|flush|>"} & named.keys():
        del named["<|end|>"]
    if "<|tool_response>" in named:
        named.pop("</s>", None)
    return list(dict.fromkeys([*said, *named.values()]))


def _flag(library: Library, file: Fields, tokens: Sequence[str]) -> None:
    """Gives control tokens the flags that take white space beside them along."""
    flags = {name: set(file.ids(f"tokenizer.anyformer.{name}", len(tokens))) for name in _FLAGS}
    added = library.get_added_tokens_decoder()
    name = str(file.metadata.get("general.name", "")).lower()
    if "phi-3" in name or "phi3" in name:
        # GGUF has no words for it, and llama.cpp goes by the name as well.
        plain = ("<unk>", "<s>", "<|endoftext|>")
        flags["rstrip"] |= {index for index, entry in added.items() if entry.content not in plain}
    changed = {index for ids in flags.values() for index in ids} & added.keys()
    library.add_tokens(
        [
            AddedToken(
                added[index].content,
                normalized=added[index].normalized,
                special=added[index].special,
                **{name: index in ids for name, ids in flags.items()},
            )
            for index in sorted(changed)
        ]
    )


def tokenizer_metadata(tokenizer: Tokenizer, rows: int, ends: Sequence[int] = ()) -> dict[str, Any]:
    """The keys `tokenizer.…` that say what `tokenizer` does.

    Args:
        tokenizer: one over a byte-level BPE, characters, or SentencePiece's BPE or Unigram.
        rows: the rows of the model's embedding; the list of tokens is filled up to it.
        ends: further ids that end a reply, beside the tokenizer's own.

    Returns:
        Plain values: text, true or false, whole numbers, lists of text, whole numbers and numbers.

    Raises:
        UserError: GGUF has no words for something that the tokenizer does.
    """
    from anyformer.text import gguf_spm

    if tokenizer.vocab_size > rows:
        raise UserError(
            "the tokenizer has more ids than the model has rows",
            where="tokenizer",
            got=f"{tokenizer.vocab_size} ids, {rows} rows",
            remedy="give the model its own tokenizer",
        )
    library = tokenizer.library
    found = gguf_bpe.metadata_of(library) or gguf_spm.metadata_of(library)
    if found is None:
        raise UserError(
            "GGUF has no place for a tokenizer of this kind",
            where="tokenizer",
            got=type(library.model).__name__,
            expected="byte-level BPE, characters, or SentencePiece's BPE or Unigram",
            remedy="save the model in the format of Hugging Face or of anyformer",
        )
    _fill(found, rows)
    flagged: dict[str, list[int]] = {name: [] for name in _FLAGS}
    for index, entry in library.get_added_tokens_decoder().items():
        for name in _FLAGS:
            if getattr(entry, name):
                flagged[name].append(index)
    found |= {f"tokenizer.anyformer.{name}": sorted(ids) for name, ids in flagged.items() if ids}
    roles = _role_keys(tokenizer, ends)
    if "tokenizer.ggml.eos_token_id" not in roles:
        roles |= _no_end(found)
    return found | roles | _affix_keys(tokenizer) | _template_keys(tokenizer.settings.chat_templates)


def _fill(found: dict[str, Any], rows: int) -> None:
    tokens, types = found[TOKENS], found[TYPES]
    known = set(tokens)
    filled = [gguf_bpe.unused_name(index, known) for index in range(len(tokens), rows)]
    found[TOKENS], found[TYPES] = [*tokens, *filled], [*types, *[UNUSED] * len(filled)]
    if SCORES in found:
        found[SCORES] = [*found[SCORES], *[_UNUSED_SCORE] * len(filled)]


def _role_keys(tokenizer: Tokenizer, ends: Sequence[int]) -> dict[str, int]:
    ids = {"bos": tokenizer.bos_id, "eos": tokenizer.eos_id, "unknown": tokenizer.unk_id, "padding": tokenizer.pad_id}
    for role in ("sep", "cls", "mask"):
        token = tokenizer.settings.named.get(f"{role}_token")
        ids["seperator" if role == "sep" else role] = None if token is None else tokenizer.token_id(token)
    ids |= _end_ids(tokenizer, ends)
    return {f"tokenizer.ggml.{role}_token_id": index for role, index in ids.items() if index is not None}


def _no_end(found: Mapping[str, Any]) -> dict[str, int]:
    """A row that stands for no token as the end of a text: for want of any, llama.cpp ends it at an id of its own."""
    usual, types = _USUAL_END[found[MODEL]], found[TYPES]
    if usual >= len(types):
        return {}
    if UNUSED not in types:
        raise UserError(
            "GGUF cannot say that no token ends a text",
            where="tokenizer",
            got=f"a tokenizer without an EOS token; readers would take {found[TOKENS][usual]!r} for it",
            remedy="train the tokenizer with a control token that ends a document, or give the model one row more",
        )
    return {"tokenizer.ggml.eos_token_id": types.index(UNUSED)}


def _end_ids(tokenizer: Tokenizer, more: Sequence[int]) -> dict[str, int | None]:
    """The ends beside EOS: those that no reader knows by name come first, as there are two places."""
    every = dict.fromkeys([*tokenizer.eos_ids, *more])
    ends = [index for index in every if index != tokenizer.eos_id and tokenizer.token(index) is not None]
    ends.sort(key=lambda index: tokenizer.token(index) in _ENDS)
    eom = next((index for index in ends if tokenizer.token(index) == "<|eom_id|>"), None)
    places = {"eom": eom}
    for index in ends:
        free = next((role for role in ("eot", "eom") if places.get(role) is None), None)
        if index != eom and free is not None:
            places[free] = index
        elif index != eom and tokenizer.token(index) not in _ENDS:
            raise UserError(
                "GGUF has three places for tokens that end a text, and there are more",
                where="tokenizer",
                got=", ".join(repr(tokenizer.token(index)) for index in every),
                remedy="leave out of eos_token_id what does not end an answer",
            )
    return places


def _affix_keys(tokenizer: Tokenizer) -> dict[str, bool]:
    for where, ids, index in (
        ("before", tokenizer.prefix, tokenizer.bos_id),
        ("after", tokenizer.suffix, tokenizer.eos_id),
    ):
        if ids and ids != (index,):
            raise UserError(
                f"GGUF has no place for what this tokenizer puts {where} a text",
                where="tokenizer",
                got=", ".join(repr(tokenizer.token(index)) for index in ids),
                expected="BOS before it, EOS after it, or nothing",
                remedy="save the model in the format of Hugging Face or of anyformer",
            )
    return {
        "tokenizer.ggml.add_bos_token": bool(tokenizer.prefix),
        "tokenizer.ggml.add_eos_token": bool(tokenizer.suffix),
    }


def _template_keys(templates: Mapping[str, str]) -> dict[str, Any]:
    named = {name: template for name, template in templates.items() if name != "default"}
    found: dict[str, Any] = {f"{TEMPLATE}.{name}": template for name, template in named.items()}
    if named:
        found[TEMPLATES] = list(named)
    if "default" in templates:
        found[TEMPLATE] = templates["default"]
    return found
