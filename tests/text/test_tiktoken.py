"""Vocabularies in tiktoken's form, against the tiktoken package."""

import base64
import json
import random

import pytest
import regex
import tiktoken
from kinds import LEARNED, TEXTS

from anyformer.errors import UserError
from anyformer.text import Tokenizer

GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]"
    r"|\s+(?!\S)|\s"
)
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
GOOD = {bytes([byte]): byte for byte in range(256)}
MORE = ["a" * n for n in range(1, 20)] + [" " * n + "b" for n in range(1, 20)] + ["x \n ", "x\n \n\t", "1 \n\n"]


def vocabulary(seed, pattern, n=600):
    """Ranks in no order that training would give: any join of two earlier tokens may come next."""
    chosen = random.Random(seed)
    tokens = [bytes([byte]) for byte in range(256)]
    chosen.shuffle(tokens)
    words = [word.encode() for text in [*LEARNED, *MORE] for word in regex.findall(pattern, text)]
    words = [word for word in words if len(word) > 1]
    while len(tokens) < n:
        word = chosen.choice(words)
        start = chosen.randrange(len(word))
        token = word[start : start + chosen.randint(2, 5)]
        known = {*tokens}
        if token not in known and any({token[:end], token[end:]} <= known for end in range(1, len(token))):
            tokens.append(token)
    return {token: rank for rank, token in enumerate(tokens)}


def write(path, ranks):
    path.write_text("".join(f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items()))
    return path


@pytest.mark.parametrize(
    ("pre", "pattern"), [("gpt-2", GPT2), ("llama-bpe", LLAMA3), ("dbrx", LLAMA3)], ids=["gpt-2", "llama-bpe", "dbrx"]
)
def test_equals_tiktoken(pre, pattern, tmp_path):
    chosen = random.Random(1)
    for seed in range(2):
        ranks = vocabulary(seed, pattern)
        theirs = tiktoken.Encoding("x", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
        ours = Tokenizer.load(write(tmp_path / "tokenizer.model", ranks), pre=pre)
        noise = ["".join(chosen.choices("ab \n1'", k=12)) for _ in range(100)]
        for text in [*TEXTS, *MORE, *noise]:
            assert ours.encode(text) == theirs.encode_ordinary(text), text
            assert ours.decode(ours.encode(text)) == text


def test_a_token_that_merges_do_not_reach(tmp_path):
    ranks = {**GOOD, b"bc": 256, b"ab": 257, b"cd": 258, b"abcd": 259}
    theirs = tiktoken.Encoding("x", pat_str=GPT2, mergeable_ranks=ranks, special_tokens={})
    ours = Tokenizer.load(write(tmp_path / "tokenizer.model", ranks), pre="gpt-2")
    assert ours.encode("abcd abcd") == theirs.encode_ordinary("abcd abcd") == [259, 32, 97, 256, 100]


@pytest.mark.parametrize(
    ("name", "pattern", "ends"),
    [("r50k_base", GPT2, 50256), ("cl100k_base", CL100K, 100257)],
    ids=["r50k_base", "cl100k_base"],
)
def test_published_file_by_its_name(name, pattern, ends, tmp_path):
    ranks = vocabulary(5, pattern)
    control = {"<|endoftext|>": ends} | ({"<|endofprompt|>": 100276} if ends > 100000 else {})
    theirs = tiktoken.Encoding("x", pat_str=pattern, mergeable_ranks=ranks, special_tokens=control)
    ours = Tokenizer.load(write(tmp_path / f"{name}.tiktoken", ranks))
    assert ours.eos_ids == (ends,)
    for text in [*TEXTS, *MORE, "a<|endoftext|>b", "<|endofprompt|> "]:
        assert ours.encode(text) == theirs.encode_ordinary(text), text
        assert ours.encode(text, control=True) == theirs.encode(text, allowed_special="all"), text


def test_qwen(tmp_path):
    ours = Tokenizer.load(write(tmp_path / "qwen.tiktoken", vocabulary(2, LLAMA3, 300)))
    found = [ours.token(index) for index in (151643, 151644, 151645, 151646, 151850)]
    assert found == ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|extra_0|>", "<|extra_204|>"]
    assert ours.vocab_size == 151851
    assert ours.encode("e\u0301") == ours.encode("\u00e9")


def test_settings_beside_the_file(tmp_path):
    """Llama 3's control tokens stand in its tokenizer_config.json."""
    write(tmp_path / "tokenizer.model", vocabulary(3, LLAMA3, 300))
    declared = {str(300 + n): {"content": token, "special": True} for n, token in enumerate(["<|bos|>", "<|eot|>"])}
    config = {"added_tokens_decoder": declared, "bos_token": "<|bos|>", "eos_token": "<|eot|>", "add_bos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours = Tokenizer.load(tmp_path / "tokenizer.model", pre="llama-bpe")
    assert (ours.bos_id, ours.eos_id, ours.prefix) == (300, 301, (300,))
    ours.save(tmp_path / "saved")
    assert Tokenizer.load(tmp_path / "saved").encode("Hello") == ours.encode("Hello")


def test_nothing_says_how_to_cut(tmp_path):
    path = write(tmp_path / "mine.tiktoken", vocabulary(1, GPT2, 260))
    with pytest.raises(UserError, match="does not say how it cuts text") as caught:
        Tokenizer.load(path)
    assert "pre=" in str(caught.value)
    with pytest.raises(UserError, match="pre-tokeniser is not known"):
        Tokenizer.load(path, pre="mine")


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "for every byte"),
        (b"YQ== 1\n", "for every byte"),
        (b"YQ== one\n", "line 1"),
        (b"Y* 1\n", "line 1"),
        (b"YQ== 1 2\n", "line 1"),
        (b"\xff\xfe\x00\n", "line 1"),
        (b"YQ== 1\nYQ== 2\n", "there twice"),
        (b"YQ== 1\nYg== 1\n", "rank is taken"),
        (b"YQ== 999999999\n", "too large"),
        (base64.b64encode(b"x" * 2000) + b" 1\n", "too long"),
        (b" 1\n", "line 1"),
    ],
)
def test_hostile_files(content, match, tmp_path):
    path = tmp_path / "r50k_base.tiktoken"
    path.write_bytes(content)
    with pytest.raises(UserError, match=match):
        Tokenizer.load(path)


def test_another_file_of_a_published_name(tmp_path):
    ranks = {**GOOD, b"<|endoftext|>": 256}
    with pytest.raises(UserError, match="not the published one"):
        Tokenizer.load(write(tmp_path / "r50k_base.tiktoken", ranks))
