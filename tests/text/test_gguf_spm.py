"""GGUF tokenizers of the SentencePiece kinds: against a plain search, the `sentencepiece` package, and themselves."""

import io
import random
import warnings
from itertools import pairwise

import pytest
import sentencepiece
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Library

from anyformer.errors import UserError
from anyformer.text import Tokenizer
from anyformer.text.gguf_spm import library_of, metadata_of

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
TEXTS = [
    "",
    " ",
    "   ",
    "a",
    " a",
    "Hello world",
    "  Hello\n\nworld ",
    "<s>a</s><unk><0x0A>",
    "é 😀 数",
    "▁▁ ▁",
    "ab ba<b>",
]
PIECES = ["▁", *"Helowrdab<>/s", "He", "ll", "▁He", "llo", "▁Hello", "▁w", "or", "ld", "▁wor", "▁world", "ab", "▁▁"]
KEYS = "tokenizer.ggml."


def read(tokens, scores, types, model="llama", **keys):
    metadata = {KEYS + key: value for key, value in keys.items()}
    return library_of(tokens, scores, types, model=model, metadata=metadata, where="model.gguf")


def llama(*more, **keys):
    """The shape of Llama 2, and of Gemma without the space: `more` are tokens with their types."""
    tokens = ["<unk>", "<s>", "</s>", *BYTES, *PIECES, *(token for token, _ in more)]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(PIECES))] + [-1000.0] * len(more)
    types = [2, 3, 3] + [6] * 256 + [1] * len(PIECES) + [kind for _, kind in more]
    return read(tokens, scores, types, **keys)


def again(metadata):
    return library_of(
        *(metadata[KEYS + key] for key in ("tokens", "scores", "token_type")),
        model=metadata[KEYS + "model"],
        metadata=metadata,
        where="again",
    )


def pieces(library, text):
    return Tokenizer(library).library.encode(text, add_special_tokens=False).tokens


