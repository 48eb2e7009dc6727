"""SentencePiece models against the `sentencepiece` package, trained here on a few lines."""

import io
import json
import struct
import unicodedata

import pytest
import sentencepiece
from gguf import GGUFReader
from tokenizers import Tokenizer as Library
from tokenizers import models

from anyformer.errors import UserError
from anyformer.text import Tokenizer
from anyformer.text.gguf import read_tokenizer, tokenizer_metadata
from anyformer.text.sentencepiece import parse
from anyformer.weights.gguf.format import read_gguf, write_gguf

LINES = [
    "Hello world, hello there. The quick brown fox jumps over the lazy dog; don't panic!",
    "def f(x):    return x + 1  # größer 😀 数学 한국어 ab abab ababab aaaa aaaaaa",
    "1 < 2 > 0. It was the best of times, it was the worst of times ... 1234567 and 3.14159 <b>bold</b>",
    "naïve café Việt ngữ が ガ ﬁne Ⅳ ½ ① 你好 世界 <0x41> 0x 0x4 <unk> </s>",
]
TEXTS = [
    *("", " ", "  ", "\n", "a", " a", "a ", "▁", " ▁ a▁", "\t\r\n \n\n", "Hello world", "  Hello   world  "),
    *("😀", "größer 😀 unknown Ж char 🏳️‍🌈", "1234567890", "<s>hello</s><unk>", "<0x41>"),
    *(
        "x <b>bold</b> y",
        "x<sep><b>",
        "don't  panic!\n\n\ndef f(x):\n\treturn 3.14",
        "你好世界 한국어",
        "ﬁne ½ Ⅳ ①",
        *LINES,
    ),
]
# Of several ways to cut these into the same pieces, a unigram model may take any.
RUNS = ["ababababab aaaaaaaaaaa", "    aaaa       b"]
IDENTITY = {"remove_extra_whitespaces": False, "normalization_rule_name": "identity"}
OPTIONS = {
    "nmt_nfkc": {},
    "identity": IDENTITY,
    "no prefix": {"add_dummy_prefix": False, **IDENTITY},
    "user defined": {"user_defined_symbols": ["<b>", "</b>", "<sep>", "<b>bold"]},
    "user-defined spaces": {"user_defined_symbols": ["\n\n", "▁▁", "▁▁▁"], "add_dummy_prefix": False, **IDENTITY},
    "other ids": {"bos_id": -1, "eos_id": 0, "unk_id": 2, "pad_id": 1, "control_symbols": ["<b>", "<sep>"]},
    "digits": {"split_digits": True, "split_by_whitespace": False, "normalization_rule_name": "nfkc_cf"},
}


def trained(model_type="bpe", **options):
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES * 3),
        model_writer=out,
        model_type=model_type,
        **{"vocab_size": 420 if options.get("byte_fallback") else 160, **options},
        character_coverage=1.0,
        hard_vocab_limit=False,
        minloglevel=2,
        num_threads=1,
    )
    return out.getvalue()


def loaded(folder, data, **config):
    (folder / "tokenizer.model").write_bytes(data)
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def llama():
    return trained(byte_fallback=True, **IDENTITY)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("falls_back", [True, False], ids=["bytes", "unknown"])
@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_ids_and_text_are_those_of_sentencepiece(tmp_path, kind, falls_back, options):
    """B04. The stream's deltas joined are the decoded text."""
    data = trained(kind, byte_fallback=falls_back, **options)
    oracle = sentencepiece.SentencePieceProcessor(model_proto=data)
    tokenizer = loaded(tmp_path, data)
    assert tokenizer.vocab_size == oracle.vocab_size()
    for text in TEXTS + RUNS if kind == "bpe" else TEXTS:
        ids = oracle.encode(text)
        assert tokenizer.encode(text) == ids, text
        if oracle.unk_id() not in ids and "▁" not in text:
            assert tokenizer.decode(ids) == oracle.decode(ids)
        stream = tokenizer.stream()
        assert "".join([*map(stream.push, ids), stream.finish()]) == tokenizer.decode(ids)


def test_letters_with_marks_apart_are_composed(tmp_path):
    data = trained("unigram")
    oracle = sentencepiece.SentencePieceProcessor(model_proto=data)
    tokenizer = loaded(tmp_path, data)
    for word in ("naïve café", "Việt ngữ", "한국어", "が ガ", "größer"):
        apart = unicodedata.normalize("NFD", word)
        assert apart != word
        assert tokenizer.encode(apart) == oracle.encode(apart) == oracle.encode(word)


def test_a_user_defined_piece_alone_gets_no_space_before_it(tmp_path):
    data = trained(user_defined_symbols=["<b>", "</b>"], **IDENTITY)
    oracle = sentencepiece.SentencePieceProcessor(model_proto=data)
    tokenizer = loaded(tmp_path, data)
    assert tokenizer.encode("<b>") == [oracle.piece_to_id("<b>")]
    for text in ("<b> ", " <b>", "<b><b>", "a<b>a", "<b>a</b>"):
        assert tokenizer.encode(text) == oracle.encode(text), text


