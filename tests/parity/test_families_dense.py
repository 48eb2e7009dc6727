"""LLaMA and its kin: every class and kind that their configurations can say, in both directions."""

import copy

import pytest
import torch
import transformers
from checkpoints import both, greedy, opened, result, written
from dense import DENSE, DYNAMIC, LONGROPE, PHI3, SIZES
from maps import from_halves, scattered
from pairs import Pair, ids, padded, pair
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from anyformer.nn.model import build
from anyformer.spec import expand
from anyformer.weights.config import write_config
from anyformer.weights.hf import load_model

CPU = torch.device("cpu")
PLAIN = {name: value for name, value in SIZES.items() if name != "head_dim"}
LAYERS = {**SIZES, "num_hidden_layers": 3}
NORMED = {name: value for name, value in SIZES.items() if name != "rms_norm_eps"} | {"norm_epsilon": 1e-3}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
FULL = ["full_attention"] * 3
PHI = {**PLAIN, "original_max_position_embeddings": 16}
BASES = {
    "Llama": SIZES,
    "Mistral": {**SIZES, "sliding_window": 5},
    "Qwen2": SIZES,
    "Qwen3": SIZES,
    "Gemma": SIZES,
    "Gemma2": {**LAYERS, "query_pre_attn_scalar": 3, "sliding_window": 5, "layer_types": MIXED},
    "Gemma3": {**LAYERS, "query_pre_attn_scalar": 3, "sliding_window": 5, "layer_types": MIXED},
    "Phi3": {**PHI, "sliding_window": 5, "partial_rotary_factor": 0.7},
    "Olmo2": SIZES,
    "Starcoder2": {**NORMED, "sliding_window": 5},
}
KINDS = {
    "LlamaForCausalLM": [
        {**SIZES, "tie_word_embeddings": True, "attention_bias": True, "hidden_act": "relu"},
        {**PLAIN, "mlp_bias": True, "num_key_value_heads": 6},
    ],
    "MistralForCausalLM": [
        {**BASES["Mistral"], "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0}},
        {**BASES["Mistral"], "hidden_size": 37, "head_dim": 8, "hidden_act": "gelu"},
    ],
    "Qwen2ForCausalLM": [
        {**LAYERS, "use_sliding_window": True, "sliding_window": 4, "layer_types": MIXED, "tie_word_embeddings": True},
        {**LAYERS, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0},
    ],
    "Qwen3ForCausalLM": [
        {**LAYERS, "attention_bias": True, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    ],
    "GemmaForCausalLM": [
        {**SIZES, "attention_bias": True, "tie_word_embeddings": False, "hidden_act": "gelu_python"},
        {**SIZES, "hidden_act": "gelu"},
    ],
    "Gemma2ForCausalLM": [
        {**BASES["Gemma2"], "attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": True},
        {**BASES["Gemma2"], "layer_types": FULL, "hidden_activation": "gelu", "tie_word_embeddings": False},
    ],
    "Gemma3ForCausalLM": [
        {**BASES["Gemma3"], "final_logit_softcapping": 3.0, "layer_types": FULL},
        {
            **BASES["Gemma3"],
            "attention_bias": True,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0},
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
            },
        },
        {**BASES["Gemma3"], "layer_types": ["sliding_attention"] * 3},
    ],
    "Phi3ForCausalLM": [{**BASES["Phi3"], "sliding_window": None, "tie_word_embeddings": True}],
    "Olmo2ForCausalLM": [{**PLAIN, "attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": None}],
    "Starcoder2ForCausalLM": [
        {**NORMED, "use_bias": False, "tie_word_embeddings": False, "hidden_act": "relu"},
        {**BASES["Starcoder2"], "hidden_size": 37, "head_dim": 8},
    ],
}
WITHOUT = {"TokenClassification": ("Gemma3", "Olmo2"), "QuestionAnswering": tuple(list(BASES)[4:])}
ONE = {"num_hidden_layers": 1}
HEADS = {
    ("Gemma3Text" if name == "Gemma3" else name) + head: [
        {**settings, **ONE, **({"layer_types": MIXED[:1]} if "layer_types" in settings else {})}
    ]
    for name, settings in BASES.items()
    for head in ("Model", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
    if name not in WITHOUT.get(head.removeprefix("For"), ())
}
CASES = [(name, settings) for table in (KINDS, HEADS) for name, all_of in table.items() for settings in all_of]


def case_name(case) -> str:
    name, settings = case
    changed = {key: value for key, value in settings.items() if SIZES.get(key) != value}
    return " ".join([name, *(f"{key}={value}" for key, value in changed.items() if not isinstance(value, list | dict))])


def theirs(name: str, **settings) -> torch.nn.Module:
    """A model of theirs with random weights that hide nothing; to be called in `wide()` for float64."""
    model = getattr(transformers, name)
    more = {"num_labels": 3} if "Classification" in name else {}
    special = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0 if "Sequence" in name else None}
    config = model.config_class(**special, **more, **copy.deepcopy(settings))
    config._attn_implementation = "eager"
    return scattered(model(config).eval())


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_every_kind_gives_their_numbers_and_goes_back(case, tmp_path):
    """B51, B55. Padded rows past the windows, and every tensor back in its place."""
    pair = both(theirs, case, tmp_path / "theirs")
    real = padded([19, 7], "left")
    tokens = ids(2, 19, 37).masked_fill(~real, 0)
    before, ours = result(pair, tokens, real)
    rows = ... if ours.dim() == 2 else real
    pair.close(before[rows], ours[rows])
    name = write_config(pair.our.spec)[0]["architectures"][0]
    again = opened(pair.our, tmp_path / "ours", pair.hf, getattr(transformers, name))
    again.config.pad_token_id = pair.hf.config.pad_token_id
    if name == case[0]:
        mine, back = pair.hf.state_dict(), again.state_dict()
        assert mine.keys() == back.keys()
        assert [key for key in mine if not torch.equal(mine[key], back[key])] == []
    else:
        assert name.startswith("Llama") or (case[0].startswith("Phi3") and name.startswith("Mistral"))
    if case[0] not in KINDS:
        return
    after, _ = result(Pair(pair.family, again, pair.our), tokens, real)
    pair.close(before[rows], after[rows])
    _, once_more = load_model(tmp_path / "ours", torch.float64, CPU)
    assert all(torch.equal(x, once_more.state_dict()[key]) for key, x in pair.our.state_dict().items())


