"""Tokenizers: what each kind is, and the rules they share."""

import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from anyformer.errors import UserError
from anyformer.text import Tokenizer
from anyformer.text.encoding import neutral_cuts
from anyformer.text.trained import WORDS

WRITTEN = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
TOTAL = ["byte", "bpe", "with_added"]


@pytest.mark.parametrize("name", TOTAL)
@settings(deadline=None, max_examples=60)
@given(text=WRITTEN)
def test_bytes_can_write_any_text(zoo, name, text):
    tokenizer = zoo[name]
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_each_byte_token_is_its_byte():
    tokenizer = Tokenizer.train("byte", [])
    assert tokenizer.encode("héllo 😀") == list("héllo 😀".encode())
    assert (tokenizer.vocab_size, tokenizer.eos_id, tokenizer.eos_ids, tokenizer.bos_id) == (257, 256, (256,), None)


def test_characters_are_numbered_by_code_point_and_nothing_is_added(texts):
    tokenizer = Tokenizer.train("char", texts)
    alphabet = sorted(set("".join(texts)))
    assert tokenizer.vocab_size == len(alphabet)
    assert tokenizer.eos_ids == ()
    assert tokenizer.control_ids == frozenset()
    assert tokenizer.encode(texts[1]) == [alphabet.index(character) for character in texts[1]]
    assert tokenizer.decode(tokenizer.encode(texts[1])) == texts[1]


def test_an_unknown_character_becomes_the_declared_token():
    tokenizer = Tokenizer.train("char", ["what? no"])
    assert tokenizer.token(tokenizer.unk_id) == "?"
    assert tokenizer.decode(tokenizer.encode("hé~~t")) == "h???t"
    assert Tokenizer.train("char", ["ba b"]).decode([0]) == " "
    no_mark = Tokenizer.train("char", ["cab"])
    assert no_mark.decode(no_mark.encode("cxb")) == "cab"


def test_bpe_has_every_byte_then_merges_then_control_tokens(texts):
    tokenizer = Tokenizer.train("bpe", texts * 3, 300)
    assert tokenizer.vocab_size == 300
    assert tokenizer.eos_id == 299
    assert tokenizer.control_ids == {299}
    assert sorted(tokenizer.token_bytes(index) for index in range(256)) == [bytes([byte]) for byte in range(256)]
    text = texts[0] + texts[1]
    assert len(tokenizer.encode(text)) < 0.9 * len(text.encode())


def test_bpe_training_gives_the_same_file_in_every_process(texts, tmp_path):
    code = (
        "import sys, json; from anyformer.text import Tokenizer;"
        "Tokenizer.train('bpe', json.loads(sys.argv[1]), 380).save(sys.argv[2])"
    )
    files = []
    for name in ("one", "two", "three"):
        subprocess.run([sys.executable, "-c", code, json.dumps(texts), str(tmp_path / name)], check=True)
        files.append((tmp_path / name / "tokenizer.json").read_bytes())
    assert files[0] == files[1] == files[2]


def test_bpe_finds_the_most_frequent_pair_first():
    tokenizer = Tokenizer.train("bpe", ["aa bb bb bb cc cc"], 259)
    # " b" (3 times) and "bb" (3 times) come before " c" (2 times); the oracle is a count by hand.
    assert {tokenizer.token_bytes(index) for index in (256, 257)} <= {b" b", b"bb", b" bb"}


def test_a_small_vocabulary_or_an_unfit_control_token_is_refused(texts):
    for wrong in (
        lambda: Tokenizer.train("bpe", texts, 256),
        lambda: Tokenizer.train("byte", texts, 300),
        lambda: Tokenizer.train("word", texts),
        lambda: Tokenizer.train("char", [""]),
        lambda: Tokenizer.train("char", ["abc"], control_tokens=["a"]),
        lambda: Tokenizer.train("byte", [], control_tokens=["<x>", "<x>"]),
        lambda: Tokenizer.train("byte", [], control_tokens=[""]),
        lambda: Tokenizer.train("byte", [], eos_token="<x>"),
    ):
        with pytest.raises(UserError):
            wrong()


