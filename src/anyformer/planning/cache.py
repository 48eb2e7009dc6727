"""Bytes of a KV cache, equal to what the model's own cache allocates."""

from collections.abc import Iterator

from anyformer.errors import UserError
from anyformer.spec.parts import Alibi, Attention, Latent, ModelSpec, RelativeBias, Rope

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
KINDS = ("static", "ring")
POSITION = 8
"""Bytes of the stored position of a token, int64."""


def stored(spec: Attention) -> int:
    """Elements that a layer keeps of a token: keys and values, or the latent and the one turning key."""
    if isinstance(spec, Latent):
        return spec.kv_rank + spec.d_rope
    return spec.n_kv_heads * (spec.d_head + spec.d_value)


def keeps_positions(spec: ModelSpec) -> bool:
    """Whether keys are told apart by stored positions: a bias by distance, or keys that are turned anew each call."""
    blocks = () if spec.decoder is None else spec.decoder.blocks
    positions = [block.attention.position for block in blocks]
    return any(isinstance(p, Alibi | RelativeBias) or (isinstance(p, Rope) and p.by_length) for p in positions)


def _slots(spec: Attention, capacity: int, kind: str) -> int:
    mask = spec.mask
    if kind == "static" or mask.window is None:
        return capacity
    return min(mask.window + mask.sinks, capacity)


def _rooms(spec: ModelSpec, capacity: int, kind: str, source: int) -> Iterator[int]:
    """Elements of a row, layer by layer."""
    for block in () if spec.decoder is None else spec.decoder.blocks:
        yield _slots(block.attention, capacity, kind) * stored(block.attention)
        if block.cross is not None:
            yield source * stored(block.cross)


def cache_bytes(
    spec: ModelSpec, batch: int, capacity: int, kind: str = "static", source: int = 0, dtype: str = "float32"
) -> int:
    """Bytes of a cache for `batch` rows of up to `capacity` tokens; 0 for an encoder alone.

    Args:
        spec: the model.
        batch: rows.
        capacity: tokens a row.
        kind: "static", or "ring", in which layers with a window keep its tokens and the sinks alone.
        source: tokens a row of the encoder's output, whose keys and values cross-attention keeps.
        dtype: of what is stored; positions are int64.

    Raises:
        UserError: an unknown kind or dtype.
    """
    for word, known, what in ((kind, KINDS, "kind of cache"), (dtype, tuple(BYTES), "dtype")):
        if word not in known:
            raise UserError(f"unknown {what}", got=word, expected=", ".join(known))
    positions = POSITION * capacity if keeps_positions(spec) else 0
    return batch * (positions + BYTES[dtype] * sum(_rooms(spec, capacity, kind, source)))


def cache_bytes_per_token(spec: ModelSpec, dtype: str = "float32") -> int:
    """Bytes that a static KV cache takes for each token of each row, the source's aside."""
    return cache_bytes(spec, 1, 1, dtype=dtype)
