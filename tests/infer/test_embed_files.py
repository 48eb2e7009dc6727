"""The files of sentence-transformers: what they say, what is written, and what is refused by name."""

import json
import os
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from anyformer.errors import UserError
from anyformer.infer.embed import Dense, Embedding

OLD = {
    "modules.json": [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"},
        {"idx": 3, "name": "3", "path": "3_Dropout", "type": "sentence_transformers.models.Dropout"},
        {"idx": 4, "name": "4", "path": "4_Normalize", "type": "sentence_transformers.models.Normalize"},
    ],
    "1_Pooling/config.json": {
        "word_embedding_dimension": 6,
        "pooling_mode_cls_token": False,
        "pooling_mode_mean_tokens": True,
        "pooling_mode_max_tokens": True,
        "pooling_mode_mean_sqrt_len_tokens": False,
    },
    "2_Dense/config.json": {
        "in_features": 12,
        "out_features": 5,
        "bias": True,
        "activation_function": "torch.nn.modules.activation.Tanh",
    },
    "sentence_bert_config.json": {"max_seq_length": 256, "do_lower_case": True},
    "config_sentence_transformers.json": {"__version__": {"sentence_transformers": "2.0.0", "pytorch": "1.8.1"}},
    "tokenizer_config.json": {"model_max_length": 512, "truncation_side": "left"},
}
NEW = {
    "modules.json": [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.sentence_transformer.Pooling"},
        {
            "idx": 2,
            "name": "2",
            "path": "2_Normalize",
            "type": "sentence_transformers.base.modules.normalize.Normalize",
        },
    ],
    "1_Pooling/config.json": {
        "embedding_dimension": 6,
        "pooling_mode": ["weightedmean", "cls", "mean_sqrt_len_tokens"],
        "include_prompt": False,
    },
    "2_Normalize/config.json": {"module_input_name": "sentence_embedding", "module_output_name": None},
    "sentence_bert_config.json": {
        "transformer_task": "feature-extraction",
        "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
        "module_output_name": "token_embeddings",
    },
    "config_sentence_transformers.json": {
        "model_type": "SentenceTransformer",
        "prompts": {"query": "query: ", "document": ""},
        "default_prompt_name": "query",
        "similarity_fn_name": "cosine",
    },
    "tokenizer_config.json": {"model_max_length": 300},
}
WEIGHTS = {"linear.weight": torch.arange(60.0).view(5, 12), "linear.bias": torch.arange(5.0)}


def written(folder, files, weights=WEIGHTS):
    for name, value in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")
    if weights is not None and (folder / "2_Dense").is_dir():
        save_file(weights, folder / "2_Dense" / "model.safetensors")
    return folder


def changed(files, name, **values):
    return {**files, name: {**files[name], **values}}


def test_no_modules_file_says_nothing(tmp_path):
    assert Embedding.read(tmp_path) is None
    assert Embedding.read(str(tmp_path / "absent")) is None


def test_an_old_folder_is_read(tmp_path):
    """Flags for modes; the first of a folder's limits; dropout, which does nothing here."""
    found = Embedding.read(written(tmp_path, OLD))
    (dense,) = found.dense
    expected = Embedding(
        pooling=("max", "mean"),
        normalise=True,
        max_length=256,
        truncation="left",
        lower=True,
        d_model=6,
    )
    assert replace(found, dense=()) == expected
    assert dense.activation == "tanh"
    assert torch.equal(dense.weight, WEIGHTS["linear.weight"])
    assert torch.equal(dense.bias, WEIGHTS["linear.bias"])


def test_a_new_folder_is_read(tmp_path):
    """Modes as a list in any order; the limit in the tokenizer's settings; prompts."""
    assert Embedding.read(written(tmp_path, NEW)) == Embedding(
        pooling=("weighted_mean", "cls", "mean_sqrt_len"),
        normalise=True,
        max_length=300,
        prompts={"query": "query: ", "document": ""},
        default_prompt="query",
        pool_prompt=False,
        similarity="cosine",
        d_model=6,
    )


def test_what_is_absent_has_its_default(tmp_path):
    files = {name: NEW[name] for name in ("modules.json", "1_Pooling/config.json")}
    files["1_Pooling/config.json"] = {"word_embedding_dimension": 6, "pooling_mode_cls_token": False}
    assert Embedding.read(written(tmp_path, files)) == Embedding(normalise=True, d_model=6)


def test_the_list_of_modes_comes_before_flags(tmp_path):
    files = changed(NEW, "1_Pooling/config.json", pooling_mode="cls", pooling_mode_mean_tokens=True)
    assert Embedding.read(written(tmp_path, files)).pooling == ("cls",)


