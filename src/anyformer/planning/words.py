"""A plan in words: what the model is, numbers with prefixes."""

from collections.abc import Iterator, Sequence
from math import floor, isfinite, log10

from anyformer.spec.parts import (
    Alibi,
    Attention,
    BlockSpec,
    FeedForward,
    LanguageHead,
    Latent,
    Learned,
    Mask,
    ModelSpec,
    MoE,
    Position,
    RelativeBias,
    Rope,
    Sinusoidal,
    StackSpec,
)


def figures(number: float, digits: int = 3) -> str:
    """A number as people write it, 1,010 and 0.0123: whole digits all, decimals up to so many significant figures."""
    if not isfinite(number) or not 1e-4 <= abs(number) < 1e15:
        # Far out an exponent is shorter.
        return f"{number:.{digits}g}"
    text = f"{number:,.{max(0, digits - 1 - floor(log10(abs(number))))}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _prefixed(number: float, base: int, units: Sequence[str], last: str) -> str:
    """A number in the largest unit of which it is one or more once it is rounded."""
    for power, unit in zip(range(len(units), 0, -1), units, strict=True):
        if round(abs(number) / base**power, 3) >= 1:
            return f"{figures(number / base**power)} {unit}"
    return f"{figures(number)}{last}"


def si(number: float) -> str:
    """A number with a decimal prefix: 1.5 G."""
    return _prefixed(number, 1000, ("P", "T", "G", "M", "k"), "")


def binary(count: float) -> str:
    """Bytes with a binary prefix: 1.5 MiB."""
    return _prefixed(count, 1024, ("TiB", "GiB", "MiB", "KiB"), " B")


def facts_of(spec: ModelSpec) -> dict[str, str]:
    """What the model is, one line a key."""
    facts = {"vocabulary": f"{spec.vocab_size:,}{_tied_words(spec)}"}
    for name, stack in spec.stacks.items():
        facts |= {(f"{name}: {key}" if len(spec.stacks) > 1 else key): v for key, v in _stack_facts(stack)}
    if not isinstance(spec.head, LanguageHead):
        facts["head"] = "none" if spec.head is None else spec.head.kind
    return facts


def _tied_words(spec: ModelSpec) -> str:
    if {"encoder.embed", "decoder.embed"} <= spec.ties:
        return f", one table for both stacks{' and the head' if 'head' in spec.ties else ''}"
    return ", head tied to the embedding" if "head" in spec.ties else ""


def _stack_facts(stack: StackSpec) -> Iterator[tuple[str, str]]:
    distinct = "" if stack.owners is None else f", {len(set(stack.owners))} with parameters of their own"
    yield "width, layers", f"{stack.d_model}, {stack.n_layers}{distinct}"
    if stack.embed.factor is not None:
        yield "embedding", f"{stack.d_embed} wide, projected"
    yield "positions", _positions_words(stack)
    yield "context", "any" if stack.max_positions is None else f"{stack.max_positions:,}"
    yield from _layer_facts([_block_words(block) for block in stack.blocks])


def _layer_facts(words: list[str]) -> Iterator[tuple[str, str]]:
    kinds = list(dict.fromkeys(words))
    for index, kind in enumerate(kinds):
        yield "layers" if len(kinds) == 1 else f"layers, kind {index + 1}", f"{words.count(kind)} × {kind}"
    if len(kinds) > 1:
        yield "order of kinds", _order_words([kinds.index(word) + 1 for word in words])


def _order_words(order: list[int]) -> str:
    """5×1, 2, over and over."""
    n = len(order)
    period = next(p for p in range(1, n + 1) if all(order[i] == order[i % p] for i in range(n)))
    runs: list[list[int]] = []
    for kind in order[:period]:
        if runs and runs[-1][0] == kind:
            runs[-1][1] += 1
        else:
            runs.append([kind, 1])
    words = ", ".join(f"{count}×{kind}" if count > 1 else f"{kind}" for kind, count in runs)
    return f"{words}, over and over" if period < n else words


def _block_words(block: BlockSpec) -> str:
    parts = [_attention_words(block.attention), *_mask_words(block.attention.mask)]
    if block.cross is not None:
        parts.append(f"cross {_attention_words(block.cross)}")
    return ", ".join([*parts, _feed_forward_words(block.ffn), block.wiring.kind])


def _attention_words(a: Attention) -> str:
    if isinstance(a, Latent):
        rope = f" + {a.d_rope} rotary" if a.d_rope else ""
        return f"MLA {a.n_heads} heads of {a.d_nope}{rope}, latent {a.kv_rank}"
    name = "MHA" if a.n_kv_heads == a.n_heads else "MQA" if a.n_kv_heads == 1 else "GQA"
    return f"{name} {a.n_heads}/{a.n_kv_heads} heads of {a.d_head}"


def _mask_words(mask: Mask) -> Iterator[str]:
    if mask.kind != "causal":
        yield mask.kind
    if mask.window is not None:
        yield f"window {mask.window:,}{f' + first {mask.sinks}' if mask.sinks else ''}"


def _feed_forward_words(f: FeedForward) -> str:
    if not isinstance(f, MoE):
        return f"{f.kind} {f.activation} {f.d_ff}"
    shared = "" if f.shared is None else f" + shared {_feed_forward_words(f.shared)}"
    return f"MoE {f.n_experts}/{f.top_k} experts of {_feed_forward_words(f.expert)}{shared}"


def _positions_words(stack: StackSpec) -> str:
    words: list[str] = []
    if isinstance(stack.embed.position, Sinusoidal | Learned):
        words.append(stack.embed.position.kind)
    found = dict.fromkeys(_position_words(block.attention.position) for block in stack.blocks)
    return "; ".join([*words, *sorted(word for word in found if word)]) or "none"


def _position_words(position: Position) -> str:
    match position:
        case Rope(theta=theta, fraction=fraction, layout=layout, scaling=scaling):
            part = "" if fraction == 1 else f", {figures(fraction)} of a head"
            scaled = "" if scaling.kind == "none" else f", {scaling.kind}"
            return f"rotary, theta {figures(theta, 6)}, {layout}{part}{scaled}"
        case Alibi():
            return "ALiBi"
        case RelativeBias(n_buckets=n, shared=shared):
            return f"relative bias, {n} buckets{'' if shared else ' a layer'}"
    return ""
