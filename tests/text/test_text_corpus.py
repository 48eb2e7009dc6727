"""Corpora: what is read, how it is split, what lies on disk."""

import json
import math
import os
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anyformer.errors import UserError
from anyformer.text import Tokenizer
from anyformer.text.corpus import Corpus, bits_per_byte, prepare
from anyformer.text.encoding import neutral_cuts
from anyformer.text.settings import Settings
from anyformer.text.shards import Tokens
from anyformer.text.sources import Document, list_documents
from anyformer.text.split import Part, sample_texts, split_documents

WORDS = "the of größer and 😀 to def return self for x1 in import 数学 value list None (a, b) ...".split()


def some_text(seed, words=200):
    draw = random.Random(seed)
    return "".join(draw.choice(WORDS) + draw.choice([" ", " ", "\n", ", "]) for _ in range(words))


@pytest.fixture
def folder(tmp_path):
    """24 documents of unequal length, three of them equal, and some that are no text."""
    root = tmp_path / "texts"
    (root / "sub").mkdir(parents=True)
    for index in range(21):
        place = root / "sub" if index % 3 else root
        (place / f"d{index:02d}.txt").write_text(some_text(index, 40 + 37 * (index % 7)))
    for name in ("copy1.md", "copy2.md", "sub/copy3.md"):
        (root / name).write_text(some_text(99))
    return root


def documents_of(split, tokenizer):
    ends = [*split.documents[1:], split.n_tokens]
    return [tokenizer.decode(split.tokens[a:b]) for a, b in zip(split.documents, ends, strict=True)]


@pytest.mark.parametrize("kind", ["byte", "char", "bpe"])
def test_every_document_comes_back_whole_on_one_side(folder, tmp_path, kind):
    corpus = prepare(folder, tmp_path / "out", kind, 300 if kind == "bpe" else None, val_fraction=0.2)
    train, val = (documents_of(split, corpus.tokenizer) for split in (corpus.train, corpus.val))
    originals = sorted(path.read_text() for path in folder.rglob("*.*"))
    # What the characters of the training text cannot write is marked; with this seed there is nothing of the kind.
    assert sorted(train + val) == originals
    assert corpus.inexact_documents == 0
    assert not set(train) & set(val)
    assert (train + val).count(some_text(99)) == 3
    for split, texts in ((corpus.train, train), (corpus.val, val)):
        assert list(split.document_bytes) == [len(text.encode()) for text in texts]
        assert split.n_bytes == sum(len(text.encode()) for text in texts)
        assert split.n_tokens == len(split.tokens)
        assert split.n_documents == len(texts)
    share = corpus.val.n_bytes / (corpus.val.n_bytes + corpus.train.n_bytes)
    assert 0.14 < share <= 0.2


def test_each_document_ends_with_eos_and_nothing_else_is_added(folder, tmp_path):
    corpus = prepare(folder, tmp_path / "out", "byte")
    for split in (corpus.train, corpus.val):
        tokens = split.tokens[:]
        ends = np.flatnonzero(tokens == 256)
        assert list(ends + 1) == [*split.documents[1:], split.n_tokens]
        assert split.n_tokens == split.n_bytes + split.n_documents


def test_the_tokenizer_learns_from_the_training_side_alone(folder, tmp_path):
    """The split never leaks: a character that only validation has is unknown."""
    for index in range(21):
        path = next(folder.rglob(f"d{index:02d}.txt"))
        path.write_text(path.read_text() + chr(0x2600 + index))
    corpus = prepare(folder, tmp_path / "out", "char", val_fraction=0.3)
    signs = {chr(0x2600 + index) for index in range(21)}
    known = {sign for sign in signs if corpus.tokenizer.token_id(sign) is not None}
    train = "".join(documents_of(corpus.train, corpus.tokenizer))
    assert known
    assert known == signs & set(train)
    assert known != signs
    assert corpus.inexact_documents == len(signs - known)
    # Bytes are the source's own, whatever the tokenizer could write.
    total = sum(path.stat().st_size for path in folder.rglob("*.*"))
    assert corpus.train.n_bytes + corpus.val.n_bytes == total


def test_a_single_document_is_split_by_position(tmp_path):
    text = some_text(5, 3001)
    (tmp_path / "one.txt").write_bytes(text.encode())
    corpus = prepare(tmp_path / "one.txt", tmp_path / "out", "char")
    at = int(len(text) * 0.9)
    assert corpus.tokenizer.vocab_size == len(set(text[:at]))
    assert documents_of(corpus.train, corpus.tokenizer) == [text[:at]]
    assert documents_of(corpus.val, corpus.tokenizer) == [text[at:]]
    assert corpus.info["split_by"] == "position"
    bpe = prepare(tmp_path / "one.txt", tmp_path / "bpe", "bpe", 300)
    assert bpe.tokenizer.eos_id is not None
    for split in (bpe.train, bpe.val):
        assert bpe.tokenizer.eos_id not in split.tokens[:]


