"""Our own weights: one safetensors file, a tensor for each parameter under its one name, three for one in codes."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from anyformer.errors import UserError
from anyformer.nn.model import Model, build
from anyformer.nn.precision import exact
from anyformer.nn.quantised import Codes, codes_of, keep, load_rest, why_not_kept
from anyformer.planning import buffers, parameters
from anyformer.spec.parts import ModelSpec
from anyformer.weights.dtypes import STORED, require_float
from anyformer.weights.mapping import lies_in, release

WEIGHTS_FILE = "model.safetensors"


def write_weights(file: Path, model: torch.nn.Module) -> None:
    """Writes every parameter and buffer once. Raises `UserError` where that cannot be done."""
    tensors = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    save_tensors(file, tensors)


def save_tensors(file: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Writes tensors, contiguous and on the CPU. Raises `UserError` where that cannot be done."""
    try:
        save_file(tensors, file, metadata={"format": "pt"})
        file.chmod(0o644)  # As its neighbours in the folder: the library lets the owner alone read it.
    except SafetensorError as error:
        remedy = "free some space and try again; nothing that was there before has changed"
        raise UserError(f"cannot write the weights: {error}", where=file, remedy=remedy) from error


def read_weights(
    file: Path,
    spec: ModelSpec,
    *,
    dtype: torch.dtype | None,
    device: torch.device,
    mapped: bool = False,
    quantize: str | None = None,
) -> Model:
    """A model of `spec` with the tensors of a safetensors file, each used exactly once, in evaluation mode.

    A weight that was kept in quantised codes is there as `NAME` (uint8 codes), `NAME.scales` and `NAME.zeros`.

    Args:
        file: as `write_weights` left it.
        spec: what the tensors should be.
        dtype: of the weights, None for the file's own; float32 for quantised ones.
        device: where they go.
        mapped: whether weights that are already of that type stay mapped from the file, read when they are used and
            never written back; otherwise they are copied into memory of their own, which a later change of the file
            does not reach and where kernels round as they did.
        quantize: "keep" leaves weights in codes that are stored so, where the device has a product for them; None makes
            floats of all.

    Raises:
        UserError: a file that is missing, cut short or foreign; tensors that the specification does not have, lacks,
            or shapes otherwise; codes, scales and zeros that do not go together.
    """
    try:
        with safe_open(file, framework="pt") as stored:
            return _read(_Stored(file, stored), spec, dtype, device, mapped=mapped, keeps=quantize == "keep").eval()
    except FileNotFoundError:
        raise UserError("the checkpoint has no weights", where=file) from None
    except (SafetensorError, OSError) as error:
        remedy = "the file is cut short or damaged: use another checkpoint, or save it again"
        raise UserError(f"cannot read the weights: {error}", where=file, remedy=remedy) from None


class _Stored:
    """The tensors of an open file by name, and which of them are weights in codes."""

    def __init__(self, file: Path, stored: Any) -> None:
        self.file, self._stored = file, stored
        slices = {name: stored.get_slice(name) for name in stored.keys()}  # noqa: SIM118  no mapping
        self.shapes = {name: tuple(part.get_shape()) for name, part in slices.items()}
        self.kinds = {name: part.get_dtype() for name, part in slices.items()}
        self.quantised = [name for name in slices if f"{name}.scales" in slices or f"{name}.zeros" in slices]
        self.parts = {f"{name}.{part}" for name in self.quantised for part in ("scales", "zeros")}

    def __getitem__(self, name: str) -> Tensor:
        value: Tensor = self._stored.get_tensor(name)
        return value

    def codes(self, name: str) -> Codes:
        """A weight in codes. Raises `UserError` for parts that are missing or do not fit."""
        parts = [name, f"{name}.scales", f"{name}.zeros"]
        missing = [part for part in parts if part not in self.shapes]
        if missing:
            raise UserError("a quantised weight is not whole", where=self.file, got=f"no {missing[0]}")
        codes, scales, zeros = (self[part] for part in parts)
        return codes_of(codes, scales, zeros, f"{self.file}, {name}")


def _read(
    stored: _Stored, spec: ModelSpec, dtype: torch.dtype | None, device: torch.device, *, mapped: bool, keeps: bool
) -> Model:
    kept = {p.name: p.shape for p in buffers(spec)}
    expected = {p.name: p.shape for p in parameters(spec)} | kept
    found = {name: shape for name, shape in stored.shapes.items() if name not in stored.parts}
    _compare(expected, found, stored.file)
    quantised = set(stored.quantised)
    for name in expected:
        if name not in quantised:
            require_float(stored.kinds[name], f"{stored.file}, {name}")
    model = build(spec, device="meta", dtype=dtype or torch.float32)
    tensors = {}
    for name in expected:
        if name not in quantised:
            wanted = dtype or STORED[stored.kinds[name]]
            value = stored[name]
            tensors[name] = value.to(device, exact(wanted) if name in kept else wanted, copy=not mapped)
            if not lies_in(tensors[name], [value]):
                release([value])
            continue
        codes = stored.codes(name)
        if keeps and why_not_kept(model, name, codes, device) is None:
            keep(model, name, codes)
        else:
            tensors[name] = codes.dequantised().to(device, dtype or torch.float32)
        release([codes.codes, codes.scales, codes.zeros])
    load_rest(model, tensors)
    return model


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
