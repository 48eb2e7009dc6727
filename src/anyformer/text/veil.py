"""Text stays text: encoders in which no spelling of a control token can become one.

Three views of one tokenizer. The plain view matches control tokens in text; the text view never does, not
even where the model's own vocabulary holds them as pieces (as Unigram vocabularies do). The marked view is
the text view with one private alias for every control token, so that text and control tokens can be encoded
in a single pass, with the flags (stripping of neighbouring space) that each control token has.
"""

import json
from collections.abc import Iterable, Iterator
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Library
from tokenizers.models import BPE


def private_characters(texts: Iterable[str]) -> Iterator[str]:
    """Characters from the last private-use plane, none of which occurs in `texts`, as itself or as a JSON escape."""
    material = "\n".join(texts)
    lowered = material.lower()
    for code in range(0x10FFFD, 0x100000, -1):
        character = chr(code)
        if character not in material and json.dumps(character)[1:-1] not in lowered:
            yield character


class Veil:
    """The text view and the marked view of `library`, built when first needed."""

    def __init__(self, library: Library, control: dict[int, str]) -> None:
        self._library, self._control = library, control
        self._views: dict[str, Library] = {}
        self._marked: dict[str, tuple[Library, dict[int, int]]] = {}
        self._reachable: bool | None = None

    def text(self, texts: Iterable[str]) -> Library:
        """An encoder in which `texts` hold no control token."""
        private = ""
        if self._in_model():
            private = next(private_characters(texts))
        if private not in self._views:
            _make_room(self._views)
            self._views[private] = self._text_view(private)
        return self._views[private]

    def marked(self, mark: str) -> tuple[Library, dict[int, int]]:
        """An encoder that reads `alias(mark, id)` as a control token, and the map from its private ids to
        true ids.

        `mark` is a character that the text to be encoded does not hold.
        """
        if mark not in self._marked:
            _make_room(self._marked)
            library = self._text_view(mark if self._in_model() else "")
            flags = self._library.get_added_tokens_decoder()
            library.add_tokens(
                [
                    AddedToken(
                        alias(mark, index),
                        lstrip=flags[index].lstrip,
                        rstrip=flags[index].rstrip,
                        # Whatever its own flag says: behind a normaliser that begins every text with ▁ the library
                        # would find such a token at the very start alone.
                        normalized=False,
                        special=False,
                    )
                    for index in self._control
                ]
            )
            back: dict[int, int] = {}
            for index in self._control:
                private = library.token_to_id(alias(mark, index))
                assert private is not None
                back[private] = index
            self._marked[mark] = (library, back)
        return self._marked[mark]

    def _in_model(self) -> bool:
        """Whether the model's own vocabulary spells a control token, so that text could reach it."""
        if self._reachable is None:
            model = self._library.model
            # Such a BPE makes tokens of several characters by merging alone, and what merges make is not hidden anyway.
            single = isinstance(model, BPE) and not (
                model.ignore_merges
                or model.byte_fallback
                or model.continuing_subword_prefix
                or model.end_of_word_suffix
            )
            tokens = [token for token in self._control.values() if not single or len(token) == 1]
            ordinary = self._library.get_vocab(with_added_tokens=False) if tokens else {}
            self._reachable = any(token in ordinary for token in tokens)
        return self._reachable

    def _text_view(self, private: str) -> Library:
        if private:
            state = json.loads(self._library.to_str())
            library = Library.from_str(json.dumps(_rename(state, private, set(self._control.values()))))
        else:
            library = _twin(self._library)
        library.encode_special_tokens = True
        return library


def _twin(library: Library) -> Library:
    """A tokenizer of its own with the parts of `library`: writing and reading a large one would take a second."""
    twin = Library(library.model)
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        if getattr(library, part) is not None:
            setattr(twin, part, getattr(library, part))
    added = library.get_added_tokens_decoder()
    twin.add_tokens([added[index] for index in sorted(added)])
    if twin.get_added_tokens_decoder().keys() != added.keys():
        return Library.from_str(library.to_str())
    return twin


def _make_room(views: dict[str, Any], most: int = 4) -> None:
    """Drops the oldest view, so that texts made of private characters cannot fill the memory with views."""
    while len(views) >= most:
        del views[next(iter(views))]


def alias(mark: str, index: int) -> str:
    """The private spelling of control token `index`."""
    return f"{mark}{index}{mark}"


def _rename(state: dict[str, Any], private: str, control: set[str]) -> dict[str, Any]:
    """The tokenizer with `private` put before every control token in vocabulary and added tokens; ids are unchanged."""
    model = state["model"]
    made = {"".join(merge.split(" ", 1) if isinstance(merge, str) else merge) for merge in model.get("merges", ())}
    control = control - made

    def name(token: str) -> str:
        return private + token if token in control else token

    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {name(token): index for token, index in vocab.items()}
    else:
        model["vocab"] = [[name(token), score] for token, score in vocab]
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = name(model["unk_token"])
    for entry in state["added_tokens"]:
        entry["content"] = name(entry["content"])
    return state
