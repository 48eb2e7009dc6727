"""A model with its specification and its tokenizer, as one thing to load, save and use.

A checkpoint folder holds `spec.json`, `model.safetensors` and the tokenizer's files; a published one holds
`config.json` in place of `spec.json`; a GGUF file holds all of it. Nothing in any is ever unpickled. A run folder given
as a checkpoint means its best.
"""

import json
import os
import re
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from anyformer.errors import UserError
from anyformer.families import FAMILIES, Family
from anyformer.files import atomic_folder, write_text
from anyformer.infer.generation import GENERATION_FILE, UNSAID, Generation
from anyformer.nn.model import Model
from anyformer.nn.quantised import dequantised_state, quantised
from anyformer.opened import SUPPRESSED, Opened, opened
from anyformer.spec.folder import GGUF, PUBLISHED_FILE, SPEC_FILE, is_gguf, is_published, strangers
from anyformer.spec.parts import ModelSpec
from anyformer.spec.problems import did_you_mean
from anyformer.spec.stored import from_json
from anyformer.text import Tokenizer
from anyformer.text.gguf import tokenizer_metadata
from anyformer.weights.config import read_object
from anyformer.weights.dtypes import dtype_of, name_of
from anyformer.weights.gguf.load import load_gguf
from anyformer.weights.gguf.placement import Placed, table
from anyformer.weights.gguf.reading import write_place
from anyformer.weights.gguf.save import require_kind, save_gguf
from anyformer.weights.hf import load_model, save_folder
from anyformer.weights.own import WEIGHTS_FILE, read_weights, write_weights

if TYPE_CHECKING:
    from anyformer.infer import Completion
    from anyformer.infer.embed import Embedding
    from anyformer.weights.eject.hugging import Form

FORMATS = ("anyformer", "hf", "gguf")
QUANTIZE = ("keep",)
"""How weights may be held otherwise than as floats."""
GGUF_FILE = "model.gguf"
LABELS_FILE = "labels.json"
_KNOWN_ELSEWHERE = {
    "max_length": "max_new_tokens",
    "max_tokens": "max_new_tokens",
    "do_sample": "temperature",
    "eos_token_id": "stop",
    "stop_strings": "stop",
}
"""What other libraries call what `generate` takes."""


