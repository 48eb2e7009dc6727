"""GGUF files of Phi-3, GPT-2, StarCoder2, OLMo 2 and DeepSeek: the same logits, both ways, and what is refused."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import CPU, Change, apart, gguf, modeling_gguf_pytorch_utils, put, raw, tiny, tokens, transformers
from torch import Tensor, nn

from anyformer.errors import UserError
from anyformer.families.gguf import DIALECTS
from anyformer.spec.parts import ModelSpec
from anyformer.weights.config import read_config
from anyformer.weights.gguf.format import read_gguf
from anyformer.weights.gguf.load import load_gguf
from anyformer.weights.gguf.reading import Place, read_place, write_place
from anyformer.weights.gguf.save import require_kind, save_gguf

SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
SAID = {
    "embedding_length": 48,
    "feed_forward_length": 72,
    "block_count": 2,
    "attention.head_count": 6,
    "attention.head_count_kv": 2,
    "context_length": 128,
}
SHORT, LONG = [1.0, 1.5, 2.25], [1.25, 4.0, 9.5]
GPT2 = {"vocab_size": 97, "n_embd": 48, "n_layer": 2, "n_head": 6, "n_positions": 40, "layer_norm_epsilon": 3e-5}
SAID_GPT2 = {
    "embedding_length": 48,
    "feed_forward_length": 192,
    "block_count": 2,
    "attention.head_count": 6,
    "context_length": 40,
    "attention.layer_norm_epsilon": 3e-5,
}
LATENT = {
    "vocab_size": 97,
    "hidden_size": 36,
    "intermediate_size": 68,
    "moe_intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "kv_lora_rank": 20,
    "q_lora_rank": 26,
    "qk_nope_head_dim": 14,
    "qk_rope_head_dim": 6,
    "v_head_dim": 18,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
    "max_position_embeddings": 128,
    "rms_norm_eps": 2e-6,
    "n_group": 1,
    "topk_group": 1,
}
SAID_LATENT = {
    "embedding_length": 36,
    "feed_forward_length": 68,
    "expert_feed_forward_length": 20,
    "block_count": 3,
    "attention.head_count": 3,
    "attention.head_count_kv": 1,
    "attention.kv_lora_rank": 20,
    "attention.q_lora_rank": 26,
    "attention.key_length": 26,
    "attention.value_length": 20,
    "attention.key_length_mla": 20,
    "attention.value_length_mla": 18,
    "rope.dimension_count": 6,
    "expert_count": 6,
    "expert_used_count": 2,
    "expert_shared_count": 2,
    "leading_dense_block_count": 1,
    "expert_weights_scale": 1.7,
    "context_length": 128,
    "attention.layer_norm_rms_epsilon": 2e-6,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4}
SAID_YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 32,
    "rope.scaling.yarn_beta_fast": 32.0,
    "rope.scaling.yarn_beta_slow": 1.0,
}
V3 = {"scoring_func": "sigmoid", "norm_topk_prob": True}
SAID_V3 = {"expert_gating_func": 2, "expert_weights_norm": True}


def as_it_is(name: str, tensor: Tensor) -> Mapping[str, Tensor]:
    return {name: tensor}


def upright(name: str, tensor: Tensor) -> Mapping[str, Tensor]:
    """GPT-2's matrices, which `transformers` keeps as [in, out]."""
    return {name: tensor.T if re.search(r"\.(c_attn|c_proj|c_fc)\.weight", name) else tensor}


def absorbed(name: str, tensor: Tensor) -> Mapping[str, Tensor]:
    """Each head's way from the latent to its keys, turned round, and to its values."""
    if name.endswith("e_score_correction_bias"):
        return {name.replace("correction_bias", "correction.bias"): tensor}
    if not name.endswith("kv_b_proj.weight"):
        return {name: tensor}
    heads = tensor.view(3, 32, 20)
    return {
        name.replace("kv_b", "k_b"): torch.stack([head[:14].T for head in heads]),
        name.replace("kv_b", "v_b"): torch.stack([head[14:] for head in heads]),
    }


