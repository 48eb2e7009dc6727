"""Small runs for the tests of training."""

from pathlib import Path
from typing import Any

RECIPE: dict[str, Any] = {
    "d_model": 24,
    "n_layers": 2,
    "tie": True,
    "norm": "rms",
    "ffn": {"kind": "gated", "activation": "silu", "d_ff": 40},
    "attention": {"n_heads": 3, "n_kv_heads": 1, "position": "rope"},
}
LETTERS = "the quick brown fox jumps over the lazy dog, and then again; "


def text(n: int) -> str:
    """n characters, no two lines alike."""
    out = "".join(f"{i:03d} {LETTERS[i % 40 :]}{i * i}\n" for i in range(n // 30 + 1))
    return out[:n]


def table(folder: Path, n: int = 590, **changes: Any) -> dict[str, Any]:
    """A run on n bytes: with n = 590, an epoch is 28 rows of 16 tokens, 7 updates of 4 rows."""
    file = folder / "text.txt"
    if not file.exists():
        file.write_text(text(n), encoding="utf-8")
    run: dict[str, Any] = {
        "name": "tiny",
        "model": {**RECIPE, **changes.pop("model", {})},
        "data": {
            "sources": [str(file)],
            "tokenizer": {"kind": "byte"},
            "val_fraction": 0.2,
            "context": 16,
            **changes.pop("data", {}),
        },
        "train": {"steps": 20, "batch": 4, "micro_batch": 3, **changes.pop("train", {})},
    }
    run.update(changes)
    return run