@dataclass
class Checkpoint:
    """A specification, a model and, where text goes in and out, a tokenizer.

    Attributes:
        spec: what the model is.
        model: of that specification, in evaluation mode as loaded.
        tokenizer: None for a model of token ids alone.
        generation: how replies begin and end, beside what the tokenizer says.
        embedding: how a sentence vector is made, None where the checkpoint does not say.
        labels: the names of a classifier's labels, in the order of its scores; none where they have no names.
        placed: for a GGUF file, what became of each of its tensors.
    """

    spec: ModelSpec
    model: Model
    tokenizer: Tokenizer | None = None
    generation: Generation = UNSAID
    embedding: "Embedding | None" = None
    labels: tuple[str, ...] = ()
    placed: tuple[Placed, ...] = ()

    def explain(self) -> str:
        """Which tensors are held how, their bytes in memory, and which attention backend each layer takes."""
        held = table(self.placed) if self.placed else _held(self.model)
        backends = Counter((choice.backend, choice.why) for choice in self.model.explain())
        lines = [f"{backend}, {n} layers: {why}" for (backend, why), n in backends.items()]
        return "\n".join([held, "", "attention of a whole context", *lines])

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        max_new_tokens: int = 20,
        temperature: float = 0.0,
        seed: int = 0,
        **more: Any,
    ) -> str | list[int]:
        """The continuation alone: text for a text, ids for ids. For an encoder–decoder the prompt is the source.

        Args:
            prompt: text, or token ids.
            max_new_tokens: the most tokens to add.
            temperature: 0 takes the likeliest token.
            seed: of this call's own generator.
            **more: further fields of `infer.Sampling` (top_k, top_p, min_p, repetition_penalty, stop, …).
        """
        from anyformer.infer import Sampling

        known = [field.name for field in fields(Sampling)]
        for name in more:
            if name not in known:
                near = _KNOWN_ELSEWHERE.get(name) or did_you_mean(name, known)
                remedy = f"did you mean `{near}`?" if near else None
                raise UserError("generate takes no such argument", got=name, expected=", ".join(known), remedy=remedy)
        if not isinstance(prompt, str) and len(prompt) and isinstance(prompt[0], str | Sequence):
            remedy = "for several, infer.generate(ckpt.model, ckpt.tokenizer, prompts, Sampling(…))"
            raise UserError("generate takes one prompt", got=f"{len(prompt)} of them", remedy=remedy)
        settings = Sampling(max_new_tokens=max_new_tokens, temperature=temperature, seed=seed, **more)
        completion = self.complete(prompt, settings)
        return completion.text if isinstance(prompt, str) else list(completion.ids)

    def complete(self, prompt: str | Sequence[int], settings: Any) -> "Completion":
        """The whole outcome of a generation: text, ids, why it ended, how many tokens.

        Without a tokenizer a prompt of ids gives ids and an empty text; a prompt of text is a `UserError`.
        """
        from anyformer.infer import generate

        return generate(self.model, self.tokenizer, [prompt], settings, self.generation)[0]

    def embed(self, texts: Sequence[str], *, batch_size: int = 32, prompt: str | None = None) -> Tensor:
        """Sentence vectors [n, d] in float32, as the checkpoint says they are made.

        Without a word on it: the mean over each text's real tokens, special ones included, not normalised.

        Args:
            texts: any number of texts.
            batch_size: how many go through the model at a time; texts of like length go together.
            prompt: the name of one of the checkpoint's prompts ("query", "passage"), which goes before each text.

        Raises:
            UserError: no tokenizer; texts that are no list of strings; a prompt that the checkpoint does not have.
        """
        from anyformer.infer.embed import Embedding, embed

        how = self.embedding or Embedding()
        return embed(self.model, self.tokenizer, texts, how, batch_size=batch_size, prompt=prompt)

    def save(
        self,
        folder: str | Path,
        format: str = "anyformer",
        families: Sequence[Family] = (),
        quantize: str | None = None,
    ) -> Path:
        """Writes the checkpoint to `folder`, whole or not at all.

        A checkpoint that is there is replaced; a file or a folder of other things is never touched.

        Args:
            folder: where to. For "gguf" a name that ends so is the file; otherwise it is a folder, in which the file is
                called model.gguf.
            format: "anyformer"; "hf" for the form of Hugging Face; "gguf" for the form of llama.cpp, which only some
                published families have. A folder of Hugging Face that no published family says carries the model's own
                code, `modeling_anyformer.py`: `transformers` opens it with `trust_remote_code=True`, and `load` reads
                the specification that its config.json carries and runs no code.
            families: further families beside the package's own, looked through after them; not for "gguf".
            quantize: for "gguf", the type of matrices: "f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0" or "q5_1";
                without one, that of the model.

        Raises:
            UserError: a place that is taken by something else or cannot be written to; for "gguf", a specification
                that no family of the format says, with the nearest that one does and the first part that it lacks.
        """
        if format not in FORMATS:
            raise UserError("unknown checkpoint format", got=format, expected=", ".join(FORMATS))
        path = Path(folder)
        if format == "gguf":
            _require_no_families(families)
            return self._save_gguf(path, quantize)
        if quantize is not None:
            remedy = 'format="gguf" has quantised types'
            raise UserError("this format is not written quantised", where="quantize", got=quantize, remedy=remedy)
        _require_free(path)
        published = _published(self.spec, families) if format == "hf" else None
        with atomic_folder(path) as partial:
            if published is None:
                save_into(partial, self.spec, self.model, self.tokenizer)
            else:
                save_folder(partial, self.model, published.reading, self._beside(published.config))
                if self.tokenizer is not None:
                    self.tokenizer.save(partial)
                published.write_code(partial)
            # Theirs reads this file alone for the ends of a reply; ours keeps the tokenizer's own beside the tokenizer.
            generation = self.generation if published is None else replace(self.generation, eos_ids=self.eos_ids)
            if generation != UNSAID:
                (partial / GENERATION_FILE).write_text(generation.text(), encoding="utf-8")
            if self.labels and published is None:
                write_text(partial / LABELS_FILE, json.dumps(self.labels, ensure_ascii=False) + "\n")
            if self.embedding is not None:
                stack = self.spec.encoder or self.spec.last
                replace(self.embedding, d_model=stack.d_model).write(partial)
        return path

    def _save_gguf(self, path: Path, quantize: str | None) -> Path:
        kind = require_kind(quantize or _GGUF_KINDS[name_of(_dtype(self.model))])
        place = write_place(self.spec)
        metadata: dict[str, Any] = {"tokenizer.ggml.model": "none"}
        if self.tokenizer is not None:
            metadata = tokenizer_metadata(self.tokenizer, self.spec.vocab_size, self.generation.eos_ids)
        elif self.generation.eos_ids:
            metadata["tokenizer.ggml.eos_token_id"] = self.generation.eos_ids[0]
        if self.generation.suppressed:
            metadata[SUPPRESSED] = list(self.generation.suppressed)
        state = dequantised_state(self.model)
        if path.suffix.lower() == GGUF:
            if os.path.lexists(path) and not is_gguf(path):
                raise UserError("there is something else than a GGUF file", where=path, remedy="choose another name")
            save_gguf(path, place, state, kind, metadata, path.stem)
            return path
        if os.path.lexists(path):
            others = [each.name for each in path.iterdir() if each.name != GGUF_FILE] if path.is_dir() else [path.name]
            if others:
                remedy = "choose a new folder, or a file name that ends in .gguf"
                got = ", ".join(sorted(others)[:5])
                raise UserError("there are other things, which saving would remove", where=path, got=got, remedy=remedy)
        with atomic_folder(path) as folder:
            save_gguf(folder / GGUF_FILE, place, state, kind, metadata, path.name, path / GGUF_FILE)
        return path

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Every id that ends a reply."""
        own = () if self.tokenizer is None else self.tokenizer.eos_ids
        return tuple(dict.fromkeys([*own, *self.generation.eos_ids]))

    def _beside(self, config: dict[str, Any]) -> dict[str, Any]:
        """A published configuration with what it says beside the specification: ids of special tokens, the dtype."""
        more: dict[str, Any] = {"torch_dtype": name_of(_dtype(self.model))}
        more |= {
            name: i for name in ("bos_token_id", "pad_token_id") if isinstance(i := self.generation.rest.get(name), int)
        }
        eos = self.eos_ids
        if self.tokenizer is not None:
            ids = {"bos_token_id": self.tokenizer.bos_id, "pad_token_id": self.tokenizer.pad_id}
            # A token that the model has no embedding for would be looked up in its table.
            more |= {name: i for name, i in ids.items() if i is not None and i < self.spec.vocab_size}
        more["eos_token_id"] = eos[0] if len(eos) == 1 else list(eos) or None
        if self.labels and "id2label" in config:
            config = config | {
                "id2label": {str(i): name for i, name in enumerate(self.labels)},
                "label2id": {name: i for i, name in enumerate(self.labels)},
            }
        if self.generation.start:
            more["decoder_start_token_id"] = self.generation.start[0]
        return {**more, **{key: value for key, value in config.items() if value is not None or key not in more}}


_GGUF_KINDS = {"float32": "f32", "float64": "f32", "float16": "f16", "bfloat16": "bf16"}


def _dtype(model: torch.nn.Module) -> torch.dtype:
    """The type of a model's floats."""
    return next(value.dtype for value in model.parameters() if value.is_floating_point())


