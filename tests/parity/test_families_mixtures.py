"""Mixtures of experts and latent attention: published configurations, classes and files of every form."""

import json
from copy import deepcopy

import pytest
import torch
import transformers
from checkpoints import greedy, imported, opened, unlike, written
from maps import scattered
from mixtures import (
    DEEPSEEK_V2,
    DEEPSEEK_V2_LITE,
    MIXTRAL,
    QWEN2_MOE_WINDOWS,
    QWEN3_MOE,
    QWEN3_MOE_WINDOW,
    deepseek_v3,
)
from pairs import ids, padded, pair, wide
from published_mixtures import PUBLISHED
from safetensors.torch import load_file, save_file

from anyformer.errors import UserError
from anyformer.nn.model import build
from anyformer.spec import expand, load_spec
from anyformer.spec.problems import SpecError
from anyformer.weights.config import read_config, write_config
from anyformer.weights.hf import load_model

CPU = torch.device("cpu")
DEEPSEEK_V3 = deepseek_v3("deepseek v3", q_rank=13, interleaved=True, normalise=True)

CLASSES = {"mixtral": "Mixtral", "qwen2_moe": "Qwen2Moe", "qwen3_moe": "Qwen3Moe", "deepseek_v2": "DeepseekV2"} | {
    "deepseek_v3": "DeepseekV3"
}


def standing(table):
    """The configuration as `transformers` keeps it once it has read it, every key of its class included."""
    config = getattr(transformers, f"{CLASSES[table['model_type']]}Config")(**deepcopy(table))
    return json.loads(config.to_json_string(use_diff=False))


def settings(case, **over):
    """A case's settings as a configuration file."""
    config = getattr(transformers, case.config)(**deepcopy(case.settings))
    return {**json.loads(config.to_json_string(use_diff=False)), "architectures": [case.model], **over}


EVEN = {"kv_lora_rank": 12, "qk_nope_head_dim": 8}
"""DeepSeek-V2's own code turns float32 pairs where they lie, and they must lie on even places."""
CASES = [MIXTRAL, QWEN2_MOE_WINDOWS, QWEN3_MOE, QWEN3_MOE_WINDOW, DEEPSEEK_V2, DEEPSEEK_V2_LITE, DEEPSEEK_V3]


def theirs(case, name, folder, **over):
    """One of their classes with the case's settings, as it stands in a folder now."""
    config = getattr(transformers, case.config)(**deepcopy({**case.settings, "eos_token_id": None, **over}))
    config._attn_implementation = config._experts_implementation = "eager"
    hf = scattered(getattr(transformers, name)(config).eval())
    hf.save_pretrained(folder)
    return hf


@pytest.fixture(params=CASES, ids=lambda case: case.name, scope="module")
def in_float32(request, tmp_path_factory):
    """Their model and ours."""
    case, folder = request.param, tmp_path_factory.mktemp("float32")
    hf = theirs(case, case.model, folder, **(EVEN if case.module == "deepseek_v2" else {}))
    return hf, load_model(folder, torch.float32, CPU)[1]


@torch.no_grad()
def test_float32_logits_are_theirs(in_float32):
    """Past windows, and past the original context of YaRN."""
    hf, our = in_float32
    tokens = ids(2, 70, 37)
    expected, got = hf(tokens).logits, our(tokens)
    assert got.dtype == expected.dtype == torch.float32
    assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()


@torch.no_grad()
def test_greedy_continuation_is_theirs_with_and_without_a_cache(in_float32):
    """Prompts of two lengths, padded on the left, that end past windows and the original context."""
    hf, our = in_float32
    tokens, real = ids(2, 66, 37, seed=1), padded([66, 41], "left")
    expected = greedy(hf, tokens.masked_fill(~real, 0), real, 6)
    cache_, row, seen = our.new_cache(2, 80), tokens, real
    best = our(tokens, padding=real, cache=cache_, last_only=True)[:, -1].argmax(-1, keepdim=True)
    for step in range(6):
        assert torch.equal(our(row, padding=seen)[:, -1].argmax(-1, keepdim=True), best)
        assert torch.equal(expected[:, step : step + 1], best)
        row, seen = torch.cat([row, best], 1), torch.cat([seen, torch.ones(2, 1, dtype=torch.bool)], 1)
        best = our(best, cache=cache_, last_only=True)[:, -1].argmax(-1, keepdim=True)


