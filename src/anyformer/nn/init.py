"""Initial values, by the role of a parameter. A parameter that no rule covers is an error, not noise."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from anyformer.nn.attention import GroupedAttention, Scores
from anyformer.nn.position import inverse_frequencies, pairs
from anyformer.nn.roles import roles
from anyformer.spec.parts import Rope


@dataclass(frozen=True)
class Init:
    """Standard deviations of normal draws; a std of None is 1/√fan_in.

    Args:
        embedding, position, head, router, hidden: the std by role.
        residual: the std of matrices that write to the residual stream, before `depth`.
        depth: divide that std by √(2·n_layers), so that the stream's variance does not grow with depth (Radford et al.
            2019, section 2.3), or leave it ("none"), or start these matrices at zero ("zero").
        look_back: head h of the first layer begins by looking h + 1 tokens back: the size of the biases of rotary
            queries and keys that make it so (3 is strong); 0 leaves these biases at zero. See `look_back`.
    """

    embedding: float | None = 0.02
    position: float | None = 0.02
    head: float | None = 0.02
    router: float | None = 0.02
    hidden: float | None = 0.02
    residual: float | None = 0.02
    depth: Literal["sqrt", "none", "zero"] = "sqrt"
    look_back: float = 0.0


INITS: dict[str, Init] = {
    "gpt2": Init(),
    "scaled": Init(embedding=None, position=0.02, head=None, router=None, hidden=None, residual=None),
}
"""gpt2: std 0.02 everywhere (Radford et al. 2019). scaled: std 1/√fan_in, for any width. Both divide by depth."""


def resolve(init: str | Init) -> Init:
    """The rules that a name means."""
    if isinstance(init, Init):
        return init
    if init not in INITS:
        raise ValueError(f"unknown initialisation {init!r}; known: {', '.join(INITS)}")
    return INITS[init]


@torch.no_grad()
def initialise(model: nn.Module, depths: Mapping[str, int], *, seed: int, init: str | Init) -> None:
    """Fills every parameter of `model`. The same seed gives the same values on every device and in every dtype.

    Args:
        model: modules that declare roles.
        depths: for the beginning of a parameter's name, the number of layers that its residual matrices are scaled by.
        seed: of a generator of its own; the global one is not touched.
        init: a name in `INITS`, or rules.
    """
    rules = resolve(init)
    if isinstance(seed, bool) or not isinstance(seed, int) or not -(2**63) <= seed < 2**63:
        raise ValueError(f"seed is a whole number of 64 bits; got {seed!r}")
    generator = torch.Generator().manual_seed(seed)
    parameters = dict(model.named_parameters())
    starts = _starts(model)
    for name, role in roles(model).items():
        parameter = parameters[name]
        if role in ("bias", "norm"):
            parameter.fill_(starts.get(name, 0.0))
            continue
        std = getattr(rules, role)
        std = 1 / math.sqrt(parameter.shape[-1]) if std is None else std
        if role == "residual":
            n_layers = next(n for prefix, n in depths.items() if name.startswith(prefix))
            std *= {"sqrt": (2 * n_layers) ** -0.5, "none": 1.0, "zero": 0.0}[rules.depth]
        parameter.copy_(_normal(parameter, std, generator))
    for name, buffer in model.named_buffers():
        buffer.fill_(starts[name])
    if rules.look_back:
        attentions = [module for module in model.modules() if isinstance(module, Scores)]
        for index, attention in enumerate(attentions):
            look_back(attention, rules.look_back, first=index == 0)


def _starts(model: nn.Module) -> dict[str, float]:
    """The constants that modules say their norm weights, biases and buffers begin at, by name."""
    found: dict[str, float] = {}
    for path, module in model.named_modules():
        own: dict[str, float] = getattr(module, "starts", {})
        found |= {f"{path}.{name}" if path else name: value for name, value in own.items()}
    return found


def look_back(attention: Scores, size: float, *, first: bool) -> None:
    """Sets the biases of rotary queries and keys so that head h of a first layer looks h + 1 tokens back.

    With key biases (a, 0) and query biases a·(cos(m·f), −sin(m·f)) in the pair of frequency f, the rotated product of a
    query at i and a key at j is a²·Σ_f cos(f·(i − j − m)), largest at j = i − m. Frequencies that follow the length of
    a row are those of a short one. Other layers get the key biases alone, which do nothing until a query learns to use
    them.

    Raises:
        ValueError: latent attention, or one without rotary positions or without biases of queries and keys.
    """
    spec, position = attention.scores, attention.scores.position
    if not isinstance(attention, GroupedAttention) or not isinstance(position, Rope) or not attention.spec.qkv_bias:
        raise ValueError(
            "look_back sets the biases of rotary queries and keys: it needs grouped attention, a rope and "
            "qkv_bias = true in every layer"
        )
    width = position.width(spec.d_head)
    offsets, a_token = torch.arange(1, spec.n_heads + 1), torch.ones(1, dtype=torch.int64)
    frequencies = inverse_frequencies(position, width, a_token, offsets.device, torch.float32)
    angles = offsets[:, None] * frequencies
    q, k = torch.zeros(spec.n_heads, spec.d_head), torch.zeros(spec.n_kv_heads, spec.d_head)
    pairs(k[:, :width], position.layout)[0].fill_(size)
    if first:
        a, b = pairs(q[:, :width], position.layout)
        a.copy_(size * angles.cos())
        b.copy_(-size * angles.sin())
    attention.q.bias.copy_(q.flatten())
    attention.k.bias.copy_(k.flatten())


def _normal(like: Tensor, std: float, generator: torch.Generator) -> Tensor:
    """Drawn in float32 on the host, so that neither dtype nor device changes the draw."""
    return torch.randn(like.shape, generator=generator) * std
