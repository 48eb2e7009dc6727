"""Every parameter of a model: its canonical name, its shape and its role, without building it."""

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

from anyformer.spec.parts import (
    Attention,
    BlockSpec,
    BranchNorms,
    FeedForward,
    Gated,
    Grouped,
    LanguageHead,
    Latent,
    Learned,
    ModelSpec,
    MoE,
    NoNorm,
    Norm,
    Parallel,
    RelativeBias,
    SequenceHead,
    SingleFeedForward,
    StackSpec,
    TokenHead,
)


class Parameter(NamedTuple):
    """A parameter of the model: its canonical name, its shape, and what it is for."""

    name: str
    shape: tuple[int, ...]
    role: str

    @property
    def size(self) -> int:
        """Its number of elements."""
        return prod(self.shape)


def _norm(path: str, norm: Norm, *shape: int) -> Iterator[Parameter]:
    if isinstance(norm, NoNorm):
        return
    if norm.weight:
        yield Parameter(f"{path}.weight", shape, "norm")
    if norm.bias:
        yield Parameter(f"{path}.bias", shape, "bias")


def _linear(path: str, n_in: int, n_out: int, bias: bool, role: str) -> Iterator[Parameter]:
    yield Parameter(f"{path}.weight", (n_out, n_in), role)
    if bias:
        yield Parameter(f"{path}.bias", (n_out,), "bias")


def _score_parameters(path: str, spec: Attention) -> Iterator[Parameter]:
    if spec.sink_logit:
        yield Parameter(f"{path}.sink", (spec.n_heads,), "bias")
    if isinstance(spec.position, RelativeBias) and not spec.position.shared:
        yield Parameter(f"{path}.relative_bias.weight", (spec.position.n_buckets, spec.n_heads), "position")


def _grouped(path: str, spec: Grouped, c: int, c_keys: int) -> Iterator[Parameter]:
    h, g, d, dv = spec.n_heads, spec.n_kv_heads, spec.d_head, spec.d_value
    yield from _score_parameters(path, spec)
    yield from _linear(f"{path}.q", c, h * d, spec.qkv_bias, "hidden")
    yield from _linear(f"{path}.k", c_keys, g * d, spec.qkv_bias, "hidden")
    yield from _linear(f"{path}.v", c_keys, g * dv, spec.qkv_bias, "hidden")
    yield from _linear(f"{path}.out", h * dv, c, spec.out_bias, "residual")
    if spec.qk_norm is not None:
        for name, heads in (("q", h), ("k", g)):
            whole = (heads * d,) if spec.qk_norm.over == "projection" else (d,)
            shape = (heads, d) if spec.qk_norm.weights == "per_head" else whole
            yield from _norm(f"{path}.{name}_norm.norm", spec.qk_norm.norm, *shape)


def _latent(path: str, spec: Latent, c: int) -> Iterator[Parameter]:
    h = spec.n_heads
    yield from _score_parameters(path, spec)
    if spec.q_rank is None:
        yield from _linear(f"{path}.q", c, h * spec.d_head, False, "hidden")
    else:
        yield from _linear(f"{path}.q_down", c, spec.q_rank, spec.bias, "hidden")
        yield from _norm(f"{path}.q_norm", spec.norm, spec.q_rank)
        yield from _linear(f"{path}.q_up", spec.q_rank, h * spec.d_head, False, "hidden")
    yield from _linear(f"{path}.kv_down", c, spec.kv_rank + spec.d_rope, spec.bias, "hidden")
    yield from _norm(f"{path}.kv_norm", spec.norm, spec.kv_rank)
    yield from _linear(f"{path}.k_up", spec.kv_rank, h * spec.d_nope, False, "hidden")
    yield from _linear(f"{path}.v_up", spec.kv_rank, h * spec.d_value, False, "hidden")
    yield from _linear(f"{path}.out", h * spec.d_value, c, spec.out_bias, "residual")


def _single(path: str, spec: SingleFeedForward, c: int) -> Iterator[Parameter]:
    if isinstance(spec, Gated):
        yield from _linear(f"{path}.gate", c, spec.d_ff, spec.bias, "hidden")
    yield from _linear(f"{path}.up", c, spec.d_ff, spec.bias, "hidden")
    yield from _linear(f"{path}.down", spec.d_ff, c, spec.bias, "residual")


def expert_parameters(path: str, spec: MoE, c: int) -> Iterator[Parameter]:
    """The stacked parameters of a mixture's experts, of which a token uses `top_k`."""
    for name, shape, role in _single(f"{path}.experts", spec.expert, c):
        yield Parameter(name, (spec.n_experts, *shape), role)


def _feed_forward(path: str, spec: FeedForward, c: int) -> Iterator[Parameter]:
    if not isinstance(spec, MoE):
        yield from _single(path, spec, c)
        return
    yield from _linear(f"{path}.router", c, spec.n_experts, spec.router_bias, "router")
    yield from expert_parameters(path, spec, c)
    if spec.shared is not None:
        yield from _single(f"{path}.shared", spec.shared, c)
    if spec.shared_gate:
        yield from _linear(f"{path}.shared_gate", c, 1, False, "router")


