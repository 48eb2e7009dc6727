"""`anyformer chat`: talk with a checkpoint in the terminal."""

import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anyformer.cli.generate import show
from anyformer.cli.hurry import hurry
from anyformer.cli.sampling import (
    Device,
    MaxNewTokens,
    MinP,
    Quantize,
    RepetitionPenalty,
    Stop,
    Temperature,
    TopK,
    TopP,
    may_pack,
    quantize_of,
    sampling_of,
)
from anyformer.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from anyformer.infer import Sampling
    from anyformer.text import Tokenizer

_HELP = "/reset forgets the conversation, /quit or Ctrl-D leaves, Ctrl-C stops a reply"


class Conversation:
    """The turns so far, and the token ids that continue them.

    With a chat template the turns are messages. Without one they are plain text: every line and reply as
    written, one line feed before each line but the first.

    Args:
        tokenizer: the checkpoint's.
        context: the model's context in tokens; None for no limit.
        reserve: how many tokens to keep free for the reply where the context allows it.
        system: the text of a system message, for tokenizers with a chat template.
    """

    def __init__(self, tokenizer: "Tokenizer", context: int | None, reserve: int, system: str | None = None) -> None:
        self.templated = tokenizer.chat_template is not None
        if system is not None and not self.templated:
            what = "a system message needs a chat template, and this checkpoint has none"
            raise UserError(what, where="--system", remedy="leave it out and write it as the first line")
        self._tokenizer, self._system, self._context = tokenizer, system, context
        self._room = None if context is None else max(context - max(min(reserve, context // 4), 1), 1)
        self._turns: list[tuple[str, str]] = []

    def reset(self) -> None:
        """Forgets every turn."""
        self._turns.clear()

    def prompt(self, line: str) -> tuple[list[int], int]:
        """The ids that a reply to `line` continues, and how many of the oldest turns went to make them fit.

        A quarter of the context, or `reserve` where that is less, stays free for the reply as long as older
        turns can go.

        Raises:
            UserError: the line alone is longer than the context; the turns are then as before.
        """
        for dropped in range(len(self._turns) + 1):
            ids = self._ids(self._turns[dropped:], line)
            if self._room is None or len(ids) <= self._room:
                break
        if self._context is not None and len(ids) > self._context:
            raise UserError(
                "this message alone is longer than the model's context",
                got=f"{len(ids)} tokens",
                expected=f"at most {self._context} tokens",
                remedy="write a shorter one",
            )
        del self._turns[:dropped]
        return ids, dropped

    def add(self, line: str, reply: str) -> None:
        """Remembers a turn."""
        self._turns.append((line, reply))

    def _ids(self, turns: list[tuple[str, str]], line: str) -> list[int]:
        from anyformer.infer import encode_prompt

        if not self.templated:
            text = "\n".join([line_then + reply_then for line_then, reply_then in turns] + [line])
            return encode_prompt(self._tokenizer, text, "message")
        messages: list[dict[str, Any]] = []
        if self._system is not None:
            messages.append({"role": "system", "content": self._system})
        for line_then, reply_then in turns:
            messages += [{"role": "user", "content": line_then}, {"role": "assistant", "content": reply_then}]
        return self._tokenizer.apply_chat([*messages, {"role": "user", "content": line}])


def _lines(console: "Console") -> Iterator[str]:
    """The user's lines, from a terminal with a prompt and line editing or from a pipe."""
    terminal = sys.stdin.isatty()
    if terminal:
        with suppress(ImportError):
            import readline  # noqa: F401  gives input() its line editing and history
    while True:
        try:
            if terminal:
                line = input("> ")
            else:
                data = sys.stdin.buffer.readline()
                if not data:
                    return
                line = data.decode("utf-8")
        except EOFError:
            console.print()
            return
        except KeyboardInterrupt:
            if not terminal:
                raise
            console.print(f"\n[dim]{_HELP}[/]")
            continue
        except UnicodeDecodeError as error:
            what = "the message is not text"
            raise UserError(what, where="standard input", got=str(error), expected="text in UTF-8") from None
        yield line.rstrip("\r\n")


def chat(
    checkpoint: Annotated[
        Path,
        typer.Argument(metavar="CHECKPOINT", help="A checkpoint or run folder, or a GGUF file.", show_default=False),
    ],
    system: Annotated[
        str | None,
        typer.Option(help="A system message, for a chat template that has one.", show_default="none"),
    ] = None,
    max_new_tokens: MaxNewTokens = 512,
    temperature: Temperature = 0.7,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = 1.0,
    seed: Annotated[int, typer.Option(help="Of the first reply; each later one takes the next.")] = 0,
    stop: Stop = None,
    device: Device = "auto",
    quantize: Quantize = "keep",
) -> None:
    """Talk with a checkpoint.

    /reset forgets the conversation, /quit or Ctrl-D leaves, Ctrl-C stops a reply. Replies go to standard output,
    everything else to standard error. Messages may also come from a pipe, one to a line.
    """
    from rich.console import Console

    held = quantize_of(quantize)
    with hurry():
        from anyformer.opened import opened

        source = opened(checkpoint, pack=may_pack(held, device))
        from anyformer.checkpoint import device_of, load
        from anyformer.infer.decode import decoder_of

    sampling = sampling_of(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=stop,
    )
    console = Console(stderr=True, highlight=False)
    with hurry():
        loaded = load(source, device=device_of(device, where="--device"), quantize=held)
    if loaded.tokenizer is None:
        raise UserError("a chat needs a tokenizer, and this checkpoint has none", where=checkpoint)
    conversation = Conversation(loaded.tokenizer, decoder_of(loaded.spec).max_positions, max_new_tokens, system)
    console.print(f"[dim]{_HELP}[/]")
    if not conversation.templated:
        console.print("[dim]This checkpoint has no chat template: your text is continued as written.[/]")
    _talk(loaded, conversation, sampling, console)


def _talk(loaded: Any, conversation: Conversation, sampling: "Sampling", console: "Console") -> None:
    """Answers line after line until the input ends."""
    n_replies = 0
    for line in _lines(console):
        command = line.strip()
        if command == "/quit":
            return
        if command == "/reset":
            conversation.reset()
            console.print("[dim]The conversation starts anew.[/]")
            continue
        if not command:
            continue
        try:
            ids, dropped = conversation.prompt(line)
        except UserError as error:
            console.print(str(error), style="red", markup=False)
            continue
        if dropped:
            turns = "turn" if dropped == 1 else f"{dropped} turns"
            console.print(f"[yellow]The oldest {turns} no longer fit the context and are forgotten.[/]")
        reply = _answer(loaded, ids, replace(sampling, seed=(sampling.seed + n_replies) % 2**64), console)
        conversation.add(line, reply)
        n_replies += 1


def _answer(loaded: Any, ids: list[int], sampling: "Sampling", console: "Console") -> str:
    """Streams one reply to stdout and returns what was shown of it."""
    from anyformer.infer import stream

    shown: list[str] = []
    reason: str | None = None
    try:
        for delta in stream(loaded.model, loaded.tokenizer, [ids], sampling, loaded.generation):
            shown.append(delta.text)
            show(delta.text)
            if delta.completion is not None:
                reason = delta.completion.finish_reason
    except KeyboardInterrupt:
        reason = "stopped"
    show("\n")
    if reason in ("length", "stopped"):
        limit = "the limit of tokens or the context is reached" if reason == "length" else "stopped"
        console.print(f"[dim]({limit})[/]")
    return "".join(shown)
