"""Drawing feed-forward networks: dense, gated, mixtures of experts."""

from typing import Any, get_args

from anyformer.laws.choose import Chooser, chance, maybe
from anyformer.spec.part import Activation

Table = dict[str, Any]

INNER_WIDTHS = (5, 16, 27)
ACTIVATIONS = ("silu", *(name for name in get_args(Activation) if name != "silu"))
WORDS = {"swiglu": "silu", "geglu": "gelu", "reglu": "relu"}


def single(choose: Chooser, *, dropout: bool = True) -> Table:
    """A dense or gated feed-forward."""
    kind = choose.pick(("dense", "gated"))
    table: Table = {"kind": kind, "activation": choose.pick(ACTIVATIONS), "d_ff": choose.pick(INNER_WIDTHS)}
    maybe(choose, table, "bias", (True, False))
    if kind == "gated":
        maybe(choose, table, "limit", (1.0, 0.5))
        maybe(choose, table, "up_offset", (1.0, -0.5))
    if dropout and chance(choose, 4):
        table["dropout"] = table["out_dropout"] = choose.pick((0.1, 0.5))
    return table


def _groups(choose: Chooser, n_experts: int, top_k: int) -> Table | None:
    """Groups that hold the choice, where there are any."""
    counts = [n for n in range(2, n_experts + 1) if n_experts % n == 0]
    if not counts or not choose.pick((False, True)):
        return None
    n_groups = choose.pick(counts[:2])
    size = n_experts // n_groups
    least = -(-top_k // size)
    return {
        "n_groups": n_groups,
        "top_groups": choose.pick(range(least, n_groups + 1)),
        "score": choose.pick(("max", "top2", "top2") if size >= 2 else ("max",)),
    }


def _balance(choose: Chooser, table: Table) -> None:
    """How the load of experts is kept even."""
    if choose.pick((False, True)):
        table["balance_loss"] = choose.pick((0.01, 0.3))
        table["balance_over"] = choose.pick(("sequence", "batch"))
    maybe(choose, table, "z_loss", (0.001, 0.1))
    if choose.pick((False, True)):
        table["choice_bias"] = True
        maybe(choose, table, "bias_rate", (0.001, 0.01))


def mixture(choose: Chooser) -> Table:
    """A mixture of experts."""
    n_experts = choose.pick((4, 6, 6, 3, 5))
    top_k = choose.pick(range(1, min(3, n_experts) + 1))
    table: Table = {
        "kind": "moe",
        "n_experts": n_experts,
        "top_k": top_k,
        "scoring": choose.pick(("softmax", "sigmoid")),
        "normalise": choose.pick((True, False)),
        "expert": single(choose, dropout=False),
    }
    maybe(choose, table, "scale", (2.5, 0.5))
    maybe(choose, table, "router_bias", (True, False))
    groups = _groups(choose, n_experts, top_k)
    if groups is not None:
        table["groups"] = groups
    if choose.pick((False, True)):
        table["shared"] = choose.pick(({"d_ff": 7}, 1, 2))
        table["shared_gate"] = choose.pick((False, True))
    _balance(choose, table)
    return table


def feed_forward(choose: Chooser, *, experts: bool = True) -> Table | str:
    """A feed-forward network of a layer; `experts`: it may be a mixture."""
    kind = choose.pick(("single", "single", "word", *(("moe", "moe") if experts else ())))
    if kind == "moe":
        return mixture(choose)
    if kind == "word":
        return {"kind": choose.pick(tuple(WORDS)), "d_ff": choose.pick(INNER_WIDTHS)}
    return single(choose)