def joined(text, scores):
    """SentencePiece's BPE, word for word: of all neighbours that make a piece, the best pair, leftmost first."""
    parts = list(text)
    while True:
        pairs = [(scores[a + b], -at) for at, (a, b) in enumerate(pairwise(parts)) if a + b in scores]
        if not pairs:
            return parts
        at = -max(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def made_up(rng, ties):
    letters = list("▁abc"[: rng.randint(2, 4)])
    longer = sorted({"".join(rng.choices(letters, k=rng.randint(2, 6))) for _ in range(rng.randint(3, 14))})
    ranks = rng.sample(range(len(longer)), len(longer))
    scores = [0.0] * 257 + [-1e6] * len(letters) + [-float(rank // 3 if ties else rank) for rank in ranks]
    return letters, ["<unk>", *BYTES, *letters, *longer], scores, [2] + [6] * 256 + [1] * (len(letters) + len(longer))


@pytest.mark.parametrize("ties", [False, True], ids=["scores apart", "equal scores"])
def test_merges_join_the_best_and_leftmost_pair(ties):
    """Where equal scores leave that open, reading warns."""
    rng = random.Random(3)
    warned = 0
    for _ in range(60):
        letters, tokens, scores, types = made_up(rng, ties)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            library = read(tokens, scores, types, add_space_prefix=False)
        if said:
            warned += 1
            continue
        normal = {token: score for token, score, kind in zip(tokens, scores, types, strict=True) if kind == 1}
        for _ in range(60):
            text = "".join(rng.choices(letters, k=rng.randint(1, 14)))
            assert library.encode(text).tokens == joined(text, normal), (text, normal)
        assert again(metadata_of(library)).to_str() == library.to_str()
    assert warned == 0 if not ties else 0 < warned < 40, warned


def test_one_score_for_every_token_is_refused():
    with pytest.raises(UserError, match="same score"):
        read(["<unk>", *BYTES, "a", "b", "ab", "ba"], [-1000.0] * 261, [2] + [6] * 256 + [1] * 4)


def test_bytes_join_to_a_character_and_spaces_stay():
    """B04."""
    tokenizer = Tokenizer(llama())
    face = [tokenizer.token_id(f"<0x{byte:02X}>") for byte in (0xF0, 0x9F, 0x98, 0x80)]
    hello = [tokenizer.token_id("▁Hello"), tokenizer.token_id("▁world")]
    assert tokenizer.encode("Hello world") == hello
    assert tokenizer.decode(hello) == "Hello world"
    assert tokenizer.encode("😀") == [tokenizer.token_id("▁"), *face]
    assert tokenizer.decode(face) == "😀"
    for ids in (face, hello, [*hello, *face, *face[:2]]):
        stream = tokenizer.stream()
        deltas = [stream.push(index) for index in ids]
        assert not any("\ufffd" in delta for delta in deltas)
        assert "".join([*deltas, stream.finish()]) == tokenizer.decode(ids)


def test_a_space_goes_before_a_text_and_after_each_control_token():
    tokenizer = Tokenizer(llama())
    named = [tokenizer.token(index) for index in tokenizer.encode("a<s>b", control=True)]
    assert named == ["▁", "a", "<s>", "▁", "b"]
    assert [tokenizer.token(index) for index in tokenizer.encode("  a")] == ["▁▁", "▁", "a"]
    without = Tokenizer(llama(add_space_prefix=False))
    assert [without.token(index) for index in without.encode("a<s>b", control=True)] == ["a", "<s>", "b"]
    assert without.decode(without.encode(" a")) == " a"


def test_text_spells_no_control_token_and_no_byte():
    """B19. As SentencePiece has it; llama.cpp makes a byte token where pieces lead to its name."""
    tokenizer = Tokenizer(llama(("<s", 1), ("<|im_end|>", 3)))
    for text in ("<s>a</s>", "<unk>", "<0x0A>", "x<|im_end|>"):
        ids = tokenizer.encode(text)
        assert not tokenizer.control_ids & set(ids)
        assert tokenizer.decode(ids) == text


def test_user_defined_tokens_are_found_first_and_the_longest():
    library = llama(("\n", 4), ("\n\n", 4), ("<b>", 4), ("  ", 4), add_space_prefix=False)
    assert pieces(library, "a\n\n\nb<b>  s") == ["a", "\n\n", "\n", "b", "<b>", "  ", "s"]
    assert not Tokenizer(library).control_ids & set(Tokenizer(library).encode("\n\n<b>"))
    assert again(metadata_of(library)).to_str() == library.to_str()


@pytest.mark.parametrize("squeeze", [True, False])
def test_a_unigram_vocabulary_splits_as_sentencepiece_does(squeeze):
    lines = ["Hello world and the other world", "a bold <b> word, ½ of it é ab aab bba", "1 12 123  1234 hello"]
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines * 5),
        model_writer=out,
        vocab_size=70,
        remove_extra_whitespaces=squeeze,
        normalization_rule_name="identity",
        pad_id=3,
        minloglevel=2,
        hard_vocab_limit=False,
    )
    oracle = sentencepiece.SentencePieceProcessor(model_proto=out.getvalue())
    ids = range(oracle.vocab_size())
    kinds = [2 if oracle.is_unknown(index) else 3 if oracle.is_control(index) else 1 for index in ids]
    library = read(
        [oracle.id_to_piece(index) for index in ids],
        [oracle.get_score(index) for index in ids],
        kinds,
        "t5",
        add_space_prefix=True,
        remove_extra_whitespaces=squeeze,
        unknown_token_id=oracle.unk_id(),
    )
    tokenizer = Tokenizer(library)
    for text in (*TEXTS, *lines):
        assert tokenizer.encode(text) == oracle.encode(text), text
    assert again(metadata_of(library)).to_str() == library.to_str()


def test_what_is_read_comes_back_when_written():
    more = [("<|im_end|>", 3), ("<free>", 5), ("\n", 4)]
    for library in (llama(*more), llama(*more, add_space_prefix=False)):
        found = metadata_of(library)
        assert (found[KEYS + "model"], found[KEYS + "unknown_token_id"]) == ("llama", 0)
        assert found[KEYS + "token_type"][:4] == [2, 3, 3, 6]
        assert [found[KEYS + "token_type"][found[KEYS + "tokens"].index(token)] for token, _ in more] == [3, 1, 4]
        assert pieces(again(found), "Hello  world\n<b>é") == pieces(library, "Hello  world\n<b>é")


def test_user_defined_spaces_are_written_as_they_stand_in_a_text():
    library = llama(("  ", 4), ("\n", 4), add_space_prefix=False)
    marked = Library.from_str(library.to_str().replace('"  "', '"▁▁▁"'))
    marked.add_tokens([AddedToken("▁▁▁", normalized=True)])
    found = metadata_of(marked)
    assert found[KEYS + "tokens"][-2:] == ["   ", "\n"]
    assert found[KEYS + "token_type"][-2:] == [4, 4]
    for text in ("a   b", "    \n ", "  a"):
        assert again(found).encode(text).ids == marked.encode(text).ids


def published(merges, **model):
    """A tokenizer.json of Llama's kind with its own merges, and without rules for spaces."""
    letters = ["▁", *"Heloab"]
    tokens = ["<unk>", "<s>", "</s>", *BYTES, *letters, *dict.fromkeys("".join(pair) for pair in merges)]
    vocab = {token: index for index, token in enumerate(tokens)}
    library = Library(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True, **model))
    library.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    return library


