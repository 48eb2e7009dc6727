"""FLOPs of a forward pass. A multiplication and an addition are two; only matrix products count."""

from dataclasses import dataclass

from anyformer.planning.weights import n_scores
from anyformer.spec.parts import (
    Attention,
    BlockSpec,
    FeedForward,
    Gated,
    Grouped,
    LanguageHead,
    Mask,
    ModelSpec,
    MoE,
    Prefix,
    SequenceHead,
    SingleFeedForward,
    StackSpec,
)


@dataclass(frozen=True)
class Lengths:
    """What one row of a batch holds: new tokens, source tokens, and how many of the first tokens all may see."""

    context: int
    source: int = 0
    prefix: int = 0


@dataclass(frozen=True)
class Flops:
    """FLOPs of one row: all weight products, all score and mixing products, and the share of these a mask lets see."""

    products: int
    scores: int
    visible: int


def _ramp(n: int, cap: int) -> int:
    """Σ min(x, cap) for x = 1 … n."""
    rising = max(0, min(n, cap))
    return rising * (rising + 1) // 2 + max(0, n - rising) * cap


def visible_pairs(mask: Mask, n: int, prefix: int = 0) -> int:
    """The (query, key) pairs of n tokens that a mask lets see, each exactly counted."""
    window, sinks = mask.window or n, mask.sinks if mask.window else 0
    # Behind the query: those in the window, and of the keys past it the first `sinks`.
    seen = _ramp(n, window) + _ramp(n - window, sinks)
    if mask.kind == "causal":
        return seen
    # Ahead of it, where j of the keys are all of the row's, or the prefix.
    ahead = min(prefix, n) if isinstance(mask, Prefix) else n
    return seen + _ramp(ahead - 1, window - 1) + _ramp(min(sinks, ahead) - window, n)


def _single(spec: SingleFeedForward, c: int) -> int:
    return (3 if isinstance(spec, Gated) else 2) * c * spec.d_ff


def _feed_forward(spec: FeedForward, c: int) -> int:
    """Elements of the matrices that one token meets."""
    if not isinstance(spec, MoE):
        return _single(spec, c)
    shared = 0 if spec.shared is None else _single(spec.shared, c)
    return spec.n_experts * c + spec.top_k * _single(spec.expert, c) + shared + (c if spec.shared_gate else 0)


def _attention(spec: Attention, c: int) -> int:
    """Elements of the matrices that one token meets, latent attention in its unfolded form."""
    h, out = spec.n_heads, spec.n_heads * spec.d_value * c
    if isinstance(spec, Grouped):
        return c * (h * spec.d_head + spec.n_kv_heads * (spec.d_head + spec.d_value)) + out
    queries = (c if spec.q_rank is None else spec.q_rank) * h * spec.d_head + (spec.q_rank or 0) * c
    return queries + c * (spec.kv_rank + spec.d_rope) + spec.kv_rank * h * (spec.d_nope + spec.d_value) + out


def _pair(spec: Attention) -> int:
    """FLOPs of one query and one key: q·k and its share of weights·v, over all heads."""
    return 2 * spec.n_heads * (spec.d_head + spec.d_value)


def _block(block: BlockSpec, c: int, c_memory: int, row: Lengths) -> Flops:
    n = row.context
    products = 2 * n * (_attention(block.attention, c) + _feed_forward(block.ffn, c))
    pair = _pair(block.attention)
    scores, visible = n * n * pair, visible_pairs(block.attention.mask, n, row.prefix) * pair
    if block.cross is not None:
        a = block.cross
        products += 2 * n * c * a.n_heads * (a.d_head + a.d_value)
        products += 2 * row.source * c_memory * a.n_kv_heads * (a.d_head + a.d_value)
        scores += n * row.source * _pair(a)
        visible += n * row.source * _pair(a)
    return Flops(products, scores, visible)


def _total(parts: list[Flops]) -> Flops:
    return Flops(sum(p.products for p in parts), sum(p.scores for p in parts), sum(p.visible for p in parts))


def _stack(stack: StackSpec, c_memory: int, row: Lengths) -> Flops:
    factor = 0 if stack.embed.factor is None else 2 * row.context * stack.d_embed * stack.d_model
    # Equal layers share one specification, so that it is counted once.
    once: dict[int, Flops] = {}
    for block in stack.blocks:
        if id(block) not in once:
            once[id(block)] = _block(block, stack.d_model, c_memory, row)
    return _total([Flops(factor, 0, 0), *(once[id(block)] for block in stack.blocks)])


def _head(spec: ModelSpec, row: Lengths) -> int:
    """Of a sequence head once a row, of the others for each token."""
    c, n = spec.last.d_model, n_scores(spec)
    if isinstance(spec.head, SequenceHead):
        return 2 * (n * c + (c * c if spec.head.pool == "pooler" else 0))
    transform = spec.head.transform if isinstance(spec.head, LanguageHead) else None
    if transform is None:
        return 2 * row.context * n * c
    return 2 * row.context * (c * transform.width + transform.width * n)


def forward_flops(spec: ModelSpec, row: Lengths) -> Flops:
    """FLOPs of one row through the model: of an encoder–decoder, the source through the encoder too."""
    parts = [Flops(_head(spec, row), 0, 0)]
    for name, stack in spec.stacks.items():
        of_source = name == "encoder" and spec.decoder is not None
        c_memory = stack.d_model if spec.encoder is None else spec.encoder.d_model
        parts.append(_stack(stack, c_memory, Lengths(row.source) if of_source else row))
    return _total(parts)