def test_roles_come_from_the_file_and_nothing_is_put_around_a_text(tmp_path, llama):
    """B57."""
    tokenizer = loaded(tmp_path, llama)
    assert (tokenizer.unk_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (0, 1, 2, None)
    assert tokenizer.eos_ids == (2,)
    assert tokenizer.control_ids == {0, 1, 2}
    assert (tokenizer.prefix, tokenizer.suffix) == ((), ())
    assert Tokenizer.load(tmp_path / "tokenizer.model").vocabulary_hash == tokenizer.vocabulary_hash


@pytest.mark.parametrize(
    ("config", "prefix", "suffix"),
    [
        ({"add_bos_token": True}, (1,), ()),
        ({"add_bos_token": True, "add_eos_token": True, "eos_token": "</s>"}, (1,), (2,)),
        ({"tokenizer_class": "LlamaTokenizer"}, (1,), ()),
        ({"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": False}, (), ()),
        ({"tokenizer_class": "T5Tokenizer", "extra_ids": 0}, (), (2,)),
    ],
)
def test_what_stands_around_a_text_follows_the_settings_beside(tmp_path, llama, config, prefix, suffix):
    """B57. A text that begins with BOS gets no second one."""
    tokenizer = loaded(tmp_path, llama, **config)
    assert (tokenizer.prefix, tokenizer.suffix) == (prefix, suffix)
    body = tokenizer.encode("Hello", bare=True)
    assert tokenizer.encode("Hello") == [*prefix, *body, *suffix]
    assert tokenizer.encode("<s>Hello", control=True) == [1, *body, *suffix]


def test_text_spells_no_control_token(tmp_path, llama):
    """B19."""
    tokenizer = loaded(tmp_path, llama)
    text = "<s>a</s><unk><0x0A>"
    ids = tokenizer.encode(text)
    assert not tokenizer.control_ids & set(ids)
    assert tokenizer.token_id("<0x0A>") not in ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode(text, control=True)[0] == 1


def test_declared_tokens_rename_pieces_and_follow_them(tmp_path):
    data = trained(user_defined_symbols=["<keep>", "<free0>"], byte_fallback=True, **IDENTITY)
    oracle = sentencepiece.SentencePieceProcessor(model_proto=data)
    free, end = oracle.piece_to_id("<free0>"), oracle.vocab_size()
    declared = {
        str(free): {"content": "<|im_start|>", "special": True},
        str(end): {"content": "<|im_end|>", "special": True},
    }
    tokenizer = loaded(tmp_path, data, added_tokens_decoder=declared, eos_token="<|im_end|>")
    assert (tokenizer.token(free), tokenizer.eos_id) == ("<|im_start|>", end)
    assert {free, end} <= tokenizer.control_ids
    assert not {free, end} & set(tokenizer.encode("<|im_start|>user <free0><|im_end|>"))
    assert tokenizer.encode("<keep>x") == oracle.encode("<keep>x")


def test_declared_flags_leave_user_defined_spaces_as_the_model_has_them(tmp_path):
    """Gemma's tokenizer_config.json declares its runs of ▁ for text that has ▁ itself."""
    data = trained(byte_fallback=True, **OPTIONS["user-defined spaces"])
    oracle = sentencepiece.SentencePieceProcessor(model_proto=data)
    runs = {str(oracle.piece_to_id(run)): {"content": run, "normalized": False} for run in ("▁▁", "▁▁▁")}
    tokenizer = loaded(tmp_path, data, added_tokens_decoder=runs)
    for text in ("a  b   c", "    a", "  "):
        assert tokenizer.encode(text) == oracle.encode(text)


def test_t5s_sentinels_count_backwards(tmp_path):
    tokenizer = loaded(tmp_path, trained("unigram"), tokenizer_class="T5Tokenizer", extra_ids=3)
    n = tokenizer.vocab_size
    assert [tokenizer.token(index) for index in range(n - 3, n)] == ["<extra_id_2>", "<extra_id_1>", "<extra_id_0>"]
    assert tokenizer.encode("a<extra_id_0>", control=True)[-2] == n - 1


def test_a_class_with_other_ids_is_refused(tmp_path, llama):
    with pytest.raises(UserError, match="other ids than the model file"):
        loaded(tmp_path, llama, tokenizer_class="XLMRobertaTokenizer")


def test_tokenizer_json_rules_where_both_are_there(tmp_path, llama):
    Library(models.BPE({"a": 0}, [])).save(str(tmp_path / "tokenizer.json"))
    assert loaded(tmp_path, llama).vocab_size == 1


def test_saved_and_loaded_again_it_gives_the_same_ids(tmp_path, llama):
    tokenizer = loaded(tmp_path, llama, add_bos_token=True)
    (tmp_path / "saved").mkdir()
    tokenizer.save(tmp_path / "saved")
    again = Tokenizer.load(tmp_path / "saved")
    assert [again.encode(text) for text in TEXTS] == [tokenizer.encode(text) for text in TEXTS]


def sized(number, body):
    """Field `number` of a message, of fewer than 16384 bytes."""
    return bytes([number << 3 | 2, len(body) & 0x7F | 0x80, len(body) >> 7]) + body


def piece(token, score=0.0, kind=1):
    return sized(1, sized(1, token) + b"\x15" + struct.pack("<f", score) + bytes([0x18, kind]))


UNKNOWN, TRAINER, NORMALIZER = piece(b"<unk>", kind=2), sized(2, b"\x18\x02"), sized(3, b"\x28\x01")


def test_a_model_by_hand_is_read():
    model = parse(UNKNOWN + piece("▁a".encode(), -2.5) + TRAINER + sized(9, b"ignored") + NORMALIZER, "here")
    assert (model.kind, model.tokens, model.scores, model.types) == ("bpe", ["<unk>", "▁a"], [0.0, -2.5], [2, 1])
    assert (model.spaces.prefix, model.spaces.squeeze, model.spaces.escape) == (True, True, True)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "no whole SentencePiece model"),
        (b"{}", "no whole SentencePiece model"),
        (TRAINER + NORMALIZER, "no pieces"),
        (UNKNOWN + TRAINER, "no normalizer_spec"),
        (b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\x7f", "bytes where 0 are left"),
        (b"\x0a" + b"\xff" * 40, "without an end"),
        (b"\x08\x01", "a number where bytes should be"),
        (b"\x0b\x0c", "a field of form 3"),
        (b"\x02\x00", "field 0"),
        (piece(b"\xff\xfe") + TRAINER + NORMALIZER, "can't decode"),
        (sized(1, b"\x0a\x01a\x10\x05") + TRAINER + NORMALIZER, "no four bytes"),
        (piece(b"a") + piece(b"a") + UNKNOWN + TRAINER + NORMALIZER, "twice"),
        (piece(b"a", float("nan")) + UNKNOWN + TRAINER + NORMALIZER, "score is not a number"),
        (piece(b"a", kind=77) + UNKNOWN + TRAINER + NORMALIZER, "no such type"),
        (piece(b"<0xZZ>", kind=6) + UNKNOWN + sized(2, b"\x18\x02\x98\x02\x01") + NORMALIZER, "this is no byte"),
        (piece(b"") + UNKNOWN + TRAINER + NORMALIZER, "a token is empty"),
        (piece(b"a") + TRAINER + NORMALIZER, "cannot write"),
        (UNKNOWN + piece(b"<u>", kind=2) + TRAINER + NORMALIZER, "more than one token"),
        (UNKNOWN + piece(b"a") + sized(2, b"\x18\x03") + NORMALIZER, "got: word"),
        (UNKNOWN + piece(b"a") + sized(2, b"\x18\x02\xc0\x01\x01") + NORMALIZER, "a space after a word"),
        (UNKNOWN + piece(b"a") + TRAINER + sized(3, sized(2, b"\x00\x01rubbish")), "table of characters"),
    ],
)
def test_what_is_no_model_is_refused_in_one_sentence(tmp_path, data, said):
    with pytest.raises(UserError, match=said):
        loaded(tmp_path, data)


def test_a_model_cut_short_is_refused_wherever_it_ends():
    whole = UNKNOWN + piece(b"ab", -1.0) + piece(b"a") + piece(b"b") + TRAINER + NORMALIZER
    parse(whole, "here")
    for end in range(len(whole)):
        with pytest.raises(UserError, match="no whole SentencePiece model"):
            parse(whole[:end], "here")


def test_the_table_of_characters_is_written_as_bytes(tmp_path):
    """llama.cpp opens no file in which it is a list of anything else."""
    tokenizer = loaded(tmp_path, trained("unigram"))
    metadata = tokenizer_metadata(tokenizer, tokenizer.vocab_size)
    table = metadata["tokenizer.ggml.precompiled_charsmap"]
    assert isinstance(table, bytes)
    assert len(table) > 1000
    path = tmp_path / "x.gguf"
    write_gguf(path, {"general.architecture": "t5", **metadata}, [])
    field = GGUFReader(path).fields["tokenizer.ggml.precompiled_charsmap"]
    assert field.types[1].name == "UINT8"
    back = read_tokenizer(read_gguf(path).metadata, path)
    for text in ("ﬁne ①②  Ｈello", "plain text"):
        assert back.encode(text) == tokenizer.encode(text)
