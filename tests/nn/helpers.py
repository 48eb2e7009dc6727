"""Small things that the tests of the model share."""

import torch

from anyformer.nn.model import build, build_block
from anyformer.nn.roles import roles
from anyformer.spec import expand


def randomise(module, seed=0):
    """Gives every norm weight and every bias a value that shows, and matrices enough size to matter."""
    generator = torch.Generator().manual_seed(seed)
    kinds = roles(module)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            match kinds[name]:
                case "norm":
                    value = 1 + 0.4 * noise
                case "bias":
                    value = 0.4 * noise
                case "embedding" | "position":
                    value = noise
                case _:
                    value = noise * parameter.shape[1] ** -0.5
            parameter.copy_(value)
    return module


def made(recipe, *, seed=0, dtype="float32", backend="auto", **options):
    """A model of a recipe with values that hide nothing."""
    return randomise(build(expand(recipe), dtype=dtype, **options), seed).use_backend(backend)


def made_block(recipe, *, seed=0, dtype="float32"):
    """The first block of a recipe."""
    stack = expand(recipe).decoder
    return randomise(build_block(stack.blocks[0], stack.d_model, dtype=dtype), seed)


def ids(batch, length, vocab_size, seed=0):
    """Tokens [batch, length]."""
    return torch.randint(0, vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))


LLAMA = {
    "vocab_size": 19,
    "d_model": 20,
    "n_layers": 3,
    "max_positions": 64,
    "tie": True,
    "ffn": {"kind": "swiglu", "d_ff": 33},
    "attention": {"n_heads": 6, "n_kv_heads": 2, "d_head": 6, "d_value": 5, "position": "rope", "qk_norm": True},
}
"""Rotary, RMSNorm, grouped heads of a width of their own, tied."""


def padded(rows, side, pad):
    """Rows of different length in one batch: tokens and which of them are real."""
    width = max(len(row) for row in rows)
    tokens, real = torch.full((len(rows), width), pad), torch.zeros(len(rows), width, dtype=torch.bool)
    for index, row in enumerate(rows):
        at = slice(width - len(row), width) if side == "left" else slice(0, len(row))
        tokens[index, at], real[index, at] = row, True
    return tokens, real


GPT = {
    "vocab_size": 19,
    "d_model": 18,
    "n_layers": 2,
    "max_positions": 40,
    "bias": True,
    "norm": "layer",
    "embed": {"position": "learned", "norm": "layer"},
    "head": {"kind": "language", "bias": True},
    "ffn": {"kind": "dense", "activation": "gelu_tanh"},
    "attention": {"n_heads": 3, "position": "none"},
}
"""Learned positions, LayerNorm, biases everywhere, untied."""

SINUSOIDAL = {
    "vocab_size": 19,
    "d_model": 18,
    "n_layers": 3,
    "norm": "layer",
    "placement": "post",
    "embed": {"position": {"kind": "sinusoidal", "layout": "halves"}},
    "ffn": {"kind": "dense", "activation": "relu"},
    "attention": {"n_heads": 5, "n_kv_heads": 1, "d_head": 4, "position": "none"},
}
"""The Transformer of 2017 as a decoder, with one key/value head."""

NOPE = {
    "vocab_size": 19,
    "d_model": 15,
    "n_layers": 3,
    "placement": "sandwich",
    "ffn": {"kind": "geglu", "d_ff": 21},
    "attention": {"n_heads": 3, "position": "none", "qk_norm": {"over": "projection"}},
}
"""No positions at all."""

PARALLEL = {
    "vocab_size": 19,
    "d_model": 20,
    "n_layers": 3,
    "wiring": "parallel",
    "norm": "layer",
    "ffn": {"kind": "dense", "activation": "relu2", "d_ff": 27},
    "attention": {
        "n_heads": 5,
        "d_head": 8,
        "qkv_bias": True,
        "qk_norm": {"order": "after", "norm": "layer"},
        "position": {"kind": "rope", "layout": "interleaved", "fraction": 0.5},
    },
    "pattern": [{"repeat": 2}, {"attention": {"position": "none"}}],
}
"""Side by side on one norm, partial interleaved rotation, a layer without positions."""

KINDS = {"llama": LLAMA, "gpt": GPT, "sinusoidal": SINUSOIDAL, "nope": NOPE, "parallel": PARALLEL}