@dataclass(frozen=True)
class File:
    """A model, and how a file says it."""

    architecture: str
    model: str
    settings: dict[str, Any]
    said: dict[str, Any]
    change: Change = as_it_is
    tables: dict[str, list[float]] = field(default_factory=dict)

    def made(self) -> nn.Module:
        model = tiny(self.model, **self.settings)
        generator = torch.Generator().manual_seed(2)
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
        return model

    def put(self, path: Path, **said: Any) -> Path:
        tables = {name: torch.tensor(numbers) for name, numbers in self.tables.items()}
        return put(path, self.architecture, self.made(), {**self.said, **said}, self.change, tables)


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 2e4,
    "partial_rotary_factor": 0.75,
    "short_factor": SHORT,
    "long_factor": LONG,
    "original_max_position_embeddings": 16,
}
FILES = {
    "phi3": File(
        "phi3",
        "Phi3",
        {**SIZES, "rms_norm_eps": 3e-5, "original_max_position_embeddings": 128, "pad_token_id": None},
        {**SAID, "attention.layer_norm_rms_epsilon": 3e-5, "attention.sliding_window": 5},
    ),
    "phi3 of parts, longrope": File(
        "phi3",
        "Phi3",
        {
            **SIZES,
            "tie_word_embeddings": True,
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 16,
            "rope_parameters": LONGROPE,
            "pad_token_id": None,
        },
        {
            **SAID,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "rope.freq_base": 2e4,
            "rope.dimension_count": 6,
            "rope.scaling.original_context_length": 16,
            "rope.scaling.attn_factor": math.sqrt(1 + math.log(8) / math.log(16)),
        },
        tables={"rope_factors_short.weight": SHORT, "rope_factors_long.weight": LONG},
    ),
    "gpt2": File("gpt2", "GPT2", GPT2, SAID_GPT2, upright),
    "gpt2 with two tables": File("gpt2", "GPT2", {**GPT2, "tie_word_embeddings": False}, SAID_GPT2, upright),
    "starcoder2": File(
        "starcoder2",
        "Starcoder2",
        {**SIZES, "norm_epsilon": 3e-5},
        {**SAID, "attention.layer_norm_epsilon": 3e-5},
    ),
    "starcoder2 of its own head, linear": File(
        "starcoder2",
        "Starcoder2",
        {
            **SIZES,
            "tie_word_embeddings": False,
            "rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 5e4},
        },
        {
            **SAID,
            "attention.layer_norm_epsilon": 1e-5,
            "rope.freq_base": 5e4,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 2.5,
        },
    ),
    "olmo2": File(
        "olmo2",
        "Olmo2",
        {**SIZES, "rms_norm_eps": 3e-6, "rope_parameters": YARN},
        {**SAID, **SAID_YARN, "attention.layer_norm_rms_epsilon": 3e-6},
    ),
    "deepseek-v2": File(
        "deepseek2",
        "DeepseekV2",
        {**LATENT, "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}},
        {**SAID_LATENT, **SAID_YARN, "rope.scaling.yarn_log_multiplier": 0.0707, "expert_group_count": 1},
        absorbed,
    ),
    "deepseek-v2 of old, no latent queries": File(
        "deepseek2",
        "DeepseekV2",
        {**LATENT, "q_lora_rank": None},
        {
            **{key: value for key, value in SAID_LATENT.items() if not key.endswith(("_mla", "q_lora_rank"))},
            "attention.head_count_kv": 3,
            "attention.key_length": 20,
            "attention.value_length": 18,
        },
    ),
    "deepseek-v3": File(
        "deepseek2",
        "DeepseekV3",
        {**LATENT, **V3, "n_group": 3, "topk_group": 2},
        {**SAID_LATENT, **SAID_V3, "expert_group_count": 3, "expert_group_used_count": 2},
        absorbed,
    ),
}


def written(path: Path, model: nn.Module, architecture: str) -> Place:
    """A model of ours written as that architecture, and how it is said there."""
    place = write_place(model.spec, [dialect for dialect in DIALECTS if dialect.architecture == architecture])
    save_gguf(path, place, model.state_dict(), require_kind("F32"), {}, "tiny")
    return place


@pytest.mark.parametrize("name", FILES)
def test_logits_equal_those_of_transformers(name, tmp_path):
    """B60, B61: layouts of rotation, kinds of GELU, and each family's eps."""
    file = FILES[name]
    model = file.made()
    path = file.put(tmp_path / "a.gguf")
    assert apart(model, path) < 1e-5
    if "longrope" in name:
        assert apart(model, path, length=13) < 1e-5  # Short of the original context.


@pytest.mark.parametrize("name", FILES)
def test_a_file_written_again_is_the_same_model(name, tmp_path):
    file = FILES[name]
    source, path = file.put(tmp_path / "a.gguf"), tmp_path / "b.gguf"
    model = load_gguf(source, torch.float32, CPU).model
    place = written(path, model, file.architecture)
    again = load_gguf(path, torch.float32, CPU).model
    assert again.spec == model.spec
    theirs = again.state_dict()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in model.state_dict().items())
    if "of old" not in name:
        first, second = raw(source), raw(path)
        assert first.keys() == second.keys()
        assert all((first[name] == second[name]).all() for name in first)
        for key, value in file.said.items():
            if key.startswith(("attention.", "rope.", "expert_")) and key not in _SILENT:
                here = place.meta.get(f"{file.architecture}.{key}")
                assert here == (value if isinstance(value, str) else pytest.approx(value, rel=1e-6)), key


