"""The form of Hugging Face for any specification: a published family's, or with modelling code that is ejected.

Where no published family says the specification, the folder carries `modeling_anyformer.py`: the ejected model, and a
class that `transformers` calls, which opens the folder with `trust_remote_code=True`. Imports no torch.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any

from anyformer.errors import UserError
from anyformer.families import FAMILIES, Family
from anyformer.files import write_text
from anyformer.spec.attention import Prefix
from anyformer.spec.folder import CODE_FILE
from anyformer.spec.parts import ModelSpec, Pooler
from anyformer.weights.carried import Renamed, carrying, family_of
from anyformer.weights.config import Reading, write_config
from anyformer.weights.eject.constants import Constants
from anyformer.weights.eject.file import model_text
from anyformer.weights.eject.format import wrapped
from anyformer.weights.eject.render import render
from anyformer.weights.eject.sublayers import ACTIVATIONS
from anyformer.weights.eject.uses import SAME, Kind, Use

TOKENIZER_CONFIG = "tokenizer_config.json"
_MODULE = CODE_FILE.removesuffix(".py")
_PIECE = "weights/eject/hugging.py.jinja"


@dataclass(frozen=True)
class Form:
    """A specification in the form of Hugging Face.

    Attributes:
        config: the content of config.json.
        reading: how it reads, and so under which names the parameters are written.
        code: the text of modeling_anyformer.py, None for a published family.
        why: why there is code: that no family is the model, the nearest, and the first part that it says otherwise.
    """

    config: dict[str, Any]
    reading: Reading
    code: str | None = None
    why: str = ""

    def write_code(self, folder: Path) -> None:
        """Writes the code, if there is any, into a folder whose tokenizer's files are there, if it has any.

        A tokenizer says which inputs it makes, which otherwise may be some that the code does not take.
        """
        if self.code is None:
            return
        write_text(folder / CODE_FILE, self.code)
        settings = folder / TOKENIZER_CONFIG
        if settings.exists():
            inputs = ["input_ids", *(["token_type_ids"] if "token_type_ids" in self.code else []), "attention_mask"]
            table = json.loads(settings.read_text(encoding="utf-8")) | {"model_input_names": inputs}
            write_text(settings, json.dumps(table, indent=2, ensure_ascii=False) + "\n")


@dataclass(frozen=True)
class _Task:
    """What a class of `transformers` is for: the ends of its names, its output, what it gives in words."""

    kind: str
    ending: str
    auto: str
    output: str
    gives: str

    @property
    def auto_class(self) -> str:
        """The class of `transformers` that opens the folder."""
        return self.auto or f"AutoModel{self.ending}"


_LABELS = {
    "sequence": _Task(
        "sequence", "ForSequenceClassification", "", "SequenceClassifierOutput", "logits of a row's labels"
    ),
    "token": _Task("token", "ForTokenClassification", "", "TokenClassifierOutput", "logits of each token's labels"),
    "span": _Task(
        "span", "ForQuestionAnswering", "", "QuestionAnsweringModelOutput", "logits as first and last of an answer"
    ),
}
_WORDS = "logits of the vocabulary, [B, T, V]"
_STATES = "hidden states, [B, T, C]"


def hugging_face(spec: ModelSpec, families: Sequence[Family] = FAMILIES) -> Form:
    """A specification in the form of Hugging Face: a published family's where one says it, with its own code else.

    Args:
        spec: the model.
        families: those that are looked through.

    Raises:
        UserError: a part that no piece of code says either.
    """
    try:
        return Form(*write_config(spec, families))
    except UserError as error:
        nearest = str(error.expected).partition("; the nearest is ")[2]
        where = f"; the nearest is {nearest}: {error.got}" if nearest else f": {error.got}"
    return with_code(spec, f"no published family is this model{where}")


def with_code(spec: ModelSpec, why: str = "") -> Form:
    """A specification with modelling code of its own, whatever the families say; `why` is noted in it."""
    task = _task(spec)
    body, renamed = model_text(spec, padded=True)
    model = f"Anyformer{task.ending}"
    return Form(
        config=_config(spec, task, model, renamed),
        reading=Reading(spec, family_of(spec, renamed, model), model),
        code=_code(spec, task, model, body, why),
        why=why,
    )


def _task(spec: ModelSpec) -> _Task:
    both = len(spec.stacks) == 2
    decoder = spec.decoder is not None
    if spec.head is None:
        output = "Seq2SeqModelOutput" if both else "BaseModelOutputWithPast" if decoder else "BaseModelOutput"
        return _Task("model", "Model", "AutoModel", output if spec.pooler is None else f"{output}WithPooling", _STATES)
    if spec.head.kind != "language":
        return _LABELS[spec.head.kind]
    if both:
        return _Task("seq2seq", "ForConditionalGeneration", "AutoModelForSeq2SeqLM", "Seq2SeqLMOutput", _WORDS)
    if decoder:
        return _Task("causal", "ForCausalLM", "", "CausalLMOutputWithPast", _WORDS)
    return _Task("masked", "ForMaskedLM", "", "MaskedLMOutput", _WORDS)


def _config(spec: ModelSpec, task: _Task, model: str, renamed: Renamed) -> dict[str, Any]:
    last = spec.last
    sizes: dict[str, Any] = {
        "vocab_size": spec.vocab_size,
        "hidden_size": last.d_model,
        "num_hidden_layers": last.n_layers,
        "num_attention_heads": last.blocks[0].attention.n_heads,
        "num_key_value_heads": last.blocks[0].attention.n_kv_heads,
        "is_encoder_decoder": len(spec.stacks) == 2,
    }
    if last.max_positions is not None:
        sizes["max_position_embeddings"] = last.max_positions
    n_labels = getattr(spec.head, "n_labels", 0)
    if n_labels:
        sizes["id2label"] = {str(i): f"LABEL_{i}" for i in range(n_labels)}
        sizes["label2id"] = {f"LABEL_{i}": i for i in range(n_labels)}
    classes = {"AutoConfig": f"{_MODULE}.AnyformerConfig", task.auto_class: f"{_MODULE}.{model}"}
    return {"architectures": [model], "auto_map": classes, **sizes, **carrying(spec, renamed)}


def _code(spec: ModelSpec, task: _Task, model: str, body: str, why: str) -> str:
    """The text of the modelling file."""
    both, decoder = len(spec.stacks) == 2, spec.decoder is not None
    cached = both or (decoder and task.kind in ("causal", "model"))
    prefix = decoder and any(isinstance(block.attention.mask, Prefix) for block in spec.last.blocks)
    types = bool(spec.last.embed.types)
    offset = re.findall(
        r"^class (\w+)\(nn\.Module\):\n(?:(?!class ).*\n)*?.*\(1 \+ upcast\(self\.weight\)\)", body, re.MULTILINE
    )
    generates = task.kind in ("causal", "seq2seq")
    turns = spec.decoder.turning_lengths if spec.decoder is not None else ()
    flags = {
        "kind": task.kind,
        "both": both,
        "decoder": decoder,
        "cached": cached,
        "generates": generates,
        "prefix": prefix,
        "types": types,
        "offset": bool(offset),
        "pooler": spec.pooler is not None,
        "choice_bias": "choice_bias" in body,
        "turns": bool(turns),
    }
    given = {"real=real": True, "types=token_type_ids": types, "prefix=prefix_lengths": prefix, "cache=own": cached}
    texts = {
        "CLASS_NAME": model,
        "OWN_MASK": "decoder_attention_mask" if both else "attention_mask",
        "OWN_IDS": "decoder_input_ids" if both else "input_ids",
        "TURNS_LIST": repr(turns),
        "BASES": ", ".join(["PreTrainedModel", *(["GenerationMixin"] if generates else []), "Model"]),
        "OUTPUT_TYPE": task.output,
        "SCORES_SAID": task.gives,
        "FORWARD_ARGS": ", ".join(text for text, there in given.items() if there),
        "EMBEDDING_TABLE": _table(body, spec),
        "OFFSET_NORMS": ", ".join(offset) if len(offset) == 1 else f"({', '.join(offset)})",
    }
    pooler = spec.pooler or Pooler()
    act = ACTIVATIONS[pooler.activation] if spec.pooler is not None else SAME
    wrapper = render(Kind([Use(_PIECE, "", dict(flags))]), Constants(), texts, {"ACT": act})
    if "quick_gelu(" in wrapper and "def quick_gelu(" not in body:
        wrapper = render(Kind([Use("nn/quick_gelu.py.jinja", "")]), Constants(), {}, {}) + "\n\n" + wrapper
    return wrapped(_docstring(spec, task, why) + _with_imports(body, wrapper, task) + "\n\n" + wrapper.rstrip()) + "\n"


def _table(body: str, spec: ModelSpec) -> str:
    """The expression of the token table in the model's class."""
    made = re.compile(r"^        self\.embed = ([\w.]+)\(", re.MULTILINE)
    if made.search(body, body.index("\nclass Model(")):
        return "self.embed"
    stack = next(iter(spec.stacks))
    found = made.search(body, body.index(f"\nclass {stack.title()}("))
    assert found is not None
    return f"self.{stack}.embed" if found[1] == "nn.Embedding" else f"self.{stack}.embed.token"


