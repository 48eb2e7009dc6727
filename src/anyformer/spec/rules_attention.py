"""What must hold within an attention, of the layer's own and of cross-attention alike."""

from collections.abc import Iterator
from typing import Any

from anyformer.spec.problems import Problem, neighbours
from anyformer.spec.reader import Reader, Rule, divisors, within


def heads_share_keys_evenly(read: Reader) -> Iterator[Problem]:
    """Each key/value head serves the same number of query heads."""
    if read("kind") != "grouped":
        return
    n_heads, n_kv_heads = read("n_heads"), read("n_kv_heads")
    if n_heads % n_kv_heads:
        yield Problem(
            "n_kv_heads",
            f"n_heads={n_heads} is not a multiple of n_kv_heads={n_kv_heads}",
            n_kv_heads,
            neighbours(n_kv_heads, divisors(n_heads)),
        )


def rotary_width_is_even(read: Reader) -> Iterator[Problem]:
    """Rotation turns pairs of channels."""
    if read("kind") != "grouped" or read("position").kind != "rope":
        return
    position, d_head = read("position"), read("d_head")
    width = position.width(d_head)
    if width >= 2 and width % 2 == 0:
        return
    if d_head < 2:
        yield Problem("d_head", "a head of one channel has no pair to rotate", d_head, "2 would do")
    elif position.fraction == 1.0:
        yield Problem(
            "d_head",
            f"rotary positions turn pairs of channels and d_head={d_head} is odd",
            d_head,
            f"{d_head - 1} or {d_head + 1}, or a fraction below 1, would do",
        )
    else:
        near = max(2, width - width % 2)
        yield Problem(
            "position.fraction",
            f"of d_head={d_head} it turns {width} channels, which do not make pairs",
            position.fraction,
            f"{near / d_head:.6g} ({near} channels) would do",
        )


def latent_heads_turn_d_rope(read: Reader) -> Iterator[Problem]:
    """Of a latent head the d_rope channels turn, all of them, and only with rotary positions."""
    if read("kind") != "latent":
        return
    position, d_rope = read("position"), read("d_rope")
    if position.kind != "rope":
        if d_rope:
            why = f"these channels are the ones that turn, and position = {position.kind!r} turns none"
            yield Problem("d_rope", why, d_rope, "0, or rotary positions, would do")
        return
    if position.fraction != 1.0:
        yield Problem(
            "position.fraction",
            "of a latent head d_rope says how many channels turn",
            position.fraction,
            "1.0 and another d_rope would do",
        )
    if d_rope < 2 or d_rope % 2:
        near = " or ".join(str(x) for x in sorted({max(2, d_rope - 1), max(2, d_rope + 1)}))
        yield Problem("d_rope", "rotary positions turn pairs of channels", d_rope, f"{near} would do")


def _turning(read: Reader) -> int:
    """How many channels of a head turn."""
    if read("kind") == "latent":
        return int(read("d_rope"))
    return int(read("position").width(read("d_head")))


def scalings_have_channels(read: Reader) -> Iterator[Problem]:
    """Scalings that change theta, or the slow pairs alone, need two pairs; LongRoPE lists a number for each."""
    if read("position").kind != "rope":
        return
    scaling, width = read("position").scaling, _turning(read)
    if width < 2 or width % 2:
        return
    if scaling.kind in ("ntk", "dynamic", "yarn") and width < 4:
        why = (
            "it keeps fast pairs and slows slow ones"
            if scaling.kind == "yarn"
            else "its exponent is d/(d − 2) for the d channels that turn"
        )
        yield Problem(
            "position.scaling",
            f"{why}, and d={width} is one pair",
            scaling.kind,
            '4 turning channels, or "linear", would do',
        )
    for name in ("short", "long") if scaling.kind == "longrope" else ():
        count = len(getattr(scaling, name))
        if count != width // 2:
            yield Problem(
                f"position.scaling.{name}",
                f"has {count} numbers for the {width // 2} pairs of the {width} channels that turn",
                remedy=f"{width // 2} numbers would do",
            )


def scalings_stretch(read: Reader) -> Iterator[Problem]:
    """A scaling lengthens the context; its two thresholds are in order."""
    if read("position").kind != "rope":
        return
    position: Any = read("position")
    scaling = position.scaling
    factor = getattr(scaling, "factor", 1.0)
    if factor < 1:
        yield Problem(
            "position.scaling.factor", "a scaling stretches the context", factor, f"1.0 or {1 / factor:.6g} would do"
        )
    if scaling.kind == "yarn":
        if scaling.beta_fast <= scaling.beta_slow:
            yield Problem(
                "position.scaling.beta_fast",
                f"pairs are kept above it and slowed below beta_slow={scaling.beta_slow:g} turns, so it is the larger",
                scaling.beta_fast,
                f"{2 * scaling.beta_slow:g}, or a smaller beta_slow, would do",
            )
        if position.theta <= 1:
            why = "the turns of a pair are found by the logarithm of theta, which must be above 1 with yarn"
            yield Problem("position.theta", why, position.theta, "10000.0 would do")
    if scaling.kind == "llama3" and scaling.high_freq_factor <= scaling.low_freq_factor:
        yield Problem(
            "position.scaling.high_freq_factor",
            f"frequencies are blended between low_freq_factor={scaling.low_freq_factor:g} and it, so it is the larger",
            scaling.high_freq_factor,
            f"{4 * scaling.low_freq_factor:g}, or a smaller low_freq_factor, would do",
        )


