"""Which precision a computation that must not lose any runs in."""

import torch


def exact(dtype: torch.dtype) -> torch.dtype:
    """float64 stays; everything else is computed in float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
