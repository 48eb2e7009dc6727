"""What must hold within a block: its wiring, its norms, cross-attention, a mixture's experts."""

from collections.abc import Iterator

from anyformer.spec.problems import Problem, neighbours
from anyformer.spec.reader import Reader, Rule, apply, divisors
from anyformer.spec.rules_attention import offset_needs_weight

_SLOTS = ("before", "after", "residual")


def cross_attention_sees_all_of_the_source(read: Reader) -> Iterator[Problem]:
    """Positions of a source and a target have nothing to do with each other."""
    if read("cross") is None:
        return
    position, mask = read("cross.position"), read("cross.mask")
    if position.kind != "none":
        why = "queries and keys are positions of two texts, whose distance means nothing"
        yield Problem("cross.position", why, position.kind, '"none" would do')
    if mask.kind != "bidirectional" or mask.window is not None:
        why = "a target token sees the whole source; no order holds between two texts"
        yield Problem("cross.mask", why, mask.kind, '"bidirectional" without a window would do')


def cross_attention_is_serial(read: Reader) -> Iterator[Problem]:
    """Cross-attention reads what the layer's attention has found."""
    if read("wiring").kind == "parallel" and read("cross") is not None:
        why = "parallel wiring has two branches on one input, and cross-attention reads the first's result"
        yield Problem("wiring", why, "parallel", '"serial", or cross = false, would do')


def cross_norms_belong_to_cross_attention(read: Reader) -> Iterator[Problem]:
    """A branch that is not there has no norms."""
    if read("cross") is not None:
        return
    norms = read("norms.cross")
    if norms.alpha != 1 or norms.beta != 1 or any(getattr(norms, slot).kind != "none" for slot in _SLOTS):
        yield Problem("norms.cross", "the block has no cross-attention to norm", remedy="leaving it out would do")


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


def parallel_has_one_residual(read: Reader) -> Iterator[Problem]:
    """The one residual of a parallel block is multiplied once."""
    if read("wiring").kind != "parallel":
        return
    attention, ffn = read("norms.attention.alpha"), read("norms.ffn.alpha")
    if attention != ffn:
        why = f"parallel wiring has one residual, which norms.attention.alpha multiplies by {attention:g}"
        yield Problem("norms.ffn.alpha", why, ffn, f"{attention:g} would do")


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


def _offset(path: str) -> Rule:
    def judge(read: Reader) -> Iterator[Problem]:
        yield from offset_needs_weight(read, path)

    return judge


_OFFSETS = tuple(_offset(f"norms.{branch}.{slot}") for branch in ("attention", "cross", "ffn") for slot in _SLOTS)


def norms_have_what_their_offset_moves(read: Reader) -> Iterator[Problem]:
    """The offset of a norm is added to its weight; a slot that is unknown silences itself alone."""
    yield from apply(_OFFSETS, read)


def experts_are_enough(read: Reader) -> Iterator[Problem]:
    """A token cannot use more experts than there are."""
    if read("ffn").kind != "moe":
        return
    n_experts, top_k = read("ffn.n_experts"), read("ffn.top_k")
    if top_k > n_experts:
        why = f"there are n_experts={n_experts} to choose from"
        yield Problem("ffn.top_k", why, top_k, f"{n_experts} would do, or more experts")


def groups_hold_the_choice(read: Reader) -> Iterator[Problem]:
    """Groups are equal, and the best of them hold the experts that a token chooses."""
    if read("ffn").kind != "moe" or read("ffn.groups") is None:
        return
    n_experts, top_k, groups = read("ffn.n_experts"), read("ffn.top_k"), read("ffn.groups")
    if n_experts % groups.n_groups:
        remedy = neighbours(groups.n_groups, divisors(n_experts))
        why = f"n_experts={n_experts} do not make {groups.n_groups} equal groups"
        yield Problem("ffn.groups.n_groups", why, groups.n_groups, remedy)
        return
    size = n_experts // groups.n_groups
    if groups.top_groups > groups.n_groups:
        why = f"there are n_groups={groups.n_groups}"
        yield Problem("ffn.groups.top_groups", why, groups.top_groups, f"{groups.n_groups} would do")
    elif top_k <= n_experts and top_k > groups.top_groups * size:
        yield Problem(
            "ffn.top_k",
            f"top_groups={groups.top_groups} groups of {size} hold {groups.top_groups * size} experts",
            top_k,
            f"{groups.top_groups * size}, or top_groups = {-(-top_k // size)}, would do",
        )
    if groups.score == "top2" and size < 2:
        why = "a group's score is the sum of its best two experts, and a group has one"
        yield Problem("ffn.groups.score", why, "top2", f'"max", or {n_experts // 2} groups, would do')


def bias_rate_moves_a_bias(read: Reader) -> Iterator[Problem]:
    """Balancing without a loss moves the choice bias."""
    if read("ffn").kind == "moe" and read("ffn.bias_rate") > 0 and not read("ffn.choice_bias"):
        why = "it moves the choice bias, and there is none"
        yield Problem("ffn.bias_rate", why, read("ffn.bias_rate"), "choice_bias = true would do")


def shared_gate_has_an_expert(read: Reader) -> Iterator[Problem]:
    """The gate multiplies the shared expert."""
    if read("ffn").kind == "moe" and read("ffn.shared_gate") and read("ffn.shared") is None:
        why = "it multiplies the shared expert, and there is none"
        yield Problem("ffn.shared_gate", why, True, "false, or a shared expert, would do")


WHOLE_BLOCK_RULES: tuple[Rule, ...] = (
    cross_attention_sees_all_of_the_source,
    cross_attention_is_serial,
    cross_norms_belong_to_cross_attention,
    parallel_has_no_norm_on_the_residual,
    parallel_has_one_residual,
    shared_norm_is_one_norm,
    norms_have_what_their_offset_moves,
    experts_are_enough,
    groups_hold_the_choice,
    bias_rate_moves_a_bias,
    shared_gate_has_an_expert,
)
