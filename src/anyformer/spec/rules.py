"""What must hold between fields. Each rule reads the values it needs and yields the problems it finds.

The same rules judge a recipe (in which some values may be broken, and are then unknown) and a finished specification.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from math import isqrt
from typing import Any

from anyformer.spec.problems import Problem, neighbours


class Unknown(Exception):
    """A value that a rule asked for is itself broken, so that the rule has nothing to say."""


class Reader:
    """Reads dotted paths of a part; paths in `unknown`, and all below and above them, raise `Unknown`."""

    def __init__(self, part: Any, unknown: Collection[str] = ()) -> None:
        self.part = part
        self.unknown = unknown

    def __call__(self, path: str) -> Any:
        """The value at `path`."""
        for bad in self.unknown:
            if f"{path}.".startswith(f"{bad}.") or f"{bad}.".startswith(f"{path}."):
                raise Unknown(path)
        value = self.part
        for name in path.split("."):
            value = getattr(value, name)
        return value


Rule = Callable[[Reader], Iterable[Problem]]


def apply(rules: Iterable[Rule], read: Reader) -> Iterator[Problem]:
    """Every problem that the rules find; a rule that meets an unknown value stays silent."""
    for rule in rules:
        try:
            yield from list(rule(read))
        except Unknown:
            continue


def check(rules: Iterable[Rule], read: Reader) -> None:
    """Raises `ValueError` with every problem, for use in a part's own validation."""
    problems = list(apply(rules, read))
    if problems:
        raise ValueError("; ".join(str(problem) for problem in problems))


def divisors(number: int) -> list[int]:
    """Every divisor of `number`, ascending."""
    small = [x for x in range(1, isqrt(number) + 1) if number % x == 0]
    return sorted({*small, *(number // x for x in small)})


def heads_share_keys_evenly(read: Reader) -> Iterator[Problem]:
    """Each key/value head serves the same number of query heads."""
    n_heads, n_kv_heads = read("attention.n_heads"), read("attention.n_kv_heads")
    if n_heads % n_kv_heads:
        yield Problem(
            "attention.n_kv_heads",
            f"n_heads={n_heads} is not a multiple of n_kv_heads={n_kv_heads}",
            n_kv_heads,
            neighbours(n_kv_heads, divisors(n_heads)),
        )


def rotary_width_is_even(read: Reader) -> Iterator[Problem]:
    """Rotation turns pairs of channels."""
    position = read("attention.position")
    if position.kind != "rope":
        return
    d_head = read("attention.d_head")
    width = position.width(d_head)
    if width >= 2 and width % 2 == 0:
        return
    if d_head < 2:
        yield Problem("attention.d_head", "a head of one channel has no pair to rotate", d_head, "2 would do")
    elif position.fraction == 1.0:
        yield Problem(
            "attention.d_head",
            f"rotary positions turn pairs of channels and d_head={d_head} is odd",
            d_head,
            f"{d_head - 1} or {d_head + 1}, or a fraction below 1, would do",
        )
    else:
        near = max(2, width - width % 2)
        yield Problem(
            "attention.position.fraction",
            f"of d_head={d_head} it turns {width} channels, which do not make pairs",
            position.fraction,
            f"{near / d_head:.6g} ({near} channels) would do",
        )


def parallel_has_no_norm_on_the_residual(read: Reader) -> Iterator[Problem]:
    """The two branches of a parallel block have one sum, so a norm on a branch's own sum has no meaning."""
    if read("wiring").kind != "parallel":
        return
    for branch in ("attention", "ffn"):
        if read(f"norms.{branch}.residual").kind != "none":
            yield Problem(
                f"norms.{branch}.residual",
                "parallel wiring adds both branches at once, so that no branch has a residual sum of its own to norm",
                remedy='placement = "pre", or wiring = "serial", would do',
            )
            return


def shared_norm_is_one_norm(read: Reader) -> Iterator[Problem]:
    """A parallel block with one shared norm cannot describe two."""
    wiring = read("wiring")
    if wiring.kind == "parallel" and wiring.shared_norm:
        attention, ffn = read("norms.attention.before"), read("norms.ffn.before")
        if attention != ffn:
            yield Problem(
                "norms.ffn.before",
                "the branches share one norm but describe two",
                ffn.kind,
                "wiring.shared_norm = false would do",
            )


def learned_positions_have_a_length(read: Reader) -> Iterator[Problem]:
    """A learned table needs its number of rows."""
    if read("decoder.embed.position").kind == "learned" and read("decoder.max_positions") is None:
        yield Problem(
            "max_positions",
            "learned positions need the length of their table",
            remedy="max_positions = 1024, say, would do",
        )


def sinusoids_come_in_pairs(read: Reader) -> Iterator[Problem]:
    """Each frequency fills two channels."""
    d_model = read("decoder.d_model")
    if read("decoder.embed.position").kind == "sinusoidal" and d_model % 2:
        yield Problem(
            "d_model",
            f"sinusoidal positions fill pairs of channels and d_model={d_model} is odd",
            d_model,
            f"{max(2, d_model - 1)} or {d_model + 1} would do",
        )


def ties_join_what_exists(read: Reader) -> Iterator[Problem]:
    """A tie joins two tables that are both there."""
    ties, head = read("ties"), read("head")
    if len(ties) == 1:
        yield Problem("ties", "one table alone is not tied", sorted(ties), "name two or none")
    if "head" in ties and head is None:
        yield Problem("tie", "there is no head to tie to the embedding", remedy="tie = false would do")


BLOCK_RULES: tuple[Rule, ...] = (
    heads_share_keys_evenly,
    rotary_width_is_even,
    parallel_has_no_norm_on_the_residual,
    shared_norm_is_one_norm,
)
MODEL_RULES: tuple[Rule, ...] = (
    learned_positions_have_a_length,
    sinusoids_come_in_pairs,
    ties_join_what_exists,
)
