"""A model with its specification and its tokenizer, as one thing to load, save and use.

A checkpoint folder holds `spec.json`, `model.safetensors` and the tokenizer's files; nothing in it is ever unpickled. A
run folder given as a checkpoint means its best.
"""

import os
import re
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
from anyformer.nn.precision import exact
from anyformer.planning import buffers, parameters
from anyformer.spec.folder import SPEC_FILE, resolve
from anyformer.spec.parts import ModelSpec
from anyformer.spec.stored import from_json
from anyformer.text import Tokenizer

if TYPE_CHECKING:
    from anyformer.infer import Completion

WEIGHTS_FILE = "model.safetensors"
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
"""Of weights in memory."""
_STORED = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}


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
        """The whole outcome of a generation: text, ids, why it ended, how many tokens.

        Without a tokenizer a prompt of ids gives ids and an empty text; a prompt of text is a `UserError`.
        """
        from anyformer.infer import generate

        return generate(self.model, self.tokenizer, [prompt], settings)[0]

    def save(self, folder: str | Path, format: str = "anyformer") -> Path:
        """Writes the checkpoint to `folder`, whole or not at all.

        A checkpoint that is there is replaced; a file or a folder of other things is never touched.

        Raises:
            UserError: a place that is taken by something else or cannot be written to.
        """
        if format != "anyformer":
            raise UserError("unknown checkpoint format", got=format, expected="anyformer")
        path = Path(folder)
        _require_free(path)
        with atomic_folder(path) as partial:
            save_into(partial, self.spec, self.model, self.tokenizer)
        return path


def _require_free(path: Path) -> None:
    """Raises `UserError` unless a checkpoint may be put at `path`, which replaces what is there."""
    if not os.path.lexists(path):
        return
    if not path.is_dir():
        raise UserError("a checkpoint is a folder, and there is a file", where=path, remedy="choose another name")
    if not (path / SPEC_FILE).exists() and any(path.iterdir()):
        what = "the folder holds other things than a checkpoint, which saving would remove"
        raise UserError(what, where=path, remedy="choose a new folder")


def save_into(folder: Path, spec: ModelSpec, model: torch.nn.Module, tokenizer: Tokenizer | None) -> None:
    """Writes a checkpoint's files into a folder that is there. Each parameter is stored once, under its one name.

    Raises `UserError` when the weights cannot be written.
    """
    tensors = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    try:
        save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    except SafetensorError as error:
        remedy = "free some space and try again; nothing that was there before has changed"
        raise UserError(f"cannot write the weights: {error}", where=folder / WEIGHTS_FILE, remedy=remedy) from error
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


def _dtype_of(name: str | None) -> torch.dtype | None:
    """The dtype that a name means, None for "as stored". Raises `UserError`."""
    if name is None or name == "stored":
        return None
    if name not in DTYPES:
        expected = ", ".join([*DTYPES, "stored"])
        raise UserError("unknown dtype", where="dtype", got=name, expected=expected)
    return DTYPES[name]


def load(
    path: str | Path, dtype: str | None = "float32", device: str | torch.device = "cpu", quantize: str | None = None
) -> Checkpoint:
    """Loads a checkpoint or run folder.

    Args:
        path: the folder.
        dtype: of the weights in memory: "float32", "bfloat16", "float16" or "float64"; "stored" or None keeps that of
            the file.
        device: where the model goes: "cpu", "cuda", "cuda:N", or "auto" for CUDA where it is there.
        quantize: None; quantised loading comes with the formats that need it.

    Raises:
        UserError: a dtype or device that cannot be used; no checkpoint there; files cut short, foreign or of a newer
            version; tensors that the specification does not have, lacks, or shapes otherwise.
    """
    if quantize is not None:
        raise UserError("quantised loading is not available", where="quantize", got=quantize, expected="None")
    _dtype_of(dtype)
    place = device_of(device)
    folder = resolve(path)
    spec_file = folder / SPEC_FILE
    try:
        spec = from_json(spec_file.read_text(encoding="utf-8"), where=spec_file)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the specification: {error}", where=spec_file) from None
    model = read_weights(folder / WEIGHTS_FILE, spec, dtype=dtype, device=place)
    tokenizer = Tokenizer.load(folder) if (folder / "tokenizer.json").exists() else None
    return Checkpoint(spec, model, tokenizer)


def read_weights(file: Path, spec: ModelSpec, *, dtype: str | None, device: str | torch.device) -> Model:
    """A model of `spec` with the tensors of a safetensors file, each used exactly once. Raises `UserError`."""
    wanted, place = _dtype_of(dtype), device_of(device)
    kept = {p.name: p.shape for p in buffers(spec)}
    expected = {p.name: p.shape for p in parameters(spec)} | kept
    try:
        with safe_open(file, framework="pt") as stored:
            slices = {name: stored.get_slice(name) for name in stored.keys()}  # noqa: SIM118  no mapping
            _compare(expected, {name: tuple(part.get_shape()) for name, part in slices.items()}, file)
            kinds = {name: slices[name].get_dtype() for name in expected}
            _require_floats(kinds, file)
            # Into memory of our own, tensor by tensor: a mapping would change with its file, and may lie at
            # addresses that change how a kernel rounds.
            dtypes = {name: wanted or DTYPES[_STORED[kind]] for name, kind in kinds.items()}
            dtypes |= {name: exact(dtypes[name]) for name in kept}
            tensors = {name: stored.get_tensor(name).to(place, dtypes[name], copy=True) for name in expected}
    except FileNotFoundError:
        raise UserError("the checkpoint has no weights", where=file) from None
    except (SafetensorError, OSError) as error:
        remedy = "the file is cut short or damaged: use another checkpoint, or save it again"
        raise UserError(f"cannot read the weights: {error}", where=file, remedy=remedy) from None
    model = build(spec, device="meta")
    model.load_state_dict(tensors, assign=True)
    return model.eval()


def _require_floats(kinds: dict[str, str], file: Path) -> None:
    """Raises `UserError` for tensors of a type that the model does not compute with."""
    for name, kind in kinds.items():
        if kind not in _STORED:
            expected = ", ".join(_STORED.values())
            raise UserError("weights are floating-point numbers", where=f"{file}, {name}", got=kind, expected=expected)


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