def buckets_tell_what_is_seen(read: Reader) -> Iterator[Problem]:
    """One-sided buckets put every key after the query into bucket 0."""
    position = read("position")
    if position.kind != "relative":
        return
    mask = read("mask")
    if mask.kind != "causal" and not position.bidirectional:
        yield Problem(
            "position.bidirectional",
            f"one-sided buckets cannot tell keys after the query apart, which a {mask.kind} mask shows",
            False,
            "true would do",
        )


def buckets_suffice(read: Reader) -> Iterator[Problem]:
    """Each side has a bucket for near keys and one for far ones, and the far ones begin below max_distance."""
    position = read("position")
    if position.kind != "relative":
        return
    n_buckets = position.n_buckets
    if position.bidirectional and n_buckets % 2:
        remedy = neighbours(n_buckets, [max(4, n_buckets - 1), n_buckets + 1])
        yield Problem("position.n_buckets", "each side has half of the buckets", n_buckets, remedy)
        return
    side = n_buckets // 2 if position.bidirectional else n_buckets
    if side < 2:
        why = "a side of one bucket tells no distances apart"
        yield Problem("position.n_buckets", why, n_buckets, "4 or bidirectional = false would do")
    elif position.max_distance <= side // 2:
        yield Problem(
            "position.max_distance",
            f"the first {side // 2} of a side's {side} buckets stand for one distance each, and the last ends there",
            position.max_distance,
            f"{side // 2 + 1} would do, or fewer buckets",
        )


def one_sided_slopes_need_a_causal_mask(read: Reader) -> Iterator[Problem]:
    """ALiBi without its symmetric form lowers only keys before the query."""
    position = read("position")
    if position.kind != "alibi":
        return
    mask = read("mask")
    if mask.kind != "causal" and not position.symmetric:
        yield Problem(
            "position.symmetric",
            f"only keys before the query would be lowered, and a {mask.kind} mask shows keys after it at any distance",
            False,
            'true, or mask = "causal", would do' if mask.kind == "prefix" else "true would do",
        )


def sinks_need_a_window(read: Reader) -> Iterator[Problem]:
    """Without a window the first keys are seen anyway."""
    mask = read("mask")
    if mask.sinks and mask.window is None:
        why = "without a window the first keys are seen anyway"
        yield Problem("mask.sinks", why, mask.sinks, "0, or a mask.window, would do")


def one_norm_for_all_heads_is_one_weight(read: Reader) -> Iterator[Problem]:
    """A norm over the whole projection has one weight for each of its channels already."""
    if read("kind") != "grouped":
        return
    qk_norm = read("qk_norm")
    if qk_norm is not None and qk_norm.weights == "per_head" and qk_norm.over == "projection":
        why = "a norm over the whole projection has a weight for each channel of each head already"
        yield Problem("qk_norm.weights", why, "per_head", '"shared", or over = "head", would do')


def inner_norms_have_what_their_offset_moves(read: Reader) -> Iterator[Problem]:
    """The offset of a norm is added to its weight."""
    path = "qk_norm.norm" if read("kind") == "grouped" else "norm"
    if path == "norm" or read("qk_norm") is not None:
        yield from offset_needs_weight(read, path)


def offset_needs_weight(read: Reader, path: str) -> Iterator[Problem]:
    """An offset is added to a weight, so there is one."""
    norm = read(path)
    if norm.kind != "none" and norm.offset and not norm.weight:
        yield Problem(f"{path}.offset", "it is added to the weight, and weight = false", norm.offset, "0 would do")


_OF_AN_ATTENTION: tuple[Rule, ...] = (
    heads_share_keys_evenly,
    rotary_width_is_even,
    latent_heads_turn_d_rope,
    scalings_have_channels,
    scalings_stretch,
    buckets_tell_what_is_seen,
    buckets_suffice,
    one_sided_slopes_need_a_causal_mask,
    sinks_need_a_window,
    one_norm_for_all_heads_is_one_weight,
    inner_norms_have_what_their_offset_moves,
)


def _in_both(rule: Rule) -> Rule:
    def judge(read: Reader) -> Iterator[Problem]:
        yield from within(rule, read, "attention")
        if read("cross") is not None:
            yield from within(rule, read, "cross")

    judge.__doc__ = rule.__doc__
    return judge


ATTENTION_RULES: tuple[Rule, ...] = tuple(_in_both(rule) for rule in _OF_AN_ATTENTION)
