"""Mixtures of experts in a configuration and in a file."""

from dataclasses import dataclass
from typing import Any

from anyformer.families.config import Config
from anyformer.families.family import Joined, Rule, Stacked
from anyformer.families.fields import Flag, Named, Same, put
from anyformer.families.tables import Tables, View
from anyformer.spec.ffn import Groups
from anyformer.spec.problems import MISSING

IGNORED = ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise")
"""What acts in training alone, and there only where a loss or noise is asked for."""
ACTIVATION = Named(
    "hidden_act", tuple(f"ffn.{x}.activation" for x in ("dense", "sparse.expert", "sparse.shared")), default="silu"
)
"""Of every expert and of dense layers."""
BALANCE = (
    Same("aux_loss_alpha", "ffn.sparse.balance_loss", default=0.0),
    Flag("seq_aux", "ffn.sparse.balance_over", default=True, on="sequence", off="batch"),
)
"""The loss that DeepSeek's own code adds in training."""


@dataclass(frozen=True)
class SharedExperts:
    """A number of shared experts, each as wide as a routed one: one expert as wide as all of them together."""

    key: str
    default: int
    width: str = "ffn.sparse.expert.d_ff"
    path: str = "ffn.sparse.shared.d_ff"

    def read(self, config: Config, tables: Tables) -> None:
        n, width = config.get(self.key, self.default, nullable=True), tables.get(self.width)
        if not isinstance(n, int) or isinstance(n, bool) or n < 1:
            config.refuse(self.key, n, "a whole number, 1 or more")
        tables.set(self.path, n * width if isinstance(width, int) else width, self.key)

    def write(self, view: View, config: dict[str, Any]) -> None:
        width, whole = view.first(self.width), view.first(self.path)
        if isinstance(width, int) and isinstance(whole, int) and whole % width == 0:
            put(config, self.key, whole // width)


@dataclass(frozen=True)
class ExpertGroups:
    """Groups of experts, of which a token uses the best: `n_group` and `topk_group`; one group is none.

    Args:
        score: how a group is scored, as a specification has it.
        default: the numbers where the configuration has none; None where they must be there.
        method: the key that says whether groups are used, with its words for no and for yes, no being the default.
    """

    score: str
    default: tuple[int, int] | None = None
    method: tuple[str, str, str] | None = None
    keys: tuple[str, str] = ("n_group", "topk_group")
    path: str = "ffn.sparse.groups"

    def read(self, config: Config, tables: Tables) -> None:
        for key in self.keys:
            config.get(key, None)
        if self.method is not None and config.word(self.method[0], self.method[1:], self.method[1]) == self.method[1]:
            tables.set(self.path, None, self.method[0])
            return
        n, top = (
            config.whole(key) if self.default is None else config.whole(key, self.default[place])
            for place, key in enumerate(self.keys)
        )
        if n == top == 1:
            tables.set(self.path, None, self.keys[0])
            return
        tables.set(f"{self.path}.n_groups", n, self.keys[0])
        tables.set(f"{self.path}.top_groups", top, self.keys[1])
        tables.set(f"{self.path}.score", self.score, self.keys[0])

    def write(self, view: View, config: dict[str, Any]) -> None:
        groups = view.first(self.path)
        if groups is MISSING:
            return
        if self.method is not None:
            put(config, self.method[0], self.method[1 if groups is None else 2])
        n, top = (groups.n_groups, groups.top_groups) if isinstance(groups, Groups) else (1, 1)
        put(config, self.keys[0], n)
        put(config, self.keys[1], top)


_FFN = "decoder.blocks.{i}.ffn"
_MLP = "{body}layers.{i}.mlp"
FUSED: tuple[Rule, ...] = (
    (f"{_MLP}.experts.gate_up_proj", (f"{_FFN}.experts.gate.weight", f"{_FFN}.experts.up.weight"), Joined(1)),
    (f"{_MLP}.experts.down_proj", f"{_FFN}.experts.down.weight"),
)
"""All experts of a layer in one tensor, as `transformers` 5 keeps them in memory and writes them when asked to."""
EXPERTS: tuple[Rule, ...] = (
    (f"{_MLP}.gate.weight", f"{_FFN}.router.weight"),
    *(
        (f"{_MLP}.experts.{{e}}.{x}_proj.weight", f"{_FFN}.experts.{x}.weight", Stacked())
        for x in ("gate", "up", "down")
    ),
    *FUSED,
)
"""A router, and a tensor for each expert."""


def shared(name: str) -> tuple[Rule, ...]:
    """The shared expert, called so."""
    return tuple((f"{_MLP}.{name}.{x}_proj.{{p}}", f"{_FFN}.shared.{x}.{{p}}") for x in ("gate", "up", "down"))
