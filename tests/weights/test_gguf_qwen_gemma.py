"""GGUF files of Qwen and Gemma: what `transformers` computes, what it reads of ours, and what is refused."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import (
    CPU,
    Change,
    apart,
    flat_gate,
    plus_one,
    put,
    raw,
    reopened,
    said,
    spec_of,
    tiny,
    tokens,
    unlike,
    written,
)

from anyformer.errors import UserError
from anyformer.families.gguf import DIALECTS
from anyformer.spec.parts import ModelSpec
from anyformer.spec.problems import SpecError
from anyformer.weights.gguf.format import read_gguf
from anyformer.weights.gguf.load import load_gguf
from anyformer.weights.gguf.reading import read_place, write_place
from anyformer.weights.source import load_spec

SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
SAID = {
    "embedding_length": 48,
    "block_count": 3,
    "attention.head_count": 6,
    "attention.head_count_kv": 2,
    "context_length": 128,
}
MIXTURE = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "intermediate_size": 40}
SAID_MIXTURE = {"expert_count": 5, "expert_used_count": 2, "expert_feed_forward_length": 24}
WIDE = {"head_dim": 10, "intermediate_size": 72}
SAID_WIDE = {"attention.key_length": 10, "attention.value_length": 10, "feed_forward_length": 72}
LINEAR = {"rope_type": "linear", "factor": 2.5}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
SAID_YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 32,
}


@dataclass(frozen=True)
class File:
    """A model, and how a file says it."""

    architecture: str
    model: str
    settings: dict[str, Any]
    said: dict[str, Any]

    @property
    def change(self) -> Change:
        return plus_one if "gemma" in self.architecture else flat_gate

    def put(self, path: Path, **said: Any) -> Path:
        return put(path, self.architecture, self.made(), {**self.said, **said}, self.change)

    def made(self) -> torch.nn.Module:
        return tiny(self.model, **self.settings)


def rope(theta: float, **scaling: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **scaling}}


def both(full: dict[str, Any], local: float) -> dict[str, Any]:
    sliding = {"rope_type": "default", "rope_theta": local}
    return {"rope_parameters": {"full_attention": full, "sliding_attention": sliding}}


EPS = {"attention.layer_norm_rms_epsilon": 1e-5}
FILES = {
    "qwen2": File(
        "qwen2",
        "Qwen2",
        {**SIZES, "intermediate_size": 72, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, **rope(5e4)},
        {**SAID, **EPS, "feed_forward_length": 72, "rope.freq_base": 5e4},
    ),
    "qwen2 tied, yarn": File(
        "qwen2",
        "Qwen2",
        {**SIZES, "intermediate_size": 72, "rms_norm_eps": 1e-6, "tie_word_embeddings": True, **rope(1e4, **YARN)},
        {**SAID, "attention.layer_norm_rms_epsilon": 1e-6, "feed_forward_length": 72, **SAID_YARN},
    ),
    "qwen2moe": File(
        "qwen2moe",
        "Qwen2Moe",
        {**SIZES, **MIXTURE, "shared_expert_intermediate_size": 56, "rms_norm_eps": 1e-5, **rope(1e5)},
        {**SAID, **SAID_MIXTURE, **EPS, "expert_shared_feed_forward_length": 56, "rope.freq_base": 1e5},
    ),
    "qwen3": File(
        "qwen3",
        "Qwen3",
        {**SIZES, **WIDE, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, **rope(1e6)},
        {**SAID, **SAID_WIDE, **EPS, "rope.freq_base": 1e6},
    ),
    "qwen3 tied": File(
        "qwen3",
        "Qwen3",
        {**SIZES, **WIDE, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, **rope(1e4, **LINEAR)},
        {**SAID, **SAID_WIDE, **EPS, "rope.scaling.type": "linear", "rope.scaling.factor": 2.5},
    ),
    "qwen3moe": File(
        "qwen3moe",
        "Qwen3Moe",
        {**SIZES, **MIXTURE, "head_dim": 10, "norm_topk_prob": True, "rms_norm_eps": 1e-5, **rope(1e6)},
        {**SAID, **SAID_MIXTURE, **SAID_WIDE, **EPS, "feed_forward_length": 40, "rope.freq_base": 1e6},
    ),
    "gemma": File(
        "gemma",
        "Gemma",
        {**SIZES, **WIDE, "rms_norm_eps": 1e-5, "hidden_act": "gelu_pytorch_tanh"},
        {**SAID, **SAID_WIDE, **EPS},
    ),
    "gemma2": File(
        "gemma2",
        "Gemma2",
        {
            **SIZES,
            **WIDE,
            "rms_norm_eps": 1e-5,
            "query_pre_attn_scalar": 10,
            "sliding_window": 5,
            "attn_logit_softcapping": 4.0,
            "final_logit_softcapping": 9.0,
        },
        {
            **SAID,
            **SAID_WIDE,
            **EPS,
            "attention.sliding_window": 5,
            "attn_logit_softcapping": 4.0,
            "final_logit_softcapping": 9.0,
        },
    ),
    "gemma3": File(
        "gemma3",
        "Gemma3",
        {
            **SIZES,
            **WIDE,
            "num_hidden_layers": 7,
            "rms_norm_eps": 1e-5,
            "query_pre_attn_scalar": 10,
            "sliding_window": 5,
            **both({"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}, 1e3),
        },
        {
            **SAID,
            **SAID_WIDE,
            **EPS,
            "block_count": 7,
            "attention.sliding_window": 5,
            "rope.freq_base": 1e6,
            "rope.freq_base_swa": 1e3,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
        },
    ),
    "gemma3 without windows": File(
        "gemma3",
        "Gemma3",
        {
            **SIZES,
            **WIDE,
            "rms_norm_eps": 1e-5,
            "query_pre_attn_scalar": 10,
            "layer_types": ["full_attention"] * 3,
            "final_logit_softcapping": 6.0,
            "tie_word_embeddings": False,
            **both({"rope_type": "default", "rope_theta": 5e5}, 1e4),
        },
        {**SAID, **SAID_WIDE, **EPS, "rope.freq_base": 5e5, "final_logit_softcapping": 6.0},
    ),
}
every = pytest.mark.parametrize("name", FILES)


@every
def test_a_file_computes_what_its_model_does(name, tmp_path):
    """B61. Windows are shorter than the text, and no cap is so high that it does nothing."""
    file = FILES[name]
    assert apart(file.made(), file.put(tmp_path / "a.gguf")) < 1e-5


@every
def test_written_and_read_again_is_the_same(name, tmp_path):
    """B61. A file, read and written, has the tensors that it had, bit for bit (1 + w within 2⁻²³), and no other."""
    source = FILES[name].put(tmp_path / "a.gguf")
    path, place = written(tmp_path / "b.gguf", source)
    assert not unlike(read_place(read_gguf(source)).reading.spec, read_place(read_gguf(path)).reading.spec)
    before, after = raw(source), raw(path)
    assert before.keys() == after.keys()
    for title, values in before.items():
        assert after[title].shape == values.shape, title
        shifted = "gemma" in FILES[name].architecture and "norm" in title
        assert abs(after[title] - values).max() <= (2**-23 if shifted else 0), title
    assert place.dialect.architecture == FILES[name].architecture


@pytest.mark.parametrize("name", [name for name in FILES if name not in ("gemma", "gemma3")])
def test_transformers_reads_what_is_written(name, tmp_path):
    """`transformers` has no rules for the first Gemma, and is slow to look up the names of many layers."""
    path, _ = written(tmp_path / "b.gguf", FILES[name].put(tmp_path / "a.gguf"))
    model = FILES[name].made()
    with torch.no_grad():
        wanted, got = model(tokens(model)).logits, reopened(path, model)(tokens(model)).logits
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
DENSE = {**SIZES, "intermediate_size": 72, "hidden_act": "silu"}
GEMMA = {**SIZES, **WIDE, "query_pre_attn_scalar": 10}
UNSAYABLE = {
    "qwen2 with a window": (
        {"model_type": "qwen2", **DENSE, "use_sliding_window": True, "sliding_window": 9, "layer_types": LAYERS},
        "window",
    ),
    "qwen2 with wide heads": ({"model_type": "qwen2", **DENSE, "head_dim": 10}, "d_head"),
    "qwen2 with LLaMA's scaling": (
        {
            "model_type": "qwen2",
            **DENSE,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
        "scaling",
    ),
    "qwen2moe with tied tables": (
        {"model_type": "qwen2_moe", **SIZES, **MIXTURE, "tie_word_embeddings": True},
        "ties",
    ),
    "qwen2moe with weights that sum to 1": (
        {"model_type": "qwen2_moe", **SIZES, **MIXTURE, "norm_topk_prob": True},
        "normalise",
    ),
    "qwen2moe with a dense layer": (
        {"model_type": "qwen2_moe", **SIZES, **MIXTURE, "mlp_only_layers": [1]},
        "blocks",
    ),
    "qwen3 with biases": ({"model_type": "qwen3", **DENSE, **WIDE, "attention_bias": True}, "bias"),
    "qwen3moe with weights as they are": (
        {"model_type": "qwen3_moe", **SIZES, **MIXTURE, "head_dim": 10, "norm_topk_prob": False},
        "normalise",
    ),
    "gemma with another activation": (
        {"model_type": "gemma", **SIZES, **WIDE, "hidden_act": "silu", "hidden_activation": "silu"},
        "activation",
    ),
    "gemma2 without windows": ({"model_type": "gemma2", **GEMMA, "layer_types": ["full_attention"] * 3}, "window"),
    "gemma2 without a cap": ({"model_type": "gemma2", **GEMMA, "attn_logit_softcapping": None}, "softcap"),
    "gemma2 with a scale of its own": ({"model_type": "gemma2", **GEMMA, "query_pre_attn_scalar": 12}, "scale"),
    "gemma3 with scaled local layers": (
        {
            "model_type": "gemma3_text",
            **GEMMA,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
            },
        },
        "scaling",
    ),
    "gemma3 with a factor on attention": (
        {
            "model_type": "gemma3_text",
            **GEMMA,
            "layer_types": LAYERS,
            "rope_scaling": {**YARN, "attention_factor": 1.5},
        },
        "attn_factor",
    ),
}


@pytest.mark.parametrize("name", UNSAYABLE)
def test_what_llama_cpp_cannot_compute_is_not_written(name):
    """The nearest architecture fails in one place, which the message names."""
    table, _ = UNSAYABLE[name]
    with pytest.raises(UserError, match="no architecture of GGUF is this model"):
        write_place(spec_of({"architectures": [MODELS[table["model_type"]]], **table}))


@pytest.mark.parametrize("name", UNSAYABLE)
def test_its_own_architecture_names_the_place(name):
    table, place = UNSAYABLE[name]
    architecture = name.split()[0]
    mine = [dialect for dialect in DIALECTS if dialect.architecture == architecture]
    with pytest.raises(UserError, match=place):
        write_place(spec_of({"architectures": [MODELS[table["model_type"]]], **table}), mine)


MODELS = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
TABLE = {"token_embd.weight": (97, 48)}
G3 = {**SAID, **SAID_WIDE, **EPS}
UNREADABLE = {
    "an unknown key": ("qwen2", {"attention.sliding_window": 9}, TABLE, "sliding_window"),
    "a part of heads that turns": ("qwen2", {"rope.dimension_count": 4}, TABLE, "dimension_count"),
    "heads that do not divide": ("qwen2", {"attention.key_length": 10}, TABLE, "key_length"),
    "no mask": ("qwen3", {"attention.causal": False}, TABLE, "causal"),
    "a table that is not applied": ("qwen2", {}, {**TABLE, "rope_freqs.weight": (4,)}, "rope_freqs"),
    "a ramp that is not applied": ("qwen2", {**SAID_YARN, "rope.scaling.yarn_beta_fast": 16.0}, TABLE, "beta_fast"),
    "a factor without a scaling": ("qwen3", {"rope.scaling.attn_factor": 1.5}, TABLE, "attn_factor"),
    "a factor beyond its layers": ("gemma3", {**SAID_YARN, "rope.scaling.attn_factor": 1.5}, TABLE, "attn_factor"),
    "two thetas": ("gemma2", {"rope.freq_base_swa": 5e3}, TABLE, "freq_base_swa"),
    "a window of no width": ("gemma2", {"attention.sliding_window": 0}, TABLE, "window"),
    "a pattern that is none": ("gemma3", {"attention.sliding_window_pattern": "every"}, TABLE, "pattern"),
    "a pattern of words": ("gemma2", {"attention.sliding_window_pattern": ["no"] * 3}, TABLE, "pattern"),
    "a pattern of other layers": ("gemma2", {"attention.sliding_window_pattern": [True]}, TABLE, "layer_types"),
    "too many layers": ("gemma2", {"block_count": 1 << 31}, TABLE, "block_count"),
    "layers that are no number": ("gemma3", {"block_count": True}, TABLE, "block_count"),
    "no tokens": ("gemma", {}, {}, "token_embd"),
    "no epsilon": ("gemma", {"attention.layer_norm_rms_epsilon": None}, TABLE, "epsilon"),
    "no experts": ("qwen3moe", {}, TABLE, "expert_count"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_is_not_understood_is_refused(name):
    architecture, metadata, shapes, place = UNREADABLE[name]
    found = said(architecture, shapes, **{**G3, "attention.sliding_window": 5, **metadata})
    if architecture not in ("gemma2", "gemma3") and "attention.sliding_window" not in metadata:
        del found.metadata[f"{architecture}.attention.sliding_window"]
    if architecture == "qwen2":
        for key in ("attention.key_length", "attention.value_length"):
            found.metadata[f"qwen2.{key}"] = metadata.get(key, 8)
    with pytest.raises((UserError, SpecError), match=place):
        read_place(found)


def read(architecture: str, **metadata: Any) -> ModelSpec:
    return read_place(said(architecture, TABLE, **{**SAID, **SAID_WIDE, **EPS, **metadata})).reading.spec


def attentions(spec: ModelSpec, name: str) -> list[Any]:
    return [getattr(block.attention, name) for block in spec.decoder.blocks]


def test_what_a_file_leaves_out_is_what_llama_cpp_takes():
    """B61. Not what a family's own configurations take: thetas of 10,000, the caps and the window of Gemma 2."""
    gemma2, gemma3 = read("gemma2"), read("gemma3", **{"attention.sliding_window": 5, "block_count": 13})
    assert attentions(gemma2, "softcap") == [50.0] * 3
    assert gemma2.head.softcap == 30.0
    assert [mask.window for mask in attentions(gemma2, "mask")] == [4096, None, 4096]
    assert [mask.window for mask in attentions(gemma3, "mask")] == [*[5] * 5, None] * 2 + [5]
    assert {position.theta for position in attentions(gemma3, "position")} == {1e4}
    assert {block.ffn.expert.d_ff for block in read_moe("qwen2moe").decoder.blocks} == {36}
    assert {block.ffn.shared.d_ff for block in read_moe("qwen2moe").decoder.blocks} == {72}
    assert {block.ffn.normalise for block in read_moe("qwen2moe").decoder.blocks} == {False}
    assert {block.ffn.normalise for block in read_moe("qwen3moe").decoder.blocks} == {True}


