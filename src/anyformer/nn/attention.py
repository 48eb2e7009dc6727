"""Grouped-query attention with projections, norms on queries and keys, rotation and cache (Ainslie et al. 2023)."""

from torch import Tensor, nn

from anyformer.nn.attend import Backend, attend
from anyformer.nn.attend.call import checked
from anyformer.nn.attend.reference import mixed, weights
from anyformer.nn.frame import Frame
from anyformer.nn.layers import Linear, norm_layer
from anyformer.nn.position import rotate
from anyformer.nn.tap import AnyTap, see
from anyformer.spec.parts import Grouped, QKNorm, Rope


class QKNormLayer(nn.Module):
    """A norm on [B, T, H, D], over D or over H·D."""

    def __init__(self, spec: QKNorm, n_heads: int, d_head: int) -> None:
        super().__init__()
        self.over_head = spec.over == "head"
        self.norm = norm_layer(spec.norm, d_head if self.over_head else n_heads * d_head)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        if self.over_head:
            normed: Tensor = self.norm(x)
            return normed
        return self.norm(x.flatten(-2)).view_as(x)  # type: ignore[no-any-return]


class GroupedAttention(nn.Module):
    """Projections to H query heads and G key/value heads, attention, and the projection back to C."""

    def __init__(self, spec: Grouped, d_model: int) -> None:
        super().__init__()
        self.spec = spec
        self.backend: Backend = "auto"
        h, g, d, dv = spec.n_heads, spec.n_kv_heads, spec.d_head, spec.d_value
        self.q = Linear(d_model, h * d, bias=spec.qkv_bias, role="hidden")
        self.k = Linear(d_model, g * d, bias=spec.qkv_bias, role="hidden")
        self.v = Linear(d_model, g * dv, bias=spec.qkv_bias, role="hidden")
        self.out = Linear(h * dv, d_model, bias=spec.out_bias, role="residual")
        self.q_norm = None if spec.qk_norm is None else QKNormLayer(spec.qk_norm, h, d)
        self.k_norm = None if spec.qk_norm is None else QKNormLayer(spec.qk_norm, g, d)
        self.out_dropout = nn.Dropout(spec.out_dropout) if spec.out_dropout else None

    def stores(self) -> dict[str, tuple[int, ...]]:
        """What a cache keeps of one token."""
        g = self.spec.n_kv_heads
        return {"k": (g, self.spec.d_head), "v": (g, self.spec.d_value)}

    def forward(self, x: Tensor, frame: Frame, layer: int = 0, tap: AnyTap | None = None) -> Tensor:
        """[B, T, C] -> [B, T, C]. `layer` is the cache's shelf for this module."""
        b, t, _ = x.shape
        spec = self.spec
        q = see(tap, "q", self.q(x).view(b, t, spec.n_heads, spec.d_head))
        k = see(tap, "k", self.k(x).view(b, t, spec.n_kv_heads, spec.d_head))
        v = see(tap, "v", self.v(x).view(b, t, spec.n_kv_heads, spec.d_value))
        q, k = self._placed(q, k, frame)
        if frame.cache is not None and frame.step is not None:
            kept = frame.cache.extend(layer, frame.step, {"k": k, "v": v})
            k, v = kept["k"], kept["v"]
        dropout = spec.dropout if self.training else 0.0
        if tap is not None and tap.wants("pattern"):
            z = self._with_pattern(q, k, v, frame, dropout, tap)
        else:
            z = attend(q, k, v, visible=frame.visible, dropout=dropout, backend=self.backend)
        z = see(tap, "z", z)
        out: Tensor = self.out(z.reshape(b, t, spec.n_heads * spec.d_value))
        return out if self.out_dropout is None else self.out_dropout(out)

    def _placed(self, q: Tensor, k: Tensor, frame: Frame) -> tuple[Tensor, Tensor]:
        """Norm and rotation of queries and keys, in the order of the specification."""
        position, qk_norm = self.spec.position, self.spec.qk_norm
        if self.q_norm is not None and self.k_norm is not None and qk_norm is not None and qk_norm.order == "before":
            q, k = self.q_norm(q), self.k_norm(k)
        if isinstance(position, Rope):
            tables = frame.rotation(position, self.spec.d_head, q.dtype)
            q, k = rotate(q, tables, position.layout), rotate(k, tables, position.layout)
        if self.q_norm is not None and self.k_norm is not None and qk_norm is not None and qk_norm.order == "after":
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k

    def _with_pattern(self, q: Tensor, k: Tensor, v: Tensor, frame: Frame, dropout: float, tap: AnyTap) -> Tensor:
        """Attention whose weights a tap sees; the pattern as the tap leaves it is the one that mixes the values."""
        call = checked(q, k, v, frame.visible, None, None, None, None, dropout)
        return mixed(call, tap("pattern", weights(call)))
