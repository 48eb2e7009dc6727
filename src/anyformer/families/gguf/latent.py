"""What files say of latent attention and of mixtures beside shared experts, where it is more than a key each."""

from dataclasses import dataclass
from typing import Any

from anyformer.families.config import Config
from anyformer.families.gguf.dialect import Chosen, Made, Said

CHOICE_BIAS = "exp_probs_b.bias"
"""The bias for the choice of experts alone."""
_SCORING = Chosen("expert_gating_func", "scoring_func", {0: "softmax", 1: "softmax", 2: "sigmoid"}, "softmax")


@dataclass(frozen=True)
class Widths:
    """Ranks of the latents, widths of a head, and the number of key heads, which llama.cpp takes for its cache.

    `key_length` and `value_length` are those of the latent that all heads share, and a head's own have names of their
    own; in older files, whose `attn_kv_b` is whole, they are a head's own.
    """

    def read(self, said: Said, config: dict[str, Any]) -> None:
        meta = said.meta
        rank, turning = meta.whole("attention.kv_lora_rank"), meta.whole("rope.dimension_count")
        n_heads = meta.whole("attention.head_count")
        absorbed = "attention.key_length_mla" in meta or "attention.value_length_mla" in meta
        suffix = "_mla" if absorbed else ""
        width, value = (meta.whole(f"attention.{x}_length{suffix}") for x in ("key", "value"))
        if width <= turning:
            meta.refuse(f"attention.key_length{suffix}", width, f"more than rope.dimension_count = {turning}")
        expected = {"head_count_kv": (1, n_heads)}
        if absorbed:
            expected |= {"key_length": (rank + turning, width), "value_length": (rank, value)}
        for key, allowed in expected.items():
            said_here = meta.get(f"attention.{key}", allowed[0])
            if said_here not in allowed:
                meta.refuse(f"attention.{key}", said_here, " or ".join(map(str, allowed)))
        config |= {"num_attention_heads": n_heads, "kv_lora_rank": rank, "v_head_dim": value}
        config |= {"qk_rope_head_dim": turning, "qk_nope_head_dim": width - turning}

    def write(self, config: Config, made: Made) -> None:
        keys = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
        rank, turning, still, value = (config.get(key) for key in keys)
        made.meta |= {
            "attention.head_count": config.get("num_attention_heads"),
            "attention.head_count_kv": 1,
            "attention.kv_lora_rank": rank,
            "attention.key_length": rank + turning,
            "attention.value_length": rank,
            "attention.key_length_mla": still + turning,
            "attention.value_length_mla": value,
            "rope.dimension_count": turning,
        }


@dataclass(frozen=True)
class QueryRank:
    """The rank of the queries' latent. By the number of layers (and of tokens) llama.cpp takes a model to have none."""

    key: str = "attention.q_lora_rank"
    theirs: str = "q_lora_rank"

    def read(self, said: Said, config: dict[str, Any]) -> None:
        meta = said.meta
        rank = meta.get(self.key, 0)
        lite = _lite(meta.whole("block_count"), config["vocab_size"])
        config[self.theirs] = None if lite or rank == 0 else meta.whole(self.key)

    def write(self, config: Config, made: Made) -> None:
        rank = config.get(self.theirs, None)
        if not _lite(config.whole("num_hidden_layers"), config.whole("vocab_size")):
            made.meta[self.key] = rank or 0  # Elsewhere it must be there.


def _lite(n_layers: int, n_tokens: int) -> bool:
    return n_layers in (26, 27) or (n_layers == 48 and n_tokens == 128256)


@dataclass(frozen=True)
class DenseLayers:
    """The number of layers before the first mixture of experts, none where a file says none."""

    key: str = "leading_dense_block_count"
    theirs: str = "first_k_dense_replace"

    def read(self, said: Said, config: dict[str, Any]) -> None:
        config[self.theirs] = said.meta.get(self.key, 0)

    def write(self, config: Config, made: Made) -> None:
        made.meta[self.key] = config.get(self.theirs)


@dataclass(frozen=True)
class Scoring:
    """How experts are scored; early files say nothing, and llama.cpp knows by their sizes what they mean."""

    def read(self, said: Said, config: dict[str, Any]) -> None:
        _SCORING.read(said, config)
        glm = said.meta.whole("block_count") in (47, 48) and config["vocab_size"] == 154880
        if glm and not said.meta.get(_SCORING.key, 0):
            config[_SCORING.theirs] = "sigmoid"

    def write(self, config: Config, made: Made) -> None:
        _SCORING.write(config, made)


@dataclass(frozen=True)
class ChoiceBias:
    """Whether the choice of experts has a bias of its own, as the tensors tell."""

    theirs: str = "choice_bias"

    def read(self, said: Said, config: dict[str, Any]) -> None:
        config[self.theirs] = any(name.endswith(CHOICE_BIAS) for name in said.shapes)

    def write(self, config: Config, made: Made) -> None:
        """Nothing: the tensors say it."""


@dataclass(frozen=True)
class UsedGroups:
    """Groups of experts and how many of them are used, fewer than there are, as llama.cpp requires."""

    def read(self, said: Said, config: dict[str, Any]) -> None:
        n = said.meta.whole("expert_group_count", 1)
        config |= {"n_group": n, "topk_group": said.meta.whole("expert_group_used_count", 1) if n > 1 else 1}
        said.meta.get("expert_group_used_count", None)

    def write(self, config: Config, made: Made) -> None:
        n, used = config.whole("n_group"), config.whole("topk_group")
        if n > 1 and not used < n < config.whole("n_routed_experts"):
            config.refuse("topk_group", used, f"fewer than n_group = {n}, and groups of several experts")
        if n > 1:
            made.meta |= {"expert_group_count": n, "expert_group_used_count": used}
