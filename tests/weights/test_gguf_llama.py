"""GGUF files of LLaMA and Mixtral: rows in another order, scaled rotary positions, experts in one tensor or many."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import CPU, Change, apart, permuted, put, raw, reopened, said, spec_of, tiny, tokens, unlike, written
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from anyformer.errors import UserError
from anyformer.families.gguf import DIALECTS
from anyformer.spec.parts import ModelSpec
from anyformer.weights.gguf.format import read_gguf
from anyformer.weights.gguf.load import load_gguf
from anyformer.weights.gguf.reading import read_place, write_place
from anyformer.weights.source import load_spec

SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
SAID = {
    "embedding_length": 48,
    "feed_forward_length": 72,
    "block_count": 2,
    "attention.head_count": 6,
    "attention.head_count_kv": 2,
    "context_length": 128,
    "rope.dimension_count": 8,
    "attention.layer_norm_rms_epsilon": 1e-5,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
SAID_YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 32,
}
SHORT, LONG = [1.0, 1.1, 1.25, 1.5], [1.0, 2.0, 3.5, 5.0]


TURNED = permuted(6, 2)


@dataclass(frozen=True)
class File:
    """A model, and how a file says it."""

    settings: dict[str, Any]
    said: dict[str, Any]
    model: str = "Llama"
    change: Change = TURNED
    tables: dict[str, Tensor] = field(default_factory=dict)
    length: int = 19

    def put(self, path: Path, **said: Any) -> Path:
        return put(path, "llama", self.made(), {**SAID, **self.said, **said}, self.change, self.tables)

    def made(self) -> torch.nn.Module:
        return tiny(self.model, **{**SIZES, "tie_word_embeddings": False, **self.settings})


def rope(theta: float, **scaling: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **scaling}}


def divisors(theta: float, width: int, **scaling: Any) -> Tensor:
    """What llama.cpp's converter writes: the plain frequencies over the scaled ones, here of `transformers`."""
    model = tiny("Llama", **SIZES, head_dim=width, **rope(theta, **scaling))
    inverse, _ = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](model.config, CPU)
    return theta ** (-torch.arange(0, width, 2).double() / width).float() / inverse


