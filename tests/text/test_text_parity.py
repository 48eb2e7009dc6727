"""Tokenizer folders against `transformers`: ids, text, added tokens, settings, and folders written by either side."""

import json

import pytest
from kinds import KINDS, TEXTS
from tokenizers import AddedToken
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from anyformer.errors import UserError
from anyformer.text import Tokenizer


def written(folder, library, config=None, **files):
    """A folder of a tokenizer; further files are named with two underscores for the dot."""
    library.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config or {}))
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def pair(folder):
    return Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)


def token(content, special=True, **flags):
    plain = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    return {"content": content, "special": special, **plain, **flags}


def assert_same_text(ours, theirs, text, control=False):
    ids = theirs(text).input_ids
    assert ours.encode(text, control=control) == ids
    assert ours.encode(text, control=control, bare=True) == theirs(text, add_special_tokens=False).input_ids
    for skip in (True, False):
        whole = ours.decode(ids, skip_control=skip)
        assert whole == theirs.decode(ids, skip_special_tokens=skip)
        stream = ours.stream(skip_control=skip)
        assert "".join([*map(stream.push, ids), stream.finish()]) == whole


@pytest.mark.parametrize("name", KINDS)
def test_ids_and_text_are_those_of_transformers(name, tmp_path):
    """Also without the tokens around a text, with and without control tokens in it, and one token at a time."""
    ours, theirs = pair(written(tmp_path, KINDS[name]()))
    assert ours.vocab_size == len(theirs)
    for text in TEXTS:
        assert_same_text(ours, theirs, text)
    assert ours.encode_batch(TEXTS) == theirs(TEXTS).input_ids
    for index in ours.control_ids:
        spelled = f"Hello {ours.token(index)} world{ours.token(index)}!"
        assert ours.encode(spelled, control=True, bare=True) == theirs(spelled, add_special_tokens=False).input_ids
        if name not in ("unigram_bytes", "t5", "albert"):  # whose own pieces the library lets text reach
            apart = theirs(spelled, split_special_tokens=True).input_ids
            theirs(" ", split_special_tokens=False)
            assert ours.encode(spelled) == apart


@pytest.mark.parametrize("name", ["llama", "llama_prepend", "gpt2", "bert", "t5"])
def test_without_a_post_processor_nothing_is_put_around_a_text(name, tmp_path):
    state = json.loads(KINDS[name]().to_str())
    state["post_processor"] = None
    library = KINDS[name]().from_str(json.dumps(state))
    ours, theirs = pair(written(tmp_path, library))
    assert (ours.prefix, ours.suffix) == ((), ())
    assert_same_text(ours, theirs, "Hello  world")


ROLES = (
    "{{ bos_token }}|{{ eos_token }}|{{ unk_token }}|{{ pad_token }}|{{ sep_token }}|{{ cls_token }}|{{ mask_token }}"
)
ROLES += "|{{ image_token }}|{{ audio_token }}|{{ additional_special_tokens }}|{{ extra_special_tokens }}"
PROBE = "a <x> b  <|endoftext|> c <a>B<p> [PAD] d<img><aud> <y> <z>\n <q>  A"
FOLDERS = {
    "roles as objects": {"bos_token": {"__type": "AddedToken", **token("<|endoftext|>")}, "eos_token": "<z>"},
    "declared, next in turn": {"added_tokens_decoder": {"330": token("<x>"), "331": token("<y>", special=False)}},
    "declared, in any order": {"added_tokens_decoder": {"331": token("<y>"), "330": token("<x>", lstrip=True)}},
    "declared with other flags": {"added_tokens_decoder": {"0": token("<|endoftext|>", rstrip=True)}},
    "declared plain, named": {
        "eos_token": "<|endoftext|>",
        "added_tokens_decoder": {"0": token("<|endoftext|>", False)},
    },
    "declared without flags": {"added_tokens_decoder": {"330": {"content": "<x>"}}, "mask_token": "<z>"},
    "declared ordinary token": {"added_tokens_decoder": {"34": token("A")}},
    "declared with another id": {"added_tokens_decoder": {"40": token("A")}},
    "named and nowhere": {"pad_token": {"__type": "AddedToken", **token("[PAD]", lstrip=True)}, "mask_token": "<q>"},
    "named and nowhere, in order": {"mask_token": "<x>", "pad_token": "<p>", "cls_token": "<y>", "my_token": "<z>"},
    "empty and null": {"bos_token": "", "eos_token": None, "unk_token": "<|endoftext|>"},
    "extra, a list": {"extra_special_tokens": ["<a>", "B", "<|endoftext|>"]},
    "extra, a table": {"extra_special_tokens": {"image_token": "<img>"}, "audio_token": "<aud>"},
    "additional": {"additional_special_tokens": ["<a>", "B"]},
    "additional and extra": {"additional_special_tokens": ["<a>", "B"], "extra_special_tokens": ["<x>"]},
    "additional and none extra": {"additional_special_tokens": ["<a>", "B"], "extra_special_tokens": {}},
}


