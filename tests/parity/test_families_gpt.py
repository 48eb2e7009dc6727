"""GPT-2, GPT-NeoX, GPT-J, Falcon, BLOOM and MPT: every class and kind that their configurations can say."""

import copy
import json

import pytest
import torch
import transformers
from checkpoints import both, greedy, opened, result, unlike
from maps import scattered
from pairs import Family, Pair, ids, padded
from safetensors.torch import load_file, save_file

from anyformer.errors import UserError
from anyformer.nn.layers import ACTIVATIONS
from anyformer.weights.config import read_config, write_config
from anyformer.weights.hf import load_model, save_folder

CPU = torch.device("cpu")
GPT2 = {
    "vocab_size": 37,
    "n_embd": 30,
    "n_layer": 3,
    "n_head": 5,
    "n_positions": 40,
    "layer_norm_epsilon": 1e-3,
}
NEOX = {
    "vocab_size": 37,
    "hidden_size": 60,
    "num_hidden_layers": 2,
    "num_attention_heads": 5,
    "intermediate_size": 47,
    "max_position_embeddings": 16,
    "layer_norm_eps": 1e-3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.35},
}
GPTJ = {**GPT2, "n_embd": 40, "rotary_dim": 6}
FALCON = {
    "vocab_size": 37,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "max_position_embeddings": 16,
    "layer_norm_epsilon": 1e-3,
}
GROUPS = {**FALCON, "new_decoder_architecture": True}
BLOOM = {"vocab_size": 37, "hidden_size": 48, "n_layer": 2, "n_head": 6, "layer_norm_epsilon": 1e-3}
MPT = {
    "vocab_size": 37,
    "d_model": 48,
    "n_layers": 2,
    "n_heads": 6,
    "max_seq_len": 40,
    "layer_norm_epsilon": 1e-3,
}
BASES = {"GPT2": GPT2, "GPTNeoX": NEOX, "GPTJ": GPTJ, "Falcon": FALCON, "Bloom": BLOOM, "Mpt": MPT}
LANGUAGE = {name: f"{name}{'LMHeadModel' if name == 'GPT2' else 'ForCausalLM'}" for name in BASES}


LINEAR = {"rope_type": "linear", "rope_theta": 300.0, "factor": 2.0}


