"""Multi-head latent attention: keys and values of all heads from one small vector a token (DeepSeek-V2 2024, 2.1).

With c = norm(W_kv x) [r] a head's key is [W_k c ‖ k_rope] and its value W_v c (eq. 9–19). A cache keeps c and k_rope,
the turning key of all heads: r + d_rope numbers a token. They are attended over in one of two forms, equal in value:

- unfolded: keys and values of every head are computed, as in training;
- absorbed: since q·(W_k c) = (W_kᵀ q)·c, queries go into the latent space and meet one key [c ‖ k_rope] for all heads,
  whose value is c; W_v is applied to what comes out. Stored tokens are never unfolded.
"""

import torch
from torch import Tensor

from anyformer.nn.attention import Scores
from anyformer.nn.frame import Attended, Frame
from anyformer.nn.layers import Linear, norm_layer
from anyformer.nn.position import rotate
from anyformer.nn.tap import AnyTap, see
from anyformer.spec.attention import Latent
from anyformer.spec.positions import Rope


def absorbs(spec: Latent, n_queries: int, n_keys: int) -> bool:
    """Whether the absorbed form takes fewer multiplications for T new tokens over S keys, a head and row.

    unfolded: S·r·(d_nope + d_value) for keys and values, T·S·(d_nope + d_rope + d_value) for scores and mixing;
    absorbed: T·r·(d_nope + d_value) for queries and outputs, T·S·2·(r + d_rope) for scores and mixing.
    """
    maps = spec.kv_rank * (spec.d_nope + spec.d_value)
    unfolded = n_keys * maps + n_queries * n_keys * (spec.d_head + spec.d_value)
    return n_queries * maps + n_queries * n_keys * 2 * (spec.kv_rank + spec.d_rope) < unfolded


