"""The whole file: what it says of itself, its imports and constants, the model, and how it is run."""

import json
import re
from dataclasses import dataclass
from textwrap import fill
from typing import Any

from anyformer.planning import parameters
from anyformer.spec.parts import LanguageHead, Learned, ModelSpec
from anyformer.weights.eject.compose import compose
from anyformer.weights.eject.constants import Constants
from anyformer.weights.eject.format import wrapped
from anyformer.weights.eject.layers import Choices
from anyformer.weights.eject.parts import plural
from anyformer.weights.eject.render import render
from anyformer.weights.eject.uses import Kind, Use

_IMPORTS = (
    ("argparse.", "import argparse"),
    ("json.", "import json"),
    ("math.", "import math"),
    ("mmap.", "import mmap"),
    ("Iterator[", "from collections.abc import Iterator"),
    ("Path", "from pathlib import Path"),
)

_LARGE = 1_500_000_000
"""More parameters than this, 6 GB of float32, are not made up for a look at shapes."""


@dataclass(frozen=True)
class Surroundings:
    """What a checkpoint says beside its specification.

    Attributes:
        name: of the model.
        checkpoint: the folder that the file reads its weights from, as the file writes it.
        file: what the file is called.
        words: how many ids the tokenizer has, where the vocabulary has more; the rest are never generated.
        suffix: how many ids the tokenizer puts behind a text, which a text that goes on does not have.
        ends: ids that end a reply.
        start: ids that the target of an encoder–decoder begins with; where none are named, the file asks for them.
        suppressed: ids that are never generated.
    """

    name: str = "model"
    checkpoint: str = "."
    file: str = "model.py"
    words: int | None = None
    suffix: int = 0
    ends: tuple[int, ...] = ()
    start: tuple[int, ...] = ()
    suppressed: tuple[int, ...] = ()

    def asks_for_start(self, spec: ModelSpec) -> bool:
        """Whether the file must be told with which ids an answer begins."""
        return spec.generates and spec.encoder is not None and not self.start


def eject(spec: ModelSpec, surroundings: Surroundings | None = None) -> str:
    """A specification as the text of one Python file that needs torch alone.

    Args:
        spec: the model.
        surroundings: what its checkpoint says beside it.
    """
    around = surroundings or Surroundings()
    choices = Choices(padded=_padded(spec), stores=spec.decoder is not None)
    body, constants = compose(spec, choices)
    count = sum(parameter.size for parameter in parameters(spec))
    sections = [body]
    if spec.generates:
        sections.append(_generate(spec, around, constants))
    sections.append(_loader(choices, constants))
    sections.append(_main(spec, around, constants, count))
    text = _with_helpers(spec, "\n\n".join(sections), constants, shapes=count > _LARGE)
    assignments, text = constants.put(text)
    return wrapped(f"{_head(spec, around, count)}\n{_imports(text)}\n{assignments}\n\n{text}")


def model_text(spec: ModelSpec, *, padded: bool) -> tuple[str, tuple[tuple[str, str], ...]]:
    """The part of the file that is the model, imports included, and what of a checkpoint's names is another in it.

    Args:
        spec: the model.
        padded: whether a decoder is told which of its tokens are real.

    Returns:
        The text up to and with `class Model`; pairs (stored, here), which are replaced in a name one after another.
    """
    choices = Choices(padded=padded or _padded(spec), stores=spec.decoder is not None)
    body, constants = compose(spec, choices)
    text = _with_helpers(spec, body, constants)
    assignments, text = constants.put(text)
    return wrapped(f"{_imports(text)}\n{assignments}\n\n{text}"), tuple(choices.renamed)


def _with_helpers(spec: ModelSpec, text: str, constants: Constants, *, shapes: bool = False) -> str:
    """The text with those small functions in front that it calls; `shapes`: they are called without numbers too."""
    if "sent(" in text:
        text = _piece("nn/sent.py.jinja", constants, {}, {"shapes": shapes}) + "\n\n" + text
    if "quick_gelu(" in text:
        text = _piece("nn/quick_gelu.py.jinja", constants) + "\n\n" + text
    if "best_of(" in text:
        text = _piece("nn/chosen.py.jinja", constants) + "\n\n" + text
    if spec.decoder is not None:
        n_layers = constants.name("N_LAYERS", spec.decoder.n_layers, "Decoder")
        text = _piece("nn/cache.py.jinja", constants, {"CACHE_LAYERS": n_layers}) + "\n\n" + text
    if "upcast(" in text:
        text = _piece("nn/precision.py.jinja", constants) + "\n\n" + text
    return text


