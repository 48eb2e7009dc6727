"""config.json of LLaMA and its kin: older and newer forms, defaults, and what no specification can say."""

import copy
import random

import pytest
import torch
from hub_dense import HUB, llama3

from anyformer.errors import UserError
from anyformer.families import FAMILIES
from anyformer.nn.layers import ACTIVATIONS
from anyformer.nn.position import inverse_frequencies
from anyformer.spec import load_spec
from anyformer.weights.config import read_config, write_config

RECIPES = [name for name in HUB if name in {preset for family in FAMILIES for preset in family.presets}]
TINY = {
    "vocab_size": 41,
    "hidden_size": 48,
    "intermediate_size": 53,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
}
KINDS = pytest.mark.parametrize("kind", CLASSES)


def spec_of(kind, **changes):
    """The specification of a small configuration with changes; a value of None takes a key away."""
    table = {"model_type": kind, "architectures": [CLASSES[kind]], **TINY, **changes}
    return read_config({key: value for key, value in table.items() if value != "absent"}, "config.json").spec


def attention(spec, layer=0):
    return spec.decoder.blocks[layer].attention


def frequencies(spec, layer=0):
    """What the pairs of a layer turn by, [d/2] in float64."""
    part = attention(spec, layer)
    width = part.position.width(part.d_head)
    return inverse_frequencies(part.position, width, None, torch.device("cpu"), torch.float64)


def as_theirs(table):
    """The configuration as `transformers` understands it, every key with its value."""
    from transformers import AutoConfig

    table = copy.deepcopy(table)
    return AutoConfig.for_model(table.pop("model_type"), **table).to_dict()


@pytest.mark.parametrize("name", RECIPES)
def test_a_published_file_is_the_shipped_recipe_of_its_model(name):
    """B61. Eps, activation and all else; the recipes are written by hand."""
    assert read_config(HUB[name], name).spec == load_spec(name)


@pytest.mark.parametrize("name", HUB)
def test_a_published_file_in_its_older_form_is_that_in_the_newer(name):
    """B40."""
    assert read_config(as_theirs(HUB[name]), name).spec == read_config(HUB[name], name).spec


BESIDE = {
    "architectures",
    "dtype",
    "initializer_range",
    "transformers_version",
    "_name_or_path",
    "auto_map",
    "use_cache",
}
UNREAD = {"head_dim", "hidden_act", "hidden_activation", "sliding_window_pattern", "sliding_window_size"}
"""Keys that some of their classes keep and do not look at."""


@pytest.mark.parametrize("name", HUB)
def test_what_is_written_of_a_published_file_means_the_same_to_them(name):
    """B40, B52. Key by key, where the specification is not an earlier family's as well."""
    written, reading = write_config(read_config(HUB[name], name).spec)
    theirs, back = as_theirs(HUB[name]), as_theirs(written)
    if reading.family.model_type != HUB[name]["model_type"]:
        assert name in ("Mistral-Nemo-Base-2407", "Phi-3-mini-4k", "Phi-3-mini-128k")
        return
    if isinstance(theirs.get("rope_parameters"), dict):
        for table in (theirs, back):
            table["rope_parameters"].pop("type", None)
    family = reading.family
    known = BESIDE | UNREAD | {*family.ignored, *family.fixed} | {key for key in theirs if key.endswith("token_id")}
    assert {key for key in {*theirs, *back} - known if theirs.get(key) != back.get(key)} == set()


@KINDS
def test_absent_keys_are_the_defaults_of_their_class(kind):
    """Those of heads, context, eps, theta, windows, caps, ties and biases; null heads are one for each query head."""
    sizes = {key: value for key, value in TINY.items() if key != "num_key_value_heads"}
    sizes["num_attention_heads"] = {"qwen2": 32, "qwen3": 32, "gemma": 16}.get(kind, 8)
    sizes["hidden_size"] = 6 * sizes["num_attention_heads"]
    table = {"model_type": kind, "architectures": [CLASSES[kind]], **sizes}
    assert read_config(table, "a").spec == read_config(as_theirs(table), "b").spec
    if kind in ("llama", "qwen2", "qwen3", "phi3", "olmo2"):
        nulled = {**table, "num_key_value_heads": None}
        assert read_config(nulled, "a").spec == read_config(as_theirs(nulled), "b").spec