@pytest.mark.parametrize("name", FOLDERS)
def test_tokens_of_the_settings_are_those_of_transformers(name, tmp_path):
    ours, theirs = pair(written(tmp_path, KINDS["gpt2"](), {"chat_template": ROLES, **FOLDERS[name]}))
    assert_same_added(ours, theirs)


def test_a_named_token_is_matched_as_it_is_spelled(tmp_path):
    """Before letters are made small; one that is declared without flags is matched after that."""
    library = KINDS["bert"]()
    declared = {str(library.get_vocab_size()): {"content": "<B>"}}
    config = {"added_tokens_decoder": declared, "mask_token": "<A>", "extra_special_tokens": ["<C>"]}
    ours, theirs = pair(written(tmp_path, library, config))
    assert_same_text(ours, theirs, "<A> <a> <B> <b> <C> <c>", control=True)


def test_a_control_token_of_either_file_is_one(tmp_path):
    """B19. `transformers` leaves such a token out of decoded text, and so do we; nor can text spell it."""
    declared = {"added_tokens_decoder": {"0": token("<|endoftext|>", special=False)}}
    ours, theirs = pair(written(tmp_path, KINDS["gpt2"](), declared))
    assert ours.control_ids == {0}
    assert 0 not in ours.encode("<|endoftext|>")
    assert ours.decode([0, 65]) == theirs.decode([0, 65], skip_special_tokens=True)


def test_a_role_may_be_an_object_without_a_type(tmp_path):
    """As version 4 of `transformers` wrote it."""
    ours = Tokenizer.load(written(tmp_path, KINDS["gpt2"](), {"eos_token": token("<z>", lstrip=True)}))
    assert ours.encode("a  <z>", control=True) == [*ours.encode("a"), ours.eos_id]


def assert_same_added(ours, theirs):
    added = theirs.added_tokens_decoder
    assert ours.vocab_size == len(theirs)
    assert {index: ours.token(index) for index in ours.control_ids} == {
        index: entry.content for index, entry in added.items() if entry.special
    }
    assert_same_text(ours, theirs, PROBE, control=True)
    messages = [{"role": "user", "content": "x"}]
    assert ours.render_chat(messages) == theirs.apply_chat_template(messages, tokenize=False)


MAP = {"eos_token": "B", "pad_token": token("<p>", lstrip=True), "additional_special_tokens": ["<z>", "A"]}


@pytest.mark.parametrize(
    ("config", "files"),
    [
        ({"eos_token": "A"}, {"special_tokens_map__json": MAP}),
        ({}, {"special_tokens_map__json": MAP}),
        ({"eos_token": "A", "added_tokens_decoder": {}}, {"special_tokens_map__json": MAP}),
        ({"eos_token": "<y>"}, {"added_tokens__json": {"<y>": 331, "<x>": 330}}),
        ({"eos_token": "A", "added_tokens_decoder": {}}, {"added_tokens__json": {"<x>": 330}}),
        ({}, {"added_tokens__json": {"<x>": 330}, "special_tokens_map__json": {"pad_token": "<x>"}}),
    ],
)
def test_older_files_rule_only_where_no_token_is_declared(config, files, tmp_path):
    ours, theirs = pair(written(tmp_path, KINDS["gpt2"](), {"chat_template": ROLES, **config}, **files))
    assert_same_added(ours, theirs)


