"""Models and inputs that hide nothing, drawn from a seed."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from anyformer.nn.model import Model, build
from anyformer.nn.roles import roles
from anyformer.spec.attention import Prefix
from anyformer.spec.parts import Embed, LanguageHead, ModelSpec, SequenceHead, StackSpec
from anyformer.spec.positions import DynamicNTKScaling, Learned, LongRopeScaling, Rope

LENGTH = 17
"""Tokens a row where nothing asks for more: odd, and longer than the windows of sampled specifications."""
LONGEST = 64
"""No row is made longer than this so that a window ends within it."""


def fresh(spec: ModelSpec, seed: int = 0, dtype: str = "float32") -> Model:
    """A model in which no choice is hidden: norm weights, biases, sinks, tables and choice biases all show.

    A fresh initialisation has norm weights of 1 and biases of 0, which hide the order of norm and rotation, dropped
    biases, and more.
    """
    model = build(spec, seed=seed, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    kinds = roles(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            match kinds[name]:
                case "norm":
                    # An offset of 1 makes the same weights of it: the parameter begins at 0 there and at 1 elsewhere.
                    value = float(parameter.mean()) + 0.4 * noise
                case "bias":
                    value = 0.4 * noise
                case "embedding" | "position":
                    value = noise
                case _:
                    value = noise * parameter.shape[-1] ** -0.5
            parameter.copy_(value)
        for buffer in model.buffers():
            buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator, dtype=torch.float64))
    return model


def wide(model: Model, dtype: torch.dtype = torch.float64) -> Model:
    """The same model with its weights in another dtype; the model itself where they are."""
    if all(p.dtype == dtype for p in model.parameters()):
        return model
    return copy.deepcopy(model).to(dtype)


def dtype_of(model: Model) -> torch.dtype:
    """The dtype of the weights."""
    return next(model.parameters()).dtype


def by_length(stack: StackSpec) -> list[DynamicNTKScaling | LongRopeScaling]:
    """The scalings of a stack whose frequencies depend on how long a row is."""
    positions = [block.attention.position for block in stack.blocks]
    scalings = [position.scaling for position in positions if isinstance(position, Rope)]
    return [s for s in scalings if isinstance(s, DynamicNTKScaling | LongRopeScaling)]


def reach(stack: StackSpec) -> int:
    """The largest window of a stack with its sinks, 0 without."""
    masks = [block.attention.mask for block in stack.blocks]
    return max((mask.window + mask.sinks for mask in masks if mask.window is not None), default=0)


def unreached(spec: ModelSpec) -> str:
    """What a certificate must say of windows that no sequence of the laws fills; nothing where there are none."""
    windows = {b.attention.mask.window for s in spec.stacks.values() for b in s.blocks}
    large = sorted(w for w in windows if w is not None and w >= LONGEST)
    return f"; rows are shorter than the window of {', '.join(map(str, large))}" if large else ""


def longest(stack: StackSpec, length: int = LENGTH) -> int:
    """How many tokens a row has: `length`, more where a window would not end, fewer where positions run out."""
    wanted = max(length, min(reach(stack) + 5, LONGEST))
    return min(wanted, stack.max_positions or wanted) if isinstance(stack.embed.position, Learned) else wanted


@dataclass
class Draw:
    """Inputs of one law for one model, from one seed."""

    model: Model
    seed: int

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)
        spec = self.model.spec
        self.spec, self.stack = spec, spec.last
        self.crossed = spec.encoder is not None and spec.decoder is not None
        self.prefixed = any(isinstance(b.attention.mask, Prefix) for b in self.stack.blocks)

    def between(self, low: int, high: int, *shape: int) -> Tensor:
        """int64 numbers from low to high, both included."""
        return torch.randint(low, high + 1, shape, generator=self.generator)

    def number(self, low: int, high: int) -> int:
        """One of them."""
        return int(self.between(low, high, 1))

    def normal(self, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        """Standard normal numbers."""
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(dtype)

    def tokens(self, batch: int, length: int) -> Tensor:
        """Ids int64 [batch, length]."""
        return self.between(0, self.spec.vocab_size - 1, batch, length)

    def inputs(self, batch: int, length: int, *, prefix: bool = True) -> dict[str, Any]:
        """The arguments of a call that the model has a place for, every row real from end to end.

        Token types where there are any, a source of another length for cross-attention, and a prefix of up to a third
        of the row for prefix masks unless it is declined.
        """
        made: dict[str, Any] = {"tokens": self.tokens(batch, length)}
        types = self._types(self.stack.embed, batch, length)
        if types is not None:
            made["types"] = types
        if self.prefixed and prefix:
            made["prefix"] = self.between(1, max(1, length // 3), batch)
        if self.crossed:
            made["source"] = self.tokens(batch, self.source_length())
        return made

    def source_length(self) -> int:
        """Tokens of a source: other than the target's."""
        assert self.spec.encoder is not None
        return longest(self.spec.encoder, 11)

    def _types(self, embed: Embed, batch: int, length: int) -> Tensor | None:
        return self.between(0, embed.types - 1, batch, length) if embed.types else None


def states(model: Model, inputs: dict[str, Any], **more: Any) -> Tensor:
    """What a model says of each token, [B, T, …]: its scores, or its hidden states where it scores no tokens."""
    if model.head is None or isinstance(model.spec.head, SequenceHead):
        return model.hidden(**inputs, **more)
    scores: Tensor = model(**inputs, **more)
    return scores


def outputs(model: Model, inputs: dict[str, Any], **more: Any) -> Tensor:
    """What a model says, [B, …]: the scores of its head, or hidden states without one."""
    scores: Tensor = (model.hidden if model.head is None else model)(**inputs, **more)
    return scores


def rows(inputs: dict[str, Any], which: slice | list[int] | Tensor) -> dict[str, Any]:
    """Some rows of every input."""
    return {name: value[which] for name, value in inputs.items()}


def speaks(spec: ModelSpec) -> bool:
    """Whether the model scores a vocabulary."""
    return isinstance(spec.head, LanguageHead)
