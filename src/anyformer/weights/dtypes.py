"""Types of weights in memory, and what safetensors calls them."""

import torch

from anyformer.errors import UserError

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
"""Of weights in memory."""
STORED = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F64": torch.float64,
}
"""By the names of safetensors."""


_NEAR = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "fp64": "float64"}


def dtype_of(name: str | torch.dtype | None) -> torch.dtype | None:
    """The dtype that a name means, or one of torch's itself; None for "as stored". Raises `UserError`."""
    if name is None or name == "stored":
        return None
    if isinstance(name, torch.dtype) and name in DTYPES.values():
        return name
    if not isinstance(name, str) or name not in DTYPES:
        expected = ", ".join([*DTYPES, "stored"])
        remedy = f"did you mean `{_NEAR[name]}`?" if isinstance(name, str) and name in _NEAR else None
        raise UserError("unknown dtype", where="dtype", got=name, expected=expected, remedy=remedy)
    return DTYPES[name]


def name_of(dtype: torch.dtype) -> str:
    """A dtype's name without its module."""
    return str(dtype).removeprefix("torch.")


def require_float(kind: str, where: object) -> None:
    """Raises `UserError` for a tensor of a type that models do not compute with."""
    if kind not in STORED:
        expected = ", ".join(DTYPES)
        remedy = "use the model's unquantised weights"
        raise UserError("weights are floating-point numbers", where=where, got=kind, expected=expected, remedy=remedy)