@pytest.mark.parametrize("name", PUBLISHED)
def test_older_and_newer_forms_of_a_configuration_are_one(name):
    """The published file (of fewer layers), what `transformers` makes of it, and what is written for it."""
    published = {**PUBLISHED[name], "num_hidden_layers": 5}
    spec = read_config(published, "config.json").spec
    assert unlike(spec, read_config(standing(published), "config.json").spec) == []
    table, reading = write_config(spec)
    assert reading.spec == spec
    assert unlike(spec, read_config(standing(table), "config.json").spec) == []


@pytest.mark.parametrize("name", ["mixtral-8x7b", "deepseek-v2-lite", "deepseek-v2", "deepseek-v3"])
def test_a_published_configuration_is_the_shipped_recipe(name):
    """Whose scales have twelve digits."""
    spec, shipped = read_config(PUBLISHED[name], "config.json").spec, load_spec(name)
    assert [each for each in unlike(shipped, spec) if not each.startswith("decoder.blocks.0.attention.scale")] == []
    scales = [one.decoder.blocks[0].attention.scale for one in (shipped, spec)]
    assert scales[0] == pytest.approx(scales[1], rel=1e-11)


def test_the_published_balance_loss_is_kept():
    """`aux_loss_alpha`, over each sequence with `seq_aux`."""
    for seq_aux, over in ((True, "sequence"), (False, "batch")):
        ffn = read_config({**PUBLISHED["deepseek-v2"], "seq_aux": seq_aux}, "config.json").spec.decoder.blocks[1].ffn
        assert (ffn.balance_loss, ffn.balance_over) == (0.001, over)


SMALL = {"vocab_size": 40, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 8}


@pytest.mark.parametrize("kind", CLASSES)
def test_absent_keys_are_the_defaults_of_their_class(kind):
    sizes = {**SMALL, "num_attention_heads": 32} if kind.startswith("qwen") else SMALL
    sizes = {**sizes, "num_attention_heads": 128, "hidden_size": 1280} if kind == "deepseek_v3" else sizes
    sizes = {**sizes, "num_experts_per_tok": 6} if kind == "deepseek_v2" else sizes
    table = {"model_type": kind, "architectures": [f"{CLASSES[kind]}ForCausalLM"], **sizes}
    read = read_config(table, "config.json")
    assert unlike(read.spec, read_config(standing(table), "config.json").spec) == []


@pytest.mark.parametrize("n", [0, 2, 3, 9])
def test_windows_without_kinds_of_layers_are_theirs(n):
    """Of Qwen2-MoE: every other layer of those before the key's."""
    table = settings(QWEN2_MOE_WINDOWS, max_window_layers=n, num_hidden_layers=5)
    table.pop("layer_types")
    spec = read_config(table, "config.json").spec
    assert unlike(spec, read_config(standing(table), "config.json").spec) == []
    assert [block.attention.mask.window for block in spec.decoder.blocks] == [
        6 if kind == "sliding_attention" else None for kind in standing(table)["layer_types"]
    ]


