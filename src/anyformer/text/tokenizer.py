"""The tokenizer: text to ids and back, over the `tokenizers` library, with the rules that a model was trained with.

Rules:

* **Text stays text.** `encode` never turns the spelling of a control token into that token; `encode(control=True)` is
  the opt-in. Control tokens are the added tokens that the tokenizer's file marks as special.
* **BOS by the model's own rule.** `add_bos_token` of tokenizer_config.json decides; where it is absent, the
  post-processor of tokenizer.json does. With `control=True`, text that already begins with the BOS token gets no
  second.
* **Every end counts.** `eos_ids` joins the tokenizer's EOS token with the ids that generation_config.json and
  config.json name.
* **The file decides.** Text is split as tokenizer.json says, whatever `tokenizer_class` stands beside it. Tokens that
  tokenizer_config.json declares or names come in as in `text.added`.
* **Spaces stay as decoded**, unless tokenizer_config.json asks for `clean_up_tokenization_spaces`. As in Hugging Face,
  that has no effect on a BPE, whose spaces are the text's own.
"""

import hashlib
import json
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, SupportsIndex

from tokenizers import Tokenizer as Library
from tokenizers.models import BPE

from anyformer.errors import UserError
from anyformer.files import write_text
from anyformer.text import chat
from anyformer.text.added import complete
from anyformer.text.affixes import read_affixes, with_affixes
from anyformer.text.pieces import Pieces
from anyformer.text.refusals import clear, require_text
from anyformer.text.settings import CONFIG_FILE, TOKENIZER_FILE, Settings, clear_overruling
from anyformer.text.stream import TextStream
from anyformer.text.tidy import tidy
from anyformer.text.trained import DEFAULT_CONTROL, END_OF_TEXT, train_library
from anyformer.text.veil import Veil, alias