def read_moe(architecture: str) -> ModelSpec:
    said_here = {**SAID, **EPS, "feed_forward_length": 72, "expert_count": 5, "expert_used_count": 2}
    return read_place(said(architecture, TABLE, **said_here)).reading.spec


@pytest.mark.parametrize(("architecture", "largest"), [("gemma2", 46), ("gemma3", 62)])
def test_the_largest_gemma_is_known_by_its_layers(architecture, largest):
    """Scores are divided by √(width / heads) there, by √(width of a head) elsewhere; files do not say it."""
    for n, over in ((largest, 8), (largest - 1, 10)):
        assert set(attentions(read(architecture, block_count=n), "scale")) == {over**-0.5}


@pytest.mark.parametrize(
    ("said_so", "local"),
    [
        (1, [0, 0, 0]),
        (2, [1, 0, 1]),
        (3, [1, 1, 0]),
        (0, [1, 1, 1]),
        ([False, True, True], [0, 1, 1]),
        ([1, 0, 0], [1, 0, 0]),
    ],
)
def test_a_pattern_says_which_layers_have_the_window(said_so, local):
    key = "attention.sliding_window_pattern"
    spec = read("gemma3", **{"attention.sliding_window": 5, key: said_so})
    assert [mask.window for mask in attentions(spec, "mask")] == [5 if here else None for here in local]
    written = write_place(spec).meta.get(f"gemma3.{key}")
    assert written == (None if not any(local) or all(local) else [bool(x) for x in local])


