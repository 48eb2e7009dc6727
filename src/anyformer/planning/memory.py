"""Bytes in use while training a micro-batch or predicting: weights, state, and what the passes hold."""

from dataclasses import dataclass

from anyformer.planning.cache import BYTES, cache_bytes
from anyformer.planning.flops import Lengths
from anyformer.planning.weights import Parameter, n_scores, parameters
from anyformer.spec.parts import (
    Attention,
    BlockSpec,
    BranchNorms,
    FeedForward,
    Gated,
    Grouped,
    LanguageHead,
    LayerNorm,
    ModelSpec,
    MoE,
    NoNorm,
    Norm,
    Parallel,
    SequenceHead,
    SingleFeedForward,
    StackSpec,
)

OPTIMIZER_COPIES = {"adamw": (2, 2), "muon": (1, 2), "sgd": (0, 0), "none": (0, 0)}
"""State elements for each element of a hidden matrix, and of any other parameter."""


def _norm_saved(norm: Norm, width: int) -> int:
    """Elements per token that a norm keeps for the backward pass, its output aside.

    Both norms keep their input and the statistics, one or two numbers a token.
    """
    if isinstance(norm, NoNorm):
        return 0
    return width + (2 if isinstance(norm, LayerNorm) else 1)


def _grouped_saved(spec: Grouped, c: int) -> int:
    h, g, d, dv = spec.n_heads, spec.n_kv_heads, spec.d_head, spec.d_value
    saved = c + (h + g) * d + g * dv + h * dv + h
    if spec.clip is not None:
        saved += (h + g) * d + g * dv
    if spec.qk_norm is not None:
        saved += _norm_saved(spec.qk_norm.norm, (h + g) * d)
    return saved + (c if spec.out_dropout else 0)


def _attention_saved(spec: Attention, c: int) -> int:
    if isinstance(spec, Grouped):
        return _grouped_saved(spec, c)
    # The latents before and after their norm, then queries, keys and values unfolded over the heads.
    h, ranks = spec.n_heads, [spec.kv_rank] if spec.q_rank is None else [spec.kv_rank, spec.q_rank]
    saved = c + sum(rank + _norm_saved(spec.norm, rank) for rank in ranks)
    return saved + 2 * h * (spec.d_head + spec.d_value) + h + (c if spec.out_dropout else 0)


def _single_saved(spec: SingleFeedForward, c: int) -> int:
    # relu keeps its output, which the next product keeps anyway; the others keep a tensor of their own.
    saved = c + (1 if spec.activation == "relu" else 2) * spec.d_ff
    if isinstance(spec, Gated):
        saved += 2 * spec.d_ff
        saved += 2 * spec.d_ff if spec.limit is not None else 0
    return saved + (spec.d_ff if spec.dropout else 0) + (c if spec.out_dropout else 0)


def _feed_forward_saved(spec: FeedForward, c: int) -> int:
    if not isinstance(spec, MoE):
        return _single_saved(spec, c)
    # The router's input, scores and choices, and each chosen expert's own inner tensors and output.
    saved = c + 3 * spec.n_experts + spec.top_k * (_single_saved(spec.expert, c) + c + 2)
    return saved + (0 if spec.shared is None else _single_saved(spec.shared, c)) + (c + 1 if spec.shared_gate else 0)


def _norms_saved(norms: BranchNorms, c: int) -> int:
    return sum(_norm_saved(norm, c) for norm in (norms.before, norms.after, norms.residual))


def saved_per_token(block: BlockSpec, c: int) -> int:
    """Elements per token that a block keeps for the backward pass, with attention that keeps no T×S weights.

    Cross-attention's keys and values are of source tokens: `saved_per_source_token`.
    """
    saved = _norms_saved(block.norms.attention, c) + _norms_saved(block.norms.ffn, c)
    shared = isinstance(block.wiring, Parallel) and block.wiring.shared_norm
    saved -= _norm_saved(block.norms.ffn.before, c) + c if shared else 0
    if block.cross is not None:
        saved += _norms_saved(block.norms.cross, c) + _grouped_saved(block.cross, c)
        saved -= block.cross.n_kv_heads * (block.cross.d_head + block.cross.d_value)
    return saved + _attention_saved(block.attention, c) + _feed_forward_saved(block.ffn, c)


def saved_per_source_token(block: BlockSpec) -> int:
    """Elements per source token that a block's cross-attention keeps: its keys and values."""
    return 0 if block.cross is None else block.cross.n_kv_heads * (block.cross.d_head + block.cross.d_value)


