"""A stack: embedding, blocks, final norm."""

from typing import cast

from torch import Tensor, nn

from anyformer.nn.attention import Table
from anyformer.nn.block import Block
from anyformer.nn.cache import Layout
from anyformer.nn.embed import EmbedLayer
from anyformer.nn.frame import Frame
from anyformer.nn.layers import norm_layer
from anyformer.nn.tap import Tap, Under, see
from anyformer.spec.parts import StackSpec
from anyformer.spec.positions import Alibi, RelativeBias, Rope


class Stack(nn.Module):
    """Embedding, blocks and final norm.

    `blocks[i]` is None where layer i uses an earlier layer's parameters; `layer(i)` is the block that computes it.
    `prefix` stands before the names of its activation sites.
    """

    def __init__(
        self,
        spec: StackSpec,
        vocab_size: int,
        *,
        tied: bool = False,
        d_source: int | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__()
        self.spec, self.prefix = spec, prefix
        self.embed = EmbedLayer(spec, vocab_size, tied=tied)
        shared = spec.shared_bias
        self.relative_bias = None if shared is None else Table(shared[0].n_buckets, shared[1], "position")
        self.blocks = nn.ModuleList()
        for index, block in enumerate(spec.blocks):
            own = spec.owner(index) == index
            self.blocks.add_module(str(index), Block(block, spec.d_model, d_source) if own else None)
        self.final_norm = norm_layer(spec.final_norm, spec.d_model)
        self.keeps = self._keeps()
        """What a cache for this stack keeps, whatever its kind, as values that compare."""

    def _keeps(self) -> tuple[object, ...]:
        layers = [(self.layer(index), block.attention.mask) for index, block in enumerate(self.spec.blocks)]
        kept = [(b.attention.stores(), b.cross and b.cross.stores(), mask.window, mask.sinks) for b, mask in layers]
        return (self.needs_positions, *kept)

    def layer(self, index: int) -> Block:
        """The block that computes a layer."""
        return cast(Block, self.blocks[self.spec.owner(index)])

    def layers(self) -> list[Block]:
        """The block of every layer, first to last; a shared one appears for each layer that uses it."""
        return [self.layer(index) for index in range(self.spec.n_layers)]

    def forward(self, x: Tensor, frame: Frame, types: Tensor | None, tap: Tap | None) -> Tensor:
        """Token vectors [B, T, E] -> hidden states [B, T, C]."""
        prefix = self.prefix
        x = see(tap, f"{prefix}embed", self.embed(x, frame.positions, types))
        for index in range(self.spec.n_layers):
            under = None if tap is None else Under(tap, f"{prefix}blocks.{index}.")
            x = self.layer(index)(x, frame, index, under)
        return see(tap, f"{prefix}final_norm", self.final_norm(x))

    def layouts(self, kind: str) -> list[Layout]:
        """What a cache keeps for each layer; of kind "ring" a layer with a window keeps that alone."""
        found: list[Layout] = []
        for index, block in enumerate(self.spec.blocks):
            mask, stores = block.attention.mask, self.layer(index).attention.stores()
            ring = kind == "ring" and mask.window is not None
            found.append(Layout(stores, mask.window, mask.sinks) if ring else Layout(stores))
        return found

    @property
    def shared_table(self) -> Tensor | None:
        """The relative table [n_buckets, H] that layers share, where there is one."""
        return None if self.relative_bias is None else self.relative_bias.weight

    @property
    def needs_positions(self) -> bool:
        """Whether a layer needs the position of every stored key."""
        positions = [block.attention.position for block in self.spec.blocks]
        return any(isinstance(p, Alibi | RelativeBias) or (isinstance(p, Rope) and p.by_length) for p in positions)