def test_the_original_context_of_phi_3_has_a_default_of_its_own():
    """It is not the context, and not what the table of scaling says."""
    long = {"type": "longrope", "short_factor": [1.0, 1.5, 2.0], "long_factor": [2.0, 3.0, 4.0]}
    table = {"model_type": "phi3", **TINY, "max_position_embeddings": 16384, "rope_scaling": long}
    scaling = attention(read_config(table, "a").spec).position.scaling
    assert scaling.original == 4096
    assert scaling == attention(read_config(as_theirs(table), "b").spec).position.scaling
    with pytest.raises(UserError, match="original_max_position_embeddings = 4096"):
        read_config({**table, "rope_scaling": {**long, "original_max_position_embeddings": 8192}}, "c")


SAME_THETA = [
    {"rope_theta": 500000.0},
    {"rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}},
    {"rope_theta": 500000.0, "rope_scaling": None},
    {"rope_theta": 500000, "rope_scaling": {"type": "default"}},
    {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "default"}},
    {"rope_theta": 500000.0, "rope_parameters": {"rope_theta": 500000.0}, "rope_scaling": {"rope_type": "default"}},
]


@pytest.mark.parametrize("said", SAME_THETA, ids=str)
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen3", "phi3", "olmo2", "starcoder2", "gemma"])
def test_ways_to_say_theta(kind, said):
    """B40."""
    spec = spec_of(kind, head_dim=6, **said)
    expected = 500000.0 ** (-torch.arange(0, 6, 2, dtype=torch.float64) / 6)
    assert torch.allclose(frequencies(spec), expected, rtol=1e-12)
    assert write_config(spec)[1].spec == spec


LINEAR = {"type": "linear", "factor": 4.0}
SAME_SCALING = [
    {"rope_theta": 9e5, "rope_scaling": LINEAR},
    {"rope_theta": 9e5, "rope_scaling": {"rope_type": "linear", "factor": 4}},
    {"rope_theta": 9e5, "rope_scaling": {"type": "linear", "rope_type": "linear", "factor": 4.0}},
    {"rope_parameters": {"rope_theta": 9e5, "rope_type": "linear", "factor": 4.0}},
    {"rope_theta": 9e5, "rope_parameters": {"rope_type": "linear", "factor": 4.0}, "rope_scaling": LINEAR},
]


@pytest.mark.parametrize("said", SAME_SCALING, ids=str)
def test_ways_to_say_a_scaling(said):
    """B40."""
    expected = 9e5 ** (-torch.arange(0, 6, 2, dtype=torch.float64) / 6) / 4
    assert torch.allclose(frequencies(spec_of("llama", **said)), expected, rtol=1e-12)


GLOBAL = {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0}
GEMMA3 = [
    {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"type": "linear", "factor": 8.0}},
    {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    {"rope_parameters": {"full_attention": GLOBAL, "sliding_attention": {"rope_theta": 1e4}}},
    {"rope_parameters": {"full_attention": GLOBAL}, "rope_local_base_freq": 10000},
]


@pytest.mark.parametrize("said", GEMMA3, ids=str)
@pytest.mark.parametrize(
    "layers", [{"sliding_window_pattern": 3}, {"layer_types": ["sliding_attention"] * 2 + ["full_attention"]}]
)
def test_local_and_global_theta_are_on_the_right_layers(said, layers):
    """B40. And only the global one is scaled."""
    spec = spec_of("gemma3_text", head_dim=16, sliding_window=5, **said, **layers)
    powers = -torch.arange(0, 16, 2, dtype=torch.float64) / 16
    for layer in range(3):
        assert attention(spec, layer).mask.window == (None if layer == 2 else 5)
        expected = 1e6**powers / 8 if layer == 2 else 1e4**powers
        assert torch.allclose(frequencies(spec, layer), expected, rtol=1e-12)
    written, reading = write_config(spec)
    assert (written["rope_theta"], written["rope_local_base_freq"]) == (1e6, 1e4)
    assert written["sliding_window_pattern"] == 3
    assert reading.spec == spec


