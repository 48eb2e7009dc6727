"""Attention as layers use it: projections, norms on queries and keys, rotation, cache (Ainslie et al. 2023)."""

import torch
from torch import Tensor, nn

from anyformer.nn.attend import Backend, attend
from anyformer.nn.attend.call import checked
from anyformer.nn.attend.reference import mixed, weights
from anyformer.nn.frame import Attended, Frame
from anyformer.nn.layers import Linear, norm_layer
from anyformer.nn.position import rotate
from anyformer.nn.precision import exact
from anyformer.nn.roles import Role
from anyformer.nn.tap import AnyTap, see
from anyformer.spec.attention import Attention, Grouped
from anyformer.spec.norms import QKNorm
from anyformer.spec.positions import RelativeBias, Rope


class Table(nn.Module):
    """Rows of vectors, [N, C], looked up by number."""

    def __init__(self, n_rows: int, width: int, role: Role) -> None:
        super().__init__()
        self.roles: dict[str, Role] = {"weight": role}
        self.keepable = role == "embedding"
        self.weight = nn.Parameter(torch.empty(n_rows, width))

    def forward(self, ids: Tensor) -> Tensor:
        """int64 […] -> […, C]."""
        return nn.functional.embedding(ids, self.weight)


class Scores(nn.Module):
    """What every kind of attention does once queries, keys and values are there; the base of their modules."""

    def __init__(self, spec: Attention) -> None:
        super().__init__()
        self.roles: dict[str, Role] = {"sink": "bias"}
        self.scores, self.out_rate = spec, spec.out_dropout
        self.backend: Backend = "auto"
        position = spec.position
        own = isinstance(position, RelativeBias) and not position.shared
        self.sink = nn.Parameter(torch.empty(spec.n_heads)) if spec.sink_logit else None
        self.relative_bias = Table(position.n_buckets, spec.n_heads, "position") if own else None  # type: ignore[union-attr]

    def mix(self, q: Tensor, k: Tensor, v: Tensor, attended: Attended, frame: Frame, tap: AnyTap | None) -> Tensor:
        """Values mixed by attention: q [B, T, H, D], k [B, S, G, D], v [B, S, G, Dv] -> [B, T, H, Dv].

        The pattern as a tap leaves it is the one that mixes the values, on the reference backend.
        """
        spec = self.scores
        table = None if self.relative_bias is None else self.relative_bias.weight
        bias = frame.bias(spec.position, spec.n_heads, table, attended, exact(q.dtype))
        dropout = spec.dropout if self.training else 0.0
        if tap is not None and tap.wants("pattern"):
            call = checked(q, k, v, attended.visible, bias, spec.scale, spec.softcap, self.sink, dropout)
            return mixed(call, tap("pattern", weights(call)))
        return attend(
            q,
            k,
            v,
            visible=attended.visible,
            bias=bias,
            scale=spec.scale,
            softcap=spec.softcap,
            sinks=self.sink,
            dropout=dropout,
            backend=self.backend,
        )

    def dropped(self, out: Tensor) -> Tensor:
        """The dropout after the last projection."""
        return nn.functional.dropout(out, self.out_rate) if self.training and self.out_rate else out


class QKNormLayer(nn.Module):
    """A norm on [B, T, H, D], over D or over H·D, with one weight for all heads or one for each."""

    def __init__(self, spec: QKNorm, n_heads: int, d_head: int) -> None:
        super().__init__()
        self.over_head = spec.over == "head"
        heads = n_heads if spec.weights == "per_head" else None
        self.norm = norm_layer(spec.norm, d_head if self.over_head else n_heads * d_head, heads=heads)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        if self.over_head:
            normed: Tensor = self.norm(x)
            return normed
        return self.norm(x.flatten(-2)).view_as(x)  # type: ignore[no-any-return]


