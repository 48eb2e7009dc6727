"""Three textbook decoders written from their equations, to hold the recipes against.

They share nothing with the package: parameters are bare matrices, heads are cut out one after another, rotations are
complex numbers, and the cache is a list that grows.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn


def matrix(*shape):
    return nn.Parameter(torch.randn(*shape) / math.sqrt(shape[-1]))


def vector(n, centre=0.0):
    return nn.Parameter(centre + 0.3 * torch.randn(n))


def layer_norm(x, gain, shift):
    """(x − mean) / √(variance + 1e-5) · gain + shift."""
    centred = x - x.mean(-1, keepdim=True)
    return centred * (centred.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * gain + shift


def rms_norm(x, gain):
    """x / √(mean(x²) + 1e-6) · gain."""
    return gain * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def gelu(x):
    """x·Φ(x)."""
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def causal_weights(q, k):
    """softmax(q kᵀ / √d) where query i of the last T stands among S keys, [B, T, d] and [B, S, d] -> [B, T, S]."""
    t, s = q.shape[1], k.shape[1]
    scores = torch.einsum("btd,bsd->bts", q, k) / math.sqrt(q.shape[-1])
    hidden = torch.arange(s)[None, :] > torch.arange(s - t, s)[:, None]
    shares = scores.masked_fill(hidden, -math.inf).exp()
    return shares / shares.sum(-1, keepdim=True)


class BiasedBlock(nn.Module):
    """Pre-LayerNorm with one biased product for q, k and v; dropout on the weights and after the feed-forward."""

    def __init__(self, width, n_heads, rate):
        super().__init__()
        self.n_heads, self.rate = n_heads, rate
        self.gain1, self.shift1 = vector(width, 1.0), vector(width)
        self.gain2, self.shift2 = vector(width, 1.0), vector(width)
        self.qkv, self.qkv_bias = matrix(3 * width, width), vector(3 * width)
        self.mix, self.mix_bias = matrix(width, width), vector(width)
        self.wide, self.wide_bias = matrix(4 * width, width), vector(4 * width)
        self.narrow, self.narrow_bias = matrix(width, 4 * width), vector(width)

    def forward(self, x):
        q, k, v = (layer_norm(x, self.gain1, self.shift1) @ self.qkv.T + self.qkv_bias).split(x.shape[-1], -1)
        d = x.shape[-1] // self.n_heads
        weights = torch.stack(
            [causal_weights(q[..., h : h + d], k[..., h : h + d]) for h in range(0, x.shape[-1], d)], 1
        )
        weights = F.dropout(weights, self.rate, self.training)
        heads = [weights[:, h] @ v[..., h * d : (h + 1) * d] for h in range(self.n_heads)]
        x = x + torch.cat(heads, -1) @ self.mix.T + self.mix_bias
        inner = gelu(layer_norm(x, self.gain2, self.shift2) @ self.wide.T + self.wide_bias)
        return x + F.dropout(inner @ self.narrow.T + self.narrow_bias, self.rate, self.training)


class LeanBlock(nn.Module):
    """Pre-LayerNorm, no bias in attention, biases in the feed-forward, no dropout."""

    def __init__(self, width, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.gain1, self.shift1 = vector(width, 1.0), vector(width)
        self.gain2, self.shift2 = vector(width, 1.0), vector(width)
        self.qkv, self.mix = matrix(3 * width, width), matrix(width, width)
        self.wide, self.wide_bias = matrix(4 * width, width), vector(4 * width)
        self.narrow, self.narrow_bias = matrix(width, 4 * width), vector(width)

    def forward(self, x):
        width = x.shape[-1]
        projected = layer_norm(x, self.gain1, self.shift1) @ self.qkv.T
        heads = []
        for h in range(self.n_heads):
            cut = slice(h * width // self.n_heads, (h + 1) * width // self.n_heads)
            q, k, v = (projected[..., i * width : (i + 1) * width][..., cut] for i in range(3))
            heads.append(causal_weights(q, k) @ v)
        x = x + torch.cat(heads, -1) @ self.mix.T
        return (
            x
            + gelu(layer_norm(x, self.gain2, self.shift2) @ self.wide.T + self.wide_bias) @ self.narrow.T
            + (self.narrow_bias)
        )


class LearnedPositionDecoder(nn.Module):
    """Tokens and learned positions, blocks, a LayerNorm, a head of its own."""

    def __init__(self, blocks, vocab_size, width, context):
        super().__init__()
        self.tokens, self.places = matrix(vocab_size, width), matrix(context, width)
        self.blocks = nn.ModuleList(blocks)
        self.gain, self.shift = vector(width, 1.0), vector(width)
        self.head = matrix(vocab_size, width)

    def forward(self, ids):
        x = self.tokens[ids] + self.places[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return layer_norm(x, self.gain, self.shift) @ self.head.T


def turn(x, start):
    """Rotates heads [B, T, H, d] at positions start …: channel i and channel i + d/2 are one complex number."""
    d = x.shape[-1]
    at = torch.arange(start, start + x.shape[1], dtype=x.dtype)
    angle = at[:, None] * 10000.0 ** (-2 * torch.arange(d // 2, dtype=x.dtype) / d)
    turned = torch.complex(x[..., : d // 2], x[..., d // 2 :]) * torch.polar(torch.ones_like(angle), angle)[:, None]
    return torch.cat([turned.real, turned.imag], -1)


class RotaryBlock(nn.Module):
    """RMSNorm, rotary attention, SwiGLU; no bias. Takes and gives the keys and values so far."""

    def __init__(self, width, n_heads):
        super().__init__()
        self.n_heads = n_heads
        inner = 64 * math.ceil(8 * width / 3 / 64)
        self.gain1, self.gain2 = vector(width, 1.0), vector(width, 1.0)
        self.q, self.k, self.v, self.mix = (matrix(width, width) for _ in range(4))
        self.gate, self.up, self.down = matrix(inner, width), matrix(inner, width), matrix(width, inner)

    def forward(self, x, past=None):
        b, t, _ = x.shape
        seen = 0 if past is None else past[0].shape[1]
        normed = rms_norm(x, self.gain1)
        q, k, v = ((normed @ w.T).reshape(b, t, self.n_heads, -1) for w in (self.q, self.k, self.v))
        q, k = turn(q, seen), turn(k, seen)
        if past is not None:
            k, v = torch.cat([past[0], k], 1), torch.cat([past[1], v], 1)
        heads = [causal_weights(q[:, :, h], k[:, :, h]) @ v[:, :, h] for h in range(self.n_heads)]
        x = x + torch.cat(heads, -1) @ self.mix.T
        normed = rms_norm(x, self.gain2)
        gated = normed @ self.gate.T
        return x + (gated * gated.sigmoid() * (normed @ self.up.T)) @ self.down.T, (k, v)


class RotaryDecoder(nn.Module):
    """Tokens, rotary blocks, an RMSNorm, and the token table once more as the head."""

    def __init__(self, vocab_size, width, n_layers, n_heads):
        super().__init__()
        self.tokens = matrix(vocab_size, width)
        self.blocks = nn.ModuleList(RotaryBlock(width, n_heads) for _ in range(n_layers))
        self.gain = vector(width, 1.0)

    def forward(self, ids, past=None):
        """Scores, and what to give as `past` with the tokens that follow."""
        x, kept = self.tokens[ids], []
        for block, old in zip(self.blocks, past or [None] * len(self.blocks), strict=True):
            x, new = block(x, old)
            kept.append(new)
        return rms_norm(x, self.gain) @ self.tokens.T, kept

    @torch.no_grad()
    def greedy(self, ids, n):
        """The n likeliest tokens one after another, each from the one before and what is kept."""
        scores, past = self(ids)
        out = [scores[:, -1].argmax(-1, keepdim=True)]
        while len(out) < n:
            scores, past = self(out[-1], past)
            out.append(scores[:, -1].argmax(-1, keepdim=True))
        return torch.cat(out, 1)
