"""T5, BART and Marian: every class, names of tables in any subset, relative buckets, greedy continuations, refusals."""

import copy
import dataclasses
import itertools
import json
from typing import Any

import pytest
import torch
import transformers
from checkpoints import imported, opened, written
from hub_text import BART_LARGE_CNN, FLAN_T5_BASE, OPUS_MT, SEQ2SEQ_CONFIGS, T5_SMALL
from pairs import ids, padded, pair
from safetensors.torch import load_file
from seq2seq import BART, MARIAN, PAIRS, T5, T5_V1_1
from seq2seq_more import ENCODER_ALONE, MARIAN_APART, MORE_PAIRS, STATES, T5_ENCODER
from test_families_encoders import changed, close
from torch import Tensor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import anyformer as af
from anyformer.errors import UserError
from anyformer.families import bart, marian, t5, t5_encoder
from anyformer.families.common import IGNORED
from anyformer.nn.attend.bias import BucketBias
from anyformer.nn.layers import ACTIVATIONS
from anyformer.nn.model import Model, build
from anyformer.spec import expand
from anyformer.weights.config import read_config, write_config
from anyformer.weights.hf import load_model, save_folder

CPU = torch.device("cpu")
LANGUAGE = [case for case in (*PAIRS, *MORE_PAIRS) if case.module != "umt5"]
cases = pytest.mark.parametrize("case", LANGUAGE, ids=lambda case: case.name)
states = pytest.mark.parametrize("case", STATES, ids=lambda case: case.name)
configs = pytest.mark.parametrize("old", SEQ2SEQ_CONFIGS, ids=["t5", "flan-t5", "bart", "marian"])
FAMILIES = (t5.FAMILY, t5.UNSCALED, t5_encoder.FAMILY, bart.FAMILY, marian.FAMILY, marian.APART)
SETTINGS = {"do_sample": False, "num_beams": 1, "pad_token_id": 0, "decoder_start_token_id": 0}
"""And no token twice: random models with tied tables would say one over and over."""


def test_every_class_is_one_of_the_cases():
    named = {name for family in FAMILIES for name in family.models}
    assert named == {case.model for case in (*LANGUAGE, *STATES, *ENCODER_ALONE)}


def _greedy(model: Model, source: Tensor, seen: Tensor, n: int, *, cached: bool) -> Tensor:
    """Our continuation [B, n] of the token 0, no token twice, with a cache or whole passes."""
    tokens = torch.zeros(len(source), 1, dtype=torch.long)
    cache, step = model.new_cache(len(source), n + 1), tokens
    for i in range(n):
        if cached:
            given = {"source": source, "source_padding": seen} if i == 0 else {}
            scores = model(step, cache=cache, **given)
        else:
            scores = model(tokens, source=source, source_padding=seen)
        step = scores[:, -1].scatter(1, tokens, float("-inf")).argmax(-1)[:, None]
        tokens = torch.cat([tokens, step], 1)
    return tokens[:, 1:]


@cases
def test_in_float32_logits_and_greedy_continuations_are_theirs(case, tmp_path):
    """Sources padded on the right, and of T5 on the left; past the distance of the buckets; with and without cache."""
    hf = copy.deepcopy(pair(case).hf).float()
    model = load_model(written(case, tmp_path), torch.float32, CPU)[1]
    source, target = ids(3, 27, 37), ids(3, 17, 37, seed=1)
    for side in ("right", "left") if case.module == "t5" else ("right",):
        seen = padded([27, 13, 3], side)
        with torch.no_grad():
            theirs = hf(source, attention_mask=seen.long(), decoder_input_ids=target).logits
            close(theirs, model(target, source=source, source_padding=seen))
            settings = transformers.GenerationConfig(max_new_tokens=14, no_repeat_ngram_size=1, **SETTINGS)
            said = hf.generate(source, attention_mask=seen.long(), generation_config=settings)[:, 1:]
            for cached in (True, False) if side == "right" else (True,):
                assert torch.equal(said, _greedy(model, source, seen, 14, cached=cached))


@states
def test_states_are_theirs(case, tmp_path):
    """In float64, of either stack, padded."""
    both, model = pair(case), imported(case, tmp_path)
    source, seen, target = ids(2, 15, 37), padded([15, 8], "right"), ids(2, 9, 37, seed=1)
    out = both.theirs(source, seen, decoder_input_ids=target)
    both.close(out.last_hidden_state, model.hidden(target, source=source, source_padding=seen).detach())
    both.close(out.encoder_last_hidden_state[seen], model.encode(source, padding=seen).detach()[seen])