def _held(model: torch.nn.Module) -> str:
    """Numbers and bytes of a model's tensors, by their type."""
    groups: dict[str, list[tuple[int, int]]] = {}
    for kept in quantised(model).values():
        groups.setdefault("kept", []).append((kept.shape.numel(), kept.nbytes))
    for value in (*model.parameters(), *model.buffers()):
        groups.setdefault(name_of(value.dtype), []).append((value.numel(), value.nbytes))
    lines = [f"{'held as':<10} {'tensors':>7} {'numbers':>15} {'MiB':>9}"]
    for name, values in groups.items():
        numbers, size = (sum(part) for part in zip(*values, strict=True))
        lines.append(f"{name:<10} {len(values):>7,} {numbers:>15,} {size / 2**20:>9,.1f}")
    return "\n".join(lines)


def _require_no_families(families: Sequence[Family]) -> None:
    if families:
        remedy = 'leave it out; format="hf" and folders of Hugging Face take families'
        what = "GGUF files are read and written by the package's own dialects"
        raise UserError(what, where="families", got=f"{len(families)} of them", remedy=remedy)


def _published(spec: ModelSpec, families: Sequence[Family]) -> "Form":
    """A specification in the form of Hugging Face."""
    # Composing code takes a template engine, which no model that is loaded and run needs.
    from anyformer.weights.eject.hugging import hugging_face

    return hugging_face(spec, (*FAMILIES, *families))