def test_copies_of_one_document_are_one_document(tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("abcdefghij" * 3)
    train, val = split_documents(list_documents([tmp_path]).documents, 0.1)
    assert [part.text() for part in train + val] == [("abcdefghij" * 3)[:27], "hij"]


def test_no_validation_text_on_request(folder, tmp_path):
    corpus = prepare(folder, tmp_path / "out", "byte", val_fraction=0)
    assert corpus.val.n_tokens == 0
    assert corpus.val.n_documents == 0
    assert corpus.train.n_documents == 24
    assert len(corpus.val.tokens[:]) == 0
    with pytest.raises(UserError, match="shorter than the context"):
        corpus.val.require(1)


@settings(deadline=None, max_examples=100)
@given(
    sizes=st.lists(st.integers(1, 10_000), min_size=2, max_size=60, unique=True),
    fraction=st.floats(0.001, 0.95),
)
def test_documents_are_dealt_out_by_content(sizes, fraction):
    import hashlib

    documents = [
        Document(f"d{size}", size, hashlib.sha256(str(size).encode()).hexdigest(), lambda: b"") for size in sizes
    ]
    train, val = split_documents(documents, fraction)
    assert train
    assert val
    assert sorted(part.document.size for part in train + val) == sorted(sizes)
    bytes_of_val = sum(part.document.size for part in val)
    target = fraction * sum(sizes)
    if len(val) > 1:
        assert bytes_of_val <= target
    assert bytes_of_val >= 0.9 * target - max(sizes)
    again, _ = split_documents(documents[::-1], fraction)
    assert {part.document.size for part in again} == {part.document.size for part in train}


@pytest.mark.parametrize("fraction", [-0.1, 1, 1.5, float("nan"), True])
def test_an_impossible_share_is_refused(folder, tmp_path, fraction):
    with pytest.raises(UserError, match="val_fraction"):
        prepare(folder, tmp_path / "out", "byte", val_fraction=fraction)


def test_the_same_text_gives_the_same_bytes(folder, tmp_path):
    for name in ("one", "two"):
        prepare(folder, tmp_path / name, "bpe", 300)
    files = [sorted(p.relative_to(tmp_path / n) for p in (tmp_path / n).rglob("*.*")) for n in ("one", "two")]
    assert files[0] == files[1]
    assert len(files[0]) == 7
    for file in files[0]:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def test_shards_are_bounded_and_read_as_one(folder, tmp_path):
    whole = prepare(folder, tmp_path / "whole", "byte")
    parts = prepare(folder, tmp_path / "parts", "byte", shard_tokens=1000)
    tokens, expected = parts.train.tokens, whole.train.tokens[:]
    sizes = [path.stat().st_size for path in sorted((tmp_path / "parts" / "train").glob("tokens-*"))]
    assert len(sizes) > 5
    assert set(sizes[:-1]) == {2000}
    assert sizes[-1] <= 2000
    raw = b"".join(path.read_bytes() for path in sorted((tmp_path / "parts" / "train").glob("tokens-*")))
    assert np.array_equal(np.frombuffer(raw, dtype="<u2"), expected)
    n = len(expected)
    assert len(tokens) == n
    assert tokens[:].dtype == np.int64
    for key in (slice(0, 0), slice(990, 3010), slice(1000, 2000), slice(-5, None), slice(7, -7, 13), slice(50, 10)):
        assert np.array_equal(tokens[key], expected[key])
    assert np.array_equal(tokens[::-1], expected[::-1])
    at = np.random.default_rng(0).integers(-n, n, size=(4, 9))
    assert np.array_equal(tokens[at], expected[at])
    assert tokens[999] == expected[999]
    assert tokens[-1] == expected[-1]
    assert isinstance(tokens[0], int)
    assert tokens.read(1200, 1300).dtype == np.dtype("<u2")
    for wrong in (n, -n - 1, np.array([0, n]), np.array([0.5])):
        with pytest.raises(IndexError):
            tokens[wrong]
    assert len(Tokens([])) == 0
    assert len(Tokens([])[:]) == 0


def test_large_vocabularies_take_four_bytes(folder, tmp_path):
    state = json.loads(Tokenizer.train("byte", [])._library.to_str())
    state["model"]["vocab"] |= {f"filler{index}": index for index in range(256, 70_000)}
    state["added_tokens"][0]["id"] = 70_000
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    corpus = prepare(folder, tmp_path / "out", tmp_path / "tokenizer.json")
    assert corpus.info["dtype"] == "uint32"
    assert corpus.train.tokens.read(0, 1).dtype == np.dtype("<u4")
    assert documents_of(corpus.train, corpus.tokenizer)[0].encode() == bytes(
        corpus.train.tokens[: corpus.train.documents[1]].astype(np.uint8)
    )


def test_segments_name_the_document_of_each_token(folder, tmp_path):
    """A packed window knows where each document begins."""
    corpus = prepare(folder, tmp_path / "out", "byte", shard_tokens=777)
    split = corpus.train
    expected = np.zeros(split.n_tokens, dtype=int)
    for place in split.documents[1:]:
        expected[place:] += 1
    assert np.array_equal(split.segments(0, split.n_tokens), expected)
    assert np.array_equal(split.segments(500, 2500), expected[500:2500])
    assert split.segments(3, 9).dtype == np.int64
    last_of_first = split.documents[1] - 1
    assert list(split.segments(last_of_first, last_of_first + 2)) == [0, 1]


@pytest.mark.parametrize("name", ["byte", "bpe", "sentencepiece_bpe"])
def test_bytes_of_any_range_are_those_its_tokens_stand_for(folder, tmp_path, zoo, name):
    corpus = prepare(folder, tmp_path / "out", zoo[name])
    assert corpus.inexact_documents == 0
    for split in (corpus.train, corpus.val):
        assert split.bytes_of(0, split.n_tokens) == split.n_bytes
        middle = split.n_tokens // 3
        assert split.bytes_of(0, middle) + split.bytes_of(middle, split.n_tokens) == split.n_bytes
        ends = [*split.documents[1:], split.n_tokens]
        assert [split.bytes_of(a, b) for a, b in zip(split.documents, ends, strict=True)] == list(split.document_bytes)
        first = int(split.tokens[0])
        lost = 0 if first in corpus.tokenizer.control_ids else len(corpus.tokenizer.token_bytes(first))
        assert split.predicted_bytes == split.n_bytes - lost


def test_bits_per_byte_of_a_uniform_model_are_known(tmp_path):
    """A model that finds each of 257 tokens equally probable spends log2(257) bits on every predicted one."""
    texts = ["ab😀", "cdefgh"]
    for index, text in enumerate(texts):
        (tmp_path / f"{index}.txt").write_text(text)
    split = prepare(sorted(tmp_path.glob("*.txt")), tmp_path / "out", "byte", val_fraction=0).train
    predicted = split.n_tokens - 1
    assert (predicted, split.n_bytes, split.predicted_bytes) == (6 + 6 + 2 - 1, 12, 11)
    nats = predicted * math.log(257)
    assert bits_per_byte(nats, split.predicted_bytes) == pytest.approx(13 * math.log2(257) / 11, rel=1e-12)
    with pytest.raises(UserError, match="at least one"):
        bits_per_byte(1.0, 0)


def test_a_models_own_bos_and_eos_surround_each_document(folder, tmp_path, zoo):
    """Documents are written as `encode` gives them."""
    bos = prepare(folder, tmp_path / "bos", zoo["sentencepiece_bpe"])
    assert set(bos.train.tokens[bos.train.documents]) == {1}
    assert (bos.train.tokens[:] == 1).sum() == bos.train.n_documents
    named = Tokenizer(zoo["unigram"]._library, Settings(named={"eos_token": "</s>"}))
    assert named.eos_id == 1
    eos = prepare(folder, tmp_path / "eos", named).train
    assert set(eos.tokens[eos.documents[1:] - 1]) == {1}
    assert (eos.tokens[:] == 1).sum() == eos.n_documents


@pytest.mark.parametrize("name", ["byte", "char", "bpe", "sentencepiece_bpe", "unigram"])
def test_long_texts_are_cut_only_where_no_token_changes(zoo, name):
    tokenizer = zoo[name]
    text = "\n\n   ".join(some_text(seed, 300) for seed in range(4)) + "word" * 100
    cuts = neutral_cuts(tokenizer, text, piece=500)
    assert cuts or name in ("sentencepiece_bpe", "unigram")
    assert not (cuts and name == "sentencepiece_bpe")
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    together = [index for ids in tokenizer.encode_batch(pieces, bare=True) for index in ids]
    assert together == tokenizer.encode(text, bare=True)
    if name in ("byte", "bpe"):
        assert max(map(len, pieces)) < 2000
        assert all(tokenizer.spells(tokenizer.encode(p, bare=True), p, first=i == 0) for i, p in enumerate(pieces))


def test_a_document_longer_than_a_piece_is_encoded_as_a_whole(tmp_path):
    text = some_text(1, 60_000)
    (tmp_path / "long.txt").write_text(text)
    seen = []
    corpus = prepare(
        tmp_path / "long.txt", tmp_path / "out", "bpe", 350, 0, progress=lambda done, total: seen.append((done, total))
    )
    assert len(text) > 3 * 65536
    assert list(corpus.train.tokens[:]) == [*corpus.tokenizer.encode(text), corpus.tokenizer.eos_id]
    assert corpus.inexact_documents == 0
    assert corpus.train.n_documents == 1
    assert seen[-1] == (len(text.encode()), len(text.encode()))


def test_the_sample_for_training_is_spread_over_all_text(tmp_path):
    texts = {f"{index}.txt": some_text(index, 3000) for index in range(12)}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    parts = [Part(document) for document in list_documents([tmp_path]).documents]
    assert sorted(sample_texts(parts, 10**9)) == sorted(texts.values())
    some = list(sample_texts(parts, 60_000))
    assert 60_000 <= sum(len(text.encode()) for text in some) <= 200_000
    assert some == list(sample_texts(parts[::-1], 60_000))
    long = "".join(f"{index:09d}\n" for index in range(100_000))
    (tmp_path / "long").write_text(long)
    pieces = list(sample_texts([Part(list_documents([tmp_path / "long"]).documents[0])], 4 * 65536))
    places = [long.index(piece[:20]) for piece in pieces]
    assert places == [0, 250_000, 500_000, 750_000]
    assert all(len(piece) == 65536 for piece in pieces)


# -------------------------------------------------------------------------------- sources


def test_a_folder_gives_its_text_files_once_in_order(folder):
    (folder / "picture.png").write_bytes(b"\x89PNG\0")
    (folder / "bad.txt").write_bytes(b"abc\xff")
    (folder / "null.txt").write_bytes(b"abc\0def")
    (folder / "empty.txt").write_bytes(b"")
    (folder / ".hidden.txt").write_text("secret")
    (folder / "sub" / "loop").symlink_to(folder, target_is_directory=True)
    (folder / "again.txt").symlink_to(folder / "d00.txt")
    (folder / "dangling.txt").symlink_to(folder / "nowhere.txt")
    listing = list_documents([folder, folder / "d00.txt", folder])
    assert len(listing.documents) == 24
    names = [document.name for document in listing.documents]
    assert names == [document.name for document in list_documents([folder]).documents]
    assert listing.skipped["not text by suffix"] >= 1
    once = list_documents([folder]).skipped
    assert once == {"not text by suffix": 1, "not valid UTF-8": 1, "binary, not text": 1, "empty": 1}


def test_a_file_named_by_itself_must_be_text(tmp_path):
    cases = {
        "bad.txt": (b"abc\xffd", "byte 3"),
        "cut.txt": ("é".encode()[:1], "byte 0"),
        "nul.bin": (b"ab\0", "byte 2"),
    }
    for name, (data, where) in cases.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(UserError, match=f"{name}, {where}"):
            prepare(tmp_path / name, tmp_path / "out", "byte")
    (tmp_path / "no.suffix-at-all").write_text("text " * 9)
    assert prepare(tmp_path / "no.suffix-at-all", tmp_path / "out", "byte").train.n_tokens == 40


def test_nothing_to_learn_from_is_one_clear_error(tmp_path):
    """Before any training, not as a NaN in it."""
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "folder").mkdir()
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").write_bytes(b"\0")
    for source in ("empty.txt", "folder", "pictures", "missing.txt"):
        with pytest.raises(UserError, match=source):
            prepare(tmp_path / source, tmp_path / "out", "byte")
    with pytest.raises(UserError, match="no text was given"):
        prepare([], tmp_path / "out", "byte")
    (tmp_path / "one.txt").write_text("x")
    with pytest.raises(UserError, match="too short"):
        prepare(tmp_path / "one.txt", tmp_path / "out", "byte")
    assert not (tmp_path / "out").exists()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_corpus_shorter_than_the_context_says_so(tmp_path):
    (tmp_path / "one.txt").write_text("x" * 40)
    corpus = prepare(tmp_path / "one.txt", tmp_path / "out", "byte")
    corpus.train.require(35)
    with pytest.raises(UserError, match="36 tokens"):
        corpus.train.require(36)


