"""Models over the wider space, made from parts, at sizes that hide nothing."""

import torch
from helpers import randomise

from anyformer.nn.model import build
from anyformer.spec.attention import Bidirectional, Causal, Grouped, Latent, Prefix
from anyformer.spec.ffn import Dense
from anyformer.spec.norms import RMSNorm
from anyformer.spec.parts import BlockSpec, BranchNorms, ModelSpec, Norms, StackSpec
from anyformer.spec.positions import (
    Alibi,
    DynamicNTKScaling,
    LongRopeScaling,
    NoPosition,
    RelativeBias,
    Rope,
)

PRE = BranchNorms(before=RMSNorm())

POSITIONS = {
    "none": NoPosition(),
    "rope": Rope(),
    "alibi": Alibi(),
    "shared": RelativeBias(n_buckets=8, max_distance=9),
    "own": RelativeBias(n_buckets=8, max_distance=9, shared=False),
    "longrope": Rope(scaling=LongRopeScaling(original=30, short=(1.0, 2.0), long=(3.0, 4.0))),
    "dynamic": Rope(scaling=DynamicNTKScaling(factor=2.0, original=30)),
}

MASKS = {
    "causal": Causal(),
    "window": Causal(window=4),
    "sinks": Causal(window=4, sinks=2),
    "prefix": Prefix(),
    "prefix window": Prefix(window=5),
}


def two_sided(position):
    """The same encoding for layers that see both sides."""
    if isinstance(position, RelativeBias):
        return position.model_copy(update={"bidirectional": True})
    return position


def block(position="rope", mask="causal", *, cross=False, d_ff=17, **options):
    """One pre-norm layer of six query and two key/value heads."""
    mask = MASKS.get(mask, mask)
    position = POSITIONS.get(position, position) if isinstance(position, str) else position
    if not isinstance(mask, Causal):
        position = two_sided(position)
    attention = Grouped(n_heads=6, n_kv_heads=2, d_head=4, d_value=3, position=position, mask=mask, **options)
    crossing = Grouped(
        n_heads=3, n_kv_heads=1, d_head=5, d_value=4, position=NoPosition(), mask=Bidirectional(), qkv_bias=True
    )
    return BlockSpec(
        attention=attention,
        cross=crossing if cross else None,
        ffn=Dense(activation="gelu", d_ff=d_ff),
        norms=Norms(attention=PRE, cross=PRE if cross else BranchNorms(), ffn=PRE),
    )


def latent_block(position="rope", mask="causal", **options):
    """One pre-norm layer of latent attention."""
    position = POSITIONS[position]
    mask = MASKS.get(mask, mask)
    attention = Latent(
        n_heads=3,
        q_rank=7,
        kv_rank=6,
        d_nope=5,
        d_rope=4 if isinstance(position, Rope) else 0,
        d_value=3,
        position=position,
        mask=mask,
        **options,
    )
    return BlockSpec(attention=attention, ffn=Dense(activation="silu", d_ff=17), norms=Norms(attention=PRE, ffn=PRE))


def decoder(*blocks, d_model=10, **options):
    return ModelSpec(vocab_size=19, decoder=StackSpec(d_model=d_model, blocks=blocks, final_norm=RMSNorm(), **options))


def translator(position="shared", mask="causal", **options):
    """An encoder of width 14 beside a decoder of width 10."""
    sees_both = Bidirectional()
    encoder = StackSpec(
        d_model=14,
        blocks=(block(position, sees_both), block(position, Bidirectional(window=4))),
        final_norm=RMSNorm(),
    )
    own = StackSpec(
        d_model=10, blocks=(block(position, mask, cross=True), block(position, cross=True)), final_norm=RMSNorm()
    )
    return ModelSpec(vocab_size=19, encoder=encoder, decoder=own, **options)


def made_of(spec, *, seed=0, dtype="float64"):
    return randomise(build(spec, dtype=dtype), seed)


def tokens(batch=2, length=17, seed=1):
    return torch.randint(0, 19, (batch, length), generator=torch.Generator().manual_seed(seed))


SPLITS = ((17,), (5, 12), (1,) * 17, (4, 1, 1, 11), (9, 3, 1, 1, 3))


def by_parts(model, x, sizes, kind, *, capacity=40, first=None):
    """Logits of the same tokens in chunks against a cache; `first` goes with the first call."""
    cache = model.new_cache(x.shape[0], capacity, kind)
    parts, start = [], 0
    for index, size in enumerate(sizes):
        parts.append(model(x[:, start : start + size], cache=cache, **(first or {} if index == 0 else {})))
        start += size
    return torch.cat(parts, 1), cache