def _inner(spec: FeedForward, gated: int, dense: int) -> int:
    """Elements per token inside a feed-forward network, at so many tensors for a gated and for a dense one."""
    if isinstance(spec, MoE):
        shared = 0 if spec.shared is None else _inner(spec.shared, gated, dense)
        return spec.top_k * _inner(spec.expert, gated, dense) + shared + 2 * spec.n_experts
    return (gated if isinstance(spec, Gated) else dense) * spec.d_ff


def working_per_token(block: BlockSpec, c: int) -> int:
    """Elements per token that the backward pass of a block holds at once besides what was saved."""
    a = block.attention
    attention = 3 * ((a.n_heads + a.n_kv_heads) * (a.d_head + a.d_value))
    return max(_inner(block.ffn, 4, 2), attention) + 4 * c


def forward_per_token(block: BlockSpec, c: int) -> int:
    """Elements per token that a block's forward pass holds at once where nothing is kept for a backward pass."""
    a = block.attention
    attention = 2 * a.n_heads * a.d_head + a.n_kv_heads * (a.d_head + a.d_value) + a.n_heads * a.d_value
    return 2 * c + max(attention, _inner(block.ffn, 3, 2))


@dataclass(frozen=True)
class Memory:
    """Bytes while training one micro-batch, or with optimizer "none" while predicting, by purpose.

    `logits` are the scores with what the loss makes of them, `working` what one block holds besides: the gradients
    inside its backward pass, or the tensors of its forward pass where nothing is trained.
    """

    weights: int
    gradients: int
    optimizer: int
    cache: int
    activations: int
    logits: int
    working: int

    @property
    def live(self) -> int:
        """The most that is in use at one time: the loss and a block's backward pass do not meet."""
        held = self.weights + self.gradients + self.optimizer + self.cache + self.activations
        return held + max(self.logits, self.working)

    @property
    def peak(self) -> int:
        """What the process takes for it: glibc's allocator keeps 3% to 25% of freed memory (benchmarks/memory.py)."""
        return self.live * 9 // 8


def _state_elements(listed: list[Parameter], optimizer: str) -> int:
    for_matrices, for_others = OPTIMIZER_COPIES[optimizer]
    matrices = sum(p.size for p in listed if p.role in ("hidden", "residual"))
    return for_matrices * matrices + for_others * (sum(p.size for p in listed) - matrices)


def _stack_saved(stack: StackSpec) -> int:
    c = stack.d_model
    factor = 0 if stack.embed.factor is None else stack.d_embed
    embedded = 2 * c + factor + _norm_saved(stack.embed.norm, stack.d_embed)
    return embedded + sum(saved_per_token(b, c) for b in stack.blocks) + _norm_saved(stack.final_norm, c)


def _head_saved(spec: ModelSpec) -> int:
    """Elements per token that a head's transform keeps, the scores aside."""
    transform = spec.head.transform if isinstance(spec.head, LanguageHead) else None
    return 0 if transform is None else 2 * transform.width + _norm_saved(transform.norm, transform.width)


def _tokens(spec: ModelSpec, batch: int, row: Lengths) -> dict[str, int]:
    """Tokens of a batch in each stack."""
    if spec.encoder is None or spec.decoder is None:
        return dict.fromkeys(spec.stacks, batch * row.context)
    return {"encoder": batch * row.source, "decoder": batch * row.context}


def memory_of(spec: ModelSpec, batch: int, row: Lengths, dtype: str, optimizer: str) -> Memory:
    """Bytes for `batch` rows, of weights, activations and cache in `dtype`."""
    size, tokens = BYTES[dtype], _tokens(spec, batch, row)
    listed = list(parameters(spec))
    total = sum(p.size for p in listed)
    scores = n_scores(spec) * batch * (1 if isinstance(spec.head, SequenceHead) else row.context)
    measure = forward_per_token if optimizer == "none" else working_per_token
    working = max(
        tokens[name] * max(measure(block, stack.d_model) for block in stack.blocks)
        for name, stack in spec.stacks.items()
    )
    if optimizer == "none":
        cache = cache_bytes(spec, batch, row.context, source=row.source, dtype=dtype)
        return Memory(size * total, 0, 0, cache, 0, size * scores, size * working)
    saved = sum(tokens[name] * _stack_saved(stack) for name, stack in spec.stacks.items())
    if spec.decoder is not None and spec.encoder is not None:
        saved += tokens["encoder"] * sum(saved_per_source_token(block) for block in spec.decoder.blocks)
    saved += batch * row.context * _head_saved(spec)
    return Memory(
        weights=size * total,
        gradients=size * total,
        optimizer=size * _state_elements(listed, optimizer),
        cache=0,
        activations=size * saved,
        # The loss holds the scores, their log-softmax and one gradient at once, all in float32 at least.
        logits=3 * max(4, size) * scores,
        working=size * working,
    )
