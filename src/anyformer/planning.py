"""What a model costs, from its specification alone: parameters, FLOPs, bytes. Imports no torch.

A multiplication and an addition are two FLOPs; only matrix products count. Bytes are those of a single process.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import prod
from typing import Any, NamedTuple

from anyformer.errors import UserError
from anyformer.spec.parts import (
    Attention,
    BlockSpec,
    BranchNorms,
    FeedForward,
    Gated,
    LayerNorm,
    Learned,
    ModelSpec,
    NoNorm,
    Norm,
    Parallel,
    RMSNorm,
    Rope,
    Sinusoidal,
)

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


class Parameter(NamedTuple):
    """A parameter of the model: its canonical name, its shape, and what it is for."""

    name: str
    shape: tuple[int, ...]
    role: str

    @property
    def size(self) -> int:
        """Its number of elements."""
        return prod(self.shape)


def _norm(path: str, norm: Norm, width: int) -> Iterator[Parameter]:
    if not isinstance(norm, NoNorm) and norm.weight:
        yield Parameter(f"{path}.weight", (width,), "norm")
    if isinstance(norm, LayerNorm) and norm.bias:
        yield Parameter(f"{path}.bias", (width,), "bias")


def _linear(path: str, n_in: int, n_out: int, bias: bool, role: str) -> Iterator[Parameter]:
    yield Parameter(f"{path}.weight", (n_out, n_in), role)
    if bias:
        yield Parameter(f"{path}.bias", (n_out,), "bias")


def _attention(path: str, spec: Attention, c: int) -> Iterator[Parameter]:
    h, g, d, dv = spec.n_heads, spec.n_kv_heads, spec.d_head, spec.d_value
    yield from _linear(f"{path}.q", c, h * d, spec.qkv_bias, "hidden")
    yield from _linear(f"{path}.k", c, g * d, spec.qkv_bias, "hidden")
    yield from _linear(f"{path}.v", c, g * dv, spec.qkv_bias, "hidden")
    yield from _linear(f"{path}.out", h * dv, c, spec.out_bias, "residual")
    if spec.qk_norm is not None:
        over_head = spec.qk_norm.over == "head"
        yield from _norm(f"{path}.q_norm.norm", spec.qk_norm.norm, d if over_head else h * d)
        yield from _norm(f"{path}.k_norm.norm", spec.qk_norm.norm, d if over_head else g * d)


def _feed_forward(path: str, spec: FeedForward, c: int) -> Iterator[Parameter]:
    if isinstance(spec, Gated):
        yield from _linear(f"{path}.gate", c, spec.d_ff, spec.bias, "hidden")
    yield from _linear(f"{path}.up", c, spec.d_ff, spec.bias, "hidden")
    yield from _linear(f"{path}.down", spec.d_ff, c, spec.bias, "residual")


def _branch(path: str, norms: BranchNorms, c: int, *, own_before: bool = True) -> Iterator[Parameter]:
    if own_before:
        yield from _norm(f"{path}.before", norms.before, c)
    yield from _norm(f"{path}.after", norms.after, c)
    yield from _norm(f"{path}.residual", norms.residual, c)


def block_parameters(spec: BlockSpec, d_model: int, path: str = "") -> Iterator[Parameter]:
    """Every parameter of one block, in the model's order."""
    shared = isinstance(spec.wiring, Parallel) and spec.wiring.shared_norm
    yield from _attention(f"{path}attention", spec.attention, d_model)
    yield from _feed_forward(f"{path}ffn", spec.ffn, d_model)
    yield from _branch(f"{path}attention_norms", spec.norms.attention, d_model)
    yield from _branch(f"{path}ffn_norms", spec.norms.ffn, d_model, own_before=not shared)


def parameters(spec: ModelSpec) -> Iterator[Parameter]:
    """Every parameter of the model once, in the model's order, without building it."""
    stack, c = spec.decoder, spec.decoder.d_model
    yield Parameter("decoder.embed.token.weight", (spec.vocab_size, c), "embedding")
    if isinstance(stack.embed.position, Learned):
        yield Parameter("decoder.embed.position.weight", (stack.max_positions or 0, c), "position")
    yield from _norm("decoder.embed.norm", stack.embed.norm, c)
    for index, block in enumerate(stack.blocks):
        yield from block_parameters(block, c, f"decoder.blocks.{index}.")
    yield from _norm("decoder.final_norm", stack.final_norm, c)
    if spec.head is not None:
        if "head" not in spec.ties:
            yield Parameter("head.weight", (spec.vocab_size, c), "head")
        if spec.head.bias:
            yield Parameter("head.bias", (spec.vocab_size,), "bias")


