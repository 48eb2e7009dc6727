"""The rules by which byte-level vocabularies cut text, against the `regex` package and written-out cuts."""

import random

import pytest
import regex
from tokenizers import Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Library
from transformers.models.qwen2 import tokenization_qwen2
from transformers.models.qwen3_5 import tokenization_qwen3_5

from anyformer.errors import UserError
from anyformer.text import pretokenizers
from anyformer.text.pretokenizers import RULES, apply, names_of, patterns_of, rules_of

# As published: in tiktoken, in Llama 3's own tokenizer, in transformers.
PUBLISHED = {
    "gpt-2": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s",
    "llama-bpe": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    ),
    "gpt-4o": "|".join(
        [
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
            r"\p{N}{1,3}",
            r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
            r"\s*[\r\n]+",
            r"\s+(?!\S)",
            r"\s+",
        ]
    ),
    "qwen2": tokenization_qwen2.PRETOKENIZE_REGEX,
    "qwen35": tokenization_qwen3_5.PRETOKENIZE_REGEX,
}
ATOMS = [
    *("hello", " world", "don't", "I'LL", "'re", "CamelCase", "HTTPServer", "x1y22z333", "naïve", "Straße", "ǅ", "ʰª"),
    *("  ", "\n", "\r\n", "\t", " \n ", "\u00a0", "\u3000", "\u0085", "\u2028", "\u200b", "\ufeff", "\x00", "\x7f"),
    *("1", "12", "345", "67890", "½", "²", "٣", "Ⅷ", "四", "数学", "日本語テスト", "한국어", "हिन्दी", "ไทย", "e\u0301"),
    *("😀", "👩\u200d👧", "...", "!?", "$+=<>^`|~", '"q"', "_x_", "——", "“”", "。，", "\ue000", "\u0378", "/\n"),
]


def texts(seed, n):
    chosen = random.Random(seed)
    return ["", *ATOMS, *("".join(chosen.choices(ATOMS, k=chosen.randint(2, 7))) for _ in range(n))]


def cut(name, text):
    """The parts of `text` by our rule, as text."""
    library = Library(models.BPE())
    apply(RULES[name], library)
    return [text[start:end] for _, (start, end) in library.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_pattern(name):
    pattern = regex.compile(PUBLISHED[name])
    for text in texts(len(name), 150):
        assert cut(name, text) == pattern.findall(text), text


@pytest.mark.parametrize("name", sorted({rules.patterns: name for name, rules in RULES.items()}.values()))
def test_chain_of_patterns(name):
    """Every match is a part, and so is what lies between, pattern after pattern."""
    for text in texts(3, 30):
        # What a word is made of, the engines see differently for superscripts, and one rule asks for its end.
        expected = [text] if text and not (name in ("tiny_aya", "cohere2moe") and {*"½²"} & {*text}) else None
        for pattern in RULES[name].patterns if expected else ():
            expected = [part for whole in expected for part in isolated(pattern, whole)]
        if expected is not None:
            assert cut(name, text) == expected, text


def isolated(pattern, text):
    at = 0
    for match in regex.finditer(pattern, text):
        yield from (part for part in (text[at : match.start()], match.group()) if part)
        at = match.end()
    if text[at:]:
        yield text[at:]


# What the tokenizers published with these models make of a text, checked against llama.cpp.
CUTS = {
    "default": (" 1234a..b", [" ", "123", "4", "a", "..", "b"]),
    "falcon": (" 1234a$$b", [" ", "123", "4", "a", "$$", "b"]),
    "smollm": (" x 12", [" x", " ", "1", "2"]),
    "command-r": ("a12", ["a", "1", "2"]),
    "deepseek-llm": (" ab数学 12\n", [" ab", "数学", " ", "1", "2", "\n"]),
    "deepseek-coder": (" ab, 12", [" ab", ",", " ", "1", "2"]),
    "deepseek-v3": ("abc数学1234 .x", ["abc", "数学", "123", "4", " .", "x"]),
    "bloom": (" ab, cd", [" ab", ",", " cd"]),
    "viking": (" a1, b", [" a", "1", ",", " b"]),
    "tekken": ("FooBar's 12", ["Foo", "Bar", "'s", " ", "1", "2"]),
    "gpt-4o": ("FooBar's 1234", ["Foo", "Bar's", " ", "123", "4"]),
    "kimi-k2": ("数学abc", ["数学", "abc"]),
    "tiny_aya": ("1234567 x", ["1", "234", "567", " x"]),
    "laguna": ("a \n\n b", ["a", " ", "\n\n", " b"]),
    "seed-coder": ("!!\n", ["!!", "\n"]),
    "ufakzeka": ("Ali'ler", ["Ali", "'ler"]),
    "exaone-moe": ("a b/\n\n", ["a b", "/\n", "\n"]),
    "minicpm5": ("12345", ["123", "45"]),
    "spark2_5": ("!\n\n", ["!", "\n", "\n"]),
    "youtu": ("한국ab12", ["한국", "ab", "1", "2"]),
    "chameleon": ("\t\t1!!", ["\t", "\t", "1", "!", "!"]),
    "jais-2": ("a" + " " * 7 + "b", ["a", " " * 4, " " * 2, " b"]),
}


@pytest.mark.parametrize("name", CUTS)
def test_cuts(name):
    text, expected = CUTS[name]
    assert cut(name, text) == expected


def test_unknown_name():
    with pytest.raises(UserError, match="pre-tokeniser is not known") as caught:
        rules_of("qwen7", "model.gguf")
    assert "qwen2" in str(caught.value)


@pytest.mark.parametrize("name", sorted(RULES))
def test_every_rule_is_recognised(name):
    library = Library(models.BPE())
    apply(RULES[name], library)
    found = names_of(*patterns_of(library))
    assert RULES[found[0]].patterns == RULES[name].patterns
    assert RULES[found[0]].nfc == RULES[name].nfc


def split(pattern, behaviour="isolated", invert=False):
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), behaviour, invert), plain])