KINDS = {
    "GPT2LMHeadModel": [
        {**GPT2, "scale_attn_by_inverse_layer_idx": True, "tie_word_embeddings": False, "activation_function": "relu"},
        {**GPT2, "scale_attn_weights": False, "n_inner": 47, "activation_function": "gelu"},
        {**GPT2, "scale_attn_weights": False, "scale_attn_by_inverse_layer_idx": True},
    ],
    "GPTNeoXForCausalLM": [
        {**NEOX, "tie_word_embeddings": True, "attention_bias": False, "hidden_act": "gelu_fast"},
        {**NEOX, "rope_parameters": {**LINEAR, "partial_rotary_factor": 0.5}, "use_parallel_residual": False},
        {**NEOX, "rope_parameters": {"rope_type": "dynamic", "factor": 3.0, "partial_rotary_factor": 0.5}},
    ],
    "GPTJForCausalLM": [{**GPTJ, "tie_word_embeddings": True, "n_inner": 51, "activation_function": "silu"}],
    "FalconForCausalLM": [
        {**FALCON, "parallel_attn": False, "activation": "gelu_pytorch_tanh", "tie_word_embeddings": False},
        {**FALCON, "multi_query": False, "bias": True, "rope_parameters": LINEAR},
        {**FALCON, "multi_query": False, "parallel_attn": False, "ffn_hidden_size": 51},
        {**FALCON, "alibi": True},
        {**FALCON, "alibi": True, "multi_query": False, "bias": True},
        {**GROUPS, "num_kv_heads": 3, "num_ln_in_parallel_attn": 1, "bias": True},
        {**GROUPS, "num_kv_heads": 1, "num_ln_in_parallel_attn": 1},
        {**GROUPS, "multi_query": False},
        {**GROUPS, "num_kv_heads": 2, "alibi": True, "tie_word_embeddings": False},
    ],
    "BloomForCausalLM": [{**BLOOM, "tie_word_embeddings": False}, {**BLOOM, "n_head": 12}],
    "MptForCausalLM": [
        MPT,
        {**MPT, "tie_word_embeddings": False, "n_heads": 3, "attn_config": {"clip_qkv": 0.5, "softmax_scale": 0.3}},
    ],
}
HEADS = {
    f"{name}{head}": [settings]
    for name, settings in BASES.items()
    for head in ("Model", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
    if (name, head) != ("GPTJ", "ForTokenClassification")
}
CASES = [(name, settings) for table in (KINDS, HEADS) for name, all_of in table.items() for settings in all_of]


def case_name(case) -> str:
    name, settings = case
    base = next(base for prefix, base in BASES.items() if name.startswith(prefix))
    said = [f"{key}={value}" for key, value in settings.items() if base.get(key) != value and key != "rope_parameters"]
    return " ".join(
        [name, *said, *([settings["rope_parameters"]["rope_type"]] if "rope_parameters" in settings else [])]
    )


def theirs(name: str, **settings) -> torch.nn.Module:
    """A model of theirs with random weights that hide nothing; to be called in `wide()` for float64."""
    model = getattr(transformers, name)
    more = {"num_labels": 3} if "Classification" in name else {}
    special = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0 if "Sequence" in name else None}
    config = model.config_class(**special, **more, **settings)
    # Falcon adds ALiBi's bias twice otherwise.
    config._attn_implementation = "sdpa" if settings.get("alibi") else "eager"
    return scattered(model(config).eval())


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_every_kind_gives_their_numbers_and_goes_back(case, tmp_path):
    """B55. Fused and transposed matrices, branches side by side: padded rows, and every tensor back in its place."""
    pair = both(theirs, case, tmp_path / "theirs")
    real = padded([19, 7], "left")
    tokens = ids(2, 19, 37).masked_fill(~real, 0)
    if "rope_parameters" in case[1] and case[1]["rope_parameters"]["rope_type"] == "dynamic":
        tokens, real = ids(1, 19, 37), padded([19], "left")
    before, ours = result(pair, tokens, real)
    rows = ... if ours.dim() == 2 else real
    if pair.family.name.startswith("Bloom"):
        assert (before[rows] - ours[rows]).abs().max() < 1e-7  # √(2/π) with eight digits.
    else:
        pair.close(before[rows], ours[rows])
    name = case[0] if case[1].get("parallel_attn", True) else "Starcoder2ForCausalLM"  # The same model by another name.
    again = opened(pair.our, tmp_path / "ours", pair.hf, getattr(transformers, name))
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["architectures"] == [name]
    again.config.pad_token_id = pair.hf.config.pad_token_id
    mine, back = pair.hf.state_dict(), again.state_dict()
    if name == case[0]:
        assert mine.keys() == back.keys()
        assert [key for key in mine if not torch.equal(mine[key], back[key])] == []
    after, _ = result(Pair(pair.family, again, pair.our), tokens, real)
    pair.close(before[rows], after[rows])


def test_slopes_of_falcon_are_theirs_before_they_round_them(tmp_path, monkeypatch):
    """Theirs are rounded to bfloat16, and so is their product with the position: 12 heads, or 300 tokens, show it."""
    falcon, bloom = transformers.models.falcon.modeling_falcon, transformers.models.bloom.modeling_bloom
    monkeypatch.setattr(falcon, "build_alibi_tensor", bloom.build_alibi_tensor)
    case = ("FalconForCausalLM", {**FALCON, "alibi": True, "num_attention_heads": 12})
    pair = both(theirs, case, tmp_path)
    tokens = ids(1, 300, 37)
    wanted = pair.theirs(tokens).logits
    assert (pair.our(tokens).detach() - wanted).abs().max() < 1e-8 * wanted.abs().max()  # Slopes in float32.


