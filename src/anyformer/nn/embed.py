"""Tokens to vectors: the token table, positions, token types, norm, and the projection of a factorised embedding."""

import torch.nn.functional as F
from torch import Tensor, nn

from anyformer.nn.attention import Table
from anyformer.nn.layers import Linear, norm_layer
from anyformer.nn.position import sinusoids
from anyformer.nn.quantised import Quantised
from anyformer.spec.parts import StackSpec
from anyformer.spec.positions import Learned, Sinusoidal


class EmbedLayer(nn.Module):
    """norm(scale · token + position + type), dropout, projection. A tied table owns no parameter: it is given one."""

    def __init__(self, spec: StackSpec, vocab_size: int, *, tied: bool = False) -> None:
        super().__init__()
        self.spec, self.width, self.vocab_size = spec.embed, spec.d_embed, vocab_size
        embed, width = spec.embed, spec.d_embed
        self.token = None if tied else Table(vocab_size, width, "embedding")
        rows = (spec.max_positions or 0) + embed.position.offset if isinstance(embed.position, Learned) else 0
        self.position = Table(rows, width, "position") if rows else None
        self.types = Table(embed.types, width, "position") if embed.types else None
        self.norm = norm_layer(embed.norm, width)
        factor = embed.factor
        self.factor = None if factor is None else Linear(width, spec.d_model, bias=factor.bias, role="hidden")

    def lookup(self, tokens: Tensor, table: Tensor | Quantised | None = None) -> Tensor:
        """int64 [B, T] -> [B, T, width], in the layer's own table or, where it is tied, in `table` [V, width].

        Raises `ValueError` naming an id outside the vocabulary.
        """
        if table is None:
            assert self.token is not None
            table = self.token.weight
        try:
            return table.lookup(tokens) if isinstance(table, Quantised) else F.embedding(tokens, table)
        except IndexError:
            outside = tokens[(tokens < 0) | (tokens >= self.vocab_size)]
            raise ValueError(
                f"token id {int(outside[0])} is outside the vocabulary of {self.vocab_size} (0 … {self.vocab_size - 1})"
            ) from None

    def forward(self, x: Tensor, positions: Tensor, types: Tensor | None = None) -> Tensor:
        """Token vectors [B, T, width] at positions [B or 1, T] -> the input of the first block [B, T, C]."""
        if self.spec.scale != 1.0:
            x = x * self.spec.scale
        if isinstance(self.spec.position, Sinusoidal):
            x = x + sinusoids(self.spec.position, self.width, positions, x.dtype)
        if self.position is not None:
            x = x + self._learned(positions)
        x = self._typed(x, types)
        x = self.norm(x)
        if self.training and self.spec.dropout:
            x = F.dropout(x, self.spec.dropout)
        if self.factor is None:
            return x
        projected: Tensor = self.factor(x)
        return projected

    def _typed(self, x: Tensor, types: Tensor | None) -> Tensor:
        if self.types is None:
            if types is not None:
                raise ValueError("this model has no token types; embed.types = 2 gives a specification two of them")
            return x
        if types is None:
            return x + self.types.weight[0]
        try:
            found: Tensor = self.types(types)
        except IndexError:
            n = self.spec.types
            outside = int(types[(types < 0) | (types >= n)][0])
            raise ValueError(f"token type {outside} is outside the {n} types (0 … {n - 1})") from None
        return x + found

    def _learned(self, positions: Tensor) -> Tensor:
        assert self.position is not None
        assert isinstance(self.spec.position, Learned)
        offset = self.spec.position.offset
        rows = self.position.weight.shape[0] - offset
        # A position before 0 would read the rows that the offset skips.
        at = positions.masked_fill(positions < 0, -offset - 1) + offset if offset else positions
        try:
            found: Tensor = self.position(at)
        except IndexError:
            outside = int(positions[(positions < 0) | (positions >= rows)][0])
            place = "before" if outside < 0 else "past"
            raise ValueError(
                f"position {outside} is {place} the {rows} learned positions (0 … {rows - 1}); "
                "give a shorter sequence, or build the model with a larger max_positions"
            ) from None
        return found
