"""anyformer: every Transformer is a specification.

The names below are the public interface. They are imported on first use, so that `import anyformer` costs nothing and
probes nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from anyformer.checkpoint import Checkpoint, load
    from anyformer.errors import UserError
    from anyformer.nn.attend import attend, masks
    from anyformer.nn.model import build, build_block
    from anyformer.nn.tap import Tap
    from anyformer.planning import Plan, plan
    from anyformer.spec import ModelSpec, SpecError
    from anyformer.weights.source import load_spec

_HOMES = {
    "Checkpoint": "anyformer.checkpoint",
    "load": "anyformer.checkpoint",
    "UserError": "anyformer.errors",
    "attend": "anyformer.nn.attend",
    "build": "anyformer.nn.model",
    "build_block": "anyformer.nn.model",
    "masks": "anyformer.nn.attend",
    "Tap": "anyformer.nn.tap",
    "Plan": "anyformer.planning",
    "plan": "anyformer.planning",
    "ModelSpec": "anyformer.spec",
    "SpecError": "anyformer.spec",
    "load_spec": "anyformer.weights.source",
}

__all__ = [
    "Checkpoint",
    "ModelSpec",
    "Plan",
    "SpecError",
    "Tap",
    "UserError",
    "attend",
    "build",
    "build_block",
    "load",
    "load_spec",
    "masks",
    "plan",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'anyformer' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
