"""Our own weights: one safetensors file, a tensor for each parameter under its one name."""

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from anyformer.errors import UserError
from anyformer.nn.model import Model, build
from anyformer.nn.precision import exact
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
    except SafetensorError as error:
        remedy = "free some space and try again; nothing that was there before has changed"
        raise UserError(f"cannot write the weights: {error}", where=file, remedy=remedy) from error


def read_weights(
    file: Path, spec: ModelSpec, *, dtype: torch.dtype | None, device: torch.device, mapped: bool = False
) -> Model:
    """A model of `spec` with the tensors of a safetensors file, each used exactly once, in evaluation mode.

    Args:
        file: as `write_weights` left it.
        spec: what the tensors should be.
        dtype: of the weights, None for the file's own.
        device: where they go.
        mapped: whether weights that are already of that type stay mapped from the file, read when they are used and
            never written back; otherwise they are copied into memory of their own, which a later change of the file
            does not reach and where kernels round as they did.

    Raises:
        UserError: a file that is missing, cut short or foreign; tensors that the specification does not have, lacks,
            or shapes otherwise.
    """
    kept = {p.name: p.shape for p in buffers(spec)}
    expected = {p.name: p.shape for p in parameters(spec)} | kept
    try:
        with safe_open(file, framework="pt") as stored:
            slices = {name: stored.get_slice(name) for name in stored.keys()}  # noqa: SIM118  no mapping
            _compare(expected, {name: tuple(part.get_shape()) for name, part in slices.items()}, file)
            kinds = {name: slices[name].get_dtype() for name in expected}
            for name, kind in kinds.items():
                require_float(kind, f"{file}, {name}")
            dtypes = {name: dtype or STORED[kind] for name, kind in kinds.items()}
            dtypes |= {name: exact(dtypes[name]) for name in kept}
            tensors = {}
            for name in expected:
                value = stored.get_tensor(name)
                tensors[name] = value.to(device, dtypes[name], copy=not mapped)
                if not lies_in(tensors[name], [value]):
                    release([value])
    except FileNotFoundError:
        raise UserError("the checkpoint has no weights", where=file) from None
    except (SafetensorError, OSError) as error:
        remedy = "the file is cut short or damaged: use another checkpoint, or save it again"
        raise UserError(f"cannot read the weights: {error}", where=file, remedy=remedy) from None
    model = build(spec, device="meta")
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
