"""A model with its specification and its tokenizer, as one thing to load, save and use.

A checkpoint folder holds `spec.json`, `model.safetensors` and the tokenizer's files; nothing in it is ever unpickled. A
run folder given as a checkpoint means its best.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from anyformer.errors import UserError
from anyformer.files import atomic_folder
from anyformer.nn.model import Model, build
from anyformer.planning import parameters
from anyformer.spec.folder import SPEC_FILE, resolve
from anyformer.spec.parts import ModelSpec
from anyformer.spec.stored import from_json
from anyformer.text import Tokenizer

if TYPE_CHECKING:
    from anyformer.infer import Completion

WEIGHTS_FILE = "model.safetensors"


@dataclass
class Checkpoint:
    """A specification, a model and, where text goes in and out, a tokenizer."""

    spec: ModelSpec
    model: Model
    tokenizer: Tokenizer | None = None

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        max_new_tokens: int = 20,
        temperature: float = 0.0,
        seed: int = 0,
        **more: Any,
    ) -> str | list[int]:
        """The continuation alone: text for a text, ids for ids.

        Args:
            prompt: text, or token ids.
            max_new_tokens: the most tokens to add.
            temperature: 0 takes the likeliest token.
            seed: of this call's own generator.
            **more: further fields of `infer.Sampling` (top_k, top_p, min_p, repetition_penalty, stop, …).
        """
        from anyformer.infer import Sampling

        settings = Sampling(max_new_tokens=max_new_tokens, temperature=temperature, seed=seed, **more)
        completion = self.complete(prompt, settings)
        return completion.text if isinstance(prompt, str) else list(completion.ids)

    def complete(self, prompt: str | Sequence[int], settings: Any) -> "Completion":
        """The whole outcome of a generation: text, ids, why it ended, how many tokens."""
        from anyformer.infer import generate

        if self.tokenizer is None:
            raise UserError("this checkpoint has no tokenizer", remedy="infer.generate_ids continues token ids")
        return generate(self.model, self.tokenizer, [prompt], settings)[0]

    def save(self, folder: str | Path, format: str = "anyformer") -> Path:
        """Writes the checkpoint to `folder`, whole or not at all. Raises `UserError` for what cannot be written."""
        if format != "anyformer":
            raise UserError("unknown checkpoint format", got=format, expected="anyformer")
        with atomic_folder(Path(folder)) as partial:
            save_into(partial, self.spec, self.model, self.tokenizer)
        return Path(folder)


def save_into(folder: Path, spec: ModelSpec, model: torch.nn.Module, tokenizer: Tokenizer | None) -> None:
    """Writes a checkpoint's files into a folder that is there. Each parameter is stored once, under its one name."""
    tensors = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    (folder / SPEC_FILE).write_text(spec.to_json(), encoding="utf-8")
    if tokenizer is not None:
        tokenizer.save(folder)


def load(path: str | Path, *, dtype: str | None = None, device: str = "cpu", quantize: str | None = None) -> Checkpoint:
    """Loads a checkpoint or run folder.

    Args:
        path: the folder.
        dtype: of the weights in memory; as stored where None.
        device: where the model goes.
        quantize: None; quantised loading comes with the formats that need it.

    Raises:
        UserError: no checkpoint there; files cut short, foreign or of a newer version; tensors that the specification
            does not have, lacks, or shapes otherwise.
    """
    if quantize is not None:
        raise UserError("quantised loading is not available", got=quantize, expected="None")
    folder = resolve(path)
    spec_file = folder / SPEC_FILE
    try:
        spec = from_json(spec_file.read_text(encoding="utf-8"), where=spec_file)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the specification: {error}", where=spec_file) from None
    model = read_weights(folder / WEIGHTS_FILE, spec, dtype=dtype, device=device)
    tokenizer = Tokenizer.load(folder) if (folder / "tokenizer.json").exists() else None
    return Checkpoint(spec, model, tokenizer)


def read_weights(file: Path, spec: ModelSpec, *, dtype: str | None, device: str) -> Model:
    """A model of `spec` with the tensors of a safetensors file, each used exactly once. Raises `UserError`."""
    expected = {p.name: p.shape for p in parameters(spec)}
    try:
        with safe_open(file, framework="pt", device=device) as stored:
            names = set(stored.keys())
            shapes = {name: tuple(stored.get_slice(name).get_shape()) for name in names}
            _compare(expected, shapes, file)
            tensors = {name: stored.get_tensor(name) for name in expected}
    except FileNotFoundError:
        raise UserError("the checkpoint has no weights", where=file) from None
    except (SafetensorError, json.JSONDecodeError, OSError) as error:
        remedy = "the file is cut short or damaged: use another checkpoint, or save it again"
        raise UserError(f"cannot read the weights: {error}", where=file, remedy=remedy) from None
    model = build(spec, device="meta")
    if dtype is not None:
        wanted = getattr(torch, dtype, None)
        if not isinstance(wanted, torch.dtype) or not wanted.is_floating_point:
            raise UserError("unknown dtype", got=dtype, expected="float32, bfloat16, float16, float64")
        tensors = {name: value.to(wanted) for name, value in tensors.items()}
    kinds = {str(value.dtype) for value in tensors.values()}
    if not all(value.dtype.is_floating_point for value in tensors.values()):
        raise UserError("weights are floating-point numbers", where=file, got=", ".join(sorted(kinds)))
    model.load_state_dict(tensors, assign=True)
    return model.eval()


def _compare(expected: dict[str, tuple[int, ...]], found: dict[str, tuple[int, ...]], file: Path) -> None:
    missing, extra = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    wrong = [name for name in expected if name in found and found[name] != expected[name]]
    if not (missing or extra or wrong):
        return
    said = [
        f"{len(names)} {word}, first {names[0]}" for word, names in (("missing", missing), ("unknown", extra)) if names
    ]
    said += [f"{name} is {list(found[name])} and should be {list(expected[name])}" for name in wrong[:1]]
    raise UserError("the weights do not fit the specification", where=file, got="; ".join(said))
