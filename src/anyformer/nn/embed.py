"""Tokens to vectors, and hidden states to scores over the vocabulary."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anyformer.nn.layers import norm_layer
from anyformer.nn.position import sinusoids
from anyformer.nn.roles import Role
from anyformer.spec.parts import LanguageHead, Learned, Sinusoidal, StackSpec


class Table(nn.Module):
    """Rows of vectors, [N, C], looked up by number."""

    def __init__(self, n_rows: int, width: int, role: Role) -> None:
        super().__init__()
        self.roles: dict[str, Role] = {"weight": role}
        self.weight = nn.Parameter(torch.empty(n_rows, width))

    def forward(self, ids: Tensor) -> Tensor:
        """int64 […] -> […, C]."""
        return F.embedding(ids, self.weight)


class EmbedLayer(nn.Module):
    """The token table, what is added for the position, a norm and dropout."""

    def __init__(self, spec: StackSpec, vocab_size: int) -> None:
        super().__init__()
        self.spec, self.d_model, self.vocab_size = spec.embed, spec.d_model, vocab_size
        self.token = Table(vocab_size, spec.d_model, "embedding")
        learned = isinstance(spec.embed.position, Learned)
        self.position = Table(spec.max_positions or 0, spec.d_model, "position") if learned else None
        self.norm = norm_layer(spec.embed.norm, spec.d_model)

    def lookup(self, tokens: Tensor) -> Tensor:
        """int64 [B, T] -> [B, T, C]. Raises `ValueError` naming an id outside the vocabulary."""
        try:
            found: Tensor = self.token(tokens)
        except IndexError:
            outside = tokens[(tokens < 0) | (tokens >= self.vocab_size)]
            raise ValueError(
                f"token id {int(outside[0])} is outside the vocabulary of {self.vocab_size} (0 … {self.vocab_size - 1})"
            ) from None
        return found

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Token vectors [B, T, C] at positions [B or 1, T] -> the input of the first block [B, T, C]."""
        if isinstance(self.spec.position, Sinusoidal):
            x = x + sinusoids(self.spec.position, self.d_model, positions, x.dtype)
        if self.position is not None:
            x = x + self._learned(positions)
        x = self.norm(x)
        return F.dropout(x, self.spec.dropout) if self.training and self.spec.dropout else x

    def _learned(self, positions: Tensor) -> Tensor:
        assert self.position is not None
        try:
            found: Tensor = self.position(positions)
        except IndexError:
            rows = self.position.weight.shape[0]
            outside = int(positions[(positions < 0) | (positions >= rows)][0])
            place = "before" if outside < 0 else "past"
            raise ValueError(
                f"position {outside} is {place} the {rows} learned positions (0 … {rows - 1}); "
                "give a shorter sequence, or build the model with a larger max_positions"
            ) from None
        return found


class HeadLayer(nn.Module):
    """Scores over the vocabulary, [B, T, C] -> [B, T, V]. A tied head owns no matrix: it is given the embedding's."""

    def __init__(self, spec: LanguageHead, d_model: int, vocab_size: int, *, tied: bool) -> None:
        super().__init__()
        self.roles: dict[str, Role] = {"weight": "head", "bias": "bias"}
        self.weight = None if tied else nn.Parameter(torch.empty(vocab_size, d_model))
        self.bias = nn.Parameter(torch.empty(vocab_size)) if spec.bias else None

    def forward(self, hidden: Tensor, embedding: Tensor) -> Tensor:
        """Scores by the head's own matrix, or by the embedding's [V, C]."""
        return F.linear(hidden, embedding if self.weight is None else self.weight, self.bias)
