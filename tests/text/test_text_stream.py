"""Text as it is generated: deltas joined are the whole, and stop strings cut wherever tokens end."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kinds import KINDS

from anyformer.errors import UserError
from anyformer.text import StopMatcher, Tokenizer
from anyformer.text.stream import TextStream
from anyformer.text.tidy import settled, tidy

ZOO = "byte char bpe sentencepiece_bpe unigram metaspace word_piece suffixed with_added wordless spaced flagged".split()
TIDIED = ["bert_tidied", "metaspace_tidied", "wordless_tidied"]


def deltas(tokenizer, ids, **options):
    stream = tokenizer.stream(**options)
    return [*(stream.push(index) for index in ids), stream.finish()]


@pytest.mark.parametrize("name", [*ZOO, *TIDIED, *KINDS])
@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_deltas_joined_are_the_decoded_text(zoo, name, data):
    """For any ids at all, control tokens kept or left out."""
    tokenizer = zoo[name]
    likely = [i for i in range(tokenizer.vocab_size) if tokenizer.token(i) and tokenizer.token(i).strip("▁") == ""]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1) | st.sampled_from(likely or [0]), max_size=25))
    for skip in (True, False):
        assert "".join(deltas(tokenizer, ids, skip_control=skip)) == tokenizer.decode(ids, skip_control=skip)


@settings(deadline=None, max_examples=300)
@given(text=st.text(st.sampled_from(" .?!,'ntmsvrexé"), max_size=30), cuts=st.sets(st.integers(0, 30)))
def test_text_is_tidied_in_pieces_as_in_one(text, cuts):
    """The rest that is held back begins where nothing to come can reach, and no later than need be."""
    places = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    held, shown = "", ""
    for start, end in itertools.pairwise(places):
        held += text[start:end]
        place = settled(held)
        shown, held = shown + tidy(held[:place]), held[place:]
        assert not held.strip(" 'nvr")
    assert shown + tidy(held) == tidy(text)


@pytest.mark.parametrize("name", ["byte", "bpe", "sentencepiece_bpe", "unigram"])
@settings(deadline=None, max_examples=100)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁"), max_size=30))
def test_no_delta_of_a_text_holds_a_replacement_character(zoo, name, text):
    """A character split across tokens arrives whole."""
    tokenizer = zoo[name]
    text = text.replace("\ufffd", "")
    parts = deltas(tokenizer, tokenizer.encode(text))
    if tokenizer.decode(tokenizer.encode(text)) == text:
        assert "".join(parts) == text
        assert not any("\ufffd" in part for part in parts)


def test_an_emoji_in_four_tokens_arrives_once_and_whole():
    tokenizer = Tokenizer.train("byte", [])
    assert deltas(tokenizer, [0xF0, 0x9F, 0x98, 0x80]) == ["", "", "", "😀", ""]


@pytest.mark.parametrize("name", ["sentencepiece_bpe", "unigram"])
def test_an_emoji_in_byte_fallback_tokens_arrives_whole(zoo, name):
    """With SentencePiece's bytes."""
    tokenizer = zoo[name]
    ids = [tokenizer.token_id(f"<0x{byte:02X}>") for byte in "a😀".encode()]
    assert "".join(deltas(tokenizer, ids)) == "a😀"
    assert deltas(tokenizer, ids)[-2] == "😀"


@pytest.mark.parametrize("name", ["sentencepiece_bpe", "unigram", "metaspace"])
def test_words_keep_the_space_before_them(zoo, name):
    tokenizer = zoo[name]
    pieces = {"Hello world": ["▁Hello", "▁world"], "full stop": ["▁▁▁▁", "."]}
    ids = [tokenizer.token_id(piece) for piece in pieces["Hello world"]]
    assert deltas(tokenizer, ids) == ["Hello", " world", ""]
    text = "".join(deltas(tokenizer, [tokenizer.token_id(piece) for piece in pieces["full stop"]]))
    assert text.endswith(".")
    assert text.strip() == "."


@pytest.mark.parametrize("name", ["byte", "bpe", "sentencepiece_bpe", "unigram"])
def test_a_cut_inside_a_character_leaves_one_replacement_at_the_very_end(zoo, name):
    tokenizer = zoo[name]
    for text in ("ab😀", "abé", "ab数"):
        data = text.encode()
        ids = [tokenizer.token_id(f"<0x{byte:02X}>") for byte in data]
        if None in ids:
            bytewise = {tokenizer.token_bytes(i): i for i in range(256)}
            ids = [bytewise[bytes([byte])] for byte in data]
        for cut in range(3, len(data)):
            parts = deltas(tokenizer, ids[:cut])
            assert "".join(parts[:-1]) == "ab"
            assert parts[-1] == "\ufffd"
            "".join(parts).encode("utf-8")


def test_a_push_does_not_grow_dearer_with_the_text(zoo):
    """Every push decodes its own token and no other, where decoding the whole prefix would decode 2,001,000."""
    tokenizer = zoo["bpe"]
    decoded = []
    plain = tokenizer.stream()._pieces

    class Counted:
        lead, tail, additive = plain.lead, plain.tail, plain.additive

        def of(self, token, first):
            decoded.append(1)
            return plain.of(token, first)

    def whole(ids):
        decoded.append(len(ids))
        return tokenizer.decode(ids)

    ids = tokenizer.encode("a plain text of words and signs, again. ")
    ids = (ids * (2000 // len(ids) + 1))[:2000]
    stream = TextStream(Counted(), frozenset(), int, whole)
    text = "".join([*(stream.push(index) for index in ids), stream.finish()])
    assert text == tokenizer.decode(ids)
    assert sum(decoded) == 2000


@settings(deadline=None, max_examples=400)
@given(
    text=st.text("abc", max_size=24),
    stops=st.lists(st.text("abc", min_size=1, max_size=5), max_size=4),
    cuts=st.lists(st.integers(0, 24), max_size=10),
)
def test_text_is_cut_at_the_earliest_stop_string(text, stops, cuts):
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    matcher = StopMatcher(stops)
    shown = "".join(matcher.push(text[a:b]) for a, b in itertools.pairwise(places)) + matcher.finish()
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    assert shown == (text[: min(found)] if found else text)
    assert (matcher.stopped is not None) == bool(found)
    if found:
        assert text.startswith(matcher.stopped, min(found))


@pytest.mark.parametrize(
    ("text", "shown", "stopped"),
    [("xabcd", "x", "abcd"), ("xabce", "xa", "bc"), ("xabc", "xa", "bc"), ("xabab", "xabab", None)],
)
def test_a_longer_stop_string_that_began_earlier_is_waited_for(text, shown, stopped):
    for pieces in (list(text), [text], [text[:2], text[2:]]):
        matcher = StopMatcher(["abcd", "bc"])
        assert "".join([*map(matcher.push, pieces), matcher.finish()]) == shown
        assert matcher.stopped == stopped


def test_only_what_may_begin_a_stop_string_is_held_back():
    matcher = StopMatcher(["\nUser:"])
    assert [matcher.push(piece) for piece in ("Hi", " there\n", "Us", "ed car", "\nUs", "er:", " more")] == [
        "Hi",
        " there",
        "",
        "\nUsed car",
        "",
        "",
        "",
    ]
    assert matcher.stopped == "\nUser:"
    assert matcher.finish() == ""


def test_one_string_is_one_stop_string():
    matcher = StopMatcher("END")
    assert matcher.push("xEyENDz") == "xEy"
    with pytest.raises(UserError, match="at least one character"):
        StopMatcher(["a", ""])
    with pytest.raises(UserError):
        StopMatcher([3])