def test_a_declared_token_keeps_its_id_or_the_folder_is_refused(tmp_path):
    """`transformers` would give it the next id, silently."""
    written(tmp_path, KINDS["gpt2"](), {"added_tokens_decoder": {"400": token("<x>")}})
    with pytest.raises(UserError, match="'<x>' with id 400"):
        Tokenizer.load(tmp_path)


def test_added_tokens_are_usable_past_the_vocabulary(tmp_path):
    """B54. A tokenizer of 330 ids, two more declared: they encode, decode, end a text, and are saved."""
    config = {"added_tokens_decoder": {"330": token("<x>"), "331": token("<y>")}, "eos_token": "<y>"}
    ours, _ = pair(written(tmp_path, KINDS["gpt2"](), config, generation_config__json={"eos_token_id": [331, 0, 500]}))
    assert ours.encode("a<x>", control=True)[-1] == 330
    assert ours.eos_ids == (331, 0, 500)
    assert ours.decode([330], skip_control=False) == "<x>"
    with pytest.raises(UserError, match="outside the vocabulary"):
        ours.decode([332])
    ours.save(tmp_path / "again")
    again, theirs = pair(tmp_path / "again")
    assert again.vocab_size == len(theirs) == 332
    assert again.eos_ids == (331, 0, 500)


@pytest.mark.parametrize("flag", [True, False, None])
@pytest.mark.parametrize("processed", [True, False])
@pytest.mark.parametrize("kind", [None, "LlamaTokenizer", "LlamaTokenizerFast"])
def test_bos_follows_the_flag_and_else_the_file(kind, processed, flag, tmp_path):
    """B57. Whatever `tokenizer_class` says; what is saved makes `transformers`, which reads no flag, do the same."""
    state = json.loads(KINDS["llama"]().to_str())
    state["post_processor"] = state["post_processor"] if processed else None
    config = {"bos_token": "<s>", "eos_token": "</s>"}
    config |= {} if kind is None else {"tokenizer_class": kind}
    config |= {} if flag is None else {"add_bos_token": flag}
    written(tmp_path, KINDS["llama"]().from_str(json.dumps(state)), config)
    ours = Tokenizer.load(tmp_path)
    wanted = [1] * (processed if flag is None else flag)
    assert ours.encode("Hello") == wanted + ours.encode("Hello", bare=True)
    ours.save(tmp_path / "saved")
    again, theirs = pair(tmp_path / "saved")
    assert theirs("Hello world").input_ids == again.encode("Hello world") == ours.encode("Hello world")


def test_eos_by_flag_goes_along_too(tmp_path):
    config = {"eos_token": "<|end_of_text|>", "add_eos_token": True, "add_bos_token": False}
    ours = Tokenizer.load(written(tmp_path, KINDS["llama3"](), {**config, "bos_token": "<|begin_of_text|>"}))
    assert ours.encode("Hello") == [*ours.encode("Hello", bare=True), ours.eos_id]
    ours.save(tmp_path / "saved")
    again, theirs = pair(tmp_path / "saved")
    assert theirs("Hello").input_ids == again.encode("Hello") == ours.encode("Hello")


@pytest.mark.parametrize(
    ("model", "generation", "own", "wanted"),
    [
        (5, [5, 9], None, (5, 9)),
        ([5, 9], 7, None, (7, 5, 9)),
        (None, [9], None, (9,)),
        (5, None, None, (5,)),
        (-1, [], None, ()),
        (5, [5, 9], "</s>", (2, 5, 9)),
    ],
)
def test_every_end_of_either_file_counts(model, generation, own, wanted, tmp_path):
    """B37. One id, a list, null or nothing, in either file."""
    config = {} if own is None else {"eos_token": own}
    files = {"config__json": {"eos_token_id": model}, "generation_config__json": {"eos_token_id": generation}}
    written(tmp_path, KINDS["llama"](), config, **files)
    assert Tokenizer.load(tmp_path).eos_ids == wanted


