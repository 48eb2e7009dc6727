"""One layer: attention, cross-attention and feed-forward, each a branch with three places for a norm."""

from torch import Tensor, nn

from anyformer.nn.attend.shapes import said
from anyformer.nn.attention import GroupedAttention
from anyformer.nn.ffn import feed_forward
from anyformer.nn.frame import Frame, Memory
from anyformer.nn.latent import LatentAttention
from anyformer.nn.layers import norm_layer
from anyformer.nn.moe import MoELayer
from anyformer.nn.tap import AnyTap, Under, see
from anyformer.spec.attention import Latent
from anyformer.spec.parts import BlockSpec, BranchNorms, Parallel


class BranchNormLayers(nn.Module):
    """What stands around a branch f: x = residual(alpha·x + beta·after(f(before(x))))."""

    def __init__(self, spec: BranchNorms, d_model: int, *, own_before: bool = True) -> None:
        super().__init__()
        self.alpha, self.beta = spec.alpha, spec.beta
        self.before = norm_layer(spec.before, d_model) if own_before else nn.Identity()
        self.after = norm_layer(spec.after, d_model)
        self.residual = norm_layer(spec.residual, d_model)

    def kept(self, x: Tensor) -> Tensor:
        """alpha·x."""
        return x if self.alpha == 1.0 else x * self.alpha

    def added(self, branch: Tensor) -> Tensor:
        """beta·after(branch)."""
        after: Tensor = self.after(branch)
        return after if self.beta == 1.0 else after * self.beta


class Block(nn.Module):
    """A block of a specification: [B, T, C] -> [B, T, C], usable inside anyone's own module.

    Without a frame the input is B rows of T real tokens at positions 0 … T−1. `d_source` is the width of what its
    cross-attention reads.
    """

    def __init__(self, spec: BlockSpec, d_model: int, d_source: int | None = None) -> None:
        super().__init__()
        self.spec, self.d_model = spec, d_model
        self.parallel = isinstance(spec.wiring, Parallel)
        self.shared_norm = isinstance(spec.wiring, Parallel) and spec.wiring.shared_norm
        attention = spec.attention
        self.attention = (
            LatentAttention(attention, d_model)
            if isinstance(attention, Latent)
            else GroupedAttention(attention, d_model)
        )
        width = d_model if d_source is None else d_source
        self.cross = None if spec.cross is None else GroupedAttention(spec.cross, d_model, width)
        self.ffn = feed_forward(spec.ffn, d_model)
        self.attention_norms = BranchNormLayers(spec.norms.attention, d_model)
        self.cross_norms = None if spec.cross is None else BranchNormLayers(spec.norms.cross, d_model)
        self.ffn_norms = BranchNormLayers(spec.norms.ffn, d_model, own_before=not self.shared_norm)

    def forward(
        self,
        x: Tensor,
        frame: Frame | None = None,
        layer: int = 0,
        tap: AnyTap | None = None,
        *,
        memory: Tensor | None = None,
    ) -> Tensor:
        """One layer. `frame` carries positions, visibility and cache; `layer` is the cache's shelf.

        `memory` [B, S, d_source] is what cross-attention reads where there is no frame.
        """
        if frame is None:
            if (memory is None) != (self.cross is None):
                remedy = "is given memory=…" if self.cross is not None else "takes no memory"
                raise ValueError(f"a block {'with' if self.cross is not None else 'without'} cross-attention {remedy}")
            self._check(x)
            frame = Frame.of(x, memory=None if memory is None else Memory(memory))
        x = see(tap, "resid_pre", x)
        one, two = self.attention_norms, self.ffn_norms
        read = one.before(x)
        attn_out = see(tap, "attn_out", one.added(self.attention(read, frame, layer, tap)))
        if self.parallel:
            fed = self._fed(read if self.shared_norm else two.before(x), frame, layer)
            mlp_out = see(tap, "mlp_out", two.added(fed))
            return see(tap, "resid_post", one.kept(x) + attn_out + mlp_out)
        x = see(tap, "resid_mid", one.residual(one.kept(x) + attn_out))
        if self.cross is not None and self.cross_norms is not None:
            norms, under = self.cross_norms, None if tap is None else Under(tap, "cross.")
            cross_out = norms.added(self.cross(norms.before(x), frame, layer, under))
            x = see(tap, "resid_cross", norms.residual(norms.kept(x) + see(tap, "cross_out", cross_out)))
        mlp_out = see(tap, "mlp_out", two.added(self._fed(two.before(x), frame, layer)))
        return see(tap, "resid_post", two.residual(two.kept(x) + mlp_out))

    def _check(self, x: Tensor) -> None:
        """Raises `ValueError` for what a block by itself cannot read; within a model the model has checked."""
        if not isinstance(x, Tensor) or x.dim() != 3 or x.shape[2] != self.d_model or not x.is_floating_point():
            raise ValueError(f"a block reads floating-point numbers [B, T, {self.d_model}]; got {said(x)}")

    def _fed(self, x: Tensor, frame: Frame, layer: int) -> Tensor:
        fed: Tensor = self.ffn(x, frame.real, frame.routing) if isinstance(self.ffn, MoELayer) else self.ffn(x)
        return fed