REFUSED = [
    (MIXTRAL, {"hidden_act": "swoosh"}, "hidden_act = 'swoosh'"),
    (MIXTRAL, {"num_experts_per_tok": 9}, "num_experts_per_tok.*9"),
    (MIXTRAL, {"num_local_experts": 0}, "num_local_experts.*0"),
    (MIXTRAL, {"sliding_window": -3}, "sliding_window.*-3"),
    (MIXTRAL, {"intermediate_size": "wide"}, "intermediate_size.*'wide'"),
    (MIXTRAL, {"rope_parameters": {"rope_type": "spiral"}}, "rope_type = 'spiral'"),
    (MIXTRAL, {"architectures": ["MixtralForCausalLLM"]}, "MixtralForCausalLM"),
    (QWEN2_MOE_WINDOWS, {"layer_types": ["full_attention"]}, "layer_types = "),
    (QWEN2_MOE_WINDOWS, {"layer_types": ["full_attention"] * 3 + ["chunked_attention"]}, "'chunked_attention'"),
    (QWEN2_MOE_WINDOWS, {"decoder_sparse_step": 0}, "decoder_sparse_step = 0"),
    (QWEN2_MOE_WINDOWS, {"mlp_only_layers": 1}, "mlp_only_layers = 1"),
    (QWEN3_MOE, {"norm_topk_prob": "yes"}, "norm_topk_prob = 'yes'"),
    (QWEN3_MOE, {"num_experts": 8}, "num_local_experts = 7"),
    (DEEPSEEK_V2, {"topk_method": "best"}, "topk_method = 'best'"),
    (DEEPSEEK_V2, {"norm_topk_prob": True}, "norm_topk_prob = True"),
    (DEEPSEEK_V2, {"moe_layer_freq": 2}, "moe_layer_freq = 2"),
    (DEEPSEEK_V2, {"scoring_func": "sigmoid"}, "scoring_func = 'sigmoid'"),
    (DEEPSEEK_V2, {"n_shared_experts": None}, "n_shared_experts = None"),
    (DEEPSEEK_V2, {"num_key_value_heads": 2}, "num_key_value_heads = 2"),
    (DEEPSEEK_V2, {"n_group": 3}, "n_group.*3"),
    (DEEPSEEK_V2, {"n_group": None}, "n_group"),
    (DEEPSEEK_V2, {"num_experts_per_tok": None}, "num_experts_per_tok"),
    (DEEPSEEK_V2, {"first_k_dense_replace": -1}, "first_k_dense_replace = -1"),
    (DEEPSEEK_V2, {"architectures": ["DeepseekV2ForTokenClassification"]}, "DeepseekV2ForTokenClassification"),
    (DEEPSEEK_V2, {"rope_parameters": {"type": "yarn", "factor": 4.0, "mscale_all_dim": "much"}}, "mscale_all_dim"),
    (DEEPSEEK_V3, {"topk_method": "greedy"}, "topk_method = 'greedy'"),
    (DEEPSEEK_V3, {"rope_interleave": "yes"}, "rope_interleave = 'yes'"),
    (DEEPSEEK_V3, {"num_nextn_predict_layers": -1}, "num_nextn_predict_layers = -1"),
    (DEEPSEEK_V3, {"topk_group": 4}, "topk_group.*4"),
    (DEEPSEEK_V3, {"mlp_bias": True}, "mlp_bias = True"),
    (DEEPSEEK_V3, {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3"}}, "'fp8'(.|\n)*bfloat16"),
]


@pytest.mark.parametrize(("case", "over", "message"), REFUSED, ids=lambda x: ",".join(x) if isinstance(x, dict) else "")
def test_what_no_specification_says_is_refused_by_key_and_value(case, over, message):
    with pytest.raises((UserError, SpecError), match=message):
        read_config(settings(case, **over), "config.json")


def with_block(spec, layer, **parts):
    """The specification with one block changed."""
    blocks = list(spec.decoder.blocks)
    blocks[layer] = blocks[layer].model_copy(update=parts)
    return spec.model_copy(update={"decoder": spec.decoder.model_copy(update={"blocks": tuple(blocks)})})


@pytest.mark.parametrize(
    ("case", "change", "nearest", "path"),
    [
        (DEEPSEEK_V3, lambda b: {"ffn": b.ffn.model_copy(update={"shared": None})}, "DeepSeek-V3", "ffn.shared"),
        (DEEPSEEK_V3, lambda b: {"attention": b.attention.model_copy(update={"scale": 0.3})}, "DeepSeek-V3", "scale"),
        (DEEPSEEK_V2, lambda b: {"ffn": b.ffn.model_copy(update={"normalise": True})}, "DeepSeek-V2", "ffn.normalise"),
        (MIXTRAL, lambda b: {"ffn": b.ffn.model_copy(update={"router_bias": True})}, "Mixtral", "ffn.router_bias"),
        (MIXTRAL, lambda b: {"ffn": b.ffn.model_copy(update={"normalise": False})}, "Mixtral", "ffn.normalise"),
    ],
)
def test_a_specification_that_no_family_says_is_refused_with_the_nearest(case, change, nearest, path):
    spec = expand(case.recipe)
    with pytest.raises(UserError, match=f"{path.replace('.', '[.]')} = (.|\n)*the nearest is {nearest}"):
        write_config(with_block(spec, -1, **change(spec.decoder.blocks[-1])))


@pytest.mark.parametrize(
    ("case", "over"),
    [
        (QWEN2_MOE_WINDOWS, {"decoder_sparse_step": 1, "mlp_only_layers": [4]}),
        (QWEN2_MOE_WINDOWS, {"decoder_sparse_step": 2, "mlp_only_layers": [3]}),
        (QWEN2_MOE_WINDOWS, {"decoder_sparse_step": 6, "mlp_only_layers": []}),
        (QWEN3_MOE, {"decoder_sparse_step": 1, "mlp_only_layers": None}),
        (QWEN3_MOE, {"decoder_sparse_step": 1, "mlp_only_layers": [0, 3]}),
        (QWEN3_MOE, {"decoder_sparse_step": 3, "mlp_only_layers": []}),
        (DEEPSEEK_V2, {"first_k_dense_replace": 0}),
        (DEEPSEEK_V2, {"first_k_dense_replace": 9}),
        (DEEPSEEK_V3, {"first_k_dense_replace": 2}),
        (DEEPSEEK_V3, {"first_k_dense_replace": 5}),
    ],
)
def test_dense_layers_among_sparse_ones_are_theirs(case, over):
    """Read, and built by them from what is written."""
    table = settings(case, **over, num_hidden_layers=5)
    table.pop("layer_types", None)
    spec = read_config(table, "config.json").spec
    ours = [block.ffn.kind == "moe" for block in spec.decoder.blocks]
    for each in (table, write_config(spec)[0]):
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**each))
        assert [hasattr(layer.mlp, "experts") for layer in model.model.layers] == ours