_SILENT = (
    "attention.sliding_window",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "expert_group_count",
    "expert_group_used_count",
)
"""What is not written: without effect, or of one group alone."""


@pytest.mark.parametrize("name", ["phi3", "gpt2", "gpt2 with two tables", "starcoder2"])
def test_transformers_reads_what_is_written(name, tmp_path):
    file = FILES[name]
    model, path = file.made(), tmp_path / "b.gguf"
    written(path, load_gguf(file.put(tmp_path / "a.gguf"), torch.float32, CPU).model, file.architecture)
    made = type(model)(model.config).eval()
    tensors = modeling_gguf_pytorch_utils.load_gguf_checkpoint(path, True, made)["tensors"]
    lacking = made.load_state_dict(tensors, strict=False)
    assert set(lacking.missing_keys) <= ({"lm_head.weight"} if model.config.tie_word_embeddings else set())
    ids = tokens(model)
    with torch.no_grad():
        assert torch.equal(made(ids).logits, model(ids).logits)


def test_groups_of_v3_are_written(tmp_path):
    file = FILES["deepseek-v3"]
    place = written(tmp_path / "b.gguf", load_gguf(file.put(tmp_path / "a.gguf"), None, CPU).model, "deepseek2")
    assert {key: value for key, value in place.meta.items() if "group" in key} == {
        "deepseek2.expert_group_count": 3,
        "deepseek2.expert_group_used_count": 2,
    }


def read(name: str, path: Path, **said: Any) -> ModelSpec:
    return read_place(read_gguf(FILES[name].put(path, **said))).reading.spec


def test_scores_without_the_multiplier_of_yarn_are_llama_cpps(tmp_path):
    """llama.cpp scales what turns by 1 + 0.1·ln 4, and all scores by its square."""
    spec = read("deepseek-v2", tmp_path / "a.gguf", **{"rope.scaling.yarn_log_multiplier": 0.0})
    attention = spec.decoder.blocks[0].attention
    growth = 1 + 0.1 * math.log(4)
    assert attention.scale == pytest.approx(growth**2 / math.sqrt(20), rel=1e-12)
    assert attention.position.scaling.attention_factor == pytest.approx(growth, rel=1e-12)
    assert "deepseek2.rope.scaling.yarn_log_multiplier" not in write_place(spec).meta


def test_what_a_file_leaves_to_llama_cpp_is_as_there(tmp_path):
    softmax = read("deepseek-v2", tmp_path / "a.gguf", expert_group_count=3, expert_group_used_count=2)
    assert softmax.decoder.blocks[1].ffn.groups.score == "top2"
    assert softmax.decoder.blocks[1].ffn.scoring == "softmax"
    scaled = read("olmo2", tmp_path / "b.gguf", **{"rope.scaling.attn_factor": 1.5})
    factor = scaled.decoder.blocks[0].attention.position.scaling.attention_factor
    assert factor == pytest.approx(1.5 * (1 + 0.1 * math.log(4)), rel=1e-9)
    assert read("phi3", tmp_path / "c.gguf").decoder.blocks[0].attention.mask.window is None


BETA = {"rope.scaling.yarn_beta_fast": 16.0}
STRANGE: list[tuple[str, dict[str, Any], str]] = [
    ("olmo2", {"attention.sliding_window": 8}, "attention.sliding_window"),
    ("olmo2", BETA, "yarn_beta_fast"),
    ("starcoder2", {"rope.dimension_count": 4}, "rope.dimension_count"),
    ("starcoder2", {"rope.scaling.attn_factor": 1.5}, "attn_factor"),
    ("phi3 of parts, longrope", {"rope.scaling.factor": 2.0}, "rope.scaling.type"),
    ("phi3 of parts, longrope", {"rope.dimension_count": 10}, "rope.dimension_count"),
    ("gpt2", {"attention.head_count_kv": 2}, "attention.head_count_kv"),
    ("deepseek-v2", {"attention.key_length": 30}, "attention.key_length"),
    ("deepseek-v2", {"attention.key_length_mla": 6}, "attention.key_length_mla"),
    ("deepseek-v2", {"rope.scaling.type": "linear"}, "rope.scaling.factor"),
    ("deepseek-v2", {"rope.scaling.attn_factor": 1.5}, "attn_factor"),
    ("deepseek-v2", {"expert_gating_func": 3}, "expert_gating_func"),
    ("deepseek-v2", {"expert_gating_func": [2]}, "expert_gating_func"),
    ("deepseek-v2", {"attention.temperature_scale": 0.1}, "attention.temperature_scale"),
    ("deepseek-v2", {"nextn_predict_layers": 1}, "nextn_predict_layers"),
]