@pytest.mark.parametrize("limit", [1e30, 10**30, None, float("nan")])
def test_a_tokenizer_without_a_limit_gives_none(limit, tmp_path):
    assert (
        Embedding.read(written(tmp_path, changed(NEW, "tokenizer_config.json", model_max_length=limit))).max_length
        is None
    )


def test_an_older_name_of_the_text_file_is_read(tmp_path):
    files = {**NEW, "sentence_roberta_config.json": {"max_seq_length": 77}}
    del files["sentence_bert_config.json"]
    assert Embedding.read(written(tmp_path, files)).max_length == 77


@pytest.mark.parametrize(("name", "word"), [("Identity", "identity"), ("GELU", "gelu"), ("Sigmoid", "sigmoid")])
def test_an_activation_is_known_by_its_last_name(name, word, tmp_path):
    files = changed(OLD, "2_Dense/config.json", activation_function=f"torch.nn.{name}")
    assert Embedding.read(written(tmp_path, files)).dense[0].activation == word


def test_a_dense_layer_has_a_bias_and_a_tanh_where_it_does_not_say(tmp_path):
    config = {"in_features": 12, "out_features": 5, "use_residual": False}
    (layer,) = Embedding.read(written(tmp_path, {**OLD, "2_Dense/config.json": config})).dense
    assert layer.activation == "tanh"
    assert torch.equal(layer.bias, WEIGHTS["linear.bias"])


def test_a_dense_layer_may_have_no_bias_and_half_precision(tmp_path):
    weights = {"linear.weight": WEIGHTS["linear.weight"].half()}
    (layer,) = Embedding.read(written(tmp_path, changed(OLD, "2_Dense/config.json", bias=False), weights)).dense
    assert layer.bias is None
    assert layer.weight.dtype == torch.float32


def test_files_may_be_links(tmp_path):
    """As in a cache of downloads."""
    store = written(tmp_path / "store", OLD)
    snapshot = tmp_path / "snapshot"
    for path in store.rglob("*.*"):
        link = snapshot / path.relative_to(store)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(path)
    assert Embedding.read(snapshot).dense[0].widths == (12, 5)


WRITTEN = [
    Embedding(d_model=6),
    Embedding(d_model=6, pooling=("max", "mean_sqrt_len", "last"), normalise=True, max_length=12, lower=True),
    Embedding(d_model=6, pooling=("last", "cls"), pool_prompt=False, similarity="dot"),
    Embedding(d_model=6, pooling=("mean", "mean")),
    Embedding(d_model=6, pooling=("weighted_mean",), prompts={"é": "für: ", "d": ""}, default_prompt="é"),
]


@pytest.mark.parametrize("how", WRITTEN, ids=lambda how: "+".join(how.pooling))
def test_what_is_written_is_read_back(how, tmp_path):
    how.write(tmp_path / "new")
    assert Embedding.read(tmp_path / "new") == how


def test_dense_layers_are_written_and_read_back(tmp_path):
    generator = torch.Generator().manual_seed(0)
    first = Dense(torch.randn(12, 7, generator=generator).T, torch.randn(7, generator=generator), "silu")
    second = Dense(torch.randn(3, 7, generator=generator), activation="identity")
    Embedding(d_model=6, pooling=("cls", "mean"), dense=(first, second), normalise=True).write(tmp_path)
    found = Embedding.read(tmp_path)
    assert found.normalise
    assert [layer.activation for layer in found.dense] == ["silu", "identity"]
    for layer, back in zip((first, second), found.dense, strict=True):
        assert torch.equal(layer.weight, back.weight)
    assert torch.equal(first.bias, found.dense[0].bias)
    assert found.dense[1].bias is None


def test_the_written_files_are_those_that_every_version_reads(tmp_path):
    Embedding(d_model=6, normalise=True, dense=(Dense(torch.ones(2, 6)),), max_length=9).write(tmp_path)
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert files == {
        "modules.json",
        "sentence_bert_config.json",
        "config_sentence_transformers.json",
        "1_Pooling/config.json",
        "2_Dense/config.json",
        "2_Dense/model.safetensors",
    }
    modules = json.loads((tmp_path / "modules.json").read_text())
    assert [(entry["path"], entry["type"].rpartition(".")[2]) for entry in modules] == [
        ("", "Transformer"),
        ("1_Pooling", "Pooling"),
        ("2_Dense", "Dense"),
        ("3_Normalize", "Normalize"),
    ]
    assert json.loads((tmp_path / "1_Pooling/config.json").read_text()) == {
        "word_embedding_dimension": 6,
        "pooling_mode_cls_token": False,
        "pooling_mode_max_tokens": False,
        "pooling_mode_mean_tokens": True,
        "pooling_mode_mean_sqrt_len_tokens": False,
    }
    assert load_file(tmp_path / "2_Dense/model.safetensors").keys() == {"linear.weight"}