def classifiers():
    """Classes that there are, the language model's left out."""
    kinds = ("Model", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
    for case in (MIXTRAL, QWEN2_MOE_WINDOWS, QWEN3_MOE, DEEPSEEK_V2, DEEPSEEK_V3):
        for kind in kinds:
            name = case.model.replace("ForCausalLM", kind)
            if hasattr(transformers, name):
                yield pytest.param(case, name, id=name)


@pytest.mark.parametrize(("case", "name"), list(classifiers()))
def test_other_classes_give_their_outputs_and_go_back(case, name, tmp_path):
    """Rows padded on either side; every tensor comes back."""
    with wide():
        hf = theirs(case, name, tmp_path / "theirs", num_hidden_layers=2, pad_token_id=0, num_labels=3)
    our = load_model(tmp_path / "theirs", torch.float64, CPU)[1]
    for side in ("left", "right"):
        real = padded([9, 5], side)
        tokens = ids(2, 9, 37).masked_fill(~real, 0)
        positions = (real.cumsum(1) - 1).clamp(min=0)
        with wide():
            out = hf(tokens, attention_mask=real.long(), position_ids=positions)
            if name.endswith("Model"):
                expected, got = out.last_hidden_state[real], our.hidden(tokens, padding=real)[real]
            elif name.endswith("Answering"):
                expected = torch.stack([out.start_logits, out.end_logits], -1)[real]
                got = our(tokens, padding=real)[real]
            else:
                expected, got = out.logits, our(tokens, padding=real)
                expected, got = (expected[real], got[real]) if "Token" in name else (expected, got)
        assert expected.shape == got.shape
        assert (expected - got).abs().max() < 1e-9 * expected.abs().max().clamp(min=1)
    before, after = hf.state_dict(), opened(our, tmp_path / "ours", hf).state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


def router(table):
    """The router of a model of one layer and width 4 that passes on what comes in as logits."""
    sizes = {"vocab_size": 9, "hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1}
    spec = read_config({**sizes, "num_key_value_heads": 1, **table}, "config.json").spec
    made = build(spec).decoder.blocks[0].ffn.router
    with torch.no_grad():
        made.weight.copy_(torch.eye(4))
    return made


V3 = {
    "model_type": "deepseek_v3",
    "q_lora_rank": None,
    "kv_lora_rank": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
}
LOGITS = torch.tensor([[[2.0, 1.0, 0.0, -1.0]]])


@torch.no_grad()
def test_published_routers_weigh_the_chosen_experts_as_they_say():
    """B24. Softmax over all, divided by the sum of the chosen or not; sigmoid with a bias that only chooses."""
    qwen = {"model_type": "qwen2_moe", "num_experts": 4, "num_experts_per_tok": 2}
    for table, weights in (
        ({"model_type": "mixtral", "num_local_experts": 4}, [0.731059, 0.268941]),
        ({**qwen, "norm_topk_prob": True}, [0.731059, 0.268941]),
        (qwen, [0.643914, 0.236883]),
        (V3, [2.5 * 0.880797 / 1.611856, 2.5 * 0.731059 / 1.611856]),
        ({**V3, "norm_topk_prob": False, "routed_scaling_factor": 1.5}, [1.5 * 0.880797, 1.5 * 0.731059]),
    ):
        choice = router(table)(LOGITS)
        assert choice.experts.flatten().tolist() == [0, 1]
        assert choice.weights.flatten().tolist() == pytest.approx(weights, abs=1e-6)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(router(table)(LOGITS).weights, choice.weights)
        assert router(table)(torch.zeros(1, 1, 4)).experts.flatten().tolist() == [0, 1]
    biased = router({**V3, "routed_scaling_factor": 1.0})
    biased.choice_bias.copy_(torch.tensor([-9.0, 0.0, 0.0, 0.0]))
    choice = biased(LOGITS)
    assert choice.experts.flatten().tolist() == [1, 2]
    assert choice.weights.flatten().tolist() == pytest.approx([0.593845, 0.406155], abs=1e-6)


FURTHER = [
    (MIXTRAL, {"hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True, "sliding_window": None}),
    (QWEN3_MOE, {"attention_bias": False, "hidden_act": "relu", "mlp_only_layers": [0, 1]}),
    (DEEPSEEK_V2, {"mlp_bias": True, "topk_group": 3}),
    (DEEPSEEK_V2_LITE, {"attention_bias": True, "first_k_dense_replace": 3}),
    (DEEPSEEK_V3, {"n_group": 1, "topk_group": 1, "n_shared_experts": 3}),
]


@pytest.mark.parametrize(("case", "over"), FURTHER, ids=lambda x: "" if isinstance(x, dict) else x.name)
def test_further_settings_give_their_logits_and_go_back(case, over, tmp_path):
    """Among them one group of experts, which is none, as in DeepSeek-V3's smaller kin."""
    with wide():
        hf = theirs(case, case.model, tmp_path / "theirs", **over)
        our = load_model(tmp_path / "theirs", torch.float64, CPU)[1]
        again = opened(our, tmp_path / "ours", hf)
        tokens = ids(2, 11, 37)
        expected = hf(tokens).logits
        for got in (our(tokens), again(tokens).logits):
            assert (got - expected).abs().max() < 1e-9
    assert getattr(our.spec.decoder.blocks[-1].ffn, "groups", None) is None or case is DEEPSEEK_V2


@pytest.mark.parametrize(
    "rope",
    [
        {"type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0},
        {"type": "yarn", "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707},
        {"type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.7},
        {"type": "yarn", "factor": 4.0, "mscale_all_dim": 0.5},
        {"type": "yarn", "factor": 4.0, "mscale": 0.9},
        {"type": "yarn", "factor": 4.0, "mscale": 1 / 3, "mscale_all_dim": 0.123456789},
        {"type": "yarn", "factor": 4.0, "attention_factor": 1.3, "mscale_all_dim": 0.6},
        {"type": "yarn", "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
        {"type": "linear", "factor": 3.0, "mscale_all_dim": 0.8},
    ],
    ids=str,
)
def test_the_scales_of_stretched_rotation_are_theirs_both_ways(rope):
    """Of scores and of cosines, bit for bit; older keys say the same as newer ones."""
    case = DEEPSEEK_V2 if rope["factor"] == 4 else DEEPSEEK_V3
    table = settings(case, rope_scaling=rope, rope_theta=300.0)
    table.pop("rope_parameters")
    spec = read_config(table, "config.json").spec
    attention = spec.decoder.blocks[0].attention
    written_, reading = write_config(spec)
    assert reading.spec == spec
    hf = getattr(transformers, case.model)
    for each in (table, written_):
        with torch.device("meta"):
            model = hf(hf.config_class(**deepcopy(each)))
        assert model.model.layers[0].self_attn.scaling == attention.scale
        turned = getattr(attention.position.scaling, "attention_factor", 1.0)
        assert model.model.rotary_emb.attention_scaling == turned
    kept = written_["rope_scaling"]
    assert ("mscale_all_dim" in kept) == (attention.scale != 15**-0.5)
    if "mscale_all_dim" in kept:
        assert kept["mscale_all_dim"] == pytest.approx(rope["mscale_all_dim"], abs=1e-12)
    if "mscale" in rope and "mscale_all_dim" in rope and rope["factor"] > 1:
        assert kept["mscale"] == pytest.approx(rope["mscale"], abs=1e-12)


def added(folder, tensors, **keys):
    """The folder with further tensors and keys of its configuration."""
    file, config = folder / "model.safetensors", folder / "config.json"
    save_file({**load_file(file), **tensors}, file)
    config.write_text(json.dumps({**json.loads(config.read_text()), **keys}))
    return folder


def test_layers_that_predict_further_tokens_are_left_alone(tmp_path):
    """As many as the configuration names, and none that it does not; none are written."""
    names = ("eh_proj.weight", "embed_tokens.weight", "self_attn.o_proj.weight", "mlp.experts.0.up_proj.weight")
    more = {f"model.layers.3.{name}": torch.ones(3, 3) for name in (*names, "shared_head.norm.weight")}
    our = load_model(added(written(DEEPSEEK_V3, tmp_path), more), torch.float64, CPU)[1]
    state, described = our.state_dict(), pair(DEEPSEEK_V3).our.state_dict()
    assert all(torch.equal(state[name], described[name]) for name in described)
    assert write_config(our.spec)[0]["num_nextn_predict_layers"] == 0
    with pytest.raises(UserError, match=r"model\.layers\.3"):
        load_model(added(tmp_path, {}, num_nextn_predict_layers=0), torch.float64, CPU)
    added(tmp_path, {"model.layers.4.eh_proj.weight": torch.ones(3, 3)}, num_nextn_predict_layers=1)
    with pytest.raises(UserError, match=r"1 tensor has(.|\n)*model\.layers\.4"):
        load_model(tmp_path, torch.float64, CPU)


@pytest.mark.parametrize("case", [MIXTRAL, QWEN2_MOE_WINDOWS, DEEPSEEK_V3], ids=lambda case: case.name)
def test_experts_in_one_tensor_are_the_same_experts(case, tmp_path):
    """The layout that `transformers` has in memory; and both layouts at once, if they agree."""
    with wide():
        pair(case).hf.save_pretrained(tmp_path, save_original_format=False)
    held = load_file(tmp_path / "model.safetensors")
    fused = next(name for name in held if name.endswith("experts.gate_up_proj"))
    our, described = load_model(tmp_path, torch.float64, CPU)[1].state_dict(), pair(case).our.state_dict()
    assert all(torch.equal(our[name], described[name]) for name in described)
    single = load_file(written(case, tmp_path / "single") / "model.safetensors")
    with pytest.raises(UserError, match="and they differ"):
        load_model(added(tmp_path, {**single, fused: held[fused] + 1}), torch.float64, CPU)


@pytest.mark.parametrize("case", [DEEPSEEK_V2, DEEPSEEK_V2_LITE, DEEPSEEK_V3], ids=lambda case: case.name)
def test_a_published_latent_model_stores_its_latent_alone(case, tmp_path):
    """B41. For each token and layer the latent and the one turning key; parity tests compare its logits."""
    our = imported(case, tmp_path)
    sizes = [our.new_cache(1, capacity).nbytes for capacity in (10, 30)]
    positions = [our.new_cache(1, capacity).positions for capacity in (10, 30)]
    bookkeeping = 0 if positions[0] is None else positions[1].nbytes - positions[0].nbytes
    assert sizes[1] - sizes[0] - bookkeeping == 20 * 3 * (11 + 8) * 8


@torch.no_grad()
def test_the_pairs_that_turn_are_those_of_the_configuration(tmp_path):
    """B41. An odd width is refused under its key; the other pairing is another model."""
    for case in (DEEPSEEK_V2, DEEPSEEK_V3):
        with pytest.raises(SpecError, match=r"qk_rope_head_dim.*7.*pairs"):
            read_config(settings(case, qk_rope_head_dim=7, head_dim=7), "config.json")
    tokens, our = ids(1, 9, 37), imported(DEEPSEEK_V3, tmp_path)
    other = load_model(added(tmp_path, {}, rope_interleave=False), torch.float64, CPU)[1]
    assert other.spec.decoder.blocks[0].attention.position.layout == "half"
    assert (our(tokens) - other(tokens)).abs().max() > 0.01
