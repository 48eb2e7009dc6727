"""Text out of a model that writes a given script: decoding, stop strings, finish reasons, what is counted."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Library

from anyformer.errors import UserError
from anyformer.infer import Completion, Sampling, encode_prompt, generate, stream
from anyformer.text import Tokenizer


@pytest.fixture(scope="module")
def byte():
    return Tokenizer.train("byte", [])


@pytest.fixture(scope="module")
def metaspace(tmp_path_factory):
    """A vocabulary of words that carry their own word-start space, as in LLaMA's and T5's."""
    pieces = ["<unk>", "<s>", "</s>", "▁Hello", "▁world", "▁", "H", "e", "l", "o", "w", "r", "d", ".", "▁▁▁▁", "lo"]
    library = Library(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    library.decoder = decoders.Metaspace(prepend_scheme="first")
    library.add_special_tokens([AddedToken(t, special=True) for t in pieces[:3]])
    folder = tmp_path_factory.mktemp("metaspace")
    library.save(str(folder / "tokenizer.json"))
    return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def run(scripted):
    """The deltas and the completion of one scripted reply."""
    return lambda *arguments, **options: _run(scripted, *arguments, **options)


def _run(scripted, script, tokenizer, prompt="x", n=None, **options):
    sampling = Sampling(max_new_tokens=len(script) if n is None else n, **options)
    deltas = list(stream(scripted(script, tokenizer), tokenizer, [prompt], sampling))
    assert all(d.completion is None for d in deltas[:-1])
    completion = deltas[-1].completion
    assert "".join(d.text for d in deltas) == completion.text
    assert generate(scripted(script, tokenizer), tokenizer, [prompt], sampling) == [completion]
    return [d.text for d in deltas], completion


def test_characters_arrive_whole(run, byte):
    """Four bytes, one character, one delta."""
    deltas, completion = run("a😀é".encode(), byte)
    assert deltas == ["a", "😀", "é"]
    assert completion == Completion("a😀é", tuple("a😀é".encode()), "length", 1, 7)


def test_a_cut_inside_a_character_leaves_one_replacement(run, byte):
    """One U+FFFD at the very end, and the text is valid Unicode."""
    _, completion = run("a😀".encode()[:-1], byte)
    assert completion.text == "a\ufffd"
    assert completion.text.encode()


@settings(deadline=None, max_examples=60)
@given(script=st.binary(min_size=1, max_size=12))
def test_pieces_join_to_the_decoded_ids(run, byte, script):
    """For any bytes whatever."""
    _, completion = run(script, byte)
    assert completion.text == byte.decode(completion.ids)


def test_a_word_start_space_survives_the_border(run, metaspace):
    """Decode drops the space before a first word; after a prompt it belongs to the continuation."""
    hello, world = metaspace.token_id("▁Hello"), metaspace.token_id("▁world")
    assert metaspace.decode([world]) == "world"
    _, completion = run([world], metaspace, prompt=[hello])
    assert completion.text == " world"
    _, completion = run([world], metaspace, prompt=[metaspace.token_id("<s>")])
    assert completion.text == "world"
    _, completion = run([metaspace.token_id("▁▁▁▁"), metaspace.token_id(".")], metaspace, prompt=[hello])
    assert completion.text == "    ."


def test_a_decoder_that_needs_all_tokens_does_not_repeat_the_prompt(run):
    """A CTC decoder merges repeats over the whole text, so its text comes at the end: the continuation alone."""
    library = Library(models.WordLevel(vocab={"<pad>": 0, "a": 1, "b": 2, "|": 3}, unk_token="<pad>"))
    library.decoder = decoders.CTC(pad_token="<pad>", word_delimiter_token="|", cleanup=False)
    tokenizer = Tokenizer(library)
    _, completion = run([2, 3, 1], tokenizer, prompt=[1, 2])
    assert completion.text == tokenizer.decode([1, 2, 2, 3, 1]).removeprefix(tokenizer.decode([1, 2])) == "|a"


@pytest.mark.parametrize(
    ("stop", "text", "reason", "n_new"),
    [
        ("END", "one ", "stop", 7),
        (("zzz", "ND"), "one E", "stop", 7),
        ("one", "", "stop", 3),
        ("two!", "one END two", "length", 11),
        (("D two!", "two"), "one END ", "stop", 11),
        ((), "one END two", "length", 11),
    ],
)
def test_stop_strings_straddle_tokens(run, byte, stop, text, reason, n_new):
    """The text ends before the stop string, generation as soon as the string is complete; its tokens are counted."""
    _, completion = run(b"one END two", byte, stop=stop)
    assert (completion.text, completion.finish_reason) == (text, reason)
    assert completion.n_new_tokens == len(completion.ids) == n_new


def test_text_that_may_begin_a_stop_string_is_held_back(run, byte):
    deltas, completion = run(b"a EN EXY", byte, stop="END")
    assert deltas == ["a", " ", "EN ", "EX", "Y"]
    deltas, completion = run(b"a EN", byte, stop="END")
    assert deltas == ["a", " ", "EN"]
    assert completion.finish_reason == "length"


def test_a_stop_string_in_the_prompt_does_not_count(run, byte):
    _, completion = run(b"yND", byte, prompt="END E", stop="END")
    assert completion.text == "yND"


def test_every_end_token_ends_and_none_shows(run, byte):
    """The end token is neither text nor counted; all of the tokenizer's end, not its own alone."""
    _, completion = run([*b"ab", byte.eos_id, *b"cd"], byte)
    assert completion == Completion("ab", (97, 98), "stop", 1, 2)
    _, completion = run([*b"ab", byte.eos_id, *b"cd"], byte, ignore_eos=True)
    assert completion == Completion("abcd", (97, 98, byte.eos_id, 99, 100), "length", 1, 5)
    two = Tokenizer.train("byte", [], control_tokens=["<|endoftext|>", "<|turn|>"])
    two.__class__ = type("Two", (Tokenizer,), {"eos_ids": (two.token_id("<|endoftext|>"), two.token_id("<|turn|>"))})
    _, completion = run([*b"ab", two.token_id("<|turn|>"), *b"cd"], two)
    assert (completion.text, completion.finish_reason) == ("ab", "stop")