def _padded(spec: ModelSpec) -> bool:
    """Whether a decoder must know which tokens are real: where one of them stands for the row."""
    return spec.decoder is not None and spec.head is not None and not isinstance(spec.head, LanguageHead)


def _piece(
    piece: str,
    constants: Constants,
    texts: dict[str, str] | None = None,
    flags: dict[str, Any] | None = None,
    numbers: dict[str, Any] | None = None,
) -> str:
    use = Use(piece, "", dict(flags or {}), dict(numbers or {}))
    return render(Kind([use]), constants, texts or {}, {})


def _generate(spec: ModelSpec, around: Surroundings, constants: Constants) -> str:
    both = spec.encoder is not None
    assert spec.decoder is not None
    limited = spec.decoder.max_positions is not None
    turns = spec.decoder.turning_lengths
    numbers: dict[str, Any] = {}
    if around.ends:
        numbers["END_IDS"] = around.ends
    if around.words is not None:
        numbers["N_WORDS"] = around.words
    suppressed = tuple(i for i in around.suppressed if i < (around.words or spec.vocab_size))
    if suppressed:
        numbers["SUPPRESSED_IDS"] = suppressed
    if both and around.start:
        numbers["START_IDS"] = around.start
    if limited:
        numbers["MAX_POSITIONS"] = spec.decoder.max_positions
    if turns:
        numbers |= {"ROPE_ORIGINAL": turns[0]} if len(turns) == 1 else {"ROPE_ORIGINALS": turns}
    flags = {
        "both": both,
        "started": bool(around.start),
        "prefix": not both and any(block.attention.mask.kind == "prefix" for block in spec.decoder.blocks),
        "turns": bool(turns),
        "limited": limited,
        "ends": bool(around.ends),
        "suppressed": bool(suppressed),
    }
    texts = {
        "SUPPRESSED_LIST": "list(SUPPRESSED_IDS)",
        "[START_IDS]": "[list(START_IDS)]",
        ", -1, :N_WORDS]": ", -1]" if around.words is None else ", -1, :N_WORDS]",
        "TURNS_AT": "== ROPE_ORIGINAL" if len(turns) == 1 else "in ROPE_ORIGINALS",
    }
    return _piece("infer/decode.py.jinja", constants, texts, flags, numbers)


def _loader(choices: Choices, constants: Constants) -> str:
    renamed = tuple(choices.renamed)
    dtypes = '{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}'
    constants.fix("DTYPES", dtypes)
    if renamed:
        rows = [f'("{a}", "{b}")' for a, b in renamed]
        short = f"({', '.join(rows)}{',' if len(rows) == 1 else ''})"
        whole = short if len(short) < 85 else "(\n" + "".join(f"    {row},\n" for row in rows) + ")"
        constants.fix("RENAMED", f"{whole}  # stored names, and ours")
    return _piece("weights/own.py.jinja", constants, {}, {"renamed": bool(renamed)})


def _beneath(path: str) -> str:
    """A way from the file's folder, as Python writes it; what cannot be shown is escaped, JSON's way being Python's."""
    return "" if path == "." else f" / {json.dumps(path, ensure_ascii=not path.isprintable())}"