@pytest.mark.parametrize("wrong", ["5", 5.0, True, [5, "9"], {"a": 1}])
def test_an_end_that_is_no_id_is_refused(wrong, tmp_path):
    written(tmp_path, KINDS["llama"](), generation_config__json={"eos_token_id": wrong})
    with pytest.raises(UserError, match=r"generation_config\.json, eos_token_id"):
        Tokenizer.load(tmp_path)


def test_ids_of_the_model_stand_in_for_roles_without_a_name(tmp_path):
    """The folder of GPT-2 names no token; an id that is ordinary text here stands for nothing."""
    files = {"config__json": {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 65}}
    ours = Tokenizer.load(written(tmp_path, KINDS["gpt2"](), {"model_max_length": 1024}, **files))
    assert (ours.bos_id, ours.eos_id, ours.pad_id) == (0, 0, None)
    assert ours.encode("a", bare=True) == ours.encode("a")
    ours.save(tmp_path / "again")
    again = Tokenizer.load(tmp_path / "again")
    assert (again.bos_id, again.eos_id, again.eos_ids) == (0, 0, (0,))


SPACED = ["don ' t . It ' s , we ' ve ! can n't ? a . . b , c 's", "n n ' v ' r", "' . '", " . ", "they 're ' re"]


@pytest.mark.parametrize("cleans", [True, False, None])
@pytest.mark.parametrize("name", ["bert", "bert_cased", "t5", "words_alone", "llama", "gpt2"])
def test_spaces_are_cleaned_up_where_the_settings_say_so(name, cleans, tmp_path):
    """And never in a BPE, as in `transformers`; one token at a time as all at once."""
    config = {} if cleans is None else {"clean_up_tokenization_spaces": cleans}
    ours, theirs = pair(written(tmp_path, KINDS[name](), config))
    for text in [*SPACED, *TEXTS]:
        assert_same_text(ours, theirs, text)


NAMED = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
TOOLS = [{"name": "f"}]


@pytest.mark.parametrize(
    ("config", "files"),
    [
        ("S", {}),
        (NAMED, {}),
        ({"default": "D", "tool_use": "T"}, {}),
        (NAMED, {"chat_template__jinja": "J\r\n"}),
        ("S", {"chat_template__jinja": "J", "additional_chat_templates/tool_use__jinja": "U"}),
        (NAMED, {"additional_chat_templates/default__jinja": "E", "additional_chat_templates/x__jinja": "X"}),
        (None, {"additional_chat_templates/tool_use__jinja": "U"}),
        (NAMED[1:], {}),
        (None, {}),
    ],
)
def test_templates_come_from_where_transformers_finds_them(config, files, tmp_path):
    (tmp_path / "additional_chat_templates").mkdir()
    ours, theirs = pair(written(tmp_path, KINDS["gpt2"](), {"chat_template": config}, **files))
    ours.save(tmp_path / "saved")
    for tokenizers in ((ours, theirs), pair(tmp_path / "saved")):
        assert_same_choice(*tokenizers)


def assert_same_choice(ours, theirs):
    messages = [{"role": "user", "content": "x"}]
    for tools in (None, [], TOOLS):
        try:
            wanted = theirs.apply_chat_template(messages, tools=tools, tokenize=False)
        except ValueError:  # None is chosen. Ours takes the only one there is, whatever its name.
            if not isinstance(theirs.chat_template, dict) or len(theirs.chat_template) > 1:
                with pytest.raises(UserError, match="chat template"):
                    ours.render_chat(messages, tools=tools)
        else:
            assert ours.render_chat(messages, tools=tools) == wanted


