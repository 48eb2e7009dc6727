"""Hidden states to scores: over the vocabulary, for a row, a token, the ends of an answer; and the pooler."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anyformer.nn.layers import ACTIVATIONS, Linear, norm_layer
from anyformer.nn.precision import exact
from anyformer.nn.quantised import Quantised, product
from anyformer.nn.roles import Role
from anyformer.spec.parts import LanguageHead, Pooler, SequenceHead, SpanHead, TokenHead


def softcapped(x: Tensor, cap: float | None) -> Tensor:
    """cap · tanh(x / cap), in at least float32 (Gemma 2, 2024); x itself without a cap."""
    if cap is None:
        return x
    return (cap * torch.tanh(x.to(exact(x.dtype)) / cap)).to(x.dtype)


class LanguageHeadLayer(nn.Module):
    """Scores over the vocabulary, [B, T, C] -> [B, T, V]. A tied head owns no matrix: it is given the embedding's."""

    def __init__(self, spec: LanguageHead, d_model: int, vocab_size: int, *, tied: bool) -> None:
        super().__init__()
        self.spec = spec
        self.roles: dict[str, Role] = {"weight": "head", "bias": "bias"}
        transform = spec.transform
        width = d_model if transform is None else transform.width
        self.transform = None if transform is None else Linear(d_model, width, bias=transform.bias, role="head")
        self.act = None if transform is None else ACTIVATIONS[transform.activation]
        self.norm = None if transform is None else norm_layer(transform.norm, width)
        self.keepable = True
        self.weight = None if tied else nn.Parameter(torch.empty(vocab_size, width))
        self.bias = nn.Parameter(torch.empty(vocab_size)) if spec.bias else None

    def forward(self, hidden: Tensor, embedding: Tensor | Quantised | None) -> Tensor:
        """Scores by the head's own matrix, or by the embedding's [V, C]."""
        if self.transform is not None and self.act is not None and self.norm is not None:
            hidden = self.norm(self.act(self.transform(hidden)))
        matrix = embedding if self.weight is None else self.weight
        assert matrix is not None
        logits = product(hidden, matrix, self.bias)
        if self.spec.scale != 1.0:
            logits = logits * self.spec.scale
        return softcapped(logits, self.spec.softcap)


class LabelHeadLayer(nn.Module):
    """Scores over labels, […, C] -> […, n_labels]."""

    def __init__(self, spec: SequenceHead | TokenHead | SpanHead, d_model: int) -> None:
        super().__init__()
        self.rate = 0.0 if isinstance(spec, SpanHead) else spec.dropout
        labels = 2 if isinstance(spec, SpanHead) else spec.n_labels
        self.roles: dict[str, Role] = {"weight": "head", "bias": "bias"}
        self.weight = nn.Parameter(torch.empty(labels, d_model))
        self.bias = nn.Parameter(torch.empty(labels)) if spec.bias else None

    def forward(self, hidden: Tensor) -> Tensor:
        """Scores of a vector for each label."""
        if self.training and self.rate:
            hidden = F.dropout(hidden, self.rate)
        return F.linear(hidden, self.weight, self.bias)


class PoolerLayer(nn.Module):
    """act(W·h + b) of one vector a row, [B, C] -> [B, C]."""

    def __init__(self, spec: Pooler, d_model: int) -> None:
        super().__init__()
        self.roles: dict[str, Role] = {"weight": "head", "bias": "bias"}
        self.act = ACTIVATIONS[spec.activation]
        self.weight = nn.Parameter(torch.empty(d_model, d_model))
        self.bias = nn.Parameter(torch.empty(d_model)) if spec.bias else None

    def forward(self, vector: Tensor) -> Tensor:
        """The pooled vector."""
        return self.act(F.linear(vector, self.weight, self.bias))


def pooled(hidden: Tensor, padding: Tensor | None, how: str) -> Tensor:
    """One vector a row [B, C] of hidden states [B, T, C]: the first or last real token's, or the mean of the real ones.

    A row without real tokens gives its first state, or zeros for the mean.
    """
    b, t, _ = hidden.shape
    if how == "mean":
        if padding is None:
            return hidden.mean(1)
        real = padding[..., None]
        # A padded state may hold anything; multiplied by zero it could still be no number.
        total = torch.where(real, hidden, 0.0).to(exact(hidden.dtype)).sum(1)
        return (total / real.sum(1).clamp(min=1)).to(hidden.dtype)
    if padding is None:
        return hidden[:, 0] if how == "first" else hidden[:, -1]
    places = torch.arange(t, device=hidden.device)
    if how == "first":
        index = torch.where(padding, places, t).amin(1)
        index = torch.where(index == t, 0, index)
    else:
        index = torch.where(padding, places, -1).amax(1).clamp(min=0)
    return hidden[torch.arange(b, device=hidden.device), index]