@pytest.mark.parametrize("name", BASES)
def test_in_float32_logits_and_greedy_continuation_are_theirs(name, tmp_path):
    """Prompts padded on the left, past the trained context where there are no tables, with a cache and without."""
    hf = theirs(LANGUAGE[name], **BASES[name])
    hf.save_pretrained(tmp_path)
    our = load_model(tmp_path, None, CPU)[1]
    tokens, real = ids(2, 13, 37, seed=2), padded([13, 6], "left")
    pair = Pair(Family(name, "", "", "", {}, {}, []), hf, our)
    with torch.no_grad():
        positions = (real.cumsum(1) - 1).clamp(min=0)
        takes = {} if name in ("Bloom", "Mpt") else {"position_ids": positions}
        wanted = hf(tokens, attention_mask=real.long(), **takes).logits[real]
        given = our(tokens, padding=real)[real]
        assert given.dtype == torch.float32
        assert (given - wanted).abs().max() < 1e-5 * wanted.abs().max()
        chosen = greedy(hf, tokens, real, 11)
        store, new, cached, whole = our.new_cache(2, 24), tokens, [], tokens
        for step in range(11):
            best = our(new, padding=real if step == 0 else None, cache=store, last_only=True)[:, -1].argmax(-1)
            cached.append(best)
            new = best[:, None]
            seen = torch.cat([real, torch.ones(2, step, dtype=torch.bool)], 1)
            whole = torch.cat([whole, our(whole, padding=seen)[:, -1].argmax(-1)[:, None]], 1)
    assert torch.equal(torch.stack(cached, 1), chosen)
    assert torch.equal(whole[:, 13:], chosen)
    assert pair.vocab_size == 37


OLD = json.loads("""{
"gpt2": {"activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
    "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 32, "n_embd": 30, "n_head": 5, "n_layer": 2,
    "n_positions": 32, "resid_pdrop": 0.1, "summary_activation": null, "summary_first_dropout": 0.1,
    "summary_proj_to_labels": true, "summary_type": "cls_index", "summary_use_proj": true, "vocab_size": 37,
    "task_specific_params": {"text-generation": {"do_sample": true, "max_length": 50}}},
"gpt2, other names": {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "hidden_size": 30, "vocab_size": 37,
    "num_attention_heads": 5, "num_hidden_layers": 2, "max_position_embeddings": 32},
"gptj": {"architectures": ["GPTJForCausalLM"], "gradient_checkpointing": false, "model_type": "gptj", "n_embd": 40,
    "n_head": 5, "n_inner": null, "n_layer": 2, "rotary": true, "rotary_dim": 4, "scale_attn_weights": true,
    "summary_type": "cls_index", "tie_word_embeddings": false, "tokenizer_class": "GPT2Tokenizer", "vocab_size": 37},
"pythia": {"architectures": ["GPTNeoXForCausalLM"], "hidden_act": "gelu", "hidden_size": 60, "intermediate_size": 47,
    "layer_norm_eps": 1e-05, "max_position_embeddings": 64, "model_type": "gpt_neox", "num_attention_heads": 5,
    "num_hidden_layers": 2, "rotary_emb_base": 500, "rotary_pct": 0.5, "tie_word_embeddings": false,
    "torch_dtype": "float16", "use_cache": true, "use_parallel_residual": true, "vocab_size": 37},
"pythia, scaled": {"architectures": ["GPTNeoXForCausalLM"], "hidden_size": 60, "intermediate_size": 47,
    "model_type": "gpt_neox", "num_attention_heads": 5, "num_hidden_layers": 2, "rotary_emb_base": 500,
    "rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 500, "partial_rotary_factor": 0.5,
    "rotary_pct": 0.5, "attention_probs_dropout_prob": 0, "hidden_dropout_prob": 0, "vocab_size": 37},
"falcon 7b": {"alibi": false, "apply_residual_connection_post_layernorm": false, "bias": false, "hidden_size": 48,
    "architectures": ["FalconForCausalLM"], "auto_map": {"AutoConfig": "configuration_falcon.FalconConfig"},
    "model_type": "falcon", "multi_query": true, "new_decoder_architecture": false, "num_attention_heads": 6,
    "num_hidden_layers": 2, "parallel_attn": true, "torch_dtype": "bfloat16", "vocab_size": 37},
"falcon 40b": {"architectures": ["FalconForCausalLM"], "model_type": "falcon", "n_embed": 48, "num_kv_heads": 2,
    "new_decoder_architecture": true, "num_attention_heads": 6, "num_hidden_layers": 2, "parallel_attn": true,
    "rope_scaling": null, "rope_theta": 500042.0, "vocab_size": 37},
"falcon rw": {"architectures": ["FalconForCausalLM"], "model_type": "falcon", "alibi": true, "bias": true,
    "hidden_size": 48, "num_attention_heads": 6, "num_hidden_layers": 2, "multi_query": false, "parallel_attn": false,
    "num_kv_heads": 6, "vocab_size": 37},
"bloom": {"apply_residual_connection_post_layernorm": false, "architectures": ["BloomForCausalLM"], "n_embed": 48,
    "attention_softmax_in_fp32": true, "bias_dropout_fusion": true, "masked_softmax_fusion": true,
    "model_type": "bloom", "n_inner": null, "n_layer": 2, "num_attention_heads": 6, "offset_alibi": 100,
    "pretraining_tp": 4, "skip_bias_add": true, "skip_bias_add_qkv": false, "slow_but_exact": false, "vocab_size": 37},
"mpt": {"architectures": ["MPTForCausalLM"], "attn_config": {"alibi": true, "alibi_bias_max": 8, "attn_impl": "torch",
        "attn_pdrop": 0, "attn_type": "multihead_attention", "attn_uses_sequence_id": false, "clip_qkv": null,
        "prefix_lm": false, "qk_ln": false, "softmax_scale": null}, "d_model": 48, "emb_pdrop": 0,
    "embedding_fraction": 1.0, "expansion_ratio": 4, "init_device": "cpu", "learned_pos_emb": true,
    "init_config": {"init_nonlinearity": "relu", "name": "kaiming_normal_"}, "logit_scale": null, "max_seq_len": 64,
    "model_type": "mpt", "n_heads": 6, "n_layers": 2, "no_bias": true, "norm_type": "low_precision_layernorm",
    "resid_pdrop": 0, "tokenizer_name": "EleutherAI/gpt-neox-20b", "verbose": 0, "vocab_size": 37}
}""")
"""As published files have them, the sizes made small."""