def test_the_context_before_scaling_is_written_where_each_version_looks():
    """B40. Older versions know Phi-3's with three keys alone, and take the original context from the outside."""
    long = {"type": "longrope", "short_factor": [1.0, 1.5, 2.0], "long_factor": [2.0, 3.0, 4.0]}
    sizes = {"max_position_embeddings": 64, "original_max_position_embeddings": 16}
    phi = spec_of("phi3", rope_scaling=long, partial_rotary_factor=0.5, hidden_size=96, sliding_window=5, **sizes)
    written, reading = write_config(phi)
    assert (reading.spec, reading.family.model_type) == (phi, "phi3")
    assert written["rope_scaling"] == long
    assert written["original_max_position_embeddings"] == 16
    llama = spec_of(
        "llama", rope_scaling={**long, "original_max_position_embeddings": 16, "attention_factor": 1.25}, **sizes
    )
    written, reading = write_config(llama)
    assert (reading.spec, reading.family.model_type) == (llama, "llama")
    assert written["original_max_position_embeddings"] == 16
    assert written["rope_scaling"]["original_max_position_embeddings"] == 16
    assert written["rope_scaling"]["attention_factor"] == 1.25


@pytest.mark.parametrize(("kind", "other"), [("llama", "mistral"), ("gemma2", None)])
def test_heads_that_do_not_divide_the_width_are_read_and_written_only_where_theirs_opens_them(kind, other):
    """B52. Newer versions of theirs refuse them in some families."""
    from huggingface_hub.errors import StrictDataclassClassValidationError

    spec = spec_of(kind, num_attention_heads=10, num_key_value_heads=5, head_dim=6)
    with pytest.raises(StrictDataclassClassValidationError, match="not a multiple"):
        as_theirs({"model_type": kind, **TINY, "num_attention_heads": 10, "num_key_value_heads": 5, "head_dim": 6})
    if other is None:
        with pytest.raises(UserError, match="no published family"):
            write_config(spec)
    else:
        written, reading = write_config(spec)
        assert (reading.spec, reading.family.model_type) == (spec, other)
        assert as_theirs(written)["head_dim"] == 6


def test_frequencies_of_llama_3_by_number():
    """B39. Kept, blended by the inverse of the wavelength, and divided; the same after a round trip."""
    small = {
        "head_dim": 16,
        "rope_theta": 10000.0,
        "rope_scaling": {**llama3(4.0), "original_max_position_embeddings": 256},
    }
    for spec in (spec_of("llama", **small), write_config(spec_of("llama", **small))[1].spec):
        expected = [1, 0.31622777, 0.1, 0.01018592, 0.0025, 0.00079057, 0.00025, 0.00007906]
        assert torch.allclose(frequencies(spec), torch.tensor(expected, dtype=torch.float64), rtol=1e-4, atol=1e-9)
    large = spec_of("llama", head_dim=64, rope_theta=500000.0, rope_scaling=llama3(8.0))
    for spec in (large, write_config(large)[1].spec):
        ratios = frequencies(spec) / 500000.0 ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)
        assert torch.allclose(ratios[:15], torch.ones(15, dtype=torch.float64), rtol=1e-12)
        assert ratios[15:18].tolist() == pytest.approx([0.643743, 0.371122, 0.190211], abs=1e-6)
        assert torch.allclose(ratios[18:], torch.full((14,), 0.125, dtype=torch.float64), rtol=1e-12)


