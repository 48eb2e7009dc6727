"""One layer: attention and feed-forward, each a branch with three places for a norm, in series or side by side."""

from torch import Tensor, nn

from anyformer.nn.attention import GroupedAttention
from anyformer.nn.ffn import feed_forward
from anyformer.nn.frame import Frame
from anyformer.nn.layers import norm_layer
from anyformer.nn.tap import AnyTap, see
from anyformer.spec.parts import BlockSpec, BranchNorms, Parallel


class BranchNormLayers(nn.Module):
    """The three norms of a branch: x = residual(x + after(f(before(x))))."""

    def __init__(self, spec: BranchNorms, d_model: int, *, own_before: bool = True) -> None:
        super().__init__()
        self.before = norm_layer(spec.before, d_model) if own_before else nn.Identity()
        self.after = norm_layer(spec.after, d_model)
        self.residual = norm_layer(spec.residual, d_model)


class Block(nn.Module):
    """A block of a specification: [B, T, C] -> [B, T, C], usable inside anyone's own module.

    Without a frame the input is B rows of T real tokens at positions 0 … T−1.
    """

    def __init__(self, spec: BlockSpec, d_model: int) -> None:
        super().__init__()
        self.spec = spec
        self.parallel = isinstance(spec.wiring, Parallel)
        shared = isinstance(spec.wiring, Parallel) and spec.wiring.shared_norm
        self.attention = GroupedAttention(spec.attention, d_model)
        self.ffn = feed_forward(spec.ffn, d_model)
        self.attention_norms = BranchNormLayers(spec.norms.attention, d_model)
        self.ffn_norms = BranchNormLayers(spec.norms.ffn, d_model, own_before=not shared)
        self.shared_norm = shared

    def forward(self, x: Tensor, frame: Frame | None = None, layer: int = 0, tap: AnyTap | None = None) -> Tensor:
        """One layer. `frame` carries positions, visibility and cache; `layer` is the cache's shelf."""
        if frame is None:
            frame = Frame.of(x)
        x = see(tap, "resid_pre", x)
        one, two = self.attention_norms, self.ffn_norms
        read = one.before(x)
        attn_out = see(tap, "attn_out", one.after(self.attention(read, frame, layer, tap)))
        if self.parallel:
            fed = self.ffn(read if self.shared_norm else two.before(x))
            mlp_out = see(tap, "mlp_out", two.after(fed))
            return see(tap, "resid_post", x + attn_out + mlp_out)
        x = see(tap, "resid_mid", one.residual(x + attn_out))
        mlp_out = see(tap, "mlp_out", two.after(self.ffn(two.before(x))))
        return see(tap, "resid_post", two.residual(x + mlp_out))