# As transformers derives them from scores: every way to make a piece, the pieces in their order.
DERIVED = [("l", "l"), ("▁", "H"), ("e", "l"), ("e", "ll"), ("el", "l"), ("▁H", "ell"), ("▁", "▁"), ("▁▁", "▁▁")]
WRITE_SPACES = normalizers.Replace(" ", "▁")


@pytest.mark.parametrize(
    ("normalizer", "pre_tokenizer", "prefix"),
    [
        (normalizers.Sequence([normalizers.Prepend("▁"), WRITE_SPACES]), None, True),
        (WRITE_SPACES, pre_tokenizers.Split(" ", "merged_with_previous"), False),
        (None, pre_tokenizers.Metaspace("▁", "never", split=False), False),
    ],
    ids=["Llama 2", "Gemma", "Metaspace"],
)
def test_published_forms_are_written_and_give_the_same_ids(normalizer, pre_tokenizer, prefix):
    library = published(DERIVED)
    if normalizer is not None:
        library.normalizer = normalizer
    if pre_tokenizer is not None:
        library.pre_tokenizer = pre_tokenizer
    found = metadata_of(library)
    assert found[KEYS + "add_space_prefix"] is prefix
    back = again(found)
    for text in (*TEXTS, "Hell  Hellell     "):
        assert back.encode(text).ids == library.encode(text).ids, text


def test_a_rule_that_gguf_lacks_is_named():
    library = published(DERIVED)
    library.pre_tokenizer = pre_tokenizers.Metaspace("▁", "first", split=False)
    with pytest.warns(UserWarning, match="begins with a space; text after a control token"):
        found = metadata_of(library)
    assert again(found).encode("Hell Hell").ids == library.encode("Hell Hell").ids


def spaced(library):
    library.normalizer = WRITE_SPACES
    return library


@pytest.mark.parametrize(
    ("library", "said"),
    [
        (
            spaced(published([("l", "l"), ("e", "ll"), ("e", "l"), ("H", "e"), ("He", "ll"), ("H", "ell")])),
            "order of its",
        ),
        (spaced(published([("e", "l"), ("H", "e"), ("He", "l")])), "'H' [+] 'el'"),
        (spaced(published(DERIVED, ignore_merges=True)), "ignore_merges"),
    ],
)
def test_merges_that_follow_from_no_scores_are_refused(library, said):
    with pytest.raises(UserError, match=said):
        metadata_of(library)