@pytest.mark.parametrize("name", ["byte", "bpe", "sentencepiece_bpe", "unigram", "flagged", "word_piece"])
def test_text_that_spells_a_control_token_stays_text(zoo, name):
    """No id of a control token comes out of plain text, whatever the model; control=True is the opt-in."""
    tokenizer = zoo[name]
    unknown = {tokenizer.token_id(token) for token in ("<unk>", "[UNK]")}
    around = set(tokenizer.prefix) | set(tokenizer.suffix)
    for index in tokenizer.control_ids:
        spelled = tokenizer.token(index)
        ids = tokenizer.encode(f"hello {spelled}ab{spelled}", bare=True)
        assert not (set(ids) & tokenizer.control_ids) - unknown
        assert tokenizer.encode_batch([f"hello {spelled}ab{spelled}"], bare=True) == [ids]
        assert tokenizer.encode(spelled, control=True).count(index) >= 1
        if name not in ("word_piece", "unigram"):
            assert tokenizer.decode(ids) == f"hello {spelled}ab{spelled}"
    assert around <= tokenizer.control_ids


def test_a_unigram_piece_that_is_a_control_token_is_out_of_reach(zoo):
    """Unigram vocabularies hold their control tokens as pieces, which the library itself lets text reach."""
    tokenizer = zoo["unigram"]
    tokenizer._library.encode_special_tokens = True
    assert 1 in tokenizer._library.encode("a</s>", add_special_tokens=False).ids
    tokenizer._library.encode_special_tokens = False
    assert tokenizer.decode(tokenizer.encode("a</s>", bare=True)) == "a</s>"
    assert tokenizer.encode("a\U0010fffd</s>", bare=True).count(1) == 0


def test_bos_follows_the_post_processor_unless_the_settings_say_otherwise(zoo, tmp_path):
    """By the model's own rule, once."""
    tokenizer = zoo["sentencepiece_bpe"]
    assert tokenizer.encode("Hello")[0] == 1
    assert tokenizer.encode("Hello").count(1) == 1
    assert tokenizer.bos_id == 1
    tokenizer.save(tmp_path)
    for add, bos in ((True, [1]), (False, [])):
        config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "add_bos_token": add}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        loaded = Tokenizer.load(tmp_path)
        assert loaded.encode("Hello") == bos + tokenizer.encode("Hello", bare=True)
        assert loaded.eos_id == 2
        assert loaded.bos_id == 1
    config = {"bos_token": "<|endoftext|>", "add_bos_token": True}
    zoo["byte"].save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert Tokenizer.load(tmp_path).encode("a") == [256, 97]


def test_a_prompt_that_spells_bos_gets_no_second_one_when_control_is_read(zoo):
    """The stated rule for prompts that begin with the BOS text."""
    tokenizer = zoo["sentencepiece_bpe"]
    assert tokenizer.encode("<s>Hello", control=True).count(1) == 1
    assert tokenizer.encode("<s>Hello").count(1) == 1
    assert tokenizer.decode(tokenizer.encode("<s>Hello")) == "<s>Hello"


def test_what_the_post_processor_puts_after_a_text_is_kept(zoo):
    assert zoo["word_piece"].encode("hello playing") == [2, 4, 6, 7, 3]
    assert zoo["unigram"].encode("Hello")[-1] == 1
    assert zoo["word_piece"].encode("hello", bare=True) == [4]


@pytest.mark.parametrize("name", ["byte", "char", "bpe", "sentencepiece_bpe", "unigram", "metaspace", "word_piece"])
def test_plain_text_encodes_as_the_library_does(zoo, texts, name):
    tokenizer = zoo[name]
    for text in [*texts, "Hello world", "", " ", "  two  "]:
        assert tokenizer.encode(text) == tokenizer._library.encode(text).ids
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]
    assert tokenizer.encode_batch(texts, parallel=False) == tokenizer.encode_batch(texts)


