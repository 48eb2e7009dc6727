"""BERT, RoBERTa, DistilBERT and ModernBERT: every class, old and new configurations, names of old files, refusals."""

import copy
import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoints import imported, written
from encoders import ALBERT, BERT, BERT_STATES, ENCODERS, ROBERTA, ROBERTA_SEQUENCE
from encoders_more import BERT_UNTIED, MORE_ENCODERS
from hub_text import BERT_BASE, ENCODER_CONFIGS, MODERNBERT_BASE
from pairs import ids, padded, pair
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from anyformer.errors import UserError
from anyformer.families import bert, distilbert, modernbert, roberta
from anyformer.families.common import IGNORED
from anyformer.nn.layers import ACTIVATIONS
from anyformer.nn.model import Model
from anyformer.spec import expand, load_spec
from anyformer.weights.config import read_config, write_config
from anyformer.weights.hf import load_model, save_folder

CPU = torch.device("cpu")
CASES = [case for case in (*ENCODERS, *MORE_ENCODERS) if case is not ALBERT]
cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
FAMILIES = (bert.FAMILY, roberta.FAMILY, distilbert.FAMILY, modernbert.FAMILY)
configs = pytest.mark.parametrize("old", ENCODER_CONFIGS, ids=lambda table: table["model_type"])


def theirs_of(out: Any) -> Tensor:
    """What their model ends with."""
    if hasattr(out, "start_logits"):
        return torch.stack([out.start_logits, out.end_logits], -1)
    return out.logits if hasattr(out, "logits") else out.last_hidden_state


def ours_of(model: Model, tokens: Tensor, **kwargs: Any) -> Tensor:
    """What ours ends with."""
    return (model.hidden if model.head is None else model)(tokens, **kwargs).detach()


def close(theirs: Tensor, ours: Tensor, tolerance: float = 1e-5) -> None:
    """Fails where the error, relative to the largest number, is not below the tolerance."""
    assert theirs.dtype == ours.dtype
    assert theirs.shape == ours.shape
    assert float((theirs - ours).abs().max()) < tolerance * max(1.0, float(theirs.abs().max()))


def changed(folder: Path, table: Mapping[str, Any] | None = None, **tensors: Tensor | str | None) -> Path:
    """A folder with keys of its configuration, and tensors, changed: a new one, another name of one, or none."""
    config, weights = folder / "config.json", folder / "model.safetensors"
    config.write_text(json.dumps({**json.loads(config.read_text()), **(table or {})}))
    found = load_file(weights)
    for name, value in tensors.items():
        if value is None:
            del found[name]
        else:
            found[name] = found[value].clone() if isinstance(value, str) else value
    weights.unlink()  # What is mapped stays as it was.
    save_file(found, weights)
    return folder


@cases
def test_in_float32_both_give_the_same(case, tmp_path):
    """Past windows, rows padded on the right, and a row alone as in the batch."""
    folder = written(case, tmp_path)
    hf, model = copy.deepcopy(pair(case).hf).float(), load_model(folder, torch.float32, CPU)[1]
    tokens, real = ids(3, 29, 37), padded([29, 17, 2], "right")
    with torch.no_grad():
        theirs = theirs_of(hf(tokens, attention_mask=real.long()))
    ours = ours_of(model, tokens, padding=real)
    close(theirs if theirs.dim() == 2 else theirs[real], ours if ours.dim() == 2 else ours[real])
    alone = ours_of(model, tokens[1:2, :17])
    close(alone, ours[1:2] if ours.dim() == 2 else ours[1:2, :17])


def test_every_class_is_one_of_the_cases():
    """Another name of a class, for reading alone, has a test of its own."""
    named = {name for family in FAMILIES for name in family.models}
    assert named - {case.model for case in CASES} == {"BertForPreTraining"}


@configs
def test_an_old_configuration_reads_as_the_one_that_they_write_of_it(old):
    new = json.loads(CONFIG_MAPPING[old["model_type"]](**old).to_json_string(use_diff=False))
    assert read_config(old, "old").spec == read_config(new, "new").spec