@configs
def test_an_old_configuration_reads_as_the_one_that_they_write_of_it(old):
    new = json.loads(CONFIG_MAPPING[old["model_type"]](**old).to_json_string(use_diff=False))
    assert read_config(old, "old").spec == read_config(new, "new").spec


@configs
def test_what_is_written_of_a_published_model_is_read_by_them_as_it_was(old):
    table, reading = write_config(read_config(old, "old").spec)
    theirs, again = (CONFIG_MAPPING[old["model_type"]](**each).to_dict() for each in (old, table))
    if theirs.get("activation_function") == "swish":
        theirs["activation_function"] = "silu"
    free = {*IGNORED, *reading.family.ignored, *reading.family.fixed}
    assert {key for key in theirs.keys() | again.keys() if theirs.get(key) != again.get(key)} <= free


SIZED = ("vocab_size", "d_model", "encoder_layers", "decoder_layers", "encoder_attention_heads")
SIZED += ("decoder_attention_heads", "encoder_ffn_dim", "decoder_ffn_dim")
SIZED_T5 = ("vocab_size", "d_model", "num_layers", "num_heads", "d_ff")


@configs
def test_what_is_left_out_is_as_in_their_class(old):
    sizes = {key: old[key] for key in (SIZED_T5 if old["model_type"] == "t5" else SIZED)}
    given = {"model_type": old["model_type"], "architectures": old["architectures"]}
    full = json.loads(CONFIG_MAPPING[old["model_type"]](**sizes).to_json_string(use_diff=False))
    assert read_config({**given, **sizes}, "given").spec == read_config({**full, **given}, "full").spec


def _other(value: Any) -> Any:
    match value:
        case bool():
            return not value
        case int():
            return value + 8
        case float():
            return value / 2 + 0.01
        case str():
            return "relu" if value != "relu" else "silu"
    return None


@configs
def test_a_setting_that_is_no_other_model_is_refused_or_known_to_mean_nothing(old):
    """Every key of their class, changed one by one."""
    reading, kind = read_config(old, "old"), CONFIG_MAPPING[old["model_type"]]
    full = json.loads(kind(**old).to_json_string(use_diff=False))
    silent = set()
    for key in {field.name for field in dataclasses.fields(kind)} & full.keys() - {"model_type", "dtype"}:
        if _other(full[key]) is None:
            continue
        try:
            same = read_config({**full, key: _other(full[key])}, "changed").spec == reading.spec
        except ValueError:
            continue
        silent |= {key} if same else set()
    assert silent <= {*IGNORED, *reading.family.ignored}


REFUSED = [
    (T5_SMALL, {"feed_forward_proj": "gated-mish"}, "feed_forward_proj = 'gated-mish'"),
    (T5_SMALL, {"dense_act_fn": "gelu_new"}, "dense_act_fn = 'gelu_new'"),
    (FLAN_T5_BASE, {"is_gated_act": False}, "is_gated_act = False"),
    (FLAN_T5_BASE, {"scale_decoder_outputs": True}, "scale_decoder_outputs = True"),
    (T5_SMALL, {"scale_decoder_outputs": "no"}, "scale_decoder_outputs = 'no'"),
    (T5_SMALL, {"is_encoder_decoder": False}, "is_encoder_decoder = False"),
    (T5_SMALL, {"hidden_size": 64}, "hidden_size = 64"),
    (T5_SMALL, {"architectures": ["T5ForQuestionAnswering"]}, "T5ForQuestionAnswering"),
    (BART_LARGE_CNN, {"normalize_before": True}, "normalize_before = True"),
    (BART_LARGE_CNN, {"add_final_layer_norm": True}, "add_final_layer_norm = True"),
    (BART_LARGE_CNN, {"activation_function": "gelu_10"}, "activation_function = 'gelu_10'"),
    (BART_LARGE_CNN, {"num_hidden_layers": 3}, "num_hidden_layers = 3"),
    (BART_LARGE_CNN, {"decoder_attention_heads": 7}, "decoder_attention_heads = 7"),
    (OPUS_MT, {"decoder_vocab_size": 99}, "decoder_vocab_size = 99"),
    (OPUS_MT, {"static_position_embeddings": False}, "static_position_embeddings = False"),
    (OPUS_MT, {"share_encoder_decoder_embeddings": "x"}, "share_encoder_decoder_embeddings = 'x'"),
    (OPUS_MT, {"d_model": 513, "encoder_attention_heads": 27, "decoder_attention_heads": 27}, "d_model"),
]


