"""How a byte-level BPE cuts text before it merges: the published rules by their names in GGUF (`tokenizer.ggml.pre`).

A rule is a chain of patterns; each cuts every part that the ones before it left, and what a pattern matches becomes a
part of its own. The patterns are those of the published tokenizer.json files, which llama.cpp follows; where it
approximates them (letters by case in `tekken` and `gpt-4o`, marks, a long s after an apostrophe), the published pattern
stands here. Normalisation too is that of the published file; llama.cpp has none for these vocabularies, so that ids
agree for text in NFC, as nearly all text is.

Left out are names whose vocabulary is not byte-level (`gemma4`, `granite-embed-multi-311m`, `sarvam-moe`,
`whitespace`), encoders' (`jina-…`, `roberta-bpe`, `granite-embed-…`), `superbpe`, whose pattern matches the
empty text, and `afmoe`, for which llama.cpp has a rule of its own.
"""

import json
from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Library

from anyformer.errors import UserError
from anyformer.spec.problems import did_you_mean

_PART = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_FIRST = r"[^\r\n\p{L}\p{N}]?"
_ASCII_SIGN = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"

# Radford et al., 2019: contractions, words, numbers and signs with the space before them.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Llama 3 (and cl100k): letters with one leading sign, digits by threes, signs with the line ends after them.
LLAMA3 = rf"{_PART}|{_LETTERS}|\p{{N}}{{1,3}}|{_SIGNS}|{_SPACES}"
QWEN2 = rf"{_PART}|{_LETTERS}|\p{{N}}|{_SIGNS}|{_SPACES}"
QWEN35 = rf"{_PART}|{_FIRST}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
# o200k: words change at a capital letter, and take a contraction along.
O200K = (
    rf"{_FIRST}{_UPPER}*{_LOWER}+{_PART}?|{_FIRST}{_UPPER}+{_LOWER}*{_PART}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_TEKKEN = rf"{_FIRST}{_UPPER}*{_LOWER}+|{_FIRST}{_UPPER}+{_LOWER}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_YOUTU = (
    rf"{_FIRST}{_UPPER}*{_LOWER}+{_PART}?|{_FIRST}{_UPPER}+{_LOWER}*{_PART}?|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*"
)
_NOT_HAN_UPPER, _NOT_HAN_LOWER = (rf"(?:(?!\p{{Han}}){letters})" for letters in (_UPPER, _LOWER))
_KIMI = (
    rf"\p{{Han}}+|{_FIRST}{_NOT_HAN_UPPER}*{_NOT_HAN_LOWER}+{_PART}?|{_FIRST}{_NOT_HAN_UPPER}+{_NOT_HAN_LOWER}*{_PART}?"
    rf"|\p{{N}}{{1,3}}|{_SIGNS}|{_SPACES}"
)
# DeepSeek's letters with both cases, by their code points.
_CASED = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼ"
    "ℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_CJK = "[一-龥ࠀ-一가-퟿]+"
_KANA_HAN = "[一-龥぀-ゟ゠-ヿ]+"
_DEEPSEEK3 = (
    rf"{_ASCII_SIGN}|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPARK = rf"{_ASCII_SIGN}|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+|[\r\n]|\s+(?!\S)|\s+"
_BLOOM = " ?[^(\\s|.,!?…。，、।۔،)]+"
_DIGIT, _DIGITS = r"\p{N}", r"\p{N}{1,3}"
# Threes counted from the right, as numbers are read.
_THREES = r"\d{1,3}(?=(?:\d{3})*\b)"
_JAIS2_SPACES = "|".join(
    [*(rf"\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4)), r"\s{1,2}(?!\S)", r"\s{1}"]
)
_EXAONE_MOE = (
    rf"{_PART}|{_FIRST}(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Rules:
    """How one family of tokenizers cuts text, and what else goes by the same name.

    Attributes:
        patterns: in the syntax of Oniguruma, one after another.
        nfc: text is brought into Unicode's composed form first.
        ignore_merges: a part that is a token is that token, whatever the merges make of it.
        add_bos: encoding puts BOS first where the file does not say.
    """

    patterns: tuple[str, ...]
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False


def _table() -> dict[str, Rules]:
    gpt2, llama3, qwen2 = Rules((GPT2,)), Rules((LLAMA3,)), Rules((QWEN2,))
    llama_bpe = Rules((LLAMA3,), ignore_merges=True, add_bos=True)
    digits = Rules((_DIGIT, GPT2))
    deepseek3 = Rules((_DIGITS, _KANA_HAN, _DEEPSEEK3))
    signs = r"[\p{P}\$\+<=>\^~\|`]+"
    # Of several names with the same rules the first is the one that is written.
    named = [
        ("gpt-2 phi-2 gigachat a.x-4.0 mellum modern-bert exaone4 jais trillion granite-docling", gpt2),
        ("mpt olmo", Rules((GPT2,), nfc=True)),
        ("llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2", llama_bpe),
        ("glm4 glm5", Rules((LLAMA3,), ignore_merges=True)),
        ("dbrx smaug-bpe chatglm-bpe", llama3),
        ("qwen2", Rules((QWEN2,), nfc=True)),
        ("stablelm2 deepseek-r1-qwen kormo f2llmv2 megrez hunyuan solar-open grok-2", qwen2),
        ("bailingmoe bailingmoe2 llada-moe", qwen2),
        ("qwen35", Rules((QWEN35,), nfc=True)),
        ("smollm starcoder refact codeshell exaone minerva-7b mellum2", digits),
        ("command-r", Rules((_DIGIT, GPT2), nfc=True)),
        ("gpt-4o llama4 kanana2 talkie minimax-m2", Rules((O200K,))),
        ("tekken", Rules((_TEKKEN,), ignore_merges=True, add_bos=True)),
        (
            "deepseek-llm",
            Rules((r"[\r\n]", rf"\s?[{_CASED}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", _CJK, _DIGIT)),
        ),
        ("deepseek-coder", Rules((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, _DIGIT))),
        ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", deepseek3),
        ("spark2_5", Rules((_DIGITS, _KANA_HAN, _SPARK, _DIGIT))),
        ("falcon", Rules((signs, GPT2, "[0-9][0-9][0-9]"))),
        ("default", Rules((signs.replace("`", ""), GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))),
        ("bloom poro-chat gpt3-finnish", Rules((_BLOOM,))),
        ("viking", Rules((_BLOOM, _DIGIT))),
        ("kimi-k2", Rules((_KIMI,))),
        ("tiny_aya cohere2moe", Rules((_THREES, O200K))),
        ("laguna", Rules((r"[^\n]+|\n+", QWEN2))),
        ("seed-coder", Rules((rf"{_PART}|{_LETTERS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",))),
        ("ufakzeka", Rules((rf"{_LETTERS}|\p{{N}}|{_SIGNS}|{_SPACES}",))),
        ("jais-2", Rules((rf"{_PART}|{_LETTERS}|\p{{N}}{{1,3}}|{_SIGNS}|\s*[\r\n]+|{_JAIS2_SPACES}",))),
        ("minicpm5", Rules((_DIGITS, rf"{_PART}|{_LETTERS}|\p{{N}}+|{_SIGNS}|{_SPACES}"), ignore_merges=True)),
        ("exaone-moe", Rules((_EXAONE_MOE,))),
        (
            "youtu",
            Rules(
                ("[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+", rf"{_YOUTU}|{_SPACES}"),
                ignore_merges=True,
            ),
        ),
        (
            "chameleon",
            Rules(
                (
                    "<sentinel:[0-9]+>",
                    "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
                    r"([\t\n]|    |  )",
                    _DIGIT,
                    r"[\p{P}!-/:-@\[-`{-~]",
                    GPT2,
                ),
                add_bos=True,
            ),
        ),
    ]
    return {name: rules for names, rules in named for name in names.split()}


RULES = _table()


def rules_of(name: str, where: object) -> Rules:
    """The rules of the published pre-tokeniser `name`. `UserError` for one that is not known here."""
    if name not in RULES:
        near = did_you_mean(name, RULES)
        remedy = f"did you mean `{near}`? " if near else ""
        raise UserError(
            "this pre-tokeniser is not known, and another would cut the text differently",
            where=where,
            got=repr(name),
            expected=", ".join(sorted(RULES)),
            remedy=f"{remedy}a folder of Hugging Face with tokenizer.json says how a text is cut",
        )
    return RULES[name]


def apply(rules: Rules, library: Library) -> None:
    """Gives `library` the normaliser and the pre-tokeniser of `rules`."""
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in rules.patterns]
    bytes_alone = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.pre_tokenizer = pre_tokenizers.Sequence([*cuts, bytes_alone])
    if rules.nfc:
        library.normalizer = normalizers.NFC()


def names_of(patterns: tuple[str, ...], nfc: bool) -> list[str]:
    """The names of the rules that cut at `patterns`, in canonical form, whatever they make of merges."""
    return [
        name for name, rules in RULES.items() if tuple(map(canonical, rules.patterns)) == patterns and rules.nfc == nfc
    ]


def patterns_of(library: Library) -> tuple[tuple[str, ...], bool] | None:
    """The patterns at which `library` cuts text, in canonical form, and whether it brings text into NFC first.

    None where it does something else to the text, or does not turn it into bytes.
    """
    state = {
        "normalizer": library.normalizer and json.loads(library.normalizer.__getstate__()),
        "pre_tokenizer": library.pre_tokenizer and json.loads(library.pre_tokenizer.__getstate__()),
    }
    normalisers = _flat(state["normalizer"], "normalizers")
    if any(step["type"] != "NFC" for step in normalisers):
        return None
    steps = _flat(state["pre_tokenizer"], "pretokenizers")
    if sum(step["type"] == "ByteLevel" for step in steps) != 1:
        return None
    patterns = [_pattern(step) for step in steps]
    if None in patterns:
        return None
    return tuple(canonical(pattern) for pattern in patterns if pattern), bool(normalisers)


def canonical(pattern: str) -> str:
    """One spelling for patterns that match alike."""
    for written, plain in _SPELLINGS:
        pattern = pattern.replace(written, plain)
    for ending, plain in _ENDINGS:
        if pattern.endswith(ending):
            pattern = pattern.removesuffix(ending) + plain
    return pattern


# A possessive quantifier changes nothing where what follows cannot match what it would give back, and of `\s*[\r\n]`
# the first part already takes every line end but the last.
_SPELLINGS = (
    ("'(?i:[sdmt]|ll|ve|re)", _PART),
    (r"[^\r\n\p{L}\p{N}]?+\p{L}", r"[^\r\n\p{L}\p{N}]?\p{L}"),
    (r"\p{L}++", r"\p{L}+"),
    (r"[^\s\p{L}\p{N}]++[\r\n]", r"[^\s\p{L}\p{N}]+[\r\n]"),
    (r"+[\r\n]*+", r"+[\r\n]*"),
    (r"\p{N}{1}|", r"\p{N}|"),
)
_ENDINGS = (
    (r"|\s+(?!\S)|\s", r"|\s+(?!\S)|\s+"),
    (r"|\s*[\r\n]|\s+(?!\S)|\s+", r"|\s*[\r\n]+|\s+(?!\S)|\s+"),
)


def _flat(step: dict[str, Any] | None, inner: str) -> list[dict[str, Any]]:
    if step is None:
        return []
    if step["type"] != "Sequence":
        return [step]
    return [each for part in step[inner] for each in _flat(part, inner)]


def _pattern(step: dict[str, Any]) -> str | None:
    """The pattern that `step` cuts at, empty for one that cuts nothing; None for a step that is no such cut."""
    kind = step["type"]
    if kind == "Digits":
        return _DIGIT if step["individual_digits"] else r"\p{N}+"
    if kind == "Punctuation" and step["behavior"] == "Contiguous":
        return r"[\p{P}\$\+<=>\^~\|`]+"
    if kind == "ByteLevel" and not step["add_prefix_space"]:
        return GPT2 if step.get("use_regex", True) else ""
    if kind == "Split" and "Regex" in step["pattern"]:
        return _split_pattern(step)
    return None


def _split_pattern(step: dict[str, Any]) -> str | None:
    pattern: str = step["pattern"]["Regex"]
    if step["behavior"] == "Isolated" and not step["invert"]:
        return pattern
    # What lies between the matches is removed: nothing, where the pattern matches any white space and any sign.
    whole = canonical(pattern).endswith(r"|\s+(?!\S)|\s+")
    return pattern if step["behavior"] == "Removed" and step["invert"] and whole else None