@configs
def test_what_is_written_of_a_published_model_is_read_by_them_as_it_was(old):
    """Every key of their class but for what has no meaning."""
    table, reading = write_config(read_config(old, "old").spec)
    theirs, again = (CONFIG_MAPPING[old["model_type"]](**each).to_dict() for each in (old, table))
    free = {*IGNORED, *reading.family.ignored, *reading.family.fixed}
    assert {key for key in theirs.keys() | again.keys() if theirs.get(key) != again.get(key)} <= free


SIZED = {
    "bert": ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
    "distilbert": ("vocab_size", "dim", "n_layers", "n_heads", "hidden_dim"),
}


@configs
def test_what_is_left_out_is_as_in_their_class(old):
    model_type = old["model_type"]
    sizes = {key: old[key] for key in SIZED.get(model_type, SIZED["bert"])}
    given = {"model_type": model_type, "architectures": old["architectures"], **sizes}
    full = json.loads(CONFIG_MAPPING[model_type](**sizes).to_json_string(use_diff=False))
    ours = read_config(given, "given").spec
    assert ours == read_config({**full, "architectures": old["architectures"]}, "full").spec


def _other(value: Any) -> Any:
    match value:
        case bool():
            return not value
        case int():
            return value + 12
        case float():
            return value / 2 + 0.01
        case "gelu":
            return "relu"
    return None


@configs
def test_a_setting_that_is_no_other_model_is_refused_or_known_to_mean_nothing(old):
    """Every key of their class, changed one by one, labels and lists aside."""
    reading, kind = read_config(old, "old"), CONFIG_MAPPING[old["model_type"]]
    full = json.loads(kind(**old).to_json_string(use_diff=False))
    full["architectures"] = [next(iter(reading.family.models))]
    spec = read_config(full, "full").spec
    silent = set()
    for key in {field.name for field in dataclasses.fields(kind)} & full.keys():
        if _other(full[key]) is None:
            continue
        try:
            same = read_config({**full, key: _other(full[key])}, "changed").spec == spec
        except ValueError:
            continue
        silent |= {key} if same else set()
    assert silent <= {*IGNORED, *reading.family.ignored}


LOCAL = {"rope_type": "linear", "factor": 2.0}
REFUSED = [
    (BERT_BASE, {"position_embedding_type": "relative_key"}, "position_embedding_type = 'relative_key'"),
    (BERT_BASE, {"is_decoder": True}, "is_decoder = True"),
    (BERT_BASE, {"add_cross_attention": True}, "add_cross_attention = True"),
    (BERT_BASE, {"pruned_heads": {"0": [1]}}, r"pruned_heads = \{'0': \[1\]\}"),
    (BERT_BASE, {"hidden_act": "mish"}, "hidden_act = 'mish'"),
    (BERT_BASE, {"type_vocab_size": 0}, "type_vocab_size = 0"),
    (BERT_BASE, {"num_attention_heads": 7}, "num_attention_heads = 7"),
    (BERT_BASE, {"layer_norm_eps": -1.0}, "layer_norm_eps"),
    (BERT_BASE, {"hidden_dropout_prob": 1.5}, "hidden_dropout_prob"),
    (BERT_BASE, {"num_hidden_layers": 0}, "num_hidden_layers"),
    (BERT_BASE, {"tie_word_embeddings": "yes"}, "tie_word_embeddings = 'yes'"),
    (BERT_BASE, {"architectures": ["BertForMultipleChoice"]}, "BertForMultipleChoice"),
    (ENCODER_CONFIGS[1], {"pad_token_id": -1}, "pad_token_id = -1"),
    (ENCODER_CONFIGS[1], {"max_position_embeddings": 2}, "max_position_embeddings = 2"),
    (ENCODER_CONFIGS[2], {"hidden_size": 512}, "hidden_size = 512"),
    (ENCODER_CONFIGS[2], {"activation": "gleu"}, "activation = 'gleu'"),
    (MODERNBERT_BASE, {"local_attention": -4}, "local_attention = -4"),
    (MODERNBERT_BASE, {"layer_types": ["full_attention"]}, "22 layers"),
    (MODERNBERT_BASE, {"layer_types": ["full_attention"] * 21 + ["chunked"]}, "layer_types = 'chunked'"),
    (MODERNBERT_BASE, {"rope_parameters": {"full_attention": LOCAL}}, "rope_type = 'linear'"),
    (MODERNBERT_BASE, {"rope_scaling": LOCAL}, "rope_scaling"),
    (MODERNBERT_BASE, {"rope_parameters": {"rope_theta": 5.0}}, "rope_parameters.rope_theta = 5.0"),
    (MODERNBERT_BASE, {"global_attn_every_n_layers": 0}, "global_attn_every_n_layers = 0"),
    (MODERNBERT_BASE, {"architectures": ["ModernBertForSequenceClassification"]}, "ForSequenceClassification"),
]