def test_an_end_token_flushes_what_was_held_back(run, byte):
    _, completion = run([*b"a EN", byte.eos_id], byte, stop="END")
    assert (completion.text, completion.finish_reason) == ("a EN", "stop")


def test_rows_keep_their_own_streams(scripted, byte):
    script = "é|ü".encode()
    samplings = [Sampling(max_new_tokens=5), Sampling(max_new_tokens=5, stop="|"), Sampling(max_new_tokens=1)]
    found = generate(scripted(script, byte), byte, ["p", [65, 66], "q"], samplings)
    assert [(c.text, c.finish_reason, c.n_prompt_tokens) for c in found] == [
        ("é|ü", "length", 1),
        ("é", "stop", 2),
        ("\ufffd", "length", 1),
    ]


def test_ids_without_a_token_are_never_generated(scripted):
    """Rows past the vocabulary and holes inside it."""
    library = Library(models.WordLevel(vocab={"a": 0, "b": 2, "c": 4}, unk_token="a"))
    tokenizer = Tokenizer(library)
    assert tokenizer.vocab_size == 5
    model = scripted([1, 3, 7], tokenizer, vocab_size=8)
    samplings = [Sampling(temperature=5.0, max_new_tokens=3, seed=seed) for seed in range(60)]
    assert {i for c in generate(model, tokenizer, [[0]] * 60, samplings) for i in c.ids} == {0, 2, 4}
    assert generate(model, tokenizer, [[0]], Sampling(max_new_tokens=3))[0].ids == (0, 0, 0)


def test_an_empty_prompt_starts_from_bos_or_is_refused(scripted, byte, tmp_path):
    with pytest.raises(UserError, match="prompt is empty") as caught:
        generate(scripted(b"ab", byte), byte, ["a", ""], Sampling())
    assert caught.value.where == "prompt 1"
    with_bos = Tokenizer.train("byte", [], control_tokens=["<s>"], bos_token="<s>")
    assert encode_prompt(with_bos, "") == [with_bos.bos_id]
    assert encode_prompt(with_bos, "a") == [with_bos.bos_id, 97]
    with_bos.save(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "add_bos_token": False}))
    without = Tokenizer.load(tmp_path)
    assert encode_prompt(without, "a") == [97]
    assert encode_prompt(without, "") == [without.bos_id] == [256]
    (completion,) = generate(scripted(b"ab", with_bos), with_bos, "", Sampling(max_new_tokens=2))
    assert (completion.text, completion.n_prompt_tokens) == ("ab", 1)


def test_a_prompt_goes_on_so_no_end_token_follows_it(tmp_path):
    """A tokenizer that closes every text with EOS would end the reply before it began."""
    library = Library(models.WordLevel(vocab={"a": 0, "</s>": 1}, unk_token="a"))
    library.add_special_tokens([AddedToken("</s>", special=True)])
    library.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("a") == [0, 1]
    assert encode_prompt(tokenizer, "a") == [0]


@pytest.mark.parametrize("prompt", ["a\udcff", 7, None, [1.5], [999], b"ab", np.float32(1)])
def test_prompts_that_are_no_text_are_refused(scripted, byte, prompt):
    with pytest.raises(UserError):
        generate(scripted(b"ab", byte), byte, [prompt], Sampling())


def test_prompts_may_be_arrays_of_ids(scripted, byte):
    arrays = [np.array([65, 66], dtype=np.uint16), torch.tensor([65, 66])]
    found = generate(scripted(b"ab", byte), byte, arrays, Sampling(max_new_tokens=2))
    assert [(c.text, c.n_prompt_tokens) for c in found] == [("ab", 2)] * 2


def test_without_a_tokenizer_ids_go_in_and_out(scripted, byte):
    (completion,) = generate(scripted([5, 6], byte), None, [[1]], Sampling(max_new_tokens=2))
    assert completion == Completion("", (5, 6), "length", 1, 2)
    for prompt, options in (("text", {}), ([1], {"stop": "x"})):
        with pytest.raises(UserError, match="tokenizer"):
            generate(scripted([5, 6], byte), None, [prompt], Sampling(**options))


def test_the_context_is_quoted_and_counts_are_true(scripted, byte):
    with pytest.raises(UserError, match="17 tokens, context 16"):
        generate(scripted(b"a" * 20, byte, 16), byte, "x" * 17, Sampling())
    (completion,) = generate(scripted(b"a" * 20, byte, 16), byte, "x" * 10, Sampling(max_new_tokens=100))
    assert completion == Completion("a" * 6, (97,) * 6, "length", 10, 6)