class GroupedAttention(Scores):
    """Projections to H query heads and G key/value heads, attention, and the projection back to C.

    Cross-attention is the same with keys and values of the encoder's output, of width `d_source`.
    """

    def __init__(self, spec: Grouped, d_model: int, d_source: int | None = None) -> None:
        super().__init__(spec)
        self.spec, self.crosses = spec, d_source is not None
        h, g, d, dv = spec.n_heads, spec.n_kv_heads, spec.d_head, spec.d_value
        read = d_model if d_source is None else d_source
        self.q = Linear(d_model, h * d, bias=spec.qkv_bias, role="hidden")
        self.k = Linear(read, g * d, bias=spec.qkv_bias, role="hidden")
        self.v = Linear(read, g * dv, bias=spec.qkv_bias, role="hidden")
        self.out = Linear(h * dv, d_model, bias=spec.out_bias, role="residual")
        self.q_norm = None if spec.qk_norm is None else QKNormLayer(spec.qk_norm, h, d)
        self.k_norm = None if spec.qk_norm is None else QKNormLayer(spec.qk_norm, g, d)

    def stores(self) -> dict[str, tuple[int, ...]]:
        """What a cache keeps of one token."""
        g = self.spec.n_kv_heads
        return {"k": (g, self.spec.d_head), "v": (g, self.spec.d_value)}

    def forward(self, x: Tensor, frame: Frame, layer: int = 0, tap: AnyTap | None = None) -> Tensor:
        """[B, T, C] -> [B, T, C]. `layer` is the cache's shelf for this module."""
        b, t, _ = x.shape
        q = self._queries(x, frame, tap)
        if self.crosses:
            attended = frame.crossed(layer, lambda memory: self._keys(memory, frame, tap))
        else:
            attended = frame.attended(layer, self.spec.mask, self._keys(x, frame, tap))
        k, v = attended.kept["k"], attended.kept["v"]
        if not self.crosses and self._turns_late(frame):
            k = self._turned(k, frame, attended)
        z = see(tap, "z", self.mix(q, k, v, attended, frame, tap))
        return self.dropped(self.out(z.reshape(b, t, self.spec.n_heads * self.spec.d_value)))

    def _queries(self, x: Tensor, frame: Frame, tap: AnyTap | None) -> Tensor:
        q = see(tap, "q", self.q(x).view(*x.shape[:2], self.spec.n_heads, self.spec.d_head))
        return self._placed(self._clipped(q), self.q_norm, frame, late=False)

    def _keys(self, x: Tensor, frame: Frame, tap: AnyTap | None) -> dict[str, Tensor]:
        g = self.spec.n_kv_heads
        k = see(tap, "k", self.k(x).view(*x.shape[:2], g, self.spec.d_head))
        v = see(tap, "v", self.v(x).view(*x.shape[:2], g, self.spec.d_value))
        return {
            "k": self._placed(self._clipped(k), self.k_norm, frame, late=self._turns_late(frame)),
            "v": self._clipped(v),
        }

    def _clipped(self, x: Tensor) -> Tensor:
        return x if self.spec.clip is None else x.clamp(-self.spec.clip, self.spec.clip)

    def _turns_late(self, frame: Frame) -> bool:
        """Whether stored keys are turned only when they are attended over: their angles follow the row's length."""
        position = self.spec.position
        return frame.cache is not None and isinstance(position, Rope) and position.by_length

    def _placed(self, x: Tensor, norm: nn.Module | None, frame: Frame, *, late: bool) -> Tensor:
        """Norm and rotation, in the order of the specification; with `late` what comes before the rotation alone."""
        position, qk_norm = self.spec.position, self.spec.qk_norm
        if norm is not None and qk_norm is not None and qk_norm.order == "before":
            x = norm(x)
        if late:
            return x
        if isinstance(position, Rope):
            x = rotate(x, frame.rotation(position, self.spec.d_head, x.dtype), position.layout)
        if norm is not None and qk_norm is not None and qk_norm.order == "after":
            x = norm(x)
        return x

    def _turned(self, k: Tensor, frame: Frame, attended: Attended) -> Tensor:
        position, qk_norm = self.spec.position, self.spec.qk_norm
        assert isinstance(position, Rope)
        tables = frame.rotation_of_keys(position, self.spec.d_head, k.dtype, attended)
        k = rotate(k, tables, position.layout)
        if self.k_norm is not None and qk_norm is not None and qk_norm.order == "after":
            k = self.k_norm(k)
        return k