@pytest.mark.parametrize(("table", "change", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_a_configuration_that_says_another_model_is_refused_by_key_and_value(table, change, message):
    with pytest.raises(ValueError, match=message):
        read_config({**table, **change}, "config.json")


def test_a_null_theta_of_windows_is_that_of_the_other_layers():
    spec = read_config({**MODERNBERT_BASE, "local_rope_theta": None}, "config.json").spec
    assert {block.attention.position.theta for block in spec.encoder.blocks} == {160000.0}


def test_a_specification_past_the_family_names_what_it_cannot_say():
    """Windows that change from layer to layer; a model without types is no BERT; a pooler beside a masked head."""
    base = read_config(MODERNBERT_BASE, "config.json").spec
    blocks = list(base.encoder.blocks)
    mask = blocks[2].attention.mask.model_copy(update={"window": 9})
    blocks[2] = blocks[2].model_copy(update={"attention": blocks[2].attention.model_copy(update={"mask": mask})})
    odd = base.model_copy(update={"encoder": base.encoder.model_copy(update={"blocks": tuple(blocks)})})
    with pytest.raises(UserError, match=r"blocks\.2\.attention\.mask\.window = 9"):
        write_config(odd)
    with pytest.raises(UserError, match=r"the nearest is BERT"):
        write_config(load_spec("bert-base"))
    untyped = expand({**BERT.recipe, "embed": {**BERT.recipe["embed"], "types": 0}})
    with pytest.raises(UserError, match=r"eps = 0\.001 \(there: 1e-12\)"):
        write_config(untyped)


def test_names_of_older_files_are_read(tmp_path):
    """gamma and beta, the pooler and the next sentence's head in the file of the masked model, computed positions."""
    folder = written(BERT, tmp_path)
    before = load_model(folder, None, CPU)[1].state_dict()
    tensors = load_file(folder / "model.safetensors")
    old: dict[str, Tensor | None] = {}
    for name, value in tensors.items():
        if ".LayerNorm." in name:
            old |= {name: None, name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta"): value}
    width = before["encoder.embed.token.weight"].shape[1]
    extra = {
        "bert.pooler.dense.weight": torch.randn(width, width),
        "bert.pooler.dense.bias": torch.randn(width),
        "cls.seq_relationship.weight": torch.randn(2, width),
        "cls.seq_relationship.bias": torch.randn(2),
        "bert.embeddings.position_ids": torch.arange(48)[None],
        "cls.predictions.decoder.weight": tensors["bert.embeddings.word_embeddings.weight"].clone(),
        "cls.predictions.decoder.bias": tensors["cls.predictions.bias"].clone(),
    }
    changed(folder, **old, **extra)
    after = load_model(folder, None, CPU)[1].state_dict()
    assert before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []


def test_a_second_name_with_other_numbers_is_refused(tmp_path):
    """A tied table, and a bias, that the file holds twice; a norm under an old and a new name."""
    for name, like in (
        ("cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"),
        ("cls.predictions.decoder.bias", "cls.predictions.bias"),
        ("bert.embeddings.LayerNorm.gamma", "bert.embeddings.LayerNorm.weight"),
    ):
        (tmp_path / name).mkdir()
        folder = written(BERT, tmp_path / name)
        changed(folder, **{name: load_file(folder / "model.safetensors")[like] + 1})
        with pytest.raises(UserError, match="differ") as failure:
            load_model(folder, None, CPU)
        assert name in str(failure.value)
        assert like in str(failure.value)


@pytest.mark.parametrize("prefix", ["", "bert."])
def test_the_body_is_found_with_and_without_its_prefix(prefix, tmp_path):
    """Files of states, whichever class wrote them."""
    folder = written(BERT_STATES, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    save_file({f"{prefix}{name}": value for name, value in tensors.items()}, folder / "model.safetensors")
    model = load_model(folder, None, CPU)[1]
    assert torch.equal(model.pooler.weight, tensors["pooler.dense.weight"])


def test_a_pretraining_model_is_read_as_the_masked_model_in_it(tmp_path):
    """Its prediction of the next sentence is left out, and what is written is the masked model."""
    config = transformers.BertConfig(**BERT.settings)
    hf = transformers.BertForPreTraining(config).eval()
    hf.save_pretrained(tmp_path)
    model = load_model(tmp_path, torch.float32, CPU)[1]
    tokens = ids(2, 9, 37)
    with torch.no_grad():
        close(hf(tokens).prediction_logits, ours_of(model, tokens))
    assert write_config(model.spec)[1].model == "BertForMaskedLM"


def test_a_classifier_drops_the_pooler_that_it_does_not_use(tmp_path):
    """RoBERTa's files of before 2020 hold one beside the head's own layer."""
    folder = written(ROBERTA_SEQUENCE, tmp_path)
    extra = {"roberta.pooler.dense.weight": torch.ones(30, 30), "roberta.pooler.dense.bias": torch.ones(30)}
    model = load_model(changed(folder, **extra), None, CPU)[1]
    assert torch.equal(model.pooler.weight, pair(ROBERTA_SEQUENCE).our.pooler.weight)


def test_states_without_a_pooler_lack_it(tmp_path):
    folder = written(BERT_STATES, tmp_path)
    names = dict.fromkeys(("pooler.dense.weight", "pooler.dense.bias"))
    with pytest.raises(UserError, match=r"no pooler\.dense\.weight"):
        load_model(changed(folder, **names), None, CPU)


def test_an_untied_head_is_written_with_its_bias_under_both_names(tmp_path):
    """Their version 5 computes with one of them, earlier versions kept one tensor under both."""
    model = imported(BERT_UNTIED, tmp_path)
    config, reading = write_config(model.spec)
    assert config["tie_word_embeddings"] is False
    (tmp_path / "out").mkdir()
    save_folder(tmp_path / "out", model, reading, config)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(tensors["cls.predictions.bias"], tensors["cls.predictions.decoder.bias"])
    assert not torch.equal(tensors["cls.predictions.decoder.weight"], tensors["bert.embeddings.word_embeddings.weight"])


def test_positions_count_from_the_one_after_the_padding_token():
    """50 rows with the padding token 1 are 48 positions after two that no token reads; with 4, 45 after five."""
    for pad, length in ((1, 48), (0, 49), (4, 45)):
        table = {**pair(ROBERTA).hf.config.to_dict(), "pad_token_id": pad}
        spec = read_config(table, "config.json").spec
        assert (spec.encoder.max_positions, spec.encoder.embed.position.offset) == (length, pad + 1)
        back = write_config(spec)[0]
        assert (back["max_position_embeddings"], back["pad_token_id"]) == (50, pad)


def test_the_dropout_before_labels_is_said_or_the_hidden_states():
    """Each class's own key, and what stands for it."""
    rows = {**BERT_BASE, "architectures": ["BertForSequenceClassification"], "hidden_dropout_prob": 0.3}
    answers = {**ENCODER_CONFIGS[2], "dropout": 0.25}
    labels = {**answers, "architectures": ["DistilBertForTokenClassification"]}
    for table, rate in (
        (rows, 0.3),
        ({**rows, "classifier_dropout": None}, 0.3),
        ({**rows, "classifier_dropout": 0.05}, 0.05),
        (answers, 0.2),
        ({**answers, "seq_classif_dropout": 0.4}, 0.4),
        (labels, 0.25),
    ):
        spec = read_config(table, "config.json").spec
        assert spec.head.dropout == rate
        assert read_config(write_config(spec)[0], "again").spec == spec


def test_states_and_pooler_of_a_checkpoint(tmp_path):
    """B58. Hidden states and the pooler's tanh of the first token; token types left out are zeros."""
    both, model = pair(BERT_STATES), imported(BERT_STATES, tmp_path)
    tokens = ids(2, 11, both.vocab_size)
    out = both.theirs(tokens)
    both.close(out.last_hidden_state, model.hidden(tokens).detach())
    both.close(out.pooler_output, model.pooled(tokens).detach())
    types = torch.zeros_like(tokens)
    assert torch.equal(model.hidden(tokens), model.hidden(tokens, types=types))
    assert not torch.allclose(model.hidden(tokens), model.hidden(tokens, types=types + 1), atol=0.1)
    for side, at in (("left", slice(5, None)), ("right", slice(0, 6))):
        real = padded([11, 6], side)
        alone = both.theirs(tokens[1:, at]).pooler_output
        both.close(alone, model.pooled(tokens, padding=real)[1:].detach())


def test_the_masked_head_is_the_table_with_a_bias_of_its_own(tmp_path):
    """B58."""
    model = imported(BERT, tmp_path)
    assert model.head.weight is None
    assert model.spec.ties == {"encoder.embed", "head"}
    tokens = ids(2, 7, 37)
    before = ours_of(model, tokens)
    with torch.no_grad():
        model.head.bias += 1
    close(before + 1, ours_of(model, tokens), 1e-12)


NAMED = [
    (BERT_BASE, "hidden_act", {"gelu": "gelu", "gelu_new": "gelu_tanh", "relu": "relu", "silu": "silu"}),
    (ENCODER_CONFIGS[2], "activation", {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "quick_gelu": "quick_gelu"}),
    (MODERNBERT_BASE, "hidden_activation", {"gelu": "gelu", "gelu_new": "gelu_tanh", "swish": "silu"}),
]


@pytest.mark.parametrize(("table", "key", "words"), NAMED, ids=lambda value: str(value)[:20])
def test_an_activation_keeps_its_variant_both_ways(table, key, words):
    """B61. And its numbers are theirs: gelu(3) is 2.9959503 exactly and 2.9963626 with tanh."""
    for word, ours in words.items():
        spec = read_config({**table, key: word}, "config.json").spec
        assert spec.encoder.blocks[0].ffn.activation == ours
        written_word = write_config(spec)[0][key]
        x = torch.linspace(-4, 4, 33, dtype=torch.float64)
        for name in (word, written_word):
            theirs = transformers.activations.ACT2FN[name](x)
            assert float((theirs - ACTIVATIONS[ours](x)).abs().max()) < 1e-7
    assert ACTIVATIONS["gelu"](torch.tensor(3.0)).item() == pytest.approx(2.9959503, abs=1e-6)
    assert ACTIVATIONS["gelu_tanh"](torch.tensor(3.0)).item() == pytest.approx(2.9963626, abs=1e-6)


def test_an_epsilon_is_the_configurations_and_else_the_families():
    """B61. BERT's 1e-12 where it says none, 1e-5 where it does; ModernBERT's is 1e-5; all norms of a model."""
    without = {key: value for key, value in BERT_BASE.items() if key != "layer_norm_eps"}
    for table, eps in ((without, 1e-12), ({**without, "layer_norm_eps": 1e-5}, 1e-5), (MODERNBERT_BASE, 1e-5)):
        spec = read_config(table, "config.json").spec
        text = spec.to_json()
        assert {float(line.split(":")[1].strip(" ,")) for line in text.splitlines() if '"eps"' in line} == {eps}
        assert read_config(write_config(spec)[0], "again").spec == spec
    norm = torch.nn.functional.layer_norm
    x = torch.tensor([0.001, -0.001], dtype=torch.float64)
    for eps, value in ((1e-5, 0.301511), (1e-6, 0.707107), (1e-12, 1.0)):
        assert math.isclose(norm(x, (2,), eps=eps)[0].item(), value, abs_tol=1e-6)