@pytest.mark.parametrize("name", OLD)
def test_an_older_configuration_means_what_their_newest_says(name):
    old = OLD[name]
    config = transformers.AutoConfig.for_model(**old)
    new = {**config.to_dict(), "architectures": old["architectures"]}
    assert read_config(new, "new").spec == read_config(old, "old").spec


@pytest.mark.parametrize("name", OLD)
def test_what_is_read_is_written_as_the_same_family(name):
    spec = read_config(OLD[name], "config.json").spec
    table, reading = write_config(spec)
    assert unlike(spec, reading.spec) == []
    assert table["model_type"] == OLD[name]["model_type"]
    assert table.get("multi_query") == OLD[name].get("multi_query")


@pytest.mark.parametrize("name", BASES)
def test_what_is_left_out_is_their_default(name):
    config = getattr(transformers, LANGUAGE[name]).config_class()
    full = {**config.to_dict(), "architectures": [LANGUAGE[name]]}
    needed = ("vocab_size", "n_embd", "n_layer", "n_head", "hidden_size", "num_hidden_layers", "num_attention_heads")
    needed += ("intermediate_size", "d_model", "n_layers", "n_heads", "model_type", "architectures")
    short = {key: value for key, value in full.items() if key in needed}
    assert read_config(short, "short").spec == read_config(full, "full").spec