def test_rules_without_words_in_gguf_are_refused():
    library = published(DERIVED)
    library.normalizer = normalizers.Sequence([normalizers.Lowercase(), WRITE_SPACES])
    with pytest.raises(UserError, match="no place in GGUF"):
        metadata_of(library)
    library.normalizer = WRITE_SPACES
    library.pre_tokenizer = pre_tokenizers.Split(Regex(r"\d"), "isolated")
    with pytest.raises(UserError, match="no place in GGUF"):
        metadata_of(library)
    library = spaced(Library(models.BPE({"<unk>": 0, "▁": 1, "a": 2}, [], unk_token="<unk>")))
    with pytest.raises(UserError, match="in bytes"):
        metadata_of(library)


def test_other_kinds_are_none_of_these():
    byte_level = Library(models.BPE({"a": 0}, []))
    byte_level.pre_tokenizer = pre_tokenizers.ByteLevel()
    for library in (byte_level, Library(models.BPE({"a": 0}, [])), Library(models.WordLevel({"a": 0}, unk_token="a"))):
        assert metadata_of(library) is None


def test_a_published_unigram_form_is_written():
    """T5's: Metaspace before splitting, sentinels after the pieces."""
    vocab = [
        ("<pad>", 0.0),
        ("</s>", 0.0),
        ("<unk>", 0.0),
        ("▁", -2.0),
        ("▁a", -3.0),
        ("b", -4.0),
        ("ab", -4.5),
        ("a", -5.0),
    ]
    library = Library(models.Unigram(vocab, unk_id=2))
    library.normalizer = normalizers.Sequence([normalizers.Strip(left=False), normalizers.Replace(Regex(" {2,}"), " ")])
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.add_tokens([AddedToken(token, special=True) for token in ("<pad>", "</s>", "<unk>", "<extra_id_0>")])
    found = metadata_of(library)
    assert (found[KEYS + "add_space_prefix"], found[KEYS + "remove_extra_whitespaces"]) == (True, True)
    assert found[KEYS + "tokens"][-1] == "<extra_id_0>"
    back = again(found)
    for text in ("a ab  b", " aab ", "a", "", "x ab"):
        assert back.encode(text).ids == library.encode(text).ids, text


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"scores": [0.0]}, "needs a score"),
        ({"types": [2]}, "needs a score"),
        ({"tokens": ["<unk>", "a", "a"]}, "twice"),
        ({"scores": [0.0, float("inf"), 0.0]}, "not a number"),
        ({"types": [2, 9, 1]}, "no such type"),
        ({"types": [2, 6, 1]}, "no byte"),
        ({"types": [1, 1, 1], "tokens": ["x", "a", "b"]}, "cannot write"),
        ({"model": "rwkv"}, "no SentencePiece"),
        ({"unknown_token_id": 3}, "this is no token"),
        ({"unknown_token_id": "0"}, "this is no token"),
        ({"add_space_prefix": 1}, "either true or false"),
        ({"model": "t5", "precompiled_charsmap": "text"}, "no list of bytes"),
        ({"model": "t5", "precompiled_charsmap": [1, 2, -3]}, "table of characters"),
    ],
)
def test_what_cannot_be_meant_is_refused(change, said):
    given = {"tokens": ["<unk>", "a", "b"], "scores": [0.0, -1.0, -2.0], "types": [2, 1, 1], **change}
    with pytest.raises(UserError, match=said):
        read(given.pop("tokens"), given.pop("scores"), given.pop("types"), **given)


def test_a_token_without_a_text_gets_a_name():
    library = read(["<unk>", "", "a"], [0.0, -1.0, -2.0], [2, 1, 1], "t5")
    assert library.id_to_token(1) == "[EMPTY_1]"