def _require_free(path: Path) -> None:
    """Raises `UserError` unless a checkpoint may be put at `path`, which replaces what is there."""
    if not os.path.lexists(path):
        return
    if not path.is_dir():
        raise UserError("a checkpoint is a folder, and there is a file", where=path, remedy="choose another name")
    others = strangers(path)
    if others:
        what = "the folder holds other things than a checkpoint, which saving would remove"
        raise UserError(what, where=path, got=", ".join(others[:5]), remedy="choose a new folder")


def save_into(folder: Path, spec: ModelSpec, model: torch.nn.Module, tokenizer: Tokenizer | None) -> None:
    """Writes a checkpoint's files into a folder that is there. Each parameter is stored once, under its one name.

    Raises `UserError` when the weights cannot be written.
    """
    write_weights(folder / WEIGHTS_FILE, model)
    (folder / SPEC_FILE).write_text(spec.to_json(), encoding="utf-8")
    if tokenizer is not None:
        tokenizer.save(folder)


def device_of(name: str | torch.device, where: str = "device") -> torch.device:
    """The device that a name means: "auto" is CUDA where it is there, else the CPU. Raises `UserError`."""
    name = str(name)
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = re.fullmatch(r"cpu|cuda(?::(\d+))?", name)
    if found is None:
        what = "this device is not known and cannot be used here"
        raise UserError(what, where=where, got=name, expected="cpu, cuda, cuda:N or auto")
    count = 0 if name == "cpu" else torch.cuda.device_count()
    if name != "cpu" and not (torch.cuda.is_available() and int(found[1] or 0) < count):
        there = f"this machine has {count} of them" if count else "this machine has no CUDA device"
        remedy = '"auto" or "cpu" would do'
        raise UserError(f"this device cannot be used here: {there}", where=where, got=name, remedy=remedy)
    return torch.device(name)