def _matrix_flops(spec: ModelSpec) -> int:
    """FLOPs of all weight products for one token."""
    matrices = sum(p.size for p in parameters(spec) if p.role in ("hidden", "residual"))
    head = 0 if spec.head is None else spec.vocab_size * spec.decoder.d_model
    return 2 * (matrices + head)


def _score_flops(spec: ModelSpec, keys: float) -> float:
    """FLOPs of q·k and weights·v for one token that is matched with `keys` keys."""
    return sum(2 * keys * b.attention.n_heads * (b.attention.d_head + b.attention.d_value) for b in spec.decoder.blocks)


def cache_bytes_per_token(spec: ModelSpec, dtype: str = "float32") -> int:
    """Bytes that the KV cache takes for each token of each row."""
    per_layer = (b.attention.n_kv_heads * (b.attention.d_head + b.attention.d_value) for b in spec.decoder.blocks)
    return BYTES[dtype] * sum(per_layer)


def _norm_saved(norm: Norm, width: int) -> int:
    """Elements per token that a norm keeps for the backward pass, its output aside.

    Both norms keep their input and the statistics, one or two numbers a token.
    """
    if isinstance(norm, NoNorm):
        return 0
    return width + (1 if isinstance(norm, RMSNorm) else 2)


def _attention_saved(spec: Attention, c: int) -> int:
    h, g, d, dv = spec.n_heads, spec.n_kv_heads, spec.d_head, spec.d_value
    saved = c + (h + g) * d + g * dv + h * dv + h
    if spec.qk_norm is not None:
        saved += _norm_saved(spec.qk_norm.norm, (h + g) * d)
    return saved + (c if spec.out_dropout else 0)


def _feed_forward_saved(spec: FeedForward, c: int) -> int:
    # relu keeps its output, which the next product keeps anyway; the others keep a tensor of their own.
    saved = c + (1 if spec.activation == "relu" else 2) * spec.d_ff
    if isinstance(spec, Gated):
        saved += 2 * spec.d_ff
    return saved + (spec.d_ff if spec.dropout else 0) + (c if spec.out_dropout else 0)


def saved_per_token(block: BlockSpec, c: int) -> int:
    """Elements per token that a block keeps for the backward pass, with attention that keeps no T×S weights."""
    norms = (block.norms.attention, block.norms.ffn)
    saved = sum(_norm_saved(n, c) for branch in norms for n in (branch.before, branch.after, branch.residual))
    shared = isinstance(block.wiring, Parallel) and block.wiring.shared_norm
    saved -= _norm_saved(block.norms.ffn.before, c) + c if shared else 0
    return saved + _attention_saved(block.attention, c) + _feed_forward_saved(block.ffn, c)


def working_per_token(block: BlockSpec, c: int) -> int:
    """Elements per token that the backward pass of a block holds at once besides what was saved."""
    a, f = block.attention, block.ffn
    attention = 3 * ((a.n_heads + a.n_kv_heads) * a.d_head + (a.n_heads + a.n_kv_heads) * a.d_value)
    return max((4 if isinstance(f, Gated) else 2) * f.d_ff, attention) + 4 * c


def forward_per_token(block: BlockSpec, c: int) -> int:
    """Elements per token that a block's forward pass holds at once where nothing is kept for a backward pass."""
    a, f = block.attention, block.ffn
    attention = 2 * a.n_heads * a.d_head + a.n_kv_heads * (a.d_head + a.d_value) + a.n_heads * a.d_value
    return 2 * c + max(attention, (3 if isinstance(f, Gated) else 2) * f.d_ff)


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