def test_activations_and_eps_survive():
    """B61. Exact and approximated GELU by number; Gemma's first name of the second; eps of the configuration."""
    x = torch.tensor([3.0, -1.0], dtype=torch.float64)
    exact, tanh = torch.tensor([2.9959503, -0.1586553]), torch.tensor([2.9963626, -0.1588080])
    gpt2 = {"model_type": "gpt2", "vocab_size": 41, "n_embd": 48, "n_layer": 2, "n_head": 8}
    bert = {
        "model_type": "bert",
        "architectures": ["BertModel"],
        **{key: value for key, value in TINY.items() if key != "num_key_value_heads"},
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
    }
    models = [
        (read_config(gpt2, "gpt2").spec, tanh, 1e-5),
        (read_config(bert, "bert").spec, exact, 1e-12),
        (spec_of("gemma", hidden_act="gelu"), tanh, 1e-6),
        (spec_of("gemma", hidden_act="gelu", hidden_activation="gelu_pytorch_tanh"), tanh, 1e-6),
        (spec_of("gemma", hidden_act="gelu_python", hidden_activation="gelu", rms_norm_eps=1e-4), exact, 1e-4),
        (spec_of("gemma2", hidden_activation="gelu"), exact, 1e-6),
        (spec_of("gemma3_text", hidden_act="gelu"), tanh, 1e-6),
        (spec_of("starcoder2", hidden_act="gelu", norm_epsilon=1e-3), exact, 1e-3),
        (spec_of("llama", hidden_act="gelu_new", rms_norm_eps=1e-5), tanh, 1e-5),
    ]
    for spec, expected, eps in models:
        for each in (spec, write_config(spec)[1].spec):
            block = (each.decoder or each.encoder).blocks[0]
            given = ACTIVATIONS[block.ffn.activation](x)
            assert torch.allclose(given, expected.double(), atol=1e-7), each
            assert [x.eps for x in _norms(block)] == [eps] * len(_norms(block))


def _norms(block):
    slots = [
        getattr(branch, name) for branch in (block.norms.attention, block.norms.ffn) for name in ("before", "after")
    ]
    slots += [branch.residual for branch in (block.norms.attention, block.norms.ffn)]
    return [slot for slot in slots if slot.kind != "none"]


HUGE = 10**400
REFUSED = [
    ("llama", {"hidden_act": "mish"}, "hidden_act = 'mish'"),
    ("llama", {"rope_scaling": {"type": "spiral", "factor": 2.0}}, "type = 'spiral'"),
    ("llama", {"rope_scaling": {"type": "linear"}}, "`factor`"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0, "alpha": 3}}, "alpha = 3"),
    ("llama", {"rope_scaling": {"type": "linear", "rope_type": "default", "factor": 2.0}}, "type = 'linear'"),
    ("llama", {"rope_scaling": [1]}, r"rope_scaling = \[1\]"),
    ("llama", {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}, r"rope_theta = 10000.0[\s\S]*1000000.0"),
    ("llama", {"rope_parameters": {"factor": 2.0}, "rope_scaling": {"factor": 4.0}}, "rope_scaling.factor = 4.0"),
    ("llama", {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "one table for all layers"),
    ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
    (
        "llama",
        {"rope_scaling": {"type": "yarn", "factor": 2.0}, "original_max_position_embeddings": 32},
        "original_max_position_embeddings = 32",
    ),
    ("llama", {"rope_interleaved": True}, "rope_interleaved = True"),
    (
        "llama",
        {"rope_scaling": {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 32}},
        "original_max_position_embeddings = 32",
    ),
    ("llama", {"num_key_value_heads": 3}, "num_key_value_heads"),
    ("llama", {"head_dim": 7}, "rotary|rope|turn"),
    ("llama", {"max_position_embeddings": "long"}, "max_position_embeddings = 'long'"),
    ("llama", {"rms_norm_eps": 0}, "rms_norm_eps"),
    ("llama", {"rope_theta": HUGE}, "rope_theta = 1000"),
    ("llama", {"rope_scaling": {"type": "yarn", "factor": HUGE}}, "factor = 1000"),
    (
        "llama",
        {
            "max_position_embeddings": HUGE,
            "rope_scaling": {"type": "yarn", "factor": None, "original_max_position_embeddings": 32},
        },
        "max_position_embeddings = 1000",
    ),
    ("gemma", {"hidden_size": HUGE}, "hidden_size = 1000"),
    ("gemma2", {"query_pre_attn_scalar": HUGE}, "query_pre_attn_scalar = 1000"),
    ("llama", {"tie_word_embeddings": "yes"}, "tie_word_embeddings = 'yes'"),
    ("llama", {"architectures": ["LlamaForTokens"]}, "LlamaForTokens"),
    ("llama", {"hidden_size": "absent"}, "`hidden_size`"),
    ("mistral", {"sliding_window": 0}, "sliding_window"),
    ("mistral", {"layer_types": ["full_attention"] * 3}, "layer_types"),
    ("qwen2", {"use_mrope": True}, "use_mrope = True"),
    ("qwen2", {"attention_bias": True}, "attention_bias = True"),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": -1}, "max_window_layers = -1"),
    ("qwen3", {"layer_types": ["full_attention"] * 2}, "layer_types"),
    ("qwen3", {"layer_types": ["full_attention", "full_attention", "linear_attention"]}, "'linear_attention'"),
    ("qwen3", {"layer_types": ["sliding_attention"] * 3}, "use_sliding_window = False"),
    ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
    ("gemma", {"hidden_act": "gelu", "hidden_activation": "gelu"}, "hidden_activation = 'gelu'"),
    ("gemma2", {"query_pre_attn_scalar": 10.5}, "query_pre_attn_scalar = 10.5"),
    ("gemma2", {"sliding_window_pattern": 3}, "sliding_window_pattern = 3"),
    ("gemma2", {"sliding_window": None}, "sliding_window = None"),
    ("gemma2", {"sliding_window_size": 7}, "sliding_window_size = 7"),
    ("gemma2", {"final_logit_softcapping": -1.0}, "final_logit_softcapping"),
    ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
    ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
    ("gemma3_text", {"rope_parameters": {"rope_theta": 1e6}}, "full_attention and sliding_attention"),
    ("gemma3_text", {"_sliding_window_pattern": 4}, "_sliding_window_pattern = 4"),
    ("phi3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "type = 'linear'"),
    ("phi3", {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}}, "scaling.short"),
    ("phi3", {"head_dim": 8}, "head_dim = 8"),
    ("phi3", {"lm_head_bias": True}, "lm_head_bias = True"),
    ("olmo2", {"clip_qkv": 8.0}, "clip_qkv = 8.0"),
    ("starcoder2", {"mlp_type": "gated"}, "mlp_type = 'gated'"),
]