def test_a_file_that_changes_meanwhile_is_noticed(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    document = list_documents([tmp_path / "a.txt"]).documents[0]
    (tmp_path / "a.txt").write_text("two")
    with pytest.raises(UserError, match="changed"):
        document.text()


def test_the_python_library_and_its_documentation_are_at_hand():
    library = list_documents(["python:stdlib"])
    names = [document.name for document in library.documents]
    assert any(name.endswith("/json/decoder.py") for name in names)
    assert names == sorted(names)
    assert not any(part in name for name in names for part in ("/test/", "/idlelib/", "site-packages"))
    assert sum(document.size for document in library.documents) > 5_000_000
    topics = list_documents(["python:docs"]).documents
    assert len(topics) > 50
    assert "python:docs if" in [document.name for document in topics]
    assert "else" in next(document for document in topics if document.name == "python:docs if").text()


# -------------------------------------------------------------------------------- places and faults


def test_only_a_corpus_is_replaced(folder, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    (tmp_path / "file").write_text("precious")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "corpus.json").write_text('{"format": "something else"}')
    for name in ("mine", "file", "run"):
        with pytest.raises(UserError):
            prepare(folder, tmp_path / name, "byte")
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "precious"
    (tmp_path / "empty").mkdir()
    assert prepare(folder, tmp_path / "empty", "byte").tokenizer.vocab_size == 257
    assert prepare(folder, tmp_path / "empty", "bpe", 280).tokenizer.vocab_size == 280
    (tmp_path / "empty" / "notes.txt").write_text("put here by mistake, and long enough to be split")
    with pytest.raises(UserError, match="would replace"):
        prepare(tmp_path / "empty" / "notes.txt", tmp_path / "empty", "byte")


def test_a_failure_leaves_the_old_corpus(folder, tmp_path):
    old = prepare(folder, tmp_path / "out", "byte")

    def fail(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(folder, tmp_path / "out", "bpe", 280, progress=fail)
    assert Corpus.open(tmp_path / "out").tokenizer.vocabulary_hash == old.tokenizer.vocabulary_hash
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "texts"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_one_clear_error(folder, tmp_path):
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(UserError, match="cannot write"):
        prepare(folder, tmp_path / "locked" / "out", "byte")


def damage_shard(out):
    path = out / "train" / "tokens-00001.bin"
    path.write_bytes(path.read_bytes()[:-2])


def damage_index(out):
    path = out / "val" / "documents.bin"
    path.write_bytes(path.read_bytes()[::-1])


def damage_counts(out):
    info = json.loads((out / "corpus.json").read_text())
    info["train"]["n_bytes"] += 1
    (out / "corpus.json").write_text(json.dumps(info))


def edit(**changes):
    def damage(out):
        info = json.loads((out / "corpus.json").read_text()) | changes
        (out / "corpus.json").write_text(json.dumps(info))

    return damage


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (damage_shard, "not whole"),
        (damage_index, "contradict"),
        (damage_counts, "contradict"),
        (lambda out: (out / "train" / "tokens-00000.bin").unlink(), "missing"),
        (lambda out: (out / "train" / "documents.bin").unlink(), "missing"),
        (lambda out: (out / "tokenizer" / "tokenizer.json").unlink(), "no tokenizer"),
        (lambda out: (out / "tokenizer" / "tokenizer_config.json").unlink(), "missing"),
        (lambda out: Tokenizer.train("byte", [], control_tokens=["<x>"]).save(out / "tokenizer"), "not the one"),
        (lambda out: (out / "corpus.json").write_text('{"format"'), "JSON"),
        (lambda out: (out / "corpus.json").unlink(), "no corpus here"),
        (edit(format="theirs"), "anyformer prepare"),
        (edit(format_version=2), "version"),
        (edit(train=None), "not whole"),
        (edit(val={"n_tokens": "many"}), "not whole"),
    ],
)
def test_a_corpus_that_is_not_whole_is_refused(folder, tmp_path, damage, says):
    out = tmp_path / "out"
    prepare(folder, out, "byte", shard_tokens=1000)
    damage(out)
    with pytest.raises(UserError, match=says):
        Corpus.open(out)


def test_tokenizer_choices_that_cannot_work_are_refused(folder, tmp_path):
    for wrong in (
        {"tokenizer": tmp_path / "nowhere"},
        {"tokenizer": "wordpiece"},
        {"tokenizer": "byte", "vocab_size": 300},
        {"tokenizer": Tokenizer.train("byte", []), "vocab_size": 300},
        {"tokenizer": "bpe", "vocab_size": 200},
    ):
        with pytest.raises(UserError):
            prepare(folder, tmp_path / "out", **wrong)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["", "  "])
def test_an_empty_name_is_no_folder(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(UserError, match="an empty name"):
        list_documents([name])