def _docstring(spec: ModelSpec, task: _Task, why: str) -> str:
    stacks = " and ".join(f"{name} of {stack.n_layers} layers" for name, stack in spec.stacks.items())
    reason = "\n" + fill(f"Why it is here: {why}.", 116) + "\n" if why else ""
    return (
        f'"""The model of this folder, {"an" if stacks[0] in "ae" else "a"} {stacks}, for transformers.\n\n'
        f"{task.auto_class}.from_pretrained(DIR, trust_remote_code=True) opens it.\n"
        f'{reason}"""\n\n'
    )


def _with_imports(body: str, wrapper: str, task: _Task) -> str:
    """The model's text with the imports of the class around it."""
    names = ["GenerationMixin"] if "GenerationMixin" in wrapper else []
    lines = [f"from transformers import {', '.join([*names, 'PretrainedConfig', 'PreTrainedModel'])}"]
    outputs = sorted({task.output, *(["BaseModelOutput"] if "BaseModelOutput:" in wrapper else [])})
    lines.append(f"from transformers.modeling_outputs import {', '.join(outputs)}")
    lines.append("from transformers.utils import can_return_tuple")
    first, rest = body.lstrip("\n").split("import torch\n", 1)
    imports, rest = rest.split("from torch import Tensor, nn\n", 1)
    plain = sorted(line for line in (*first.splitlines(), "from typing import Any") if line)
    plain.sort(key=lambda line: line.startswith("from"))
    if "F." in wrapper and "functional as F" not in imports:
        imports = "import torch.nn.functional as F\n" + imports
    torch = f"import torch\n{imports}from torch import Tensor, nn\n"
    return "\n".join(plain) + "\n\n" + torch + "\n".join(lines) + "\n" + rest
