"""Tokenizer folders that are broken or mean harm: one clear error each, and nothing half loaded."""

import json

import pytest
from kinds import KINDS
from tokenizers import Tokenizer as Library

from anyformer.errors import UserError
from anyformer.text import Tokenizer


def state_of(kind, *path, value=None):
    """The state of a tokenizer, with the value at a path of keys replaced."""
    state = json.loads(KINDS[kind]().to_str())
    part = state
    for key in path[:-1]:
        part = part[key]
    if path:
        part[path[-1]] = value
    return state


def assert_refused(folder, match="not a whole tokenizer file|cannot be used"):
    with pytest.raises(UserError, match=match) as caught:
        Tokenizer.load(folder)
    assert str(folder) in str(caught.value.where)
    return caught.value


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_cut_anywhere_is_refused(kind, tmp_path):
    data = KINDS[kind]().to_str().encode()
    for cut in [0, 1, *range(7, len(data) - 1, len(data) // 23), len(data) - 1]:
        (tmp_path / "tokenizer.json").write_bytes(data[:cut])
        assert_refused(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"not JSON",
        b"\xff\xfe\x00",
        b"null",
        b"[]",
        b"{}",
        b"3",
        b"[" * 200_000,
        b'{"model": ' + b'{"a": ' * 100_000,
        json.dumps({**state_of("gpt2"), "pre_tokenizer": {"type": "Sequence", "pretokenizers": [[]]}}).encode(),
        json.dumps({**state_of("gpt2"), "model": {"type": "Oracle"}}).encode(),
        json.dumps({**state_of("gpt2"), "added_tokens": [{"id": 0}]}).encode(),
        json.dumps({**state_of("gpt2"), "added_tokens": 3}).encode(),
        json.dumps(state_of("gpt2", "model", "merges", value=["x y z"])).encode(),
        json.dumps(state_of("gpt2", "model", "merges", value=[["no", "such"]])).encode(),
        json.dumps(state_of("gpt2", "model", "vocab", value={})).encode(),
        json.dumps(state_of("gpt2", "model", "vocab", "!", value=-1)).encode(),
        json.dumps(state_of("gpt2", "model", "vocab", "!", value=2**32)).encode(),
        json.dumps(state_of("t5", "model", "vocab", value=[])).encode(),
        json.dumps(state_of("t5", "model", "unk_id", value=10**6)).encode(),
    ],
)
def test_what_is_no_tokenizer_is_refused(content, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(content)
    assert_refused(tmp_path)


@pytest.mark.parametrize("index", [1 << 24, 2**31, 2**32 - 1])
def test_one_enormous_id_does_not_fill_the_memory(index, tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps(state_of("gpt2", "model", "vocab", "!", value=index)))
    assert_refused(tmp_path, match="counts further than any embedding")


@pytest.mark.parametrize(
    ("single", "match"),
    [
        ([{"SpecialToken": {"id": "<no>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}], "used|whole"),
        ([{"SpecialToken": {"id": "<s>", "type_id": 0}}], "as it is"),
        ([{"Sequence": {"id": "A", "type_id": 0}}] * 2, "as it is"),
    ],
)
def test_a_post_processor_that_loses_the_text_is_refused(single, match, tmp_path, capfd):
    """Where the library panics, that is our one clear error too."""
    (tmp_path / "tokenizer.json").write_text(json.dumps(state_of("llama", "post_processor", "single", value=single)))
    assert_refused(tmp_path, match=match)


def test_a_post_processor_with_an_id_of_no_token_is_refused(tmp_path):
    state = state_of("llama", "post_processor", "special_tokens", "<s>", "ids", value=[9999])
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    assert_refused(tmp_path, match="stands for no token")


def test_a_model_that_cannot_write_a_text_refuses_the_text_alone(tmp_path):
    """A vocabulary without the unknown token that it names."""
    state = state_of("words_alone", "model", "unk_token", value="[none]")
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("Hello world") == [1, 2]
    with pytest.raises(UserError, match="cannot encode"):
        tokenizer.encode("anything")
    with pytest.raises(UserError, match="cannot encode"):
        tokenizer.encode_batch(["anything"])


HALF = "\ud83d"


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ("{", "cannot be read as JSON"),
        ("[1]", "JSON object"),
        ('{"a": ' * 100_000, "cannot be read as JSON"),
        ({"eos_token": HALF}, "cannot be read as JSON"),
        ({"anything": [HALF]}, "cannot be read as JSON"),
        ({"eos_token": 3}, "eos_token"),
        ({"eos_token": ["a"]}, "eos_token"),
        ({"eos_token": {"text": "a"}}, "eos_token"),
        ({"add_bos_token": "true"}, "add_bos_token"),
        ({"add_eos_token": 1}, "add_eos_token"),
        ({"chat_template": 5}, "chat_template"),
        ({"chat_template": ["x"]}, "chat_template"),
        ({"chat_template": [{"name": "default"}]}, "chat_template"),
        ({"chat_template": [{"template": "x"}]}, "chat_template"),
        ({"chat_template": {"default": {"a": 1}}}, "chat_template"),
        ({"added_tokens_decoder": []}, "added_tokens_decoder"),
        ({"added_tokens_decoder": {"x": {"content": "a"}}}, "added_tokens_decoder.x"),
        ({"added_tokens_decoder": {"-1": {"content": "a"}}}, "added_tokens_decoder.-1"),
        ({"added_tokens_decoder": {"9" * 30: {"content": "a"}}}, "added_tokens_decoder"),
        ({"added_tokens_decoder": {"1": "a"}}, "added_tokens_decoder.1"),
        ({"added_tokens_decoder": {"1": {"content": None}}}, "added_tokens_decoder.1"),
        ({"added_tokens_decoder": {"330": {"content": "a b"}, "332": {"content": "c d"}}}, "do not follow"),
        ({"extra_special_tokens": "abc"}, "extra_special_tokens"),
        ({"extra_special_tokens": [1]}, "extra_special_tokens"),
        ({"extra_special_tokens": {"image_token": 1}}, "image_token"),
        ({"bos_token": "<nowhere>", "add_bos_token": True}, "not in the vocabulary"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(config, match, tmp_path):
    KINDS["gpt2"]().save(str(tmp_path / "tokenizer.json"))
    text = config if isinstance(config, str) else json.dumps(config)
    (tmp_path / "tokenizer_config.json").write_text(text)
    assert "tokenizer_config.json" in str(assert_refused(tmp_path, match=match).where)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("special_tokens_map.json", '{"eos_token": 3}'),
        ("special_tokens_map.json", "["),
        ("added_tokens.json", '{"<x>": "330"}'),
        ("config.json", '{"eos_token_id": "2"}'),
        ("chat_template.jinja", b"\xff"),
        ("additional_chat_templates/x.jinja", b"\xff"),
    ],
)
def test_another_file_that_cannot_be_meant_is_refused(name, content, tmp_path):
    KINDS["gpt2"]().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert name in str(assert_refused(tmp_path, match="token|JSON|read").where)


def test_a_file_without_added_tokens_is_whole(tmp_path):
    state = state_of("words_alone")
    del state["added_tokens"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    assert (
        Tokenizer.load(tmp_path).encode("Hello world") == Library.from_str(json.dumps(state)).encode("Hello world").ids
    )


def test_saving_where_that_is_not_allowed_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="cannot write"):
        Tokenizer.train("byte", []).save(tmp_path / "file")