@pytest.mark.parametrize(
    "name", ["sentencepiece_bpe", "unigram", "metaspace", "word_piece", "suffixed", "spaced", "bpe"]
)
def test_decoding_equals_the_library(zoo, name):
    tokenizer = zoo[name]
    texts = ["Hello world.", "hello , don't play s", "ab c ab", "Hello     world ..", "größer 😀", "a b"]
    for text in texts:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == tokenizer._library.decode(ids, skip_special_tokens=True)
        assert tokenizer.decode(ids, skip_control=False) == tokenizer._library.decode(ids, skip_special_tokens=False)


@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_decoding_any_byte_level_ids_equals_the_library(zoo, data):
    tokenizer = zoo["bpe"]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    assert tokenizer.decode(ids) == tokenizer._library.decode(ids, skip_special_tokens=True)


def test_added_tokens_keep_their_own_characters(zoo):
    tokenizer = zoo["with_added"]
    assert tokenizer.decode([257, 258, 259]) == "é</é>  😀!"
    assert tokenizer.vocab_size == 260
    assert 257 in tokenizer.encode("xé</é>")


@pytest.mark.parametrize("wrong", [-1, 257, 10**9, 1.5, "3", None])
def test_an_id_outside_the_vocabulary_is_refused(wrong):
    """Rows of a model beyond the tokenizer's vocabulary are no tokens."""
    tokenizer = Tokenizer.train("byte", [])
    with pytest.raises(UserError, match="token id"):
        tokenizer.decode([65, wrong])
    with pytest.raises(UserError, match="token id"):
        tokenizer.stream().push(wrong)


def test_every_id_is_the_token_that_the_vocabulary_has_for_it(zoo):
    for name, tokenizer in zoo.items():
        tokens = {index: token for token, index in tokenizer.library.get_vocab(with_added_tokens=True).items()}
        tokens |= {index: added.content for index, added in tokenizer.library.get_added_tokens_decoder().items()}
        n = tokenizer.vocab_size
        assert n == max(tokens) + 1, name
        assert [tokenizer.token(index) for index in range(-1, n + 1)] == [tokens.get(i) for i in range(-1, n + 1)], name


def test_a_hole_in_the_vocabulary_is_counted_and_refused(zoo):
    """The size is one more than the largest id, not the number of tokens."""
    tokenizer = zoo["holey"]
    assert tokenizer.vocab_size == 5
    assert tokenizer.token(1) is None
    with pytest.raises(UserError):
        tokenizer.decode([1])
    assert tokenizer.decode(np.array([0, 2])) == "a b"


def test_ids_that_the_library_would_change_are_refused(tmp_path):
    """An added token keeps the id its file gives it, or the file is refused."""
    Tokenizer.train("byte", [], control_tokens=["<a>", "<b>"]).save(tmp_path)
    state = json.loads((tmp_path / "tokenizer.json").read_text())
    state["added_tokens"][1]["id"] = 300
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    with pytest.raises(UserError, match="<b>' with id 300"):
        Tokenizer.load(tmp_path)


def test_every_id_that_ends_a_sequence_is_known(tmp_path):
    """A list in generation_config.json joins the tokenizer's own EOS, and config.json's too."""
    Tokenizer.train("byte", [], control_tokens=["<|endoftext|>", "<|im_end|>"]).save(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [256, 257]}')
    (tmp_path / "config.json").write_text('{"eos_token_id": 9}')
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.eos_ids == (256, 257, 9)
    assert tokenizer.eos_id == 256
    tokenizer.save(tmp_path / "again")
    assert Tokenizer.load(tmp_path / "again").eos_ids == (256, 257, 9)