SPELLINGS = [
    ("gpt-2", pre_tokenizers.ByteLevel(add_prefix_space=False), None),
    ("mpt", pre_tokenizers.ByteLevel(add_prefix_space=False), normalizers.NFC()),
    (
        "smollm",
        pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]),
        None,
    ),
    (
        "falcon",
        pre_tokenizers.Sequence(
            [
                pre_tokenizers.Punctuation("contiguous"),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
                pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated"),
            ]
        ),
        None,
    ),
    (
        "llama-bpe",
        split(
            r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]"
            r"|\s+(?!\S)|\s+",
            "removed",
            True,
        ),
        None,
    ),
    ("qwen2", split(PUBLISHED["qwen2"]), normalizers.Sequence([normalizers.NFC()])),
    ("stablelm2", split(PUBLISHED["qwen2"]), None),
]


@pytest.mark.parametrize(("name", "pre_tokenizer", "normalizer"), SPELLINGS, ids=[each[0] for each in SPELLINGS])
def test_spellings(name, pre_tokenizer, normalizer):
    """Rules that are written in another way, as published files do, cut alike and have the same name."""
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        library.normalizer = normalizer
    assert names_of(*patterns_of(library))[0] == name
    for text in texts(7, 100):
        spans = [span for _, span in pre_tokenizer.pre_tokenize_str(text)]
        assert [text[start:end] for start, end in spans] == cut(name, text), text


@pytest.mark.parametrize(
    ("pre_tokenizer", "normalizer"),
    [
        (pre_tokenizers.ByteLevel(add_prefix_space=True), None),
        (pre_tokenizers.ByteLevel(add_prefix_space=False), normalizers.Lowercase()),
        (pre_tokenizers.Whitespace(), None),
        (split(r"\s+", "removed"), None),
        (split(r"\w+|\W", "merged_with_next"), None),
    ],
)
def test_other_rules_have_no_name(pre_tokenizer, normalizer):
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        library.normalizer = normalizer
    assert patterns_of(library) is None


def test_pattern_of_another_tokenizer_has_no_name():
    library = Library(models.BPE())
    library.pre_tokenizer = split(r"\p{L}+|\P{L}+")
    assert names_of(*patterns_of(library)) == []
    assert pretokenizers.canonical(r"\p{L}+") == r"\p{L}+"
