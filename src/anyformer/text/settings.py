"""What a tokenizer's folder says beside tokenizer.json: named tokens, BOS rule, end-of-sequence ids, chat templates.

The file is tokenizer_config.json, in the keys of Hugging Face (`bos_token` and every other `…_token`,
`added_tokens_decoder`, `extra_special_tokens`, `add_bos_token`, `add_eos_token`, `chat_template`). Read as well, where
they exist: special_tokens_map.json and added_tokens.json, which rule only beside a tokenizer_config.json without
`added_tokens_decoder`; chat_template.jinja and additional_chat_templates/NAME.jinja, which take the place of all
templates in tokenizer_config.json; and the `eos_token_id`, `bos_token_id` and `pad_token_id` of generation_config.json
and config.json.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from tokenizers import AddedToken

from anyformer.errors import UserError
from anyformer.files import storage_errors

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
MAP_FILE = "special_tokens_map.json"
ADDED_FILE = "added_tokens.json"
TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_FOLDER = "additional_chat_templates"
_OTHERS = ("generation_config.json", "config.json")
# In this order tokens that no file numbers are appended to a vocabulary.
_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_EVEN_OF_BPE = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
# Names code of the folder it was read from; that code is not written along.
_NOT_WRITTEN = frozenset({"auto_map"})


@dataclass(frozen=True)
class Tokens:
    """What the files beside tokenizer.json say about added tokens.

    Attributes:
        declared: `added_tokens_decoder`, by id; None where the key is absent, and tokenizer.json speaks for itself.
        older: added_tokens.json, by id; empty where `declared` is given.
        roles: the token of every role, in the order in which tokens that are nowhere yet get their ids.
        extra: further special tokens, after them.
    """

    declared: dict[int, AddedToken] | None = None
    older: dict[int, AddedToken] = field(default_factory=dict)
    roles: tuple[AddedToken, ...] = ()
    extra: tuple[AddedToken, ...] = ()


@dataclass(frozen=True)
class Settings:
    """The rules of one tokenizer that its tokenizer.json does not hold.

    Attributes:
        named: token strings by role: `bos_token`, `eos_token`, `unk_token`, `pad_token` and whatever else ends in
            `_token`.
        add_bos: whether `encode` puts the BOS token first; None follows the post-processor of
            tokenizer.json.
        add_eos: the same for an EOS token at the end.
        more_eos: further ids that end a sequence, from generation_config.json and config.json.
        ids: the ids that the same files give `bos_token` and `pad_token`; they stand in for a role without a name.
        chat_templates: Jinja templates by name; the one in ordinary use is "default".
        tokens: what these files say about added tokens.
        rest: other keys of tokenizer_config.json, written back as they were read.
    """

    named: dict[str, str] = field(default_factory=dict)
    add_bos: bool | None = None
    add_eos: bool | None = None
    more_eos: tuple[int, ...] = ()
    ids: dict[str, int] = field(default_factory=dict)
    chat_templates: dict[str, str] = field(default_factory=dict)
    tokens: Tokens = field(default_factory=Tokens)
    rest: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> "Settings":
        """The settings in `folder`; an absent file says nothing.

        Raises:
            UserError: a file that is not a JSON object, or a key of it whose value cannot be meant.
        """
        config = _object(folder / CONFIG_FILE)
        numbered = "added_tokens_decoder" in config
        where: object = folder / CONFIG_FILE
        if not numbered and (older := _object(folder / MAP_FILE)):
            config = _joined(config, older)
            where = f"{folder / CONFIG_FILE} with {MAP_FILE}"
        roles = _roles(config, where)
        extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or ()
        if isinstance(extra, dict):
            roles |= {role: _added(token, where, role) for role, token in extra.items()}
            extra = ()
        if not isinstance(extra, list | tuple):
            _refuse("these are no special tokens", where, "extra_special_tokens", extra, "a list of tokens")
        extras = tuple(_added(token, where, "extra_special_tokens") for token in extra)
        named = {role: token.content for role, token in roles.items()}
        special = {*named.values(), *(token.content for token in extras)}
        others = {folder / name: _object(folder / name) for name in _OTHERS}
        ends = _ids(config.pop("eos_token_id", None), where)
        ends += [index for path, other in others.items() for index in _ids(other.get("eos_token_id"), path)]
        return cls(
            named=named,
            add_bos=_flag(config, "add_bos_token", where),
            add_eos=_flag(config, "add_eos_token", where),
            more_eos=tuple(dict.fromkeys(ends)),
            ids=_standing_in([config, *others.values()]),
            chat_templates=_templates(folder, config.pop("chat_template", None)),
            tokens=Tokens(
                declared=_declared(config["added_tokens_decoder"], where) if numbered else None,
                older={} if numbered else _older(_object(folder / ADDED_FILE), folder / ADDED_FILE, special),
                roles=tuple(roles[role] for role in sorted(roles, key=_rank)),
                extra=extras,
            ),
            rest=config,
        )

    def tidies(self, of_bpe: bool) -> bool:
        """Whether decoded text is rid of spaces before punctuation."""
        wanted = self.rest.get("clean_up_tokenization_spaces") is True
        return wanted and (not of_bpe or self.rest.get(_EVEN_OF_BPE) is True)

    def text(self) -> str:
        """The content of tokenizer_config.json."""
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **self.rest}
        config = {key: value for key, value in config.items() if key not in _NOT_WRITTEN}
        config.update(self.named)
        if self.add_bos is not None:
            config["add_bos_token"] = self.add_bos
        if self.add_eos is not None:
            config["add_eos_token"] = self.add_eos
        if self.more_eos:
            config["eos_token_id"] = list(self.more_eos)
        config.update({f"{role}_id": index for role, index in self.ids.items()})
        if set(self.chat_templates) == {"default"}:
            config["chat_template"] = self.chat_templates["default"]
        elif self.chat_templates:
            config["chat_template"] = [
                {"name": name, "template": template} for name, template in self.chat_templates.items()
            ]
        return json.dumps(config, indent=2, ensure_ascii=False) + "\n"


def overruling(folder: Path) -> list[Path]:
    """The files in `folder` that take precedence over what tokenizer_config.json says."""
    templates = sorted((folder / TEMPLATE_FOLDER).glob("*.jinja"))
    return [
        path for path in (folder / MAP_FILE, folder / ADDED_FILE, folder / TEMPLATE_FILE, *templates) if path.is_file()
    ]


def clear_overruling(folder: Path) -> None:
    """Removes those files. Raises `UserError` where that is not allowed."""
    for path in overruling(folder):
        with storage_errors(path):
            path.unlink()


def is_there(path: Path) -> bool:
    """Whether there is such a file. Raises `UserError` for a folder of its name, or a link that leads nowhere."""
    if path.is_file():
        return True
    if path.exists() or path.is_symlink():
        got = "a folder" if path.is_dir() else "a link that leads nowhere" if path.is_symlink() else "no file"
        raise UserError("there should be a file of this name, or nothing", where=path, got=got)
    return False


def _object(path: Path) -> dict[str, Any]:
    if not is_there(path):
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        # Half a character, escaped, passes for JSON and could not be written back.
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except (OSError, ValueError, RecursionError) as error:
        raise UserError("this file cannot be read as JSON", where=path, got=error) from error
    if not isinstance(value, dict):
        raise UserError("this file does not hold a JSON object", where=path, got=type(value).__name__)
    return value


def _refuse(what: str, where: object, key: str, got: object, expected: str) -> NoReturn:
    raise UserError(what, where=f"{where}, {key}", got=repr(got), expected=expected)


def _joined(config: dict[str, Any], older: dict[str, Any]) -> dict[str, Any]:
    """The keys of tokenizer_config.json, overruled by those of special_tokens_map.json but for lists of tokens."""
    lists = ("extra_special_tokens", "additional_special_tokens")
    kept = {key: config[key] for key in lists if config.get(key)}
    return {**config, **{key: value for key, value in older.items() if key not in lists or not kept}}


def _rank(role: str) -> int:
    return _ROLES.index(role) if role in _ROLES else len(_ROLES)


def _roles(config: dict[str, Any], where: object) -> dict[str, AddedToken]:
    """Takes the token of every role out of `config`; a role that is null stays there, to be written back so."""
    roles: dict[str, AddedToken] = {}
    for key in [key for key in config if key.endswith("_token") and not key.startswith("add_")]:
        own = isinstance(config[key], str) or (isinstance(config[key], dict) and "content" in config[key])
        if own or (key in _ROLES and config[key] is not None):
            roles[key] = _added(config.pop(key), where, key)
    if len(roles["unk_token"].content if "unk_token" in roles else "") == 1:
        # A tokenizer of characters writes what it does not know as one of them, which is no control token for that.
        del roles["unk_token"]
    return roles


def _added(token: object, where: object, key: str) -> AddedToken:
    """An added token from its string, or from its string with flags."""
    flags: dict[str, Any] = {"special": True, "normalized": False}
    if isinstance(token, dict):
        flags |= {flag: token[flag] for flag in _FLAGS if isinstance(token.get(flag), bool)}
        token = token.get("content")
    if not isinstance(token, str):
        _refuse("this is not a token", where, key, token, 'text, or an object with a "content"')
    return AddedToken(token, **flags)


def _declared(value: object, where: object) -> dict[int, AddedToken]:
    """`added_tokens_decoder`: ids, written as text, with their tokens."""
    key = "added_tokens_decoder"
    if not isinstance(value, dict):
        _refuse("this is no table of tokens", where, key, value, "an object of ids with their tokens")
    found: dict[int, AddedToken] = {}
    for index, token in value.items():
        if not isinstance(token, dict) or not (index.isascii() and index.isdecimal() and len(index) < 10):
            _refuse("this is no token with its id", where, f"{key}.{index}", token, 'an id and {"content": …}')
        found[int(index)] = _added({"special": False, "normalized": True, **token}, where, f"{key}.{index}")
    return found


def _older(value: dict[str, Any], where: object, special: set[str]) -> dict[int, AddedToken]:
    """added_tokens.json: tokens with their ids, and no flags."""
    found: dict[int, AddedToken] = {}
    for token, index in value.items():
        if isinstance(index, bool) or not isinstance(index, int):
            _refuse("this is no id of a token", where, token, index, "a whole number")
        found[index] = AddedToken(token, special=token in special, normalized=token not in special)
    return found


def _flag(config: dict[str, Any], key: str, where: object) -> bool | None:
    value = config.pop(key, None)
    if value is not None and not isinstance(value, bool):
        _refuse("this is either true or false", where, key, value, "true | false | null")
    return value


def _ids(value: object, where: object) -> list[int]:
    """The ids that end a sequence: one, several or none; a negative one stands for none."""
    values = value if isinstance(value, list) else [value]
    for index in values:
        if index is not None and (isinstance(index, bool) or not isinstance(index, int)):
            _refuse("this is no id of a token", where, "eos_token_id", value, "a whole number, or a list of them")
    return [index for index in values if isinstance(index, int) and index >= 0]


def _standing_in(files: list[dict[str, Any]]) -> dict[str, int]:
    """The ids that the files give roles which may have no name, the first file that does so ruling."""
    found: dict[str, int] = {}
    for role in ("bos_token", "pad_token"):
        given = [file.pop(f"{role}_id", None) for file in files]
        ids = [index for index in given if isinstance(index, int) and not isinstance(index, bool) and index >= 0]
        if ids:
            found[role] = ids[0]
    return found


def _templates(folder: Path, value: object) -> dict[str, str]:
    found = {name: _read_template(path) for name, path in _template_files(folder).items()}
    if found:
        return found
    where = folder / CONFIG_FILE
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list) and all(isinstance(entry, dict) for entry in value):
        value = {entry.get("name"): entry.get("template") for entry in value}
    if not isinstance(value, dict):
        _refuse("a chat template is text", where, "chat_template", value, "text, or a list of named templates")
    for name, template in value.items():
        if not isinstance(name, str) or not isinstance(template, str):
            _refuse(
                "a chat template is text with a name",
                where,
                "chat_template",
                {name: template},
                '{"name": …, "template": …}',
            )
    return dict(value)


def _template_files(folder: Path) -> dict[str, Path]:
    found: dict[str, Path] = {}
    if is_there(folder / TEMPLATE_FILE):
        found["default"] = folder / TEMPLATE_FILE
    if (folder / TEMPLATE_FOLDER).is_dir():
        found |= {path.stem: path for path in sorted((folder / TEMPLATE_FOLDER).glob("*.jinja")) if is_there(path)}
    return found


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError("the chat template cannot be read", where=path, got=error) from error