@pytest.mark.parametrize("name", KINDS)
def test_a_saved_folder_opens_in_transformers(name, tmp_path):
    """With equal ids, templates and settings, and again here."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 77,
        "padding_side": "left",
        "clean_up_tokenization_spaces": True,
        "add_prefix_space": False,
        "pad_token": "<|pad|>",
        "image_token": "<|image|>",
        "extra_special_tokens": ["<|a|>"],
        "bos_token": None,
        "chat_template": "{{ pad_token }}{{ image_token }}{{ messages[0].content }}",
        "auto_map": {"AutoTokenizer": ["own.Tokenizer", None]},
    }
    ours = Tokenizer.load(written(tmp_path, KINDS[name](), config))
    ours.save(tmp_path / "saved")
    again, theirs = pair(tmp_path / "saved")
    for text in TEXTS:
        assert ours.encode(text) == again.encode(text) == theirs(text).input_ids
    messages = [{"role": "user", "content": "Hello"}]
    rendered = theirs.apply_chat_template(messages, tokenize=False)
    assert ours.render_chat(messages) == again.render_chat(messages) == rendered == "<|pad|><|image|>Hello"
    assert theirs.special_tokens_map == {"pad_token": "<|pad|>", "image_token": "<|image|>"}
    assert theirs.extra_special_tokens == ["<|a|>"]
    assert (theirs.model_max_length, theirs.padding_side, theirs.pad_token_id) == (77, "left", ours.pad_id)
    assert ours.vocabulary_hash == again.vocabulary_hash
    saved = json.loads((tmp_path / "saved" / "tokenizer_config.json").read_text())
    assert {key: saved.get(key) for key in config} == {**config, "auto_map": None}
    again.save(tmp_path / "twice")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "saved" / file).read_bytes() == (tmp_path / "twice" / file).read_bytes()


def test_a_folder_that_transformers_saved_opens_here(tmp_path):
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=KINDS["llama3"](),
        bos_token="<|begin_of_text|>",
        eos_token=AddedToken("<|eot_id|>", rstrip=True),
        pad_token="<|pad|>",
        extra_special_tokens={"image_token": "<|image|>"},
        chat_template={"default": ROLES, "tool_use": "T{{ tools | tojson }}"},
    )
    theirs.save_pretrained(tmp_path)
    ours, reopened = pair(tmp_path)
    for text in TEXTS:
        assert_same_text(ours, reopened, text)
    assert_same_added(ours, reopened)
    assert_same_choice(ours, reopened)
    assert (ours.bos_id, ours.eos_id, ours.pad_id) == (0, 4, theirs.pad_token_id)


def test_saving_takes_the_place_of_another_tokenizer_with_all_its_files(tmp_path):
    """What would overrule the new one is gone; whatever else lies there stays."""
    (tmp_path / "additional_chat_templates").mkdir()
    old = {"special_tokens_map__json": {"eos_token": "A"}, "added_tokens__json": {"<x>": 330}, "notes__txt": "mine"}
    old |= {"chat_template__jinja": "old", "additional_chat_templates/tool_use__jinja": "old"}
    written(tmp_path, KINDS["gpt2"](), {"chat_template": "old"}, **old)
    new = Tokenizer.train("byte", [], chat_template="new")
    new.save(tmp_path)
    ours, theirs = pair(tmp_path)
    assert ours.vocabulary_hash == new.vocabulary_hash
    assert ours.eos_ids == (256,)
    assert ours.chat_template == theirs.chat_template == "new"
    assert theirs.eos_token_id == 256
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("kind", ["byte", "char", "bpe"])
def test_a_tokenizer_trained_here_opens_in_transformers(kind, texts, tmp_path):
    control = ["<|endoftext|>", "<s>"]
    made = Tokenizer.train(kind, texts, 300 if kind == "bpe" else None, control_tokens=control, bos_token="<s>")
    made.save(tmp_path)
    ours, theirs = pair(tmp_path)
    for text in [*texts, "what? 1 < 2", ""]:
        assert made.encode(text) == ours.encode(text) == theirs(text).input_ids
        assert ours.decode(ours.encode(text)) == theirs.decode(made.encode(text), skip_special_tokens=True)
    assert ours.control_ids == made.control_ids
    assert (theirs.bos_token_id, theirs.eos_token_id) == (made.bos_id, made.eos_id)


def test_a_character_stands_for_unknown_ones_and_stays_a_character(tmp_path):
    """Also in folders whose settings name it."""
    made = Tokenizer.train("char", ["what? no"])
    made.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"unk_token": "?"}')
    loaded = Tokenizer.load(tmp_path)
    assert loaded.control_ids == frozenset()
    assert loaded.unk_id == made.unk_id
    assert loaded.decode(loaded.encode("no? é")) == "no? ?"