@dataclass(frozen=True)
class Plan:
    """The costs of a model for a batch of B rows of T tokens. `to_dict()` is JSON-ready, `table()` is for people."""

    parameters: int
    embedding_parameters: int
    active_parameters: int
    parameters_by_role: dict[str, int]
    batch: int
    context: int
    flops_forward_per_token: float
    flops_forward_per_token_visible: float
    flops_training_per_token: float
    visible_share: float
    cache_bytes_per_token: int
    cache_bytes: int
    memory: Memory
    dtype: str
    optimizer: str
    facts: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain numbers and words."""
        table = asdict(self)
        table["memory"] |= {"live": self.memory.live, "peak": self.memory.peak}
        return table

    def table(self) -> str:
        """A table to read, as text."""
        rows = [("" if index else "model", key, value) for index, (key, value) in enumerate(self.facts.items())]
        rows += [
            ("parameters", "total", f"{self.parameters:,}"),
            ("", "embedding", f"{self.embedding_parameters:,}"),
            ("", "active for a token", f"{self.active_parameters:,}"),
            ("FLOPs a token", f"forward, all of T×S at T = {self.context}", si(self.flops_forward_per_token)),
            ("", f"forward, the visible {self.visible_share:.0%} of T×S", si(self.flops_forward_per_token_visible)),
            ("", "training, all of T×S", si(self.flops_training_per_token)),
            ("KV cache", f"a token, {self.dtype}", binary(self.cache_bytes_per_token)),
            ("", f"batch {self.batch} × {self.context} tokens", binary(self.cache_bytes)),
            *self._memory_rows(),
        ]
        first, second = (max(len(row[i]) for row in rows) for i in (0, 1))
        return "\n".join(f"{a:{first}}  {b:{second}}  {c}".rstrip() for a, b, c in rows)

    def _memory_rows(self) -> list[tuple[str, str, str]]:
        m, where = self.memory, f"batch {self.batch} × {self.context}"
        trains = self.optimizer != "none"
        rows = [
            ("weights", m.weights),
            ("gradients", m.gradients),
            (f"{self.optimizer} state", m.optimizer),
            ("KV cache", m.cache),
            (f"activations, {where}", m.activations),
            (f"logits{' and their gradient' if trains else ''}, {where}", m.logits),
            (f"{'gradients' if trains else 'tensors'} inside a block", m.working),
            ("peak, the allocator's share included", m.peak),
        ]
        title = "training memory" if trains else "memory"
        shown = [(name, size) for name, size in rows if size]
        return [("" if index else title, name, binary(size)) for index, (name, size) in enumerate(shown)]


def si(number: float) -> str:
    """A number with a decimal prefix: 1.5 G."""
    for size, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.3g}"


def binary(count: float) -> str:
    """Bytes with a binary prefix: 1.5 MiB."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if abs(count) >= 1024**power:
            return f"{count / 1024**power:.3g} {unit}"
    return f"{count:g} B"


def _facts(spec: ModelSpec) -> dict[str, str]:
    stack = spec.decoder
    kinds = Counter(_block_words(block) for block in stack.blocks)
    facts = {
        "vocabulary": f"{spec.vocab_size:,}{', head tied to the embedding' if 'head' in spec.ties else ''}",
        "width, layers": f"{stack.d_model}, {stack.n_layers}",
        "positions": _position_words(spec),
        "context": "any" if stack.max_positions is None else f"{stack.max_positions:,}",
    }
    for index, (words, count) in enumerate(kinds.items()):
        facts["layers" if len(kinds) == 1 else f"layers, kind {index + 1}"] = f"{count} × {words}"
    return facts


def _block_words(block: BlockSpec) -> str:
    a, f = block.attention, block.ffn
    name = "MHA" if a.n_kv_heads == a.n_heads else "MQA" if a.n_kv_heads == 1 else "GQA"
    heads = f"{name} {a.n_heads}/{a.n_kv_heads} heads of {a.d_head}"
    return f"{heads}, {f.kind} {f.activation} {f.d_ff}, {block.wiring.kind}"


def _position_words(spec: ModelSpec) -> str:
    words: list[str] = []
    position = spec.decoder.embed.position
    if isinstance(position, Sinusoidal | Learned):
        words.append(position.kind)
    ropes = {b.attention.position for b in spec.decoder.blocks if isinstance(b.attention.position, Rope)}
    words += [f"rotary, theta {rope.theta:g}, {rope.layout}" for rope in sorted(ropes, key=lambda r: r.theta)]
    return "; ".join(words) or "none"


OPTIMIZER_COPIES = {"adamw": (2, 2), "muon": (1, 2), "sgd": (0, 0), "none": (0, 0)}
"""State elements for each element of a hidden matrix, and of any other parameter."""