class LatentAttention(Scores):
    """Projections down to the latents and up to heads, attention, and the projection back to C."""

    def __init__(self, spec: Latent, d_model: int) -> None:
        super().__init__(spec)
        self.spec = spec
        h, r = spec.n_heads, spec.kv_rank
        if spec.q_rank is None:
            self.q = Linear(d_model, h * spec.d_head, bias=False, role="hidden")
        else:
            self.q_down = Linear(d_model, spec.q_rank, bias=spec.bias, role="hidden")
            self.q_norm = norm_layer(spec.norm, spec.q_rank)
            self.q_up = Linear(spec.q_rank, h * spec.d_head, bias=False, role="hidden")
        self.kv_down = Linear(d_model, r + spec.d_rope, bias=spec.bias, role="hidden")
        self.kv_norm = norm_layer(spec.norm, r)
        # The absorbed form multiplies with these from the other side.
        self.k_up = Linear(r, h * spec.d_nope, bias=False, role="hidden", keepable=False)
        self.v_up = Linear(r, h * spec.d_value, bias=False, role="hidden", keepable=False)
        self.out = Linear(h * spec.d_value, d_model, bias=spec.out_bias, role="residual")

    def stores(self) -> dict[str, tuple[int, ...]]:
        """What a cache keeps of one token."""
        turning = {"k_rope": (self.spec.d_rope,)} if self.spec.d_rope else {}
        return {"latent": (self.spec.kv_rank,), **turning}

    def forward(self, x: Tensor, frame: Frame, layer: int = 0, tap: AnyTap | None = None) -> Tensor:
        """[B, T, C] -> [B, T, C]. `layer` is the cache's shelf for this module.

        A tap sees queries, keys and values of the call's tokens before rotation, [B, T, H, …], and at `latent` what a
        cache stores of them, [B, T, r].

        Raises:
            ValueError: a tap changes keys or values while there is a cache, which has no place for them.
        """
        spec = self.spec
        q = see(tap, "q", self._queries(x))
        latent, k_rope = self.kv_down(x).split([spec.kv_rank, spec.d_rope], dim=-1)
        latent = see(tap, "latent", self.kv_norm(latent))
        seen = self._seen(latent, k_rope, frame, tap)
        q_nope, q_rope = q[..., : spec.d_nope], self._turned(q[..., spec.d_nope :], frame)
        if seen is not None and frame.cache is None:
            k, v = seen
            k = torch.cat([k[..., : spec.d_nope], self._turned(k[..., spec.d_nope :], frame)], -1)
            attended = frame.attended(layer, spec.mask, {})
            z = self.mix(torch.cat([q_nope, q_rope], -1), k, v, attended, frame, tap)
        else:
            attended = frame.attended(layer, spec.mask, self._stored(latent, k_rope, frame))
            z = self._mixed(q_nope, q_rope, attended, frame, tap)
        z = see(tap, "z", z)
        return self.dropped(self.out(z.flatten(-2)))

    def _queries(self, x: Tensor) -> Tensor:
        """[B, T, H, d_nope + d_rope] before rotation."""
        q = self.q(x) if self.spec.q_rank is None else self.q_up(self.q_norm(self.q_down(x)))
        return q.unflatten(-1, (self.spec.n_heads, self.spec.d_head))  # type: ignore[no-any-return]

    def _unfolded(self, latent: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of every head, [B, S, H, d_nope + d_rope] and [B, S, H, d_value]."""
        spec = self.spec
        k = self.k_up(latent).unflatten(-1, (spec.n_heads, spec.d_nope))
        v = self.v_up(latent).unflatten(-1, (spec.n_heads, spec.d_value))
        if not spec.d_rope:
            return k, v
        shared = k_rope.to(k.dtype).unsqueeze(-2).expand(*k.shape[:-1], spec.d_rope)
        return torch.cat([k, shared], -1), v

    def _seen(self, latent: Tensor, k_rope: Tensor, frame: Frame, tap: AnyTap | None) -> tuple[Tensor, Tensor] | None:
        """The call's keys and values before rotation as a tap leaves them, where it asks for them."""
        if tap is None or not (tap.wants("k") or tap.wants("v")):
            return None
        made = self._unfolded(latent, k_rope)
        k, v = tap("k", made[0]), tap("v", made[1])
        if frame.cache is not None and (k is not made[0] or v is not made[1]):
            raise ValueError(
                "a tap changes keys or values of latent attention, and the cache keeps only their latent; "
                "change the site `latent` instead, or run without a cache"
            )
        return k, v

    def _turns_late(self, frame: Frame) -> bool:
        """Whether stored keys are turned only when they are attended over: their angles follow the row's length."""
        position = self.spec.position
        return frame.cache is not None and isinstance(position, Rope) and position.by_length

    def _turned(self, x: Tensor, frame: Frame, attended: Attended | None = None) -> Tensor:
        """[B, T, H, d_rope] turned at the call's positions, or [B, S, H, d_rope] at those of what is attended over."""
        position, d = self.spec.position, self.spec.d_rope
        if not isinstance(position, Rope):
            return x
        tables = (
            frame.rotation(position, d, x.dtype)
            if attended is None
            else frame.rotation_of_keys(position, d, x.dtype, attended)
        )
        return rotate(x, tables, position.layout)

    def _stored(self, latent: Tensor, k_rope: Tensor, frame: Frame) -> dict[str, Tensor]:
        """What of the call's tokens goes to the cache."""
        if not self.spec.d_rope:
            return {"latent": latent}
        if not self._turns_late(frame):
            k_rope = self._turned(k_rope.unsqueeze(-2), frame).squeeze(-2)
        return {"latent": latent, "k_rope": k_rope}

    def _mixed(self, q_nope: Tensor, q_rope: Tensor, attended: Attended, frame: Frame, tap: AnyTap | None) -> Tensor:
        """What each head takes from all that is attended over, [B, T, H, d_value]."""
        spec, latent = self.spec, attended.kept["latent"]
        k_rope = attended.kept.get("k_rope", latent[..., :0])
        if spec.d_rope and self._turns_late(frame):
            k_rope = self._turned(k_rope.unsqueeze(-2), frame, attended).squeeze(-2)
        continues = frame.step is not None and not frame.step.fresh
        if not (continues and absorbs(spec, q_nope.shape[1], latent.shape[1])):
            k, v = self._unfolded(latent, k_rope)
            return self.mix(torch.cat([q_nope, q_rope], -1), k, v, attended, frame, tap)
        into = self.k_up.weight.view(spec.n_heads, spec.d_nope, spec.kv_rank)
        out_of = self.v_up.weight.view(spec.n_heads, spec.d_value, spec.kv_rank)
        q = torch.cat([torch.einsum("bthn,hnr->bthr", q_nope, into), q_rope], -1)
        k = torch.cat([latent, k_rope], -1).unsqueeze(-2)
        # The key is its own value, of which the latent part counts: fused kernels take equal widths, and with unequal
        # ones F.scaled_dot_product_attention copied the key for every head (17 times as slow for 16 heads on the CPU).
        z = self.mix(q, k, k, attended, frame, tap)[..., : spec.kv_rank]
        return torch.einsum("bthr,hvr->bthv", z, out_of)