@pytest.mark.parametrize("case", [DENSE[2], *DENSE[4:]], ids=lambda case: case.name)
def test_in_float32_logits_and_greedy_continuation_are_theirs(case, tmp_path):
    """Prompts padded on the left, past windows and the original context, with a cache and without."""
    folder, by_length = written(case, tmp_path), case in (DYNAMIC, LONGROPE, PHI3)
    hf = type(pair(case).hf).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    our = load_model(folder, torch.float32, CPU)[1]
    lengths = [18, 18] if by_length else [18, 7]
    tokens, real = ids(2, 18, 37, seed=2), padded(lengths, "left")
    with torch.no_grad():
        positions = (real.cumsum(1) - 1).clamp(min=0)
        wanted = hf(tokens, attention_mask=real.long(), position_ids=positions).logits[real]
        given = our(tokens, padding=real)[real]
        assert given.dtype == torch.float32
        assert (given - wanted).abs().max() < 1e-5 * wanted.abs().max()
        # Theirs keeps what earlier lengths turned by.
        chosen = greedy(hf, tokens, real, 9, use_cache=case is not DYNAMIC)
        store, new, cached, whole = our.new_cache(2, 32), tokens, [], tokens
        for step in range(9):
            best = our(new, padding=real if step == 0 else None, cache=store, last_only=True)[:, -1].argmax(-1)
            cached.append(best)
            new = best[:, None]
            seen = torch.cat([real, torch.ones(2, step, dtype=torch.bool)], 1)
            whole = torch.cat([whole, our(whole, padding=seen)[:, -1].argmax(-1)[:, None]], 1)
    assert torch.equal(torch.stack(cached, 1), chosen)
    assert torch.equal(whole[:, 18:], chosen)


@pytest.mark.parametrize("name", ["Mistral", "Qwen3"])
def test_heads_wider_than_their_share_of_the_width(name, tmp_path):
    """B52. Shapes, the table's pairs and the scale follow head_dim, which the written configuration names."""
    sizes = {"hidden_size": 80, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    pair = both(theirs, (f"{name}ForCausalLM", {**BASES[name], **sizes}), tmp_path / "theirs")
    attention, spec = pair.our.decoder.blocks[0].attention, pair.our.spec.decoder.blocks[0].attention
    assert (attention.q.weight.shape, attention.out.weight.shape) == ((128, 80), (80, 128))
    assert (spec.scale, spec.position.width(spec.d_head)) == (32**-0.5, 32)
    tokens = ids(2, 11, 37)
    pair.close(pair.theirs(tokens).logits, pair.our(tokens).detach())
    assert write_config(pair.our.spec)[0]["head_dim"] == 32
    assert opened(pair.our, tmp_path / "ours", pair.hf).config.head_dim == 32


@pytest.mark.parametrize(
    ("name", "shape"), [("Qwen3", (10,)), ("Gemma3", (10,)), ("Olmo2", (40,))], ids=["qwen3", "gemma3", "olmo2"]
)
def test_norms_of_queries_and_keys(name, shape, tmp_path):
    """B50. Over a head after the split, or over the projection before it; stored keys are normed, four heads on two."""
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2}
    pair = both(theirs, (f"{name}ForCausalLM", {**BASES[name], **sizes}), tmp_path)
    norm = pair.our.decoder.blocks[0].attention.q_norm.norm.weight
    assert norm.shape == shape
    assert norm.std() > 0.1
    tokens = ids(2, 14, 37)
    wanted = pair.theirs(tokens).logits
    pair.close(wanted, pair.our(tokens).detach())
    cache = pair.our.new_cache(2, 16)
    parts = [pair.our(part, cache=cache).detach() for part in tokens.split([9, 1, 4], 1)]
    pair.close(wanted, torch.cat(parts, 1))