REFUSED = [
    ("gpt2", {"activation_function": "gelu_new2"}, "activation_function = 'gelu_new2'"),
    ("gpt2", {"n_head": 7}, "n_head = 7"),
    ("gpt2", {"n_positions": "many"}, "n_positions = 'many'"),
    ("gpt2", {"n_layer": 0}, "n_layer"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention = True"),
    ("gpt2", {"hidden_size": 31}, "hidden_size = 31"),
    ("gpt2", {"scale_attn_weights": "yes"}, "scale_attn_weights = 'yes'"),
    ("gpt2", {"architectures": ["GPT2DoubleHeadsModel"]}, "GPT2DoubleHeadsModel"),
    ("gptj", {"rotary_dim": None}, "rotary_dim = None"),
    ("gptj", {"rotary_dim": 10}, "rotary_dim = 10"),
    ("gptj", {"rotary_dim": 3}, "rotary_dim = 3"),
    ("gptj", {"rotary": False}, "rotary = False"),
    ("gptj", {"scale_attn_weights": False}, "scale_attn_weights = False"),
    ("pythia", {"use_parallel_residual": 1}, "use_parallel_residual = 1"),
    ("pythia", {"rotary_pct": 0.25}, "rotary_pct"),
    ("pythia", {"rope_scaling": {"type": "spiral", "factor": 2.0}}, "'spiral'"),
    ("pythia, scaled", {"rope_theta": 600}, "600"),
    ("pythia", {"hidden_act": "gelu10"}, "hidden_act = 'gelu10'"),
    ("falcon 7b", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn = 2"),
    ("falcon 7b", {"multi_query": False, "num_kv_heads": 2}, "num_kv_heads = 2"),
    (
        "falcon 7b",
        {"apply_residual_connection_post_layernorm": True},
        "apply_residual_connection_post_layernorm = True",
    ),
    ("falcon 7b", {"new_decoder_architecture": "yes"}, "new_decoder_architecture = 'yes'"),
    ("falcon 40b", {"parallel_attn": False}, "parallel_attn = False"),
    ("falcon 40b", {"num_ln_in_parallel_attn": 3}, "num_ln_in_parallel_attn = 3"),
    ("falcon 40b", {"num_kv_heads": 4}, "num_kv_heads"),
    ("falcon 40b", {"num_attention_heads": 5}, "num_attention_heads = 5"),
    ("bloom", {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm = True"),
    ("bloom", {"n_inner": 100}, "n_inner = 100"),
    ("mpt", {"expansion_ratio": 8}, "expansion_ratio = 8"),
    ("mpt", {"no_bias": False}, "no_bias = False"),
    ("mpt", {"logit_scale": "inv_sqrt_d_model"}, "logit_scale = 'inv_sqrt_d_model'"),
    ("mpt", {"norm_type": "rmsnorm"}, "norm_type = 'rmsnorm'"),
    ("mpt", {"attn_config": {"alibi": False}}, "alibi = False"),
    ("mpt", {"attn_config": {"qk_ln": True}}, "qk_ln = True"),
    ("mpt", {"attn_config": {"attn_type": "multiquery_attention"}}, "attn_type = 'multiquery_attention'"),
    ("mpt", {"attn_config": {"softmax_scale": "small"}}, "softmax_scale = 'small'"),
    ("mpt", {"attn_config": {"clip_qkv": -1.0}}, "clip_qkv"),
    ("mpt", {"attn_config": {"portal": 1}}, "portal = 1"),
    ("mpt", {"attn_config": 3}, "attn_config = 3"),
]


@pytest.mark.parametrize(("name", "changed", "said"), REFUSED, ids=lambda x: str(x) if isinstance(x, dict) else None)
def test_what_no_specification_says_is_refused_by_key_and_value(name, changed, said):
    with pytest.raises(UserError) as caught:
        read_config({**OLD[name], **changed}, "config.json")
    assert said in str(caught.value)
    assert "config.json" in str(caught.value)


def test_slopes_of_another_range_are_read_and_not_written():
    """`transformers` keeps the key and computes with 8."""
    spec = read_config({**OLD["mpt"], "attn_config": {"alibi_bias_max": 16}}, "config.json").spec
    assert spec.decoder.blocks[0].attention.position.max_bias == 16
    with pytest.raises(UserError, match=r"max_bias = 16.0 \(there: 8.0\)"):
        write_config(spec)


def test_alibi_that_a_causal_mask_cannot_tell_apart_is_bloom():
    table = read_config(OLD["bloom"], "config.json").spec.model_dump()
    table["decoder"]["blocks"][0]["attention"]["position"]["symmetric"] = False
    assert write_config(type(read_config(OLD["bloom"], "").spec).model_validate(table))[1].family.name == "BLOOM"


def published(name: str, folder, tensors: dict, **changed) -> None:
    """A folder as it was published: an older configuration, tensors under their older names."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**OLD[name], **changed}))
    save_file({key: value.contiguous() for key, value in tensors.items()}, folder / "model.safetensors")


def by_hand(name: str, **changed) -> torch.nn.Module:
    """Their model of an older configuration, in float32."""
    config = transformers.AutoConfig.for_model(**{**OLD[name], **changed})
    config._attn_implementation = "eager"
    return scattered(transformers.AutoModelForCausalLM.from_config(config).float().eval())


def same(hf, our) -> bool:
    tokens = ids(2, 9, 37)
    with torch.no_grad():
        wanted = hf(tokens).logits
        return bool((our(tokens) - wanted).abs().max() < 1e-5 * wanted.abs().max())


@pytest.mark.parametrize("name", ["gpt2", "pythia", "falcon 7b", "bloom"])
def test_published_names_and_tables_are_read(name, tmp_path):
    """No prefix, causal masks and frequencies beside the weights, the head under its older name or left out."""
    hf = by_hand(name)
    prefix = hf.base_model_prefix + "."
    tensors = {key.removeprefix(prefix): value for key, value in hf.state_dict().items()}
    head = tensors.pop("lm_head.weight")
    if name == "pythia":
        tensors = {f"{prefix}{key}": value for key, value in tensors.items()} | {"embed_out.weight": head}
        tensors |= {f"{prefix}layers.{i}.attention.bias": torch.ones(1, 1, 64, 64).bool() for i in range(2)}
        tensors |= {f"{prefix}layers.{i}.attention.masked_bias": torch.tensor(-1e9) for i in range(2)}
        tensors |= {f"{prefix}layers.{i}.attention.rotary_emb.inv_freq": torch.ones(3) for i in range(2)}
    elif name == "gpt2":
        tensors |= {f"h.{i}.attn.bias": torch.ones(1, 1, 32, 32) for i in range(2)}
    published(name, tmp_path, tensors)
    assert same(hf, load_model(tmp_path, None, CPU)[1])


def test_a_tied_head_may_be_left_out_or_repeated_and_never_differs(tmp_path):
    """B33. And is written once."""
    hf = by_hand("gpt2")
    tensors = {key: value for key, value in hf.state_dict().items() if key != "lm_head.weight"}
    table = tensors["transformer.wte.weight"]
    published("gpt2", tmp_path, tensors)
    reading, our = load_model(tmp_path, None, CPU)
    assert same(hf, our)
    assert sum(value.numel() for value in our.parameters()) == sum(value.numel() for value in hf.parameters())
    published("gpt2", tmp_path, {**tensors, "lm_head.weight": table.clone()})
    assert same(hf, load_model(tmp_path, None, CPU)[1])
    published("gpt2", tmp_path, {**tensors, "lm_head.weight": table + 1e-3})
    with pytest.raises(UserError, match=r"lm_head.weight(.|\n)*tie_word_embeddings"):
        load_model(tmp_path, None, CPU)
    save_folder(tmp_path, our, reading, write_config(our.spec)[0])
    assert load_file(tmp_path / "model.safetensors").keys() == tensors.keys()


def test_heads_that_are_not_tied_stay_apart(tmp_path):
    """B33."""
    hf = by_hand("gpt2", tie_word_embeddings=False)
    tensors = hf.state_dict()
    published("gpt2", tmp_path, tensors, tie_word_embeddings=False)
    reading, our = load_model(tmp_path, None, CPU)
    assert same(hf, our)
    assert not torch.equal(tensors["lm_head.weight"], tensors["transformer.wte.weight"])
    save_folder(tmp_path, our, reading, write_config(our.spec)[0])
    again = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(again[key], tensors[key]) for key in ("lm_head.weight", "transformer.wte.weight"))
    del tensors["lm_head.weight"]
    published("gpt2", tmp_path, tensors, tie_word_embeddings=False)
    with pytest.raises(UserError, match=r"no lm_head\.weight"):
        load_model(tmp_path, None, CPU)


def test_a_tie_outlives_what_is_done_to_the_model(tmp_path):
    """B33. Copies, types, assigned weights, and a step of an optimiser, which holds the table once."""
    hf = by_hand("gpt2")
    hf.save_pretrained(tmp_path)
    our = load_model(tmp_path, None, CPU)[1]
    assigned = load_model(tmp_path, None, CPU)[1]
    assigned.load_state_dict({key: value + 0.1 for key, value in our.state_dict().items()}, assign=True)
    stepped = copy.deepcopy(our)
    optimiser = torch.optim.SGD(stepped.parameters(), lr=0.1)
    held = sum(value.numel() for value in optimiser.param_groups[0]["params"])
    assert held == sum(value.numel() for value in hf.parameters())
    stepped(ids(2, 5, 37)).logsumexp(-1).sum().backward()
    optimiser.step()
    tokens = ids(1, 6, 37)
    for model in (copy.deepcopy(our), copy.deepcopy(our).to(torch.float64), assigned, stepped):
        state = model.state_dict()
        assert "head.weight" not in state
        wanted = model.hidden(tokens) @ state["decoder.embed.token.weight"].T
        torch.testing.assert_close(model(tokens).detach(), wanted.detach())
    assert not torch.equal(stepped.state_dict()["decoder.embed.token.weight"], hf.transformer.wte.weight)


@pytest.mark.parametrize(
    ("name", "key", "word", "ours"),
    [
        ("gpt2", "activation_function", "gelu_new", "gelu_tanh"),
        ("gpt2", "activation_function", "gelu", "gelu"),
        ("gptj", "activation_function", "gelu_new", "gelu_tanh"),
        ("pythia", "hidden_act", "gelu", "gelu"),
        ("pythia", "hidden_act", "gelu_fast", "gelu_tanh"),
        ("falcon 7b", "activation", "gelu", "gelu"),
        ("falcon 7b", "activation", "gelu_pytorch_tanh", "gelu_tanh"),
    ],
)
def test_activations_and_epsilons_survive(name, key, word, ours):
    """B61. The exact GELU and its tanh form are two; no default takes the place of what a file says."""
    eps_key = "layer_norm_eps" if name == "pythia" else "layer_norm_epsilon"
    for eps in (1e-5, 1e-6, 1e-12):
        spec = read_config({**OLD[name], key: word, eps_key: eps}, "config.json").spec
        block = spec.decoder.blocks[0]
        assert block.ffn.activation == ours
        assert block.norms.attention.before.eps == block.norms.ffn.before.eps == spec.decoder.final_norm.eps == eps
        table, reading = write_config(spec)
        assert table[eps_key] == eps
        assert reading.spec.decoder.blocks[0].ffn.activation == ours
    values = {"gelu": (2.9959503, -0.1586553), "gelu_tanh": (2.9963626, -0.1588080)}[ours]
    torch.testing.assert_close(ACTIVATIONS[ours](torch.tensor([3.0, -1.0])), torch.tensor(values))


@pytest.mark.parametrize(("name", "kind"), [("bloom", "gelu_tanh"), ("mpt", "gelu")])
def test_families_with_one_activation_have_the_right_one(name, kind):
    """B61."""
    for eps in (1e-6, 1e-12):
        spec = read_config({**OLD[name], "layer_norm_epsilon": eps}, "config.json").spec
        assert spec.decoder.blocks[0].ffn.activation == kind
        assert {spec.decoder.final_norm.eps, spec.decoder.blocks[1].norms.ffn.before.eps} == {eps}
        assert write_config(spec)[0]["layer_norm_epsilon"] == eps