def test_norms_born_in_bfloat16_come_back_bit_for_bit(tmp_path):
    """w + 1 - 1 is w where w has 8 bits and is no smaller than 2⁻¹⁶: what the 24 bits of float32 hold."""
    model = FILES["gemma3"].made().to(torch.bfloat16).float()
    path = put(tmp_path / "a.gguf", "gemma3", model, FILES["gemma3"].said, plus_one)
    loaded = load_gguf(path, torch.float32, CPU).model
    found = loaded.get_parameter("decoder.blocks.3.ffn_norms.after.weight")
    torch.testing.assert_close(found, model.model.layers[3].post_feedforward_layernorm.weight, rtol=0, atol=0)


def test_a_gate_of_one_row_is_a_vector(tmp_path):
    """ggml does not tell [1, n] from [n], and files have either."""
    file = FILES["qwen2moe"]
    path = put(tmp_path / "a.gguf", "qwen2moe", file.made(), file.said)
    assert read_gguf(path).tensors["blk.0.ffn_gate_inp_shexp.weight"].shape == (1, 48)
    assert apart(file.made(), path) < 1e-5


@pytest.mark.parametrize(
    ("recipe", "architecture"),
    [
        ("qwen-3-0.6b", "qwen3"),
        ("gemma-2-2b", "gemma2"),
        ("gemma-3-1b", "gemma3"),
    ],
)
def test_published_sizes_have_their_architecture(recipe, architecture):
    assert write_place(load_spec(recipe)).dialect.architecture == architecture