def _memory(spec: ModelSpec, batch: int, context: int, dtype: str, optimizer: str) -> Memory:
    size, tokens = BYTES[dtype], batch * context
    listed = list(parameters(spec))
    total = sum(p.size for p in listed)
    scores = 0 if spec.head is None else tokens * spec.vocab_size
    if optimizer == "none":
        widest = max(forward_per_token(block, spec.decoder.d_model) for block in spec.decoder.blocks)
        cache = batch * context * cache_bytes_per_token(spec, dtype)
        return Memory(size * total, 0, 0, cache, 0, size * scores, size * tokens * widest)
    return Memory(
        weights=size * total,
        gradients=size * total,
        optimizer=size * _state_elements(listed, optimizer),
        cache=0,
        activations=size * tokens * _saved_per_token(spec),
        # The loss holds the scores, their log-softmax and one gradient at once, all in float32 at least.
        logits=3 * max(4, size) * scores,
        working=size * tokens * max(working_per_token(block, spec.decoder.d_model) for block in spec.decoder.blocks),
    )


def _state_elements(listed: list[Parameter], optimizer: str) -> int:
    for_matrices, for_others = OPTIMIZER_COPIES[optimizer]
    matrices = sum(p.size for p in listed if p.role in ("hidden", "residual"))
    return for_matrices * matrices + for_others * (sum(p.size for p in listed) - matrices)


def _saved_per_token(spec: ModelSpec) -> int:
    c = spec.decoder.d_model
    return 2 * c + sum(saved_per_token(b, c) for b in spec.decoder.blocks) + _norm_saved(spec.decoder.final_norm, c)


def plan(
    spec: ModelSpec, *, batch: int = 8, context: int | None = None, dtype: str = "float32", optimizer: str = "adamw"
) -> Plan:
    """The costs of `spec` for `batch` rows of `context` tokens.

    Args:
        spec: the model.
        batch: rows of a (micro-)batch.
        context: tokens a row; the model's `max_positions`, or 1,024, where None.
        dtype: of weights, activations and cache.
        optimizer: "adamw", "muon" (with AdamW for what is no matrix), "sgd", or "none" for inference.
    """
    if not isinstance(spec, ModelSpec):
        raise UserError("plan takes a specification", got=repr(spec), remedy="af.load_spec(name or file) gives one")
    if context is None:
        context = spec.decoder.max_positions or 1024
    if batch < 1 or context < 1:
        raise UserError("a plan needs at least one row of one token", got=f"batch={batch}, context={context}")
    rows = spec.decoder.max_positions
    if isinstance(spec.decoder.embed.position, Learned) and rows is not None and context > rows:
        raise UserError("the context is past the learned positions", where="context", got=context, expected=f"≤ {rows}")
    for word, known in ((dtype, BYTES), (optimizer, OPTIMIZER_COPIES)):
        if word not in known:
            raise UserError(
                f"unknown {'dtype' if known is BYTES else 'optimiser'}", got=word, expected=", ".join(known)
            )
    listed = list(parameters(spec))
    roles: dict[str, int] = {}
    for parameter in listed:
        roles[parameter.role] = roles.get(parameter.role, 0) + parameter.size
    total = sum(roles.values())
    per_token = _matrix_flops(spec)
    share = (context + 1) / 2 / context
    forward = per_token + _score_flops(spec, context)
    cache = cache_bytes_per_token(spec, dtype)
    return Plan(
        parameters=total,
        embedding_parameters=roles.get("embedding", 0) + roles.get("position", 0),
        active_parameters=total,
        parameters_by_role=roles,
        batch=batch,
        context=context,
        flops_forward_per_token=forward,
        flops_forward_per_token_visible=per_token + _score_flops(spec, context * share),
        flops_training_per_token=3 * forward,
        visible_share=share,
        cache_bytes_per_token=cache,
        cache_bytes=cache * batch * context,
        memory=_memory(spec, batch, context, dtype, optimizer),
        dtype=dtype,
        optimizer=optimizer,
        facts=_facts(spec),
    )


def largest_batch(
    spec: ModelSpec, memory: int, *, context: int | None = None, dtype: str = "float32", optimizer: str = "adamw"
) -> int:
    """The most rows whose planned peak fits into `memory` bytes; 0 when not even one does."""

    def peak(batch: int) -> int:
        return plan(spec, batch=batch, context=context, dtype=dtype, optimizer=optimizer).memory.peak

    one, slope = peak(1), peak(2) - peak(1)
    return 0 if one > memory else 1 + (memory - one) // max(1, slope)