class Tokenizer:
    """Text to token ids and back.

    Args:
        library: the tokenizer as the `tokenizers` library holds it. Truncation and padding are switched
            off.
        settings: what its folder says beside it.

    Attributes:
        vocab_size: the number of ids, one more than the largest; a model may have more rows, which no text
            reaches.
        control_ids: the ids of control tokens.
        bos_id, eos_id, unk_id, pad_id: the id of each role, None where there is none.
        eos_ids: every id that ends a sequence, `eos_id` first.
    """

    def __init__(self, library: Library, settings: Settings | None = None) -> None:
        library.no_truncation()
        library.no_padding()
        self._library = library
        self._settings = settings or Settings()
        self._pieces = Pieces(library)
        self.vocab_size = self._pieces.size
        if not self.vocab_size:
            raise UserError("this tokenizer has an empty vocabulary")
        self._tidies = self._settings.tidies(of_bpe=isinstance(library.model, BPE))
        added = library.get_added_tokens_decoder()
        self._control = {index: entry.content for index, entry in added.items() if entry.special}
        self.control_ids = frozenset(self._control)
        self._veil = Veil(library, self._control)
        self.prefix, self.suffix = self._affixes()

    @classmethod
    def train(
        cls,
        kind: str,
        texts: Iterable[str],
        vocab_size: int | None = None,
        *,
        control_tokens: Sequence[str] | None = None,
        eos_token: str | None = None,
        bos_token: str | None = None,
        chat_template: str | None = None,
    ) -> "Tokenizer":
        """A new tokenizer of `kind` "byte" (each id below 256 is that byte), "char" or "bpe" (byte-level
        BPE).

        Args:
            kind: byte and char take their size from the text; bpe takes `vocab_size`, 4096 by default, as
                the most it may have, control tokens included.
            texts: what to learn from; the same texts in the same order give the same tokenizer.
            vocab_size: for bpe alone.
            control_tokens: appended after the ordinary tokens; by default `<|endoftext|>` for byte and bpe,
                none for char, whose vocabulary is then exactly the characters of the text.
            eos_token: the control token that ends a document; by default `<|endoftext|>` where that is one
                of them.
            bos_token: a control token that `encode` puts first; none by default.
            chat_template: a Jinja template for `apply_chat`.
        """
        if isinstance(texts, str):
            texts = [texts]
        control = tuple(DEFAULT_CONTROL.get(kind, ()) if control_tokens is None else control_tokens)
        library = train_library(kind, texts, vocab_size, control)
        if eos_token is None and END_OF_TEXT in control:
            eos_token = END_OF_TEXT
        named = {"eos_token": eos_token, "bos_token": bos_token}
        for role, token in named.items():
            if token is not None and token not in control:
                raise UserError(f"the {role} is not a control token", where=role, got=token, expected=control)
        settings = Settings(
            named={role: token for role, token in named.items() if token is not None},
            add_bos=bos_token is not None,
            chat_templates={} if chat_template is None else {"default": chat_template},
        )
        return cls(library, settings)

    @classmethod
    def load(cls, path: str | Path, *, pre: str | None = None) -> "Tokenizer":
        """The tokenizer in a folder that holds tokenizer.json, or of that file itself, with the settings beside it.

        Where a folder has none, its SentencePiece model is read (`text.sentencepiece`), which may also be given itself.
        The file may also be a vocabulary of tiktoken (`text.tiktoken`); unless its name tells how it cuts text, `pre`
        does, as in `tokenizer.ggml.pre` of GGUF ("llama-bpe" for Llama 3).
        """
        from anyformer.text import sentencepiece, tiktoken

        path = Path(path)
        file = sentencepiece.file_in(path) or path / TOKENIZER_FILE if path.is_dir() else path
        if not file.is_file():
            raise UserError(
                "there is no tokenizer here",
                where=file,
                expected=f"a folder with {TOKENIZER_FILE}, or such a file",
                remedy="save the tokenizer in the format of the tokenizers library",
            )
        if pre is not None or tiktoken.is_vocabulary(file):
            return cls._of_tiktoken(file, pre)
        if file.suffix in sentencepiece.SUFFIXES:
            return cls._of_sentencepiece(file)
        with clear("this is not a whole tokenizer file", where=file):
            data = file.read_bytes()
            library = Library.from_buffer(data)
            added = json.loads(data).get("added_tokens") or ()
        for entry in added:
            # The library numbers added tokens one after another, whatever their file says.
            if library.token_to_id(entry["content"]) != entry["id"]:
                raise UserError(
                    "the ids of the added tokens do not follow one another",
                    where=file,
                    got=f"{entry['content']!r} with id {entry['id']}",
                    expected=f"id {library.token_to_id(entry['content'])}",
                    remedy="give the tokens in between a name too",
                )
        settings = Settings.read(file.parent)
        invented = complete(library, settings, file.parent / CONFIG_FILE)
        try:
            with clear("this tokenizer cannot be used", where=None):
                tokenizer = cls(library, settings)
        except UserError as error:
            where = ", ".join(str(part) for part in (file, error.where) if part is not None)
            raise UserError(error.what, where=where, got=error.got, expected=error.expected) from error
        tokenizer._require_real_ends(invented, file.parent / CONFIG_FILE)
        return tokenizer

    @classmethod
    def _of_sentencepiece(cls, file: Path) -> "Tokenizer":
        from anyformer.text import sentencepiece

        with clear("this SentencePiece model cannot be used", where=file):
            library, settings, invented = sentencepiece.read(file)
            tokenizer = cls(library, settings)
        tokenizer._require_real_ends(invented, file.parent / CONFIG_FILE)
        return tokenizer

    @classmethod
    def _of_tiktoken(cls, file: Path, pre: str | None) -> "Tokenizer":
        from anyformer.text import tiktoken

        library, end = tiktoken.library_of(file, pre)
        settings = Settings.read(file.parent)
        complete(library, settings, file.parent / CONFIG_FILE)
        if end is not None and "eos_token" not in settings.named:
            settings = replace(settings, named={**settings.named, "eos_token": end})
        return cls(library, settings)

    def _require_real_ends(self, invented: frozenset[str], where: Path) -> None:
        """`UserError` when text would begin or end with a token that only a name in the settings made up."""
        for index in (*self.prefix, *self.suffix):
            if self.token(index) in invented:
                raise UserError(
                    "the token that begins or ends every text is not in the vocabulary",
                    where=where,
                    got=repr(self.token(index)),
                    remedy=f"add it to the added_tokens of {TOKENIZER_FILE}, or name another",
                )

    def save(self, folder: str | Path) -> None:
        """Writes tokenizer.json and tokenizer_config.json into `folder`, each whole or not at all.

        The files say what `encode` does to any reader of such files: the BOS rule stands in the post-processor. Files
        of another tokenizer that would overrule them (`settings.overruling`) are removed.
        """
        folder = Path(folder)
        library = with_affixes(self._library, self.prefix, self.suffix)
        write_text(folder / TOKENIZER_FILE, library.to_str(pretty=True))
        write_text(folder / CONFIG_FILE, self._settings.text())
        clear_overruling(folder)

    @property
    def library(self) -> Library:
        """The tokenizer as the `tokenizers` library holds it; not to be changed."""
        return self._library

    @property
    def settings(self) -> Settings:
        """What its folder says beside it."""
        return self._settings

    @property
    def bos_id(self) -> int | None:
        """The id of the beginning-of-sequence token."""
        return self._named("bos_token")

    @property
    def eos_id(self) -> int | None:
        """The id of the tokenizer's own end-of-sequence token: what ends a document in a corpus."""
        return self._named("eos_token")

    @property
    def unk_id(self) -> int | None:
        """The id that stands for what the vocabulary cannot write."""
        own = getattr(self._library.model, "unk_token", None)
        known = None if own is None else self._library.token_to_id(own)
        return self._named("unk_token") if known is None else int(known)

    @property
    def pad_id(self) -> int | None:
        """The id of the padding token."""
        return self._named("pad_token")

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Every id that ends a sequence."""
        own = () if self.eos_id is None else (self.eos_id,)
        return tuple(dict.fromkeys((*own, *self._settings.more_eos)))

    @property
    def chat_template(self) -> str | None:
        """The Jinja template in ordinary use, None for a tokenizer without one."""
        named = self._settings.chat_templates
        return named.get("default", next(iter(named.values())) if len(named) == 1 else None)

    @property
    def vocabulary_hash(self) -> str:
        """SHA-256 of every token with its id, in hexadecimal: equal for tokenizers whose ids mean the same."""
        tokens = ((index, self.token(index)) for index in range(self.vocab_size))
        lines = (f"{index}\t{token}\n" for index, token in tokens if token is not None)
        return hashlib.sha256("".join(lines).encode("utf-8")).hexdigest()

    @property
    def holes(self) -> tuple[int, ...]:
        """The ids below `vocab_size` that the vocabulary leaves out, ascending."""
        return self._pieces.holes

    def token(self, index: int) -> str | None:
        """How the vocabulary writes token `index`; None for an id that the vocabulary leaves out."""
        return self._pieces.token(index)

    def token_id(self, token: str) -> int | None:
        """The id of the token that the vocabulary writes as `token`."""
        return self._library.token_to_id(token)

    def token_bytes(self, index: int, *, first: bool = False) -> bytes:
        """The bytes that token `index` adds to a text, as its first token or a later one; none for control tokens."""
        index = self._check(index)
        if index in self.control_ids:
            return b""
        return self._pieces.opening(index) if first else self._pieces.of(index, False)

    def _named(self, role: str) -> int | None:
        token = self._settings.named.get(role)
        if token:
            index: int | None = self._library.token_to_id(token)
            if index is None:
                raise UserError(
                    f"the {role} is not in the vocabulary",
                    where=CONFIG_FILE,
                    got=repr(token),
                    remedy=f"add it to the added_tokens of {TOKENIZER_FILE}, or name another",
                )
            return index
        if role == "bos_token" and self._written_bos is not None:
            return self._written_bos
        given = self._settings.more_eos if role == "eos_token" else (self._settings.ids.get(role),)
        # These files may count ids that are ordinary text here, as the defaults of a model's configuration do.
        return next((index for index in given if index in self.control_ids), None)

    def _affixes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What `encode` puts before and after a text: the post-processor's tokens, as the settings amend them."""
        prefix, suffix = read_affixes(self._library)
        self._written_bos = prefix[0] if prefix else None
        bos, eos = self.bos_id, self.eos_id
        if bos is not None and self._settings.add_bos is not None:
            prefix = tuple(index for index in prefix if index != bos)
            prefix = (bos, *prefix) if self._settings.add_bos else prefix
        if eos is not None and self._settings.add_eos is not None:
            suffix = tuple(index for index in suffix if index != eos)
            suffix = (*suffix, eos) if self._settings.add_eos else suffix
        for index in (*prefix, *suffix):
            if self.token(index) is None:
                what = "the post-processor puts an id around every text that stands for no token"
                raise UserError(what, where="post_processor", got=index, expected=f"0 to {self.vocab_size - 1}")
        return prefix, suffix

    def encode(self, text: str, *, control: bool = False, bare: bool = False) -> list[int]:
        """The ids of `text`.

        Args:
            text: any text. What the vocabulary cannot write becomes the unknown token.
            control: read the spelling of a control token as that token. For prompts that you write, not for
                text that comes from others.
            bare: the ids of the text alone, without BOS and whatever else the model's rule puts around a
                text.
        """
        require_text(text)
        with clear("the tokenizer cannot encode this text", where="text"):
            library = self._library if control else self._veil.text((text,))
            ids: list[int] = library.encode(text, add_special_tokens=False).ids
        return ids if bare else self._around(ids)

    def encode_batch(self, texts: Sequence[str], *, bare: bool = False, parallel: bool = True) -> list[list[int]]:
        """The ids of each text, as `encode` gives them.

        Args:
            texts: any number of texts.
            bare: as in `encode`.
            parallel: on all cores, unless the user's TOKENIZERS_PARALLELISM forbids it; the environment is
                only read.
        """
        for text in texts:
            require_text(text)
        with clear("the tokenizer cannot encode this text", where="texts"):
            library = self._veil.text(texts)
            if parallel:
                found = [each.ids for each in library.encode_batch_fast(list(texts), add_special_tokens=False)]
            else:
                found = [library.encode(text, add_special_tokens=False).ids for text in texts]
        return found if bare else [self._around(ids) for ids in found]

    def _around(self, ids: list[int]) -> list[int]:
        bos = self.prefix[:1]
        prefix = self.prefix[1:] if bos and tuple(ids[:1]) == bos else self.prefix
        eos = self.suffix[-1:]
        suffix = self.suffix[:-1] if eos and tuple(ids[-1:]) == eos else self.suffix
        return [*prefix, *ids, *suffix]

    def decode(self, ids: Iterable[SupportsIndex], *, skip_control: bool = True) -> str:
        """The text of `ids`, always valid Unicode; control tokens are left out unless `skip_control` is
        False.

        Bytes that are not UTF-8 become U+FFFD, one for each maximal invalid part, also where the tokenizer
        falls back to bytes. `UserError` for an id outside the vocabulary.
        """
        checked = [self._check(index) for index in ids]
        if skip_control and self.control_ids:
            checked = [index for index in checked if index not in self.control_ids]
        text = self._pieces.join(checked) if self._pieces.additive else self._whole(checked)
        return tidy(text) if self._tidies else text

    def spells(self, ids: Sequence[int], text: str, *, first: bool = True) -> bool:
        """Whether `ids`, as `encode` gives them for a text alone, decode to exactly `text`.

        `first` is False for what comes later in a longer text.
        """
        if not self._pieces.additive:
            spelled = self._whole(list(ids))
        else:
            spelled = self._pieces.join(ids) if first else self._pieces.join_later(ids)
        return (tidy(spelled) if self._tidies else spelled) == text

    def stream(self, *, skip_control: bool = True) -> TextStream:
        """A decoder for one id after another; its deltas joined equal `decode` of all ids."""
        skip = self.control_ids if skip_control else frozenset[int]()
        return TextStream(self._pieces, skip, self._check, self._whole, self._tidies)

    def _whole(self, ids: list[int]) -> str:
        return self._library.decode(ids, skip_special_tokens=False)

    def _check(self, index: SupportsIndex) -> int:
        try:
            number = operator.index(index)
        except TypeError as error:
            raise UserError("a token id must be a whole number", where="ids", got=repr(index)) from error
        if not self._pieces.has(number):
            raise UserError(
                "this token id is outside the vocabulary",
                where="ids",
                got=number,
                expected=f"0 to {self.vocab_size - 1}",
            )
        return number

    def apply_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> list[int]:
        """The ids of a conversation, written by the model's chat template.

        The control tokens among them are those that the template itself writes: text in `messages` and `tools` that
        looks like one stays text. BOS comes once: from the template where it writes it, else by the model's own rule.

        Args:
            messages: mappings with a "role" and a "content", as the template expects them.
            add_generation_prompt: end with the opening of the model's answer.
            tools: descriptions of tools, for templates that know them.
            **variables: further variables of the template.
        """
        text, disguise = self._rendered(messages, add_generation_prompt, tools, variables)
        with clear("the tokenizer cannot encode this conversation", where="messages"):
            ids = self._encode_marked(text, disguise)
        if self.prefix and tuple(ids[:1]) != self.prefix[:1]:
            ids = [*self.prefix, *ids]
        return ids

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The same conversation as text, to be looked at: in it, control tokens and their spellings look alike."""
        text, disguise = self._rendered(messages, add_generation_prompt, tools, variables)
        return disguise.lift(text)

    def _rendered(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        variables: dict[str, Any],
    ) -> tuple[str, chat.Disguise]:
        from anyformer.text.templates import render  # Jinja is for chats alone.

        template = self._template(tools)
        chat.check_messages(messages)
        chat.check_tools(tools)
        try:
            for text in chat.strings([messages, tools, variables]):
                require_text(text)
            disguise = chat.Disguise(self._control.values(), [messages, tools, variables, template])
            given = {
                "messages": chat.given_messages(messages),
                "tools": None if tools is None else list(tools),
                "documents": None,
            }
            hidden = {name: disguise.hide(value) for name, value in {**given, **variables}.items()}
        except RecursionError as error:
            raise UserError("the messages are nested too deep", where="messages") from error
        named = dict(self._settings.named)
        return render(template, {**named, **hidden, "add_generation_prompt": add_generation_prompt}), disguise

    def _template(self, tools: object) -> str:
        """The template for a conversation with `tools`, or with None."""
        named = self._settings.chat_templates
        template = named.get("tool_use", self.chat_template) if tools is not None else self.chat_template
        if template is None:
            several = f"none of the chat templates {', '.join(sorted(named))} is the default one"
            raise UserError(
                several if named else "this tokenizer has no chat template",
                where="apply_chat",
                remedy=f"set chat_template in {CONFIG_FILE}, or encode a plain prompt with encode(text)",
            )
        return template

    def _encode_marked(self, text: str, disguise: chat.Disguise) -> list[int]:
        library, back = self._veil.marked(disguise.mark)
        spelled = {token: alias(disguise.mark, index) for index, token in self._control.items()}
        ids = library.encode(disguise.lift(text, spelled), add_special_tokens=False).ids
        return [back.get(index, index) for index in ids]