def test_saving_and_loading_keeps_everything(tmp_path, texts):
    made = Tokenizer.train(
        "bpe",
        texts,
        300,
        control_tokens=["<|endoftext|>", "<s>"],
        bos_token="<s>",
        chat_template="{{ bos_token }}{{ messages[0].content }}",
    )
    made.save(tmp_path / "a")
    loaded = Tokenizer.load(tmp_path / "a" / "tokenizer.json")
    loaded.save(tmp_path / "b")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    for tokenizer in (made, loaded):
        assert tokenizer.encode("Hi")[0] == tokenizer.bos_id == made.vocab_size - 1
        assert tokenizer.eos_ids == (made.vocab_size - 2,)
        assert tokenizer.chat_template == "{{ bos_token }}{{ messages[0].content }}"
    assert made.vocabulary_hash == loaded.vocabulary_hash != Tokenizer.train("byte", []).vocabulary_hash
    char = Tokenizer.train("char", ["a?b"])
    char.save(tmp_path / "c")
    assert Tokenizer.load(tmp_path / "c").unk_id == char.unk_id == 0


def test_unknown_keys_of_the_settings_are_written_back(tmp_path):
    Tokenizer.train("byte", []).save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 77, "tokenizer_class": "X"}')
    Tokenizer.load(tmp_path).save(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config["model_max_length"] == 77
    assert config["tokenizer_class"] == "X"


def test_truncation_and_padding_of_a_file_are_not_applied(tmp_path):
    tokenizer = Tokenizer.train("byte", [])
    tokenizer._library.enable_truncation(4)
    tokenizer._library.enable_padding(length=9, pad_id=0, pad_token="!")
    tokenizer._library.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.load(tmp_path).encode("abcdef") == list(b"abcdef")


def test_a_broken_or_missing_tokenizer_is_one_clear_error(tmp_path):
    with pytest.raises(UserError, match="no tokenizer here"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model"')
    with pytest.raises(UserError, match="not a whole tokenizer"):
        Tokenizer.load(tmp_path)
    Tokenizer.train("byte", []).save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(UserError, match="JSON object"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<nowhere>", "add_eos_token": true}')
    with pytest.raises(UserError, match="not in the vocabulary"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("wrong", [b"bytes", 3, None, ["a"], "half \ud83d"])
def test_what_is_not_text_is_refused(wrong):
    with pytest.raises(UserError):
        Tokenizer.train("byte", []).encode(wrong)
    with pytest.raises(UserError):
        Tokenizer.train("byte", []).encode_batch(["a", wrong])


UNBOUNDED = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ORDINARY = st.text(st.sampled_from("abcé数 \t\n\r.,'-=_019s"), max_size=100)


def pieces(pattern, text):
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    return [piece for piece, _ in split.pre_tokenize_str(text)]


@settings(deadline=None, max_examples=300)
@given(text=ORDINARY)
def test_words_of_ordinary_length_are_what_llama_3_makes_of_them(text):
    assert pieces(WORDS, text) == pieces(UNBOUNDED, text)


@pytest.mark.parametrize("letter", ["x", " ", "=", "\n", "\r", "数", " \n", "x="])
def test_one_endless_word_is_cut_so_that_it_can_be_merged(letter):
    """200,000 of one character: merging them as one word takes hours."""
    text = letter * (200_000 // len(letter))
    cut = pieces(WORDS, text)
    assert "".join(cut) == text
    assert max(map(len, cut)) <= 1 + 3 * 128
    tokenizer = Tokenizer.train("bpe", [text], 300)
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("n_before", [0, 1, 61, 100])
def test_an_endless_word_is_not_cut_elsewhere_for_being_encoded_in_pieces(n_before):
    text = "a" * n_before + " " + "x" * 3000
    tokenizer = Tokenizer.train("bpe", [text], 300)
    start = 0
    ids = []
    for end in [*neutral_cuts(tokenizer, text, 512), len(text)]:
        ids += tokenizer.encode(text[start:end])
        start = end
    assert ids == tokenizer.encode(text)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "chat_template.jinja", "generation_config.json"])
@pytest.mark.parametrize("how", ["folder", "link"])
def test_a_settings_file_that_is_none_is_refused(tmp_path, name, how):
    Tokenizer.train("byte", []).save(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    if how == "folder":
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match=name):
        Tokenizer.load(tmp_path)


def test_settings_nested_too_deep_are_refused(tmp_path):
    Tokenizer.train("byte", []).save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[" * 100_000)
    with pytest.raises(UserError, match="cannot be read as JSON"):
        Tokenizer.load(tmp_path)