def load(
    path: str | Path | Opened,
    dtype: str | torch.dtype | None = "float32",
    device: str | torch.device = "cpu",
    quantize: str | None = None,
    families: Sequence[Family] = (),
) -> Checkpoint:
    """Loads a checkpoint: ours, a run folder's best, a published one of Hugging Face, or a GGUF file.

    Weights that are stored in the wanted type stay mapped from their file and are read when they are used; the file
    should not be written to meanwhile (`save` replaces it, which does no harm).

    Args:
        path: the folder or file, or a GGUF file that is open already.
        dtype: of the weights in memory: "float32", "bfloat16", "float16" or "float64"; "stored" or None keeps that of
            the file, float32 for quantised ones.
        device: where the model goes: "cpu", "cuda", "cuda:N", or "auto" for CUDA where it is there.
        quantize: None makes floats of quantised weights. "keep" leaves each matrix in the file's own quantised values
            where this machine has a product for them; `explain` says which.
        families: further families of published models beside the package's own, looked through first; not for GGUF.

    Raises:
        UserError: a dtype or device that cannot be used; no checkpoint there; files cut short, foreign or of a newer
            version; a model type or setting that no family has; tensors that the specification does not have, lacks,
            or shapes otherwise.
    """
    if quantize is not None and quantize not in QUANTIZE:
        expected = f"None or {' or '.join(map(repr, QUANTIZE))}"
        raise UserError("weights cannot be held quantised so", where="quantize", got=quantize, expected=expected)
    wanted, place = dtype_of(dtype), device_of(device)
    folder = path if isinstance(path, Opened) else opened(path)
    if isinstance(folder, Opened):
        _require_no_families(families)
        return _load_gguf(folder, wanted, place, quantize)
    from anyformer.infer.embed import Embedding

    tokenizer = _tokenizer(folder)
    generation, embedding = Generation.read(folder), Embedding.read(folder)
    if is_published(folder):
        reading, model = load_model(folder, wanted, place, (*families, *FAMILIES))
        return Checkpoint(reading.spec, model, tokenizer, generation, embedding, _labels(folder, reading.spec))
    spec_file = folder / SPEC_FILE
    try:
        spec = from_json(spec_file.read_text(encoding="utf-8"), where=spec_file)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the specification: {error}", where=spec_file) from None
    model = read_weights(folder / WEIGHTS_FILE, spec, dtype=wanted, device=place, mapped=True, quantize=quantize)
    return Checkpoint(spec, model, tokenizer, generation, embedding, _labels(folder, spec))


def _load_gguf(opened: Opened, dtype: torch.dtype | None, device: torch.device, quantize: str | None) -> Checkpoint:
    generation = Generation(eos_ids=opened.eos_ids, suppressed=opened.suppressed)
    loaded = load_gguf(opened.model, dtype, device, quantize, ahead=opened.ahead)
    return Checkpoint(loaded.model.spec, loaded.model, opened.tokenizer, generation, placed=tuple(loaded.placed))


_OTHER_TOKENIZERS = ("tokenizer.model", "spiece.model", "source.spm", "vocab.json", "vocab.txt", "merges.txt")


def _tokenizer(folder: Path) -> Tokenizer | None:
    """A folder's tokenizer; None, with a warning where one is there in a form that is not read."""
    from anyformer.text.sentencepiece import file_in

    if (folder / "tokenizer.json").exists():
        return Tokenizer.load(folder)
    why = ""
    if file_in(folder) is not None:
        try:
            return Tokenizer.load(folder)
        except UserError as error:
            why = f" ({error.what}{f', {error.got}' if error.got else ''})"
    found = [name for name in _OTHER_TOKENIZERS if (folder / name).exists()]
    if found:
        remedy = "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) of transformers writes tokenizer.json"
        what = f"{folder} has no tokenizer.json, and no tokenizer is read from {', '.join(found)}{why}"
        warnings.warn(f"{what}. {remedy}", stacklevel=3)
    return None


def _labels(folder: Path, spec: ModelSpec) -> tuple[str, ...]:
    """The names of a classifier's labels: of labels.json, or of a published configuration's id2label."""
    n = getattr(spec.head, "n_labels", 0)
    if not n:
        return ()
    if is_published(folder):
        table = read_object(folder / PUBLISHED_FILE).get("id2label") or {}
        found = [table.get(str(i)) for i in range(n)] if isinstance(table, dict) else []
        names = [name for name in found if isinstance(name, str)]
        return tuple(names) if len(names) == n else ()
    path = folder / LABELS_FILE
    if not path.exists():
        return ()
    try:
        names = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read the labels: {error}", where=path) from None
    if not isinstance(names, list) or len(names) != n or not all(isinstance(name, str) for name in names):
        raise UserError("the labels are not those of the model", where=path, expected=f"a list of {n} names")
    return tuple(names)