@pytest.mark.parametrize(("name", "said", "named"), STRANGE, ids=[f"{x[0]} {x[1]}" for x in STRANGE])
def test_metadata_that_no_specification_says_are_refused(name, said, named, tmp_path):
    with pytest.raises(UserError, match=re.escape(named)):
        read(name, tmp_path / "a.gguf", **said)


def test_a_table_that_llama_cpp_does_not_read_is_refused(tmp_path):
    file = FILES["starcoder2"]
    path = put(tmp_path / "a.gguf", "starcoder2", file.made(), file.said, tables={"rope_freqs.weight": torch.ones(4)})
    with pytest.raises(UserError, match=r"rope_freqs\.weight"):
        read_place(read_gguf(path))


def spec_of(model: str, **settings: Any) -> ModelSpec:
    """What our reader of published configurations makes of one."""
    config = getattr(transformers, f"{model}Config")(**settings).to_dict()
    names = {"GPT2": "GPT2LMHeadModel"}
    return read_config({**config, "architectures": [names.get(model, f"{model}ForCausalLM")]}, "a test").spec


MANY = {**LATENT, "num_hidden_layers": 27}
UNSAID = [
    ("phi3", "Phi3", {**SIZES, "sliding_window": 8, "pad_token_id": None}, r"mask\.window = 8"),
    ("starcoder2", "Starcoder2", {**SIZES, "sliding_window": 8}, r"mask\.window = 8"),
    ("starcoder2", "Starcoder2", {**SIZES, "sliding_window": None, "use_bias": False}, "bias = False"),
    ("starcoder2", "Starcoder2", {**SIZES, "sliding_window": None, "hidden_act": "gelu"}, "'gelu'"),
    ("gpt2", "GPT2", {**GPT2, "activation_function": "relu"}, "'relu'"),
    ("gpt2", "GPT2", {**GPT2, "scale_attn_by_inverse_layer_idx": True}, "scale"),
    ("olmo2", "Olmo2", {**SIZES, "tie_word_embeddings": True}, "ties"),
    ("olmo2", "Olmo2", {**SIZES, "attention_bias": True}, "bias = True"),
    ("olmo2", "Olmo2", {**SIZES, "rope_parameters": {**YARN, "beta_fast": 16}}, "beta_fast = 16"),
    ("deepseek2", "DeepseekV2", {**LATENT, "attention_bias": True}, "bias = True"),
    ("deepseek2", "DeepseekV2", {**LATENT, "rope_parameters": YARN}, r"attention_factor|scale"),
    ("deepseek2", "DeepseekV2", MANY, "q_rank = 26"),
    ("deepseek2", "DeepseekV3", {**LATENT, **V3, "n_group": 3, "topk_group": 3}, "topk_group = 3"),
    (
        "deepseek2",
        "DeepseekV2",
        {**LATENT, "topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 2},
        "score = 'max'",
    ),
]


@pytest.mark.parametrize(("architecture", "model", "settings", "named"), UNSAID, ids=[f"{x[1]} {x[3]}" for x in UNSAID])
def test_what_llama_cpp_would_compute_otherwise_is_not_written(architecture, model, settings, named):
    with pytest.raises(UserError, match=named):
        write_place(spec_of(model, **settings), [d for d in DIALECTS if d.architecture == architecture])


@pytest.mark.parametrize(("n_layers", "rank", "said"), [(27, None, None), (3, None, 0), (3, 26, 26)])
def test_latent_queries_are_said_as_llama_cpp_wants_it(n_layers, rank, said):
    """It takes models of 26 and 27 layers to have none, and wants the key of all others."""
    spec = spec_of("DeepseekV2", **{**LATENT, "num_hidden_layers": n_layers, "q_lora_rank": rank})
    place = write_place(spec)
    assert place.meta.get("deepseek2.attention.q_lora_rank") == said
    assert place.reading.spec.decoder.blocks[0].attention.q_rank == rank


def test_gguf_names_are_the_packages():
    """Every tensor that is written has a name that the `gguf` package knows for the architecture."""
    patterns = {re.sub(r"\{bid\}", "0", name) for name in gguf.TENSOR_NAMES.values()}
    for name in ("phi3", "gpt2", "starcoder2", "olmo2", "deepseek2"):
        (dialect,) = [d for d in DIALECTS if d.architecture == name]
        stems = {rule[0].rsplit(".", 1)[0].replace("{i}", "0") for rule in dialect.tensors}
        assert stems <= patterns
