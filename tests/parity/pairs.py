"""A published implementation and the same model of this package with the same weights, and how they are compared.

Both run in float64. `transformers` turns to float32 inside (norms, rotary tables, softmax, routers); those casts are
made to give float64 as well, so that what differs is the arithmetic and not its rounding.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from maps import Rule, copy, scattered
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from anyformer.nn.model import Model, build
from anyformer.spec import expand


class _Wide(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        def wide(value):
            return torch.float64 if value is torch.float32 else value

        return func(*map(wide, args), **{name: wide(value) for name, value in (kwargs or {}).items()})


@contextmanager
def wide() -> Iterator[None]:
    """What is asked for in float32 is made in float64; no gradients."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad(), _Wide():
            yield
    finally:
        torch.set_default_dtype(before)


@dataclass(frozen=True)
class Family:
    """A family: whose model it is, with which settings, and what it is as a recipe."""

    name: str
    module: str
    """The folder of `transformers.models`."""
    model: str
    config: str
    settings: dict[str, Any]
    recipe: dict[str, Any]
    rules: list[Rule]
    tolerance: float = 1e-9
    first_position: int = 0
    """What theirs calls the position of a row's first token."""
    prepare: Callable[[nn.Module], None] = lambda model: None
    """What is changed about theirs before weights are drawn."""


@dataclass(frozen=True)
class Pair:
    """Theirs and ours."""

    family: Family
    hf: nn.Module
    our: Model

    @property
    def vocab_size(self) -> int:
        """Of both."""
        return self.our.spec.vocab_size

    def close(self, theirs: Tensor, ours: Tensor) -> None:
        """Fails with the worst error."""
        assert theirs.dtype == ours.dtype == torch.float64
        assert theirs.shape == ours.shape
        scale = theirs.abs().max().clamp(min=1.0)
        worst = float((theirs - ours).abs().max() / scale)
        WORST[self.family.name] = max(WORST.get(self.family.name, 0.0), worst)
        assert worst < self.family.tolerance, f"{self.family.name}: off by {worst:.2e}"

    def theirs(self, tokens: Tensor, real: Tensor | None = None, stored: Tensor | None = None, **kwargs: Any) -> Any:
        """Their output for tokens [B, T]. `stored`: which of the tokens in a cache are real, bool [B, S]."""
        takes = inspect.signature(self.hf.forward).parameters
        if real is not None:
            seen = real if stored is None else torch.cat([stored, real], 1)
            kwargs["attention_mask"] = seen.long()
            if "position_ids" in takes:
                positions = (seen.cumsum(1) - 1).clamp(min=0) + self.family.first_position
                kwargs["position_ids"] = positions[:, -tokens.shape[1] :]
        with wide():
            return self.hf(tokens, **kwargs)


WORST: dict[str, float] = {}
"""The worst error of each family in this run, relative to the largest number of the output."""


_PAIRS: dict[str, Pair] = {}


def pair(family: Family) -> Pair:
    """Both models, made once, with random weights that hide nothing."""
    if family.name not in _PAIRS:
        place = f"transformers.models.{family.module}"
        model = getattr(import_module(f"{place}.modeling_{family.module}"), family.model)
        config = getattr(import_module(f"{place}.configuration_{family.module}"), family.config)
        special = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
        with wide():
            settings = config(**{**special, **family.settings})
            settings._attn_implementation = settings._experts_implementation = "eager"
            hf = model(settings).eval()
            family.prepare(hf)
            scattered(hf)
        our = build(expand(family.recipe), dtype="float64")
        copy(hf, our, family.rules)
        _PAIRS[family.name] = Pair(family, hf, our)
    return _PAIRS[family.name]


def ids(batch: int, length: int, vocab_size: int, seed: int = 0) -> Tensor:
    """Tokens [batch, length], none of those that a family may take for padding."""
    return torch.randint(3, vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))


def padded(lengths: list[int], side: str) -> Tensor:
    """bool [B, longest], True = real."""
    longest = max(lengths)
    places = torch.arange(longest)
    rows = [places < n if side == "right" else places >= longest - n for n in lengths]
    return torch.stack(rows)