@pytest.mark.parametrize(
    ("kind", "changes", "words"), REFUSED, ids=lambda x: str(x)[:60] if isinstance(x, dict) else None
)
def test_what_no_specification_says_is_refused_by_name(kind, changes, words):
    """B40, B61. Key and value."""
    with pytest.raises(UserError, match=words):
        spec_of(kind, **changes)


ODD = [None, True, -1, 0, 7, 0.5, -2.5, 1e300, HUGE, 1 << 62, "x", "", [], [1], {}, {"a": 1}, [None], float("nan")]


@KINDS
def test_values_of_any_kind_give_a_specification_or_one_error(kind):
    """Never anything else, whatever is put under whichever key."""
    window = {} if kind in ("llama", "gemma", "olmo2") else {"sliding_window": 4}
    whole = as_theirs({"model_type": kind, "architectures": [CLASSES[kind]], **TINY, **window})
    draw = random.Random(kind)
    keys = [*whole, "rope_scaling", "rope_theta", "original_max_position_embeddings", "layer_types"]
    inner = [
        *whole["rope_parameters"],
        "rope_type",
        "type",
        "factor",
        "full_attention",
        "original_max_position_embeddings",
    ]
    found = []
    for _ in range(120):
        table = copy.deepcopy(whole)
        for key in draw.sample(keys, draw.randint(0, 2)):
            table[key] = copy.deepcopy(draw.choice(ODD))
        if isinstance(table["rope_parameters"], dict) and draw.random() < 0.5:
            rope = table["rope_parameters"]
            rope["rope_type"] = draw.choice(["linear", "dynamic", "yarn", "llama3", "longrope", "default"])
            rope[draw.choice(inner)] = copy.deepcopy(draw.choice(ODD))
        try:
            found.append(read_config(table, "config.json").spec)
        except UserError:
            continue
    assert 10 < len(found) < 110
    assert all(write_config(spec)[1].spec.decoder for spec in found[:10])