def test_a_width_that_is_not_known_is_not_written(tmp_path):
    with pytest.raises(UserError, match="width of the states"):
        Embedding().write(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_place_that_cannot_be_written_to_is_one_error(tmp_path):
    (tmp_path / "1_Pooling").write_text("a file")
    with pytest.raises(UserError, match="cannot write"):
        Embedding(d_model=6).write(tmp_path)
    assert not (tmp_path / "modules.json").exists()


def module(number, **values):
    """OLD with one module changed."""
    modules = [dict(entry) for entry in OLD["modules.json"]]
    modules[number].update(values)
    return {**OLD, "modules.json": modules}


def ordered(*numbers):
    return {**OLD, "modules.json": [OLD["modules.json"][number] for number in numbers]}


NESTED = "[" * 100_000
REFUSED = {
    "unknown module": (module(1, type="sentence_transformers.models.LSTM"), "(?s)module is not supported.*LSTM"),
    "foreign module": (module(0, type="custom_st.Transformer"), "(?s)module is not supported.*custom_st.Transformer"),
    "no module": ({**OLD, "modules.json": ["Pooling"]}, "a module has a type and a path"),
    "no path": (module(1, path=None), "a module has a type and a path"),
    "arguments": (module(1, kwargs=["task"]), "(?s)arguments of modules.*task"),
    "up": (module(1, path="../1_Pooling"), "leaves the folder"),
    "up inside": (module(2, path="a/../../b"), "leaves the folder"),
    "absolute": (module(2, path="/etc"), "leaves the folder"),
    "drive": (module(2, path="C:2_Dense"), "leaves the folder"),
    "backslash": (module(2, path="..\\2_Dense"), "leaves the folder"),
    "zero byte": (module(2, path="a\0b"), "leaves the folder"),
    "model elsewhere": (module(0, path="0_Transformer"), "(?s)does not lie in the folder itself.*0_Transformer"),
    "no modules": (ordered(), "(?s)order of modules"),
    "no pooling": (ordered(0, 4), "(?s)order of modules.*Transformer, Normalize"),
    "two poolings": (ordered(0, 1, 1), "order of modules"),
    "norm before dense": (ordered(0, 1, 4, 2), "dense layer after normalisation"),
    "modules of another kind": ({**OLD, "modules.json": {}}, "(?s)another kind of JSON.*dict.*list"),
    "pooling of another kind": ({**OLD, "1_Pooling/config.json": []}, "(?s)another kind of JSON.*list.*dict"),
    "broken modules": ({**OLD, "modules.json": "[{"}, "(?s)cannot be read as JSON.*modules.json"),
    "broken pooling": ({**OLD, "1_Pooling/config.json": "{'a'"}, "(?s)cannot be read as JSON.*1_Pooling"),
    "nested": ({**OLD, "sentence_bert_config.json": NESTED}, "cannot be read as JSON"),
    "flag": (changed(OLD, "1_Pooling/config.json", pooling_mode_cls_token=1), "(?s)pooling_mode_cls_token.*1.*bool"),
    "mode": (changed(NEW, "1_Pooling/config.json", pooling_mode=["mean", ["cls"]]), "(?s)pooling_mode.*cls"),
    "pooling key": (changed(OLD, "1_Pooling/config.json", weights=[1]), "(?s)1_Pooling.config.json, weights"),
    "no width": ({**OLD, "1_Pooling/config.json": {"pooling_mode": "mean"}}, "word_embedding_dimension"),
    "negative width": (changed(OLD, "1_Pooling/config.json", word_embedding_dimension=-6), "d_model is at least 1"),
    "limit": (changed(OLD, "sentence_bert_config.json", max_seq_length=-1), "max_length is at least 1"),
    "limit's kind": (changed(OLD, "sentence_bert_config.json", max_seq_length="256"), "(?s)max_seq_length.*'256'.*int"),
    "limit's truth": (changed(OLD, "sentence_bert_config.json", max_seq_length=True), "(?s)max_seq_length.*True.*int"),
    "lower's kind": (changed(OLD, "sentence_bert_config.json", do_lower_case="no"), "(?s)do_lower_case.*'no'.*bool"),
    "task": (changed(NEW, "sentence_bert_config.json", transformer_task="fill-mask"), "transformer_task"),
    "modality": (changed(NEW, "sentence_bert_config.json", modality_config={"image": {}}), "modality_config"),
    "expansion": (changed(NEW, "sentence_bert_config.json", query_expansion={"length": 32}), "query_expansion"),
    "arguments of the model": (changed(OLD, "sentence_bert_config.json", model_args={"a": 1}), "model_args"),
    "text key": (changed(OLD, "sentence_bert_config.json", stride=3), "(?s)sentence_bert_config.json, stride"),
    "side": (changed(OLD, "tokenizer_config.json", truncation_side="both"), "(?s)unknown side.*truncation.*both"),
    "model type": (changed(NEW, "config_sentence_transformers.json", model_type="SparseEncoder"), "SparseEncoder"),
    "cut vectors": (changed(NEW, "config_sentence_transformers.json", truncate_dim=3), "truncate_dim"),
    "prompts": (changed(NEW, "config_sentence_transformers.json", prompts={"query": 1}), "(?s)prompts.*texts by name"),
    "prompt": (changed(NEW, "config_sentence_transformers.json", default_prompt_name="doc"), "(?s)no prompt.*'doc'"),
    "norm of tokens": (changed(NEW, "2_Normalize/config.json", module_input_name="token_embeddings"), "module_input"),
    "activation": (changed(OLD, "2_Dense/config.json", activation_function="custom.Tanh"), "activation_function"),
    "odd activation": (changed(OLD, "2_Dense/config.json", activation_function="torch.nn.Softmax"), "Softmax"),
    "residual": (changed(OLD, "2_Dense/config.json", use_residual=True), "use_residual"),
    "dense input": (changed(OLD, "2_Dense/config.json", module_input_name="token_embeddings"), "module_input_name"),
    "dense key": (changed(OLD, "2_Dense/config.json", scale=2.0), "(?s)2_Dense.config.json, scale"),
    "no dense width": (changed(OLD, "2_Dense/config.json", out_features=None), "(?s)out_features.*int"),
    "dense width": (changed(OLD, "1_Pooling/config.json", pooling_mode_max_tokens=False), "(?s)another width.*6.*12"),
    "misshapen": (changed(OLD, "2_Dense/config.json", out_features=4), "(?s)do not fit the dense layer.*5, 12.*4, 12"),
    "extra bias": (changed(OLD, "2_Dense/config.json", bias=False), "(?s)do not fit the dense layer.*linear.bias"),
}


@pytest.mark.parametrize(("files", "said"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_followed_is_refused_by_name(files, said, tmp_path):
    with pytest.raises(UserError, match=said) as refused:
        Embedding.read(written(tmp_path, files))
    assert str(tmp_path) in str(refused.value.where)


@pytest.mark.parametrize("name", ["1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"])
def test_a_missing_file_is_named(name, tmp_path):
    os.remove(written(tmp_path, OLD) / name)
    with pytest.raises(UserError, match=f"(?s)missing|no weights.*{name}"):
        Embedding.read(tmp_path)


@pytest.mark.parametrize("name", ["modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"])
def test_a_link_that_leads_nowhere_is_not_an_absent_file(name, tmp_path):
    os.remove(written(tmp_path, OLD) / name)
    (tmp_path / name).symlink_to(tmp_path / "gone")
    with pytest.raises(UserError, match="missing"):
        Embedding.read(tmp_path)


def test_a_pickle_is_never_opened(tmp_path):
    written(tmp_path, OLD, weights=None)
    (tmp_path / "2_Dense/pytorch_model.bin").write_bytes(b"cos\nabort\n(tR.")
    with pytest.raises(UserError, match=r"(?s)pytorch_model\.bin, a pickle.*remedy.*safetensors"):
        Embedding.read(tmp_path)


@pytest.mark.parametrize(
    "weights",
    [
        {"linear.weight": WEIGHTS["linear.weight"]},
        {**WEIGHTS, "linear.scale": torch.ones(1)},
        {**WEIGHTS, "linear.bias": torch.arange(5)},
    ],
    ids=["missing", "extra", "integers"],
)
def test_weights_that_do_not_fit_are_refused(weights, tmp_path):
    with pytest.raises(UserError, match="do not fit the dense layer"):
        Embedding.read(written(tmp_path, OLD, weights))


@pytest.mark.parametrize("size", [0, 7, 200])
def test_weights_cut_short_are_refused(size, tmp_path):
    file = written(tmp_path, OLD) / "2_Dense/model.safetensors"
    os.truncate(file, size)
    with pytest.raises(UserError, match=r"(?s)cannot read the weights.*model\.safetensors"):
        Embedding.read(tmp_path)