def _branch(path: str, norms: BranchNorms, c: int, *, own_before: bool = True) -> Iterator[Parameter]:
    if own_before:
        yield from _norm(f"{path}.before", norms.before, c)
    yield from _norm(f"{path}.after", norms.after, c)
    yield from _norm(f"{path}.residual", norms.residual, c)


def block_parameters(
    spec: BlockSpec, d_model: int, path: str = "", *, d_memory: int | None = None
) -> Iterator[Parameter]:
    """Every parameter of one block, in the model's order. `d_memory` is the encoder's width, d_model where None."""
    shared = isinstance(spec.wiring, Parallel) and spec.wiring.shared_norm
    if isinstance(spec.attention, Latent):
        yield from _latent(f"{path}attention", spec.attention, d_model)
    else:
        yield from _grouped(f"{path}attention", spec.attention, d_model, d_model)
    if spec.cross is not None:
        yield from _grouped(f"{path}cross", spec.cross, d_model, d_memory or d_model)
    yield from _feed_forward(f"{path}ffn", spec.ffn, d_model)
    yield from _branch(f"{path}attention_norms", spec.norms.attention, d_model)
    if spec.cross is not None:
        yield from _branch(f"{path}cross_norms", spec.norms.cross, d_model)
    yield from _branch(f"{path}ffn_norms", spec.norms.ffn, d_model, own_before=not shared)


def _embed(path: str, stack: StackSpec, vocab_size: int, *, owns_tokens: bool) -> Iterator[Parameter]:
    embed, width = stack.embed, stack.d_embed
    if owns_tokens:
        yield Parameter(f"{path}.token.weight", (vocab_size, width), "embedding")
    if isinstance(embed.position, Learned):
        rows = (stack.max_positions or 0) + embed.position.offset
        yield Parameter(f"{path}.position.weight", (rows, width), "position")
    if embed.types:
        yield Parameter(f"{path}.types.weight", (embed.types, width), "position")
    yield from _norm(f"{path}.norm", embed.norm, width)
    if embed.factor is not None:
        yield from _linear(f"{path}.factor", width, stack.d_model, embed.factor.bias, "hidden")


def _stack(spec: ModelSpec, name: str, stack: StackSpec) -> Iterator[Parameter]:
    tied = name == "decoder" and {"encoder.embed", "decoder.embed"} <= spec.ties
    yield from _embed(f"{name}.embed", stack, spec.vocab_size, owns_tokens=not tied)
    if stack.shared_bias is not None:
        position, n_heads = stack.shared_bias
        yield Parameter(f"{name}.relative_bias.weight", (position.n_buckets, n_heads), "position")
    d_memory = None if spec.encoder is None else spec.encoder.d_model
    for index, block in enumerate(stack.blocks):
        if stack.owner(index) == index:
            yield from block_parameters(block, stack.d_model, f"{name}.blocks.{index}.", d_memory=d_memory)
    yield from _norm(f"{name}.final_norm", stack.final_norm, stack.d_model)


def n_scores(spec: ModelSpec) -> int:
    """The scores that the head gives for a token (a sequence head: for a row); 0 without a head."""
    match spec.head:
        case None:
            return 0
        case LanguageHead():
            return spec.vocab_size
        case SequenceHead(n_labels=n) | TokenHead(n_labels=n):
            return n
    return 2


def _head(spec: ModelSpec) -> Iterator[Parameter]:
    head, width = spec.head, spec.last.d_model
    if head is None:
        return
    transform = head.transform if isinstance(head, LanguageHead) else None
    if "head" not in spec.ties:
        yield Parameter("head.weight", (n_scores(spec), width if transform is None else transform.width), "head")
    if head.bias:
        yield Parameter("head.bias", (n_scores(spec),), "bias")
    if transform is not None:
        yield from _linear("head.transform", width, transform.width, transform.bias, "head")
        yield from _norm("head.norm", transform.norm, transform.width)


def parameters(spec: ModelSpec) -> Iterator[Parameter]:
    """Every parameter of the model once, in the model's order, without building it."""
    for name, stack in spec.stacks.items():
        yield from _stack(spec, name, stack)
    if spec.pooler is not None:
        yield from _linear("pooler", spec.last.d_model, spec.last.d_model, spec.pooler.bias, "head")
    yield from _head(spec)


def buffers(spec: ModelSpec) -> Iterator[Parameter]:
    """What a state dict holds beside the parameters: the choice bias of routers that have one, role "buffer"."""
    for name, stack in spec.stacks.items():
        for index, block in enumerate(stack.blocks):
            if stack.owner(index) == index and isinstance(block.ffn, MoE) and block.ffn.choice_bias:
                yield Parameter(f"{name}.blocks.{index}.ffn.router.choice_bias", (block.ffn.n_experts,), "buffer")


def idle_parameters(spec: ModelSpec) -> int:
    """Parameters that one token does not use: those of the experts that it is not sent to."""
    idle = 0
    for stack in spec.stacks.values():
        for index, block in enumerate(stack.blocks):
            if stack.owner(index) == index and isinstance(block.ffn, MoE):
                stacked = sum(p.size for p in expert_parameters("", block.ffn, stack.d_model))
                idle += stacked // block.ffn.n_experts * (block.ffn.n_experts - block.ffn.top_k)
    return idle