def split(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Older files have a tensor for each expert."""
    name, value = next(iter(permuted(6, 2)(name, tensor).items()))
    if ".experts." not in name:
        return {name: value}
    layer, word = name.split(".")[2], name.split(".")[-2].removesuffix("_proj")
    return {f"blk.{layer}.ffn_{word}.{e}.weight": each for e, each in enumerate(value)}


MIXTRAL = File(
    {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": None, **rope(1e6)},
    {"expert_count": 5, "expert_used_count": 2, "rope.freq_base": 1e6},
    model="Mixtral",
)
FILES = {
    "llama": File(rope(5e4), {"rope.freq_base": 5e4}),
    "llama tied": File({"tie_word_embeddings": True, "rms_norm_eps": 1e-6}, {"attention.layer_norm_rms_epsilon": 1e-6}),
    "llama with wide heads": File(
        {"head_dim": 10}, {"attention.key_length": 10, "attention.value_length": 10, "rope.dimension_count": 10}
    ),
    "llama with biases": File({"attention_bias": True, "mlp_bias": True}, {}),
    "mistral": File({"sliding_window": None, **rope(1e4)}, {}, model="Mistral"),
    "linear": File(rope(1e4, rope_type="linear", factor=2.5), {"rope.scaling.factor": 2.5}),
    "linear, as older files say it": File(rope(1e4, rope_type="linear", factor=2.5), {"rope.scale_linear": 2.5}),
    "llama3": File(
        rope(500.0, **LLAMA3), {"rope.freq_base": 500.0}, tables={"rope_freqs.weight": divisors(500.0, 8, **LLAMA3)}
    ),
    "divisors of no rule": File(
        rope(
            1e4,
            rope_type="longrope",
            short_factor=LONG,
            long_factor=LONG,
            original_max_position_embeddings=32,
            attention_factor=1.0,
        ),
        {},
        tables={"rope_freqs.weight": torch.tensor(LONG)},
    ),
    "yarn": File(rope(500.0, **YARN), {"rope.freq_base": 500.0, **SAID_YARN}, length=40),
    "yarn with a factor of its own": File(
        rope(500.0, **YARN, attention_factor=1.4),
        {"rope.freq_base": 500.0, **SAID_YARN, "rope.scaling.attn_factor": 1.4 / (0.1 * math.log(4.0) + 1)},
    ),
    **{
        f"longrope, {length} tokens": File(
            rope(
                1e4,
                rope_type="longrope",
                short_factor=SHORT,
                long_factor=LONG,
                original_max_position_embeddings=32,
                attention_factor=1.25,
            ),
            {
                "rope.scaling.type": "longrope",
                "rope.scaling.original_context_length": 32,
                "rope.scaling.attn_factor": 1.25,
            },
            tables={
                "rope_factors_short.weight": torch.tensor(SHORT),
                "rope_factors_long.weight": torch.tensor(LONG),
            },
            length=length,
        )
        for length in (19, 40)
    },
    "mixtral": MIXTRAL,
    "mixtral, as older files have it": File(MIXTRAL.settings, MIXTRAL.said, "Mixtral", split),
}
every = pytest.mark.parametrize("name", FILES)


@every
def test_a_file_computes_what_its_model_does(name, tmp_path):
    """B60. B39. Rows lie as interleaved rotation wants them, tables divide frequencies."""
    file = FILES[name]
    assert apart(file.made(), file.put(tmp_path / "a.gguf"), file.length) < 1e-5


@every
def test_written_and_read_again_is_the_same(name, tmp_path):
    """B60. B39. A file, read and written, means what it meant and has the numbers that it had, bit for bit."""
    source = FILES[name].put(tmp_path / "a.gguf")
    path, _ = written(tmp_path / "b.gguf", source)
    assert not unlike(read_place(read_gguf(source)).reading.spec, read_place(read_gguf(path)).reading.spec)
    before, after = raw(source), raw(path)
    if "older files have" in name:  # Their experts are written as files have them now.
        before = {n: x for n, x in before.items() if not n.endswith(("0.weight", "1.weight")) and ".ffn_" not in n}
        after = {n: x for n, x in after.items() if n in before}
    if name == "divisors of no rule":  # The same numbers as tables of LongRoPE, for short texts and for long ones.
        before |= dict.fromkeys(("rope_factors_short.weight", "rope_factors_long.weight"), before["rope_freqs.weight"])
        del before["rope_freqs.weight"]
    assert before.keys() == after.keys()
    for title, values in before.items():
        assert abs(after[title] / values - 1).max() <= (1e-6 if title == "rope_freqs.weight" else 0), title


PEER_READS = ("llama", "llama tied", "llama with biases", "llama3", "linear")


@pytest.mark.parametrize("name", PEER_READS)
def test_transformers_reads_what_is_written(name, tmp_path):
    """B60."""
    path, _ = written(tmp_path / "b.gguf", FILES[name].put(tmp_path / "a.gguf"))
    model = FILES[name].made()
    with torch.no_grad():
        wanted, got = model(tokens(model)).logits, reopened(path, model)(tokens(model)).logits
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def table(**settings: Any) -> dict[str, Any]:
    return {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **SIZES, **settings}


def scaled(width: int, theta: float, *numbers: float) -> ModelSpec:
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    scaling = {"rope_type": "llama3", **dict(zip(names, numbers, strict=True))}
    return spec_of(table(head_dim=width, rope_theta=theta, rope_scaling=scaling))


def test_divisors_of_the_published_scaling():
    """B39. The frequencies that follow, against numbers worked out elsewhere; slow ones divided, quick ones not."""
    found = write_place(scaled(16, 1e4, 4.0, 1.0, 4.0, 256)).tables["rope_freqs.weight"]
    wanted = [1, 0.31622777, 0.1, 0.01018592, 0.0025, 0.00079057, 0.00025, 0.00007906]
    frequencies = [1e4 ** (-pair / 8) / divisor for pair, divisor in enumerate(found)]
    assert frequencies == pytest.approx(wanted, rel=1e-4)
    found = write_place(scaled(64, 5e5, 8.0, 1.0, 4.0, 8192)).tables["rope_freqs.weight"]
    assert found[:15] == [1.0] * 15
    assert [1 / x for x in found[15:18]] == pytest.approx([0.643743, 0.371122, 0.190211], rel=1e-5)
    assert found[18:] == [8.0] * 14


@pytest.mark.parametrize(
    ("width", "theta", "numbers"),
    [
        (64, 5e5, (8.0, 1.0, 4.0, 8192)),
        (128, 5e5, (32.0, 1.0, 4.0, 8192)),
        (16, 1e4, (4.0, 1.0, 4.0, 256)),
        (64, 1e4, (6.0, 2.0, 7.0, 1000)),
    ],
)
def test_the_scaling_is_known_by_its_divisors(width, theta, numbers):
    """B39. Published files hold float32 divisors alone; of what they leave open the published band is taken."""
    spec = scaled(width, theta, *numbers)
    place = write_place(spec)
    assert place.reading.spec == spec
    single = torch.tensor(place.tables["rope_freqs.weight"]).tolist()
    meta = {key.removeprefix("llama."): value for key, value in place.meta.items() if "original" not in key}
    shapes = {"token_embd.weight": (97, 48), "rope_freqs.weight": (width // 2,)}
    again = read_place(said("llama", shapes, {"rope_freqs.weight": single}, **meta)).reading.spec
    position = again.decoder.blocks[0].attention.position
    wanted = spec.decoder.blocks[0].attention.position.scaling
    if numbers[1] == 1.0:
        assert position.scaling == wanted
    else:  # A band at half the turns of a context twice as long is the same one.
        band = position.scaling
        assert band.high_freq_factor / band.low_freq_factor == pytest.approx(3.5, rel=1e-3)
        assert band.original / band.low_freq_factor == pytest.approx(500, rel=1e-3)


def test_rows_lie_as_interleaved_rotation_wants_them(tmp_path):
    """B60. [0, D/2, 1, D/2 + 1, …] of every head of queries and of keys, biases alike; values as they are."""
    path = FILES["llama with biases"].put(tmp_path / "a.gguf")
    model, theirs = load_gguf(path, torch.float32, CPU).model, raw(path)
    order = [0, 4, 1, 5, 2, 6, 3, 7]
    for x, heads in (("q", 6), ("k", 2)):
        for part in ("weight", "bias"):
            ours = model.get_parameter(f"decoder.blocks.1.attention.{x}.{part}").detach().unflatten(0, (heads, 8))
            found = torch.tensor(theirs[f"blk.1.attn_{x}.{part}"]).unflatten(0, (heads, 8))
            torch.testing.assert_close(ours[:, order], found, rtol=0, atol=0)
    ours = model.get_parameter("decoder.blocks.1.attention.v.weight").detach()
    torch.testing.assert_close(ours, torch.tensor(theirs["blk.1.attn_v.weight"]), rtol=0, atol=0)


UNSAYABLE = {
    "a window": (
        {**table(), "model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 9},
        "window",
    ),
    "a scaling that grows": (table(rope_scaling={"type": "dynamic", "factor": 2.0}), "scaling"),
    "an activation": (table(hidden_act="gelu"), "activation"),
    "a ramp": (table(rope_scaling={**YARN, "beta_fast": 16.0}), "beta_fast"),
}


@pytest.mark.parametrize("name", UNSAYABLE)
def test_what_llama_cpp_cannot_compute_is_not_written(name):
    settings, place = UNSAYABLE[name]
    spec = spec_of(settings)
    with pytest.raises(UserError, match="no architecture of GGUF is this model"):
        write_place(spec)
    with pytest.raises(UserError, match=place):
        write_place(spec, [dialect for dialect in DIALECTS if dialect.architecture == "llama"])


FREQS = {"rope_freqs.weight": (4,)}
LONG_TABLES = {"rope_factors_long.weight": (4,), "rope_factors_short.weight": (4,)}
UNREADABLE = {
    "an unknown key": ({"attention.sliding_window": 9}, {}, "sliding_window"),
    "a part of heads that turns": ({"rope.dimension_count": 4}, {}, "dimension_count"),
    "a table and a factor": ({"rope.scaling.factor": 2.0}, FREQS, "rope_freqs"),
    "tables and a factor": ({"rope.scaling.type": "longrope", "rope.scaling.factor": 2.0}, LONG_TABLES, "rope_factors"),
    "no tables": ({"rope.scaling.type": "longrope"}, {}, "rope_factors"),
    "a table of another width": ({}, {"rope_freqs.weight": (3,)}, "pairs|pair"),
    "a scaling of another name": ({"rope.scaling.type": "ntk"}, {}, "rope.scaling.type"),
    "no factor": ({"rope.scaling.type": "yarn"}, {}, "factor"),
    "no number of experts used": ({"expert_count": 4}, {}, "expert_used_count"),
    "heads of each layer": ({"attention.head_count": [6, 6]}, {}, "head_count"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_is_not_understood_is_refused(name):
    metadata, shapes, place = UNREADABLE[name]
    numbers = {title: [1.0] * shape[0] for title, shape in shapes.items()}
    with pytest.raises(UserError, match=place):
        read_place(said("llama", {"token_embd.weight": (97, 48), **shapes}, numbers, **{**SAID, **metadata}))


def test_a_bias_without_the_others_is_missed(tmp_path):
    path = put(tmp_path / "a.gguf", "llama", FILES["llama with biases"].made(), SAID, without_out_bias)
    with pytest.raises(UserError, match=r"attn_output\.bias"):
        load_gguf(path, None, CPU)


def without_out_bias(name: str, tensor: Tensor) -> dict[str, Tensor]:
    return {} if name.endswith("o_proj.bias") else dict(TURNED(name, tensor))


@pytest.mark.parametrize("recipe", ["llama-1-7b", "llama-3.1-8b", "mixtral-8x7b"])
def test_published_sizes_have_their_architecture(recipe):
    assert write_place(load_spec(recipe)).dialect.architecture == "llama"
