"""What a tokenizer's folder says beside tokenizer.json: BOS rule, end-of-sequence ids, chat template.

The file is tokenizer_config.json, in the keys of Hugging Face (`bos_token`, `eos_token`, `unk_token`,
`add_bos_token`, `add_eos_token`, `chat_template`). Read as well, where they exist: special_tokens_map.json,
chat_template.jinja, and the `eos_token_id` of generation_config.json and config.json.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anyformer.errors import UserError

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token")


@dataclass(frozen=True)
class Settings:
    """The rules of one tokenizer that its tokenizer.json does not hold.

    Attributes:
        named: token strings by role, among `bos_token`, `eos_token`, `unk_token`, `pad_token`.
        add_bos: whether `encode` puts the BOS token first; None follows the post-processor of
            tokenizer.json.
        add_eos: the same for an EOS token at the end.
        more_eos: further ids that end a sequence, from generation_config.json and config.json.
        chat_templates: Jinja templates by name; the one in ordinary use is "default".
        rest: other keys of tokenizer_config.json, written back as they were read.
    """

    named: dict[str, str] = field(default_factory=dict)
    add_bos: bool | None = None
    add_eos: bool | None = None
    more_eos: tuple[int, ...] = ()
    chat_templates: dict[str, str] = field(default_factory=dict)
    rest: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> "Settings":
        """The settings in `folder`; an absent file says nothing. `UserError` for one that is not a JSON object."""
        config = {**_object(folder / "special_tokens_map.json"), **_object(folder / CONFIG_FILE)}
        named = {role: token for role in _NAMED if (token := _content(config.pop(role, None))) is not None}
        add_bos, add_eos = config.pop("add_bos_token", None), config.pop("add_eos_token", None)
        own = config.pop("eos_token_id", None)
        more = [own, *(_object(folder / name).get("eos_token_id") for name in _OTHERS)]
        return cls(
            named=named,
            add_bos=add_bos if isinstance(add_bos, bool) else None,
            add_eos=add_eos if isinstance(add_eos, bool) else None,
            more_eos=tuple(dict.fromkeys(index for value in more for index in _ids(value))),
            chat_templates=_templates(folder, config.pop("chat_template", None)),
            rest=config,
        )

    def text(self) -> str:
        """The content of tokenizer_config.json."""
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **self.rest}
        config.update({role: self.named[role] for role in _NAMED if role in self.named})
        if self.add_bos is not None:
            config["add_bos_token"] = self.add_bos
        if self.add_eos is not None:
            config["add_eos_token"] = self.add_eos
        if self.more_eos:
            config["eos_token_id"] = list(self.more_eos)
        if set(self.chat_templates) == {"default"}:
            config["chat_template"] = self.chat_templates["default"]
        elif self.chat_templates:
            config["chat_template"] = [
                {"name": name, "template": template} for name, template in self.chat_templates.items()
            ]
        return json.dumps(config, indent=2, ensure_ascii=False) + "\n"


_OTHERS = ("generation_config.json", "config.json")


def _is_there(path: Path) -> bool:
    """Whether there is such a file. Raises `UserError` for a folder of its name, or a link that leads nowhere."""
    if path.is_file():
        return True
    if path.exists() or path.is_symlink():
        got = "a folder" if path.is_dir() else "a link that leads nowhere" if path.is_symlink() else "no file"
        raise UserError("there should be a file of this name, or nothing", where=path, got=got)
    return False


def _object(path: Path) -> dict[str, Any]:
    if not _is_there(path):
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError("this file cannot be read as JSON", where=path, got=error) from error
    if not isinstance(value, dict):
        raise UserError("this file does not hold a JSON object", where=path, got=type(value).__name__)
    return value


def _content(token: object) -> str | None:
    """A token's string, written plainly or as an added token with flags."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _ids(value: object) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [index for index in values if isinstance(index, int) and not isinstance(index, bool) and index >= 0]


def _templates(folder: Path, value: object) -> dict[str, str]:
    found: dict[str, str] = {}
    if isinstance(value, str):
        found["default"] = value
    elif isinstance(value, list):
        for entry in value:
            if isinstance(entry, dict) and isinstance(entry.get("template"), str):
                found[str(entry.get("name", "default"))] = entry["template"]
    path = folder / "chat_template.jinja"
    if _is_there(path):
        try:
            found["default"] = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise UserError("the chat template cannot be read", where=path, got=error) from error
    return found
