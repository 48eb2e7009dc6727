"""Conversations for chat templates, given as Hugging Face gives them, with the text of messages kept apart from
control tokens.

A template is a Jinja program that writes a conversation as one string, control tokens spelled out. Read
back naively, a user's text that spells a control token would become one. Here every such spelling in the
messages is broken by a private character before the template runs; what is still whole afterwards was
written by the template.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from anyformer.errors import UserError
from anyformer.text.veil import private_characters

# Values under these keys choose branches of a template; they are never shown as text of their own.
_STRUCTURE = frozenset({"role", "type"})
# What a model thought before it answered goes by these names; templates know the first, some the second.
_REASONING = ("reasoning_content", "thinking", "reasoning")


class Disguise:
    """Breaks the spellings of control tokens in texts, and mends them in what was rendered.

    Args:
        control: the spellings of all control tokens.
        material: everything that will be rendered, so that the private characters can be chosen apart from
            it.

    Attributes:
        mark: a character that occurs nowhere in `material`.
    """

    def __init__(self, control: Iterable[str], material: object) -> None:
        self._control = sorted(control, key=len, reverse=True)
        fresh = private_characters(strings(material))
        self.mark = next(fresh)
        # A control token of one character cannot be broken, so it has a stand-in of its own.
        self._stand_ins = {token: next(fresh) for token in self._control if len(token) == 1}
        whole = "|".join(re.escape(token) for token in self._control)
        self._whole = re.compile(whole or r"(?!)")
        self._starts = re.compile(f"(?=(?:{whole or '(?!)'}))(.)", re.DOTALL)
        self._heads = {token[:end] for token in self._control for end in range(1, len(token))}
        self._tails = {token[start:] for token in self._control for start in range(1, len(token))}

    def hide(self, value: Any, structure: bool = False) -> Any:
        """`value` (strings, mappings and sequences of them) with no spelling of a control token left whole.

        The result is plain data. What is none, such as an image, is replaced by a name for its type: a template may
        ask whether it is there, and has no use of its methods.
        """
        if isinstance(value, str):
            return self._hide_text(str.__str__(value), structure)
        if isinstance(value, Mapping):
            return {self.hide(key, True): self.hide(item, key in _STRUCTURE) for key, item in value.items()}
        if isinstance(value, list):
            return [self.hide(item, structure) for item in value]
        if isinstance(value, tuple):
            return tuple(self.hide(item, structure) for item in value)
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int):
            return int.__int__(value)
        if isinstance(value, float):
            return float.__float__(value)
        return value.item() if isinstance(value, np.generic) else f"<{type(value).__name__}>"

    def _hide_text(self, text: str, structure: bool) -> str:
        for token, stand_in in self._stand_ins.items():
            text = text.replace(token, stand_in)
        text = self._starts.sub(lambda found: found.group(1) + self.mark, text)
        if not structure and text:
            # Half a spelling at the edge of a text could be completed by its neighbour.
            reach = len(self._control[0]) if self._control else 0
            if any(text[-size:] in self._heads for size in range(1, reach)):
                text += self.mark
            if any(text[:size] in self._tails for size in range(1, reach)):
                text = self.mark + text
        return text

    def lift(self, text: str, spelled: Mapping[str, str] | None = None) -> str:
        """The rendered `text` mended, with each control token that the template wrote replaced as `spelled` says."""
        if spelled is None:
            return self._mend(text)
        parts, end = [], 0
        for found in self._whole.finditer(text):
            parts += [self._mend(text[end : found.start()]), spelled[found.group()]]
            end = found.end()
        return "".join([*parts, self._mend(text[end:])])

    def _mend(self, text: str) -> str:
        for private in (self.mark, *self._stand_ins.values()):
            meant = next((token for token, stand_in in self._stand_ins.items() if stand_in == private), "")
            text = text.replace(private, meant).replace(json.dumps(private)[1:-1], meant)
        return text


def strings(value: object) -> Iterator[str]:
    """Every string inside `value`, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from strings(key)
            yield from strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from strings(item)


def given_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages as templates expect them: without keys that hold None, reasoning under every name it goes by."""
    given = []
    for message in messages:
        kept = {key: value for key, value in message.items() if value is not None}
        reasoning = next((kept[name] for name in _REASONING if name in kept), None)
        if reasoning is not None:
            kept = {"thinking": reasoning, **kept, "reasoning_content": reasoning}
        given.append(kept)
    return given


def check_messages(messages: object) -> None:
    """`UserError` unless `messages` is a non-empty sequence of mappings with a role and a content."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        _refuse("messages must be a list", "messages", type(messages).__name__)
    if not messages:
        _refuse("there is no message", "messages", "[]")
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            _refuse("a message must be a mapping", where, type(message).__name__)
        role = message.get("role")
        if not isinstance(role, str) or not role:
            _refuse("a message needs a role", f"{where}.role", repr(role), 'text such as "user"')
        _check_content(message, where)


def _check_content(message: Mapping[str, Any], where: str) -> None:
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return
    if isinstance(content, str):
        return
    if not isinstance(content, list | tuple) or not content:
        _refuse("a message needs a content", f"{where}.content", repr(content), "text, or a list of parts")
    for index, part in enumerate(content):
        if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
            _refuse("a part of a message needs a type", f"{where}.content[{index}]", repr(part))


def check_tools(tools: object) -> None:
    """`UserError` unless `tools` is None or a sequence of mappings."""
    if tools is None:
        return
    form = '[{"type": "function", "function": {"name": …, "parameters": {…}}}, …]'
    if isinstance(tools, str | bytes) or not isinstance(tools, Sequence):
        _refuse("tools must be a list", "tools", type(tools).__name__, form)
    for index, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            _refuse("a tool must be described by a mapping", f"tools[{index}]", type(tool).__name__, form)


def _refuse(what: str, where: str, got: str, expected: str | None = None) -> NoReturn:
    form = '[{"role": "user", "content": "Hello"}, …]'
    raise UserError(what, where=where, got=got, expected=expected or form)