@pytest.mark.parametrize(("table", "change", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_a_configuration_that_says_another_model_is_refused_by_key_and_value(table, change, message):
    with pytest.raises(ValueError, match=message):
        read_config({**table, **change}, "config.json")


def test_a_head_scaled_otherwise_is_no_t5():
    """B42. Nor is a head of its own that is scaled."""
    for head, tie in (
        ({"kind": "language", "scale": 0.125}, True),
        ({"kind": "language"}, True),
        ({"kind": "language", "scale": 24**-0.5}, ["encoder.embed", "decoder.embed"]),
    ):
        with pytest.raises(UserError, match=r"head\.scale = [\s\S]*nearest is T5"):
            write_config(expand({**T5.recipe, "head": head, "tie": tie}))


def test_buckets_of_both_directions():
    """B25. 32 buckets up to a distance of 128, of a key before (negative) and after its query, in either stack."""
    table = torch.arange(32, dtype=torch.float32)[:, None]
    wanted = {
        -1: (1, 1),
        -7: (7, 7),
        -20: (10, 17),
        -100: (15, 30),
        1: (17, 0),
        20: (26, 0),
        128: (31, 0),
        999: (31, 0),
    }
    for distance, buckets in wanted.items():
        queries, keys = torch.tensor([[1000]]), torch.tensor([[1000 + distance]])
        for bidirectional, bucket in zip((True, False), buckets, strict=True):
            bias = BucketBias(table, 128, bidirectional).at(queries=queries, keys=keys)
            assert bias.added(1, 1).item() == bucket


def test_a_stack_has_one_table_of_buckets_and_cross_attention_none(tmp_path):
    """B25. The first layer's, used by all: changed, it changes what the last layer does, alone and in cached steps."""
    both, model = pair(T5), imported(T5, tmp_path)
    tables = [name for name, _ in model.named_parameters() if "relative_bias" in name]
    assert tables == ["encoder.relative_bias.weight", "decoder.relative_bias.weight"]
    source, target = ids(2, 21, 37), ids(2, 19, 37, seed=1)
    whole = both.theirs(source, decoder_input_ids=target).logits
    cache = model.new_cache(2, 19)
    steps = [model(target[:, :7], cache=cache, source=source)]
    steps += [model(target[:, i : i + 1], cache=cache) for i in range(7, 19)]
    both.close(whole, torch.cat(steps, 1).detach())


def test_a_tied_head_is_scaled_and_one_of_its_own_is_not(tmp_path):
    """B42. logits = (h/√d)·Eᵀ, and h·Wᵀ; scores are not divided by √d_head."""
    tied, own = imported(T5, tmp_path / "tied"), imported(T5_V1_1, tmp_path / "own")
    source, target = ids(2, 9, 37), ids(2, 5, 37, seed=1)
    for model, matrix, scale in ((tied, tied.encoder.embed.token.weight, 24**-0.5), (own, own.head.weight, 1.0)):
        with torch.no_grad():
            hidden = model.hidden(target, source=source)
            close(hidden * scale @ matrix.T, model(target, source=source), 1e-12)
        assert {block.attention.scale for block in model.spec.encoder.blocks} == {1.0}
        assert {block.cross.scale for block in model.spec.decoder.blocks} == {1.0}
    small = read_config({**T5_SMALL, "d_model": 64}, "config.json").spec
    assert small.head.scale == 0.125


TABLES = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight")
SUBSETS = [names for n in range(1, 5) for names in itertools.combinations(TABLES, n)]


@pytest.mark.parametrize(("case", "subsets"), [(T5, SUBSETS), (BART, SUBSETS[::3])], ids=["t5", "bart"])
def test_a_tied_table_may_have_any_of_its_names(case, subsets, tmp_path):
    """B42."""
    folder = written(case, tmp_path)
    body = "" if case is T5 else "model."
    tables = [name if name.startswith("lm_head") else f"{body}{name}" for name in TABLES]
    table = load_file(folder / "model.safetensors")[f"{body}shared.weight"]
    for names in subsets:
        wanted = [f"{body}{name}" if not name.startswith("lm_head") else name for name in names]
        changed(folder, **{name: table.clone() if name in wanted else None for name in _there(folder, tables, wanted)})
        model = load_model(folder, None, CPU)[1]
        assert torch.equal(model.encoder.embed.token.weight, table)
        assert model.decoder.embed.token is None
        assert model.head.weight is None


def _there(folder, names, wanted):
    """Names that a file has, or should have."""
    found = load_file(folder / "model.safetensors")
    return [name for name in names if name in found or name in wanted]


@pytest.mark.parametrize("names", [names for names in SUBSETS if names[-1] == "lm_head.weight" and len(names) > 1])
def test_a_head_of_its_own_never_feeds_the_encoder(names, tmp_path):
    """B42. Least of all beside the decoder's table alone, which is the encoder's too."""
    folder = written(T5_V1_1, tmp_path)
    config = {"tie_word_embeddings": False, "scale_decoder_outputs": None}
    found = load_file(folder / "model.safetensors")
    table, head = found["shared.weight"], found["lm_head.weight"]
    tensors = {name: table.clone() if name in names else None for name in _there(folder, TABLES[:3], names)}
    model = load_model(changed(folder, config, **tensors), None, CPU)[1]
    assert torch.equal(model.encoder.embed.token.weight, table)
    assert torch.equal(model.head.weight, head)
    assert not torch.equal(table, head)


def test_a_head_of_its_own_that_is_missing_is_an_error_and_never_a_table(tmp_path):
    """B42. And a head that differs from the table to which the configuration ties it."""
    folder = written(T5_V1_1, tmp_path)
    apart = {"tie_word_embeddings": True, "scale_decoder_outputs": True}
    with pytest.raises(UserError, match="differ"):
        load_model(changed(folder, apart), None, CPU)
    own = {"tie_word_embeddings": False, "scale_decoder_outputs": None}
    with pytest.raises(UserError, match=r"no lm_head\.weight"):
        load_model(changed(folder, own, **{"lm_head.weight": None}), None, CPU)


def test_their_version_5_writes_an_unscaled_head_with_and_without_its_matrix(tmp_path):
    """One that was never untied has none in the file; it is a copy here, which trains by itself."""
    config = transformers.T5Config(**{**T5_V1_1.settings, "pad_token_id": 0})
    hf = transformers.T5ForConditionalGeneration(config).eval()
    hf.save_pretrained(tmp_path / "tied")
    assert "lm_head.weight" not in load_file(tmp_path / "tied" / "model.safetensors")
    model = load_model(tmp_path / "tied", torch.float32, CPU)[1]
    source, target = ids(2, 9, 37), ids(2, 5, 37, seed=1)
    with torch.no_grad():
        close(hf(source, decoder_input_ids=target).logits, model(target, source=source))
        model.head.weight += 1
    assert torch.equal(model.encoder.embed.token.weight, hf.shared.weight)
    own = imported(T5_V1_1, tmp_path / "own")
    assert torch.equal(own.head.weight, pair(T5_V1_1).hf.lm_head.weight)
    assert write_config(own.spec)[0]["tie_word_embeddings"] is False


def test_a_leftover_table_of_cross_attention_is_dropped(tmp_path):
    """B25. T5's first files have one that nothing reads."""
    folder = written(T5, tmp_path)
    name = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    load_model(changed(folder, **{name: torch.ones(8, 6)}), None, CPU)
    with pytest.raises(UserError, match="no place"):
        load_model(changed(folder, **{name.replace("block.0", "block.1"): torch.ones(8, 6)}), None, CPU)


def test_the_encoder_alone_is_read_from_a_file_of_the_encoder(tmp_path):
    folder = written(T5_ENCODER, tmp_path)
    reading, model = load_model(folder, None, CPU)
    assert reading.family is t5_encoder.FAMILY
    assert model.spec.decoder is None
    assert write_config(model.spec)[0]["architectures"] == ["T5EncoderModel"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_table_of_sines_in_an_old_file_is_that_of_the_configuration(dtype, tmp_path):
    folder = written(MARIAN, tmp_path)
    table = pair(MARIAN).hf.model.encoder.embed_positions.weight.detach().to(dtype)
    names = [f"model.{stack}.embed_positions.weight" for stack in ("encoder", "decoder")]
    load_model(changed(folder, **dict.fromkeys(names[:1], table), **{names[1]: table.clone()}), None, CPU)


def test_a_table_of_other_positions_is_refused(tmp_path):
    """Interleaved, of another width, shifted by one, and no numbers at all."""
    table = pair(MARIAN).hf.model.encoder.embed_positions.weight.detach()
    halves = table.unflatten(1, (2, -1)).transpose(1, 2).flatten(1)
    for number, wrong in enumerate((halves.contiguous(), table[:, :-1].contiguous(), table[1:].clone(), table / 0)):
        (tmp_path / str(number)).mkdir()
        folder = written(MARIAN, tmp_path / str(number))
        with pytest.raises(UserError, match=r"model\.decoder\.embed_positions\.weight is not that"):
            load_model(changed(folder, **{"model.decoder.embed_positions.weight": wrong}), None, CPU)


@pytest.mark.parametrize("case", [BART, MARIAN], ids=["bart", "marian"])
def test_the_bias_of_the_scores_is_theirs_in_one_row(case, tmp_path):
    """final_logits_bias, [1, vocabulary] there; 0.4 times noise in these models, and learned in Marian's."""
    model = imported(case, tmp_path)
    bias = pair(case).hf.final_logits_bias
    assert bias.abs().max() > 0.3
    assert torch.equal(model.head.bias, bias[0])


@pytest.mark.parametrize("case", [BART, MARIAN], ids=["bart", "marian"])
def test_an_untied_head_goes_there_with_a_table_for_each_stack(case, tmp_path):
    """Their version 5 unties all three."""
    recipe = {**case.recipe, "tie": ["encoder.embed", "decoder.embed"]}
    model = build(expand(recipe), seed=3)
    again = opened(model, tmp_path / "out", pair(case).hf)
    source, target = ids(2, 9, 37), ids(2, 5, 37, seed=1)
    with torch.no_grad():
        theirs = again(source, decoder_input_ids=target).logits
        assert float((theirs - model(target, source=source)).abs().max()) < 1e-6
    names = load_file(tmp_path / "out" / "model.safetensors")
    assert {"lm_head.weight", "model.shared.weight", "model.decoder.embed_tokens.weight"} <= names.keys()
    back = load_model(tmp_path / "out", None, CPU)[1].state_dict()
    assert [name for name, value in model.state_dict().items() if not torch.equal(value, back[name])] == []


def test_a_tied_head_is_written_once(tmp_path):
    for case, table in ((T5, "shared.weight"), (BART, "model.shared.weight"), (MARIAN, "model.shared.weight")):
        folder = tmp_path / case.name
        model = imported(case, folder / "theirs")
        config, reading = write_config(model.spec)
        (folder / "ours").mkdir()
        save_folder(folder / "ours", model, reading, config)
        names = load_file(folder / "ours" / "model.safetensors")
        assert [name for name in names if "shared" in name or "embed_tokens" in name or "lm_head" in name] == [table]


def test_tables_for_each_language_are_of_one_size():
    table = {**OPUS_MT, "share_encoder_decoder_embeddings": False}
    spec = read_config(table, "config.json").spec
    assert spec.ties == {"decoder.embed", "head"}
    assert write_config(spec)[1].family is marian.APART
    assert pair(MARIAN_APART).our.spec.ties == spec.ties


@pytest.mark.parametrize("case", [T5_V1_1, MARIAN], ids=["t5 v1.1", "marian"])
def test_a_checkpoint_goes_on_from_its_start_token_here_and_there(case, tmp_path):
    """What is saved names the start token, and none for padding where theirs would not fit the vocabulary."""
    checkpoint = af.load(written(case, tmp_path / "theirs"))
    checkpoint.save(tmp_path / "ours", format="hf")
    again = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "ours").eval()
    source = ids(1, 12, 37)
    settings = transformers.GenerationConfig.from_model_config(again.config)
    settings.update(max_new_tokens=9, do_sample=False, forced_eos_token_id=None)  # Marian's class forces one.
    said = again.generate(source, generation_config=settings)[0]
    assert said[0] == 0
    assert checkpoint.generate(source[0].tolist(), max_new_tokens=9) == said[1:].tolist()


WORDS = {
    "relu": ("dense", "relu"),
    "gelu": ("dense", "gelu"),
    "gelu_new": ("dense", "gelu_tanh"),
    "gated-gelu": ("gated", "gelu_tanh"),
    "gated-gelu_python": ("gated", "gelu"),
    "gated-silu": ("gated", "silu"),
    "gated-relu": ("gated", "relu"),
}


@pytest.mark.parametrize("word", WORDS)
def test_a_word_for_the_feed_forward_keeps_its_variant_both_ways(word):
    """B61. The gelu of gated-gelu is the one with tanh; numbers are those of their activation."""
    base = {key: value for key, value in FLAN_T5_BASE.items() if key not in ("dense_act_fn", "is_gated_act")}
    spec = read_config({**base, "feed_forward_proj": word}, "config.json").spec
    for stack in spec.stacks.values():
        assert (stack.blocks[0].ffn.kind, stack.blocks[0].ffn.activation) == WORDS[word]
    back = write_config(spec)[0]["feed_forward_proj"]
    x = torch.linspace(-4, 4, 33, dtype=torch.float64)
    for each in (word, back):
        theirs = transformers.T5Config(feed_forward_proj=each)
        assert theirs.is_gated_act == (WORDS[word][0] == "gated")
        activation = transformers.activations.ACT2FN[theirs.dense_act_fn]
        assert float((activation(x) - ACTIVATIONS[WORDS[word][1]](x)).abs().max()) < 1e-7