def test_biases_of_qwen2_are_on_queries_keys_and_values_alone(tmp_path):
    """B51. And a file with one that the configuration does not have is refused."""
    pair = both(theirs, ("Qwen2ForCausalLM", BASES["Qwen2"]), tmp_path)
    biased = {name.split(".")[-2] for name in pair.our.state_dict() if name.endswith("bias")}
    assert biased == {"q", "k", "v"}
    file = tmp_path / "model.safetensors"
    extra = {"model.layers.0.self_attn.o_proj.bias": torch.zeros(36)}
    save_file({**load_file(file), **extra}, file)
    with pytest.raises(ValueError, match=r"no place in the model[\s\S]*layers\.0\.self_attn\.o_proj\.bias"):
        load_model(tmp_path, None, CPU)


def test_interleaved_rotary_of_metas_layout_is_theirs_in_halves(tmp_path):
    """B60. Rows of queries and keys in the order in which Meta keeps them."""
    case = DENSE[0]
    reading, halves = load_model(written(case, tmp_path), torch.float64, CPU)
    recipe = copy.deepcopy(case.recipe)
    recipe["attention"]["position"]["layout"] = "interleaved"
    meta = build(expand(recipe), dtype="float64")
    state = halves.state_dict()
    for name, value in state.items():
        part = name.split(".")[-2]
        if part in ("q", "k"):
            state[name] = from_halves(6 if part == "q" else 2)(value)[0]
    meta.load_state_dict(state)
    tokens = ids(2, 23, 37)
    assert (meta(tokens) - halves(tokens)).abs().max() < 1e-12
    assert reading.spec == halves.spec
    with pytest.raises(ValueError, match=r"layout = 'interleaved' \(there: 'half'\)"):
        write_config(meta.spec)


@pytest.mark.parametrize("name", ["Llama", "Gemma", "Phi3"])
def test_a_tied_table_is_written_as_the_embedding(name, tmp_path):
    """Older versions of theirs and other readers look for it there."""
    pair = both(theirs, (f"{name}ForCausalLM", {**BASES[name], "tie_word_embeddings": True}), tmp_path / "theirs")
    opened(pair.our, tmp_path / "ours", pair.hf, getattr(transformers, write_config(pair.our.spec)[1].model))
    with safe_open(tmp_path / "ours" / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names


def test_files_with_tables_of_angles_and_without_the_body_s_prefix(tmp_path):
    """As the first LLaMA's and Qwen3-Embedding's are."""
    pair = both(theirs, ("Qwen3ForCausalLM", {**BASES["Qwen3"], "tie_word_embeddings": True}), tmp_path)
    file = tmp_path / "model.safetensors"
    bare = {name.removeprefix("model."): value for name, value in load_file(file).items() if name != "lm_head.weight"}
    angles = {f"layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(5) for i in range(2)}
    save_file({**bare, **angles}, file)
    again = load_model(tmp_path, None, CPU)[1].state_dict()
    assert all(torch.equal(value, again[name]) for name, value in pair.our.state_dict().items())


def test_the_text_part_of_a_gemma_with_eyes_is_taken_out_as_the_message_says(tmp_path):
    """The whole is refused with the way; what comes out of it is a model."""
    text = {**BASES["Gemma3"], "rope_parameters": None, "vocab_size": 40}
    eyes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config=text,
        vision_config={**eyes, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        image_token_index=39,
    )
    whole = scattered(transformers.Gemma3ForConditionalGeneration(config).eval())
    whole.save_pretrained(tmp_path / "whole")
    with pytest.raises(ValueError, match="gemma3_text") as refusal:
        load_model(tmp_path / "whole", None, CPU)
    way = str(refusal.value).split("in transformers: ")[1]
    names = {"Gemma3ForCausalLM": transformers.Gemma3ForCausalLM, "model": whole, "FOLDER": tmp_path / "text"}
    exec(way, names)
    our = load_model(tmp_path / "text", None, CPU)[1]
    tokens = ids(1, 13, 37)
    with torch.no_grad():
        wanted = whole(tokens).logits
        assert (our(tokens) - wanted).abs().max() < 1e-5 * wanted.abs().max()
