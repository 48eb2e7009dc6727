"""What each attention backend computes: the table that the book prints and the tests prove call by call."""

from typing import Literal

Support = Literal["yes", "no", "accelerator"]
"""`accelerator`: yes on an accelerator, refused on the CPU."""

CAPABILITIES: dict[str, dict[str, Support]] = {
    "causal": {"reference": "yes", "tiled": "yes", "fused": "yes", "flex": "yes"},
    "window": {"reference": "yes", "tiled": "yes", "fused": "yes", "flex": "yes"},
    "window and first keys": {"reference": "yes", "tiled": "yes", "fused": "yes", "flex": "yes"},
    "segments": {"reference": "yes", "tiled": "yes", "fused": "yes", "flex": "yes"},
    "padding": {"reference": "yes", "tiled": "yes", "fused": "yes", "flex": "yes"},
    "prefix": {"reference": "yes", "tiled": "yes", "fused": "yes", "flex": "yes"},
    "dense mask": {"reference": "yes", "tiled": "yes", "fused": "yes", "flex": "yes"},
    "dense bias": {"reference": "yes", "tiled": "yes", "fused": "yes", "flex": "yes"},
    "ALiBi": {"reference": "yes", "tiled": "yes", "fused": "yes", "flex": "yes"},
    "buckets": {"reference": "yes", "tiled": "yes", "fused": "yes", "flex": "yes"},
    "soft-cap": {"reference": "yes", "tiled": "yes", "fused": "no", "flex": "yes"},
    "sink logit": {"reference": "yes", "tiled": "yes", "fused": "no", "flex": "accelerator"},
    "dropout": {"reference": "yes", "tiled": "yes", "fused": "yes", "flex": "no"},
    "grouped heads": {"reference": "yes", "tiled": "yes", "fused": "yes", "flex": "yes"},
    "d_value ≠ d_head": {"reference": "yes", "tiled": "yes", "fused": "yes", "flex": "yes"},
    "gradients": {"reference": "yes", "tiled": "yes", "fused": "yes", "flex": "accelerator"},
    "float64": {"reference": "yes", "tiled": "yes", "fused": "yes", "flex": "no"},
    "memory linear in T": {"reference": "no", "tiled": "yes", "fused": "yes", "flex": "yes"},
}
"""Support by option and backend.

`fused` keeps its memory linear by refusing, where gradients are wanted, a mask or bias that it would have to write out
beyond `fused.MASK_ELEMENTS` elements; what the caller gives as T×S is T×S on every backend.
"""


def table() -> str:
    """The capabilities in Markdown."""
    backends = list(next(iter(CAPABILITIES.values())))
    lines = ["| | " + " | ".join(f"`{name}`" for name in backends) + " |", "|---" * (len(backends) + 1) + "|"]
    lines += [f"| {option} | " + " | ".join(row.values()) + " |" for option, row in CAPABILITIES.items()]
    return "\n".join(lines)