def _main(spec: ModelSpec, around: Surroundings, constants: Constants, count: int) -> str:
    both = spec.encoder is not None and spec.decoder is not None
    longest = [s.max_positions for s in spec.stacks.values() if isinstance(s.embed.position, Learned)]
    shown = min([16, *(n for n in longest if n is not None)])
    cut = around.suffix > 0 and spec.generates and not both
    limit = next(iter(spec.stacks.values())).max_positions  # of the stack that reads the prompt
    flags = {
        "meta": count > _LARGE,
        "begins": around.asks_for_start(spec),
        "limited": limit is not None,
        "bounded": spec.last.max_positions is not None,
        "generates": spec.generates,
        "cut": cut,
    }
    texts = {
        "GIGABYTES": f"{count * 4 / 1e9:,.0f}",
        "SHOWN_SCORES": "hidden states" if spec.head is None else "logits",
        "PROMPT_HELP": f"a text to {_does(spec)}; without one the model is shown",
        "SHOWN": str(shown),
        "MODEL_READS": "tokens, source=tokens" if both else "tokens",
        "PROMPT_POSITIONS": "SOURCE_POSITIONS" if both else "MAX_POSITIONS",
        "ENCODED": "tokenizer.encode(args.prompt).ids" + ("[:-SUFFIX_IDS]" if cut else ""),
        "CHECKPOINT_DEFAULT": f"Path(__file__).parent{_beneath(around.checkpoint)}",
    }
    numbers = {"VOCAB_SIZE": spec.vocab_size} | ({"SUFFIX_IDS": around.suffix} if cut else {})
    if limit is not None:
        numbers["SOURCE_POSITIONS" if both else "MAX_POSITIONS"] = limit
    if both and spec.last.max_positions is not None:
        numbers["MAX_POSITIONS"] = spec.last.max_positions
    return _piece("weights/eject/main.py.jinja", constants, texts, flags, numbers)


def _head(spec: ModelSpec, around: Surroundings, count: int) -> str:
    """What the file says of itself: the model, its size, how it is run, the letters of its shapes."""
    stacks = " and ".join(
        f"{'an' if name[0] in 'ae' else 'a'} {name} of {plural(stack.n_layers, 'layer')}"
        for name, stack in spec.stacks.items()
    )
    own, plain = around.checkpoint != ".", f"python {_plain(around.file)}"
    prompt = f'{plain} --prompt "…"' if own else f'{plain} --checkpoint DIR --prompt "…"'
    prompt += " --start ID" if around.asks_for_start(spec) else ""
    does = {"continue": "continues a text", "answer": "answers a text", "read": "reads a text"}[_does(spec)]
    whose = "its checkpoint" if own else "DIR"
    return (
        f'"""{_plain(around.name)}: {stacks}, {count:,} parameters.\n\n'
        f"    {plain:<{len(prompt)}}   {_shown(count)}\n"
        f"    {prompt}   {does}, with the weights and tokenizer of {whose}\n\n"
        f"{fill(_letters(spec), 120)}\n"
        '"""\n'
    )


def _does(spec: ModelSpec) -> str:
    """What the file does with a prompt."""
    return "read" if not spec.generates else "answer" if spec.encoder is not None else "continue"


def _shown(count: int) -> str:
    """What the file shows by itself."""
    return "the shapes of a pass, without weights" if count > _LARGE else "a pass with random weights"


def _letters(spec: ModelSpec) -> str:
    """The letters of the shapes in the file, with what they are."""
    blocks = [block for stack in spec.stacks.values() for block in stack.blocks]
    attentions = [a for block in blocks for a in (block.attention, block.cross) if a is not None]
    said = ["B batch", "T queries", "S keys", "H query heads"]
    if any(a.n_kv_heads != a.n_heads for a in attentions):
        said.append("G key/value heads")
    said.append("D head width")
    if any(a.d_value != a.d_head for a in attentions):
        said.append("Dv value width")
    said += ["C d_model", "F d_ff"]
    if any(block.ffn.kind == "moe" for block in blocks):
        said.append("E experts")
    if isinstance(spec.head, LanguageHead):
        said.append("V vocabulary")
    return f"Shapes: {', '.join(said)}."


def _plain(name: str) -> str:
    """A name as it may stand in the file's docstring."""
    return " ".join(name.replace("\\", "/").replace('"', "'").split())


def _imports(text: str) -> str:
    first = [line for mark, line in _IMPORTS if re.search(rf"\b{re.escape(mark)}", text)]
    functional = ["import torch.nn.functional as F"] if re.search(r"\bF\.", text) else []
    return "\n".join([*first, "", "import torch", *functional, "from torch import Tensor, nn"]) + "\n"
