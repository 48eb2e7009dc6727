"""SentencePiece models (`tokenizer.model`, `spiece.model`): ids as the `sentencepiece` package gives them.

The file is a ModelProto: its pieces, and how a text is normalised. It says nothing about BOS and EOS around a text.
tokenizer_config.json beside it does; where that only names a class of Hugging Face, `_AFFIXES` says what this adds;
where there is neither, nothing is put around a text, as in the `sentencepiece` package.

Tokens that tokenizer_config.json declares take the place of pieces with their ids (a published model may rename pieces
that were kept free for that), or follow them.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path

from tokenizers import Tokenizer as Library

from anyformer.errors import UserError
from anyformer.text import protobuf, spm
from anyformer.text.added import complete
from anyformer.text.settings import CONFIG_FILE, TOKENIZER_FILE, Settings

SUFFIXES = (".model", ".spm")
MODEL_FILES = ("tokenizer.model", "spiece.model", "spm.model")
# The largest published models have 5 MB.
_MOST_BYTES = 1 << 28
_KINDS = {1: "unigram", 2: "bpe"}
_OTHER_KINDS = {3: "word", 4: "char"}
# Fields of ModelProto.
_PIECES, _TRAINER, _NORMALIZER, _DENORMALIZER = 1, 2, 3, 5
# Fields of TrainerSpec, with their defaults.
_MODEL_TYPE, _SUFFIX, _BYTE_FALLBACK = 3, 24, 35
_ROLE_IDS = {40: ("unk_token", 0), 41: ("bos_token", 1), 42: ("eos_token", 2), 43: ("pad_token", -1)}
# Fields of NormalizerSpec.
_CHARSMAP, _DUMMY_PREFIX, _EXTRA, _ESCAPE = 2, 3, 4, 5
# What a class of Hugging Face puts around a text where tokenizer_config.json does not say: BOS, EOS.
_AFFIXES = {
    "LlamaTokenizer": (True, False),
    "CodeLlamaTokenizer": (True, False),
    "GemmaTokenizer": (True, False),
    "T5Tokenizer": (False, True),
    "MT5Tokenizer": (False, True),
}
# Classes that give pieces other ids than their file does, or put other tokens around a text than BOS and EOS.
_OTHERWISE = frozenset(
    {
        *("AlbertTokenizer", "BarthezTokenizer", "BigBirdTokenizer", "CamembertTokenizer", "CpmTokenizer"),
        *("DebertaV2Tokenizer", "FNetTokenizer", "M2M100Tokenizer", "MBart50Tokenizer", "MBartTokenizer"),
        *("MarianTokenizer", "NllbTokenizer", "PLBartTokenizer", "PegasusTokenizer", "RemBertTokenizer"),
        *("Speech2TextTokenizer", "XGLMTokenizer", "XLMRobertaTokenizer", "XLNetTokenizer"),
    }
)
# T5's own count of sentinels, where tokenizer_config.json does not say.
_SENTINELS = 100


@dataclass
class Model:
    """What a ModelProto says.

    Attributes:
        kind: "bpe" or "unigram".
        tokens, scores, types: of each piece, its index being its id.
        spaces: how a text is normalised.
        roles: the id of the unknown, BOS, EOS and padding token, below 0 where there is none.
    """

    kind: str = "unigram"
    tokens: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    types: list[int] = field(default_factory=list)
    spaces: spm.Spaces = field(default_factory=lambda: spm.Spaces(squeeze=True))
    roles: dict[str, int] = field(default_factory=lambda: dict(_ROLE_IDS.values()))


def parse(data: bytes, where: object) -> Model:
    """Reads a ModelProto.

    Raises:
        UserError: `data` is none, ends too early, or is of a kind (word, char, spaces as suffixes) that is not read.
    """
    model = Model()
    specs: dict[int, list[memoryview]] = {_TRAINER: [], _NORMALIZER: [], _DENORMALIZER: []}
    for number, value in protobuf.fields(memoryview(data), where):
        if number == _PIECES:
            _piece(model, protobuf.content(value, where), where)
        elif number in specs:
            specs[number].append(protobuf.content(value, where))
    missing = [name for name, number in (("trainer", _TRAINER), ("normalizer", _NORMALIZER)) if not specs[number]]
    if not model.tokens or missing:
        got = f"no {missing[0]}_spec" if model.tokens else "no pieces"
        raise UserError("this is no whole SentencePiece model", where=where, got=got)
    trainer, normaliser, denormaliser = (_spec(parts, where) for parts in specs.values())
    kind = protobuf.number(trainer.get(_MODEL_TYPE, 1), where)
    if kind not in _KINDS:
        got = _OTHER_KINDS.get(kind, str(kind))
        raise UserError("this kind of SentencePiece model is not read", where=where, got=got, expected="unigram | bpe")
    model.kind = _KINDS[kind]
    if protobuf.number(trainer.get(_SUFFIX, 0), where):
        raise UserError("a model that writes a space after a word, not before it, is not read", where=where)
    if denormaliser.get(_CHARSMAP):
        raise UserError("a model that changes the characters of what it decodes is not read", where=where)
    if not protobuf.number(trainer.get(_BYTE_FALLBACK, 0), where):
        model.types = [spm.UNUSED if kind == spm.BYTE else kind for kind in model.types]
    for number, (role, usual) in _ROLE_IDS.items():
        index = protobuf.number(trainer.get(number, usual), where)
        named = 0 <= index < len(model.tokens) and model.types[index] in (spm.CONTROL, spm.UNKNOWN)
        model.roles[role] = index if named else -1
    model.spaces = spm.Spaces(
        prefix=bool(protobuf.number(normaliser.get(_DUMMY_PREFIX, 1), where)),
        squeeze=bool(protobuf.number(normaliser.get(_EXTRA, 1), where)),
        escape=bool(protobuf.number(normaliser.get(_ESCAPE, 1), where)),
        charsmap=bytes(protobuf.content(normaliser.get(_CHARSMAP, memoryview(b"")), where)),
    )
    return model


def _piece(model: Model, message: memoryview, where: object) -> None:
    token, score, kind = "", 0.0, spm.NORMAL
    for number, value in protobuf.fields(message, where):
        if number == 1:
            token = protobuf.text(value, where)
        elif number == 2:
            score = protobuf.real(value, where)
        elif number == 3:
            kind = protobuf.number(value, where)
    model.tokens.append(token)
    model.scores.append(score)
    model.types.append(kind)


def _spec(parts: list[memoryview], where: object) -> dict[int, protobuf.Value]:
    """The fields of a message, of which a later one overrules an earlier one."""
    return {number: value for part in parts for number, value in protobuf.fields(part, where)}


def file_in(folder: Path) -> Path | None:
    """The SentencePiece model of a folder without a tokenizer.json."""
    if (folder / TOKENIZER_FILE).exists():
        return None
    return next((folder / name for name in MODEL_FILES if (folder / name).is_file()), None)


def read(file: Path) -> tuple[Library, Settings, frozenset[str]]:
    """The tokenizer in a SentencePiece model, the settings beside it, and the tokens to which no file gives an id.

    Raises:
        UserError: the file cannot be read as one, or the settings beside it number tokens in another way.
    """
    try:
        if file.stat().st_size > _MOST_BYTES:
            raise UserError("this file is too large for a SentencePiece model", where=file)
        data = file.read_bytes()
    except OSError as error:
        raise UserError("the tokenizer cannot be read", where=file, got=error) from error
    model = parse(data, file)
    settings = Settings.read(file.parent)
    name = str(settings.rest.get("tokenizer_class") or "").removesuffix("Fast")
    if name in _OTHERWISE:
        remedy = "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) of transformers writes tokenizer.json"
        what = "this class of tokenizer gives other ids than the model file beside it"
        raise UserError(what, where=file.parent / CONFIG_FILE, got=name, remedy=remedy)
    _declare(model, settings)
    if name == "T5Tokenizer" and settings.tokens.declared is None:
        _sentinels(model, settings, file.parent / CONFIG_FILE)
    vocabulary = spm.Vocabulary(model.kind, model.tokens, model.scores, model.types, model.spaces)
    library = spm.build(vocabulary, file)
    settings = _with_roles(settings, model, _AFFIXES.get(name))
    invented = complete(library, settings, file.parent / CONFIG_FILE)
    # The flags that other files declare for user-defined pieces are those of a tokenizer that finds them otherwise.
    library.add_tokens([token for token in spm.added(vocabulary) if not token.special])
    return library, settings, invented


def _declare(model: Model, settings: Settings) -> None:
    """Gives pieces the names that tokenizer_config.json declares for their ids, and marks control tokens as such."""
    control = {*settings.named.values(), *(token.content for token in settings.tokens.extra)}
    known = {token: index for index, token in enumerate(model.tokens)}
    for index, token in (settings.tokens.declared or {}).items():
        if index < len(model.tokens) and known.setdefault(token.content, index) == index:
            model.tokens[index] = token.content
            if model.types[index] not in (spm.UNKNOWN, spm.BYTE) and (token.special or token.content in control):
                model.types[index] = spm.CONTROL
            elif model.types[index] == spm.UNUSED:
                model.types[index] = spm.USER_DEFINED
    for name in control & known.keys():
        if model.types[known[name]] in (spm.USER_DEFINED, spm.UNUSED):
            model.types[known[name]] = spm.CONTROL


def _sentinels(model: Model, settings: Settings, where: Path) -> None:
    """T5's sentinels, which follow the pieces from the last to the first (Raffel et al., 2020)."""
    count = settings.rest.get("extra_ids", _SENTINELS)
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= 1 << 16:
        raise UserError("this is no number of tokens", where=f"{where}, extra_ids", got=repr(count))
    names = [f"<extra_id_{index}>" for index in reversed(range(count))]
    if set(names) & set(model.tokens):
        return
    model.tokens += names
    model.scores += [0.0] * count
    model.types += [spm.CONTROL] * count


def _with_roles(settings: Settings, model: Model, affixes: tuple[bool, bool] | None) -> Settings:
    own = {role: model.tokens[index] for role, index in model.roles.items() if index >= 0}
    add_bos, add_eos = affixes or (False, False)
    return replace(
        settings,
        named={**own, **settings.named},
        add_bos=add_bos if settings.add_bos is None else settings.add_bos,
        add_eos=add_eos if settings.add_eos is None else settings.add_eos,
    )
