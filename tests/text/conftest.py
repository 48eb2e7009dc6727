"""Tokenizers of the kinds in use, small and made on the spot."""

import json

import pytest
from kinds import KINDS
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Library

from anyformer.text import Tokenizer
from anyformer.text.settings import Settings

TEXTS = [
    "Hello world, hello there. The quick brown fox jumps over the lazy dog; don't panic!\n",
    "def f(x):\n    return x + 1  # größer → 😀 数学\n\nfor i in range(10):\n        print(f(i))\n",
    "It was the best of times, it was the worst of times ... 1234567 and 3.14159\r\n\ttabs\n",
]
CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def sentencepiece_bpe():
    """Llama 2's shape: BPE without a pre-tokenizer, spaces written as ▁, one put first, bytes for the rest."""
    merges = [("▁", "H"), ("e", "l"), ("▁H", "el"), ("l", "o"), ("▁Hel", "lo"), ("▁", "▁"), ("▁▁", "▁▁"), ("o", "r")]
    merges += [("l", "d"), ("▁", "w"), ("▁w", "or"), ("▁wor", "ld"), ("<", "s")]
    letters = sorted(set("▁Helowrd.,!<s>/abcdefgh"))
    tokens = ["<unk>", "<s>", "</s>", *BYTES, *letters, *("".join(pair) for pair in merges)]
    vocab = {token: index for index, token in enumerate(dict.fromkeys(tokens))}
    library = Library(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    return library


def unigram():
    """T5's shape: Unigram with Metaspace both ways, control tokens among the pieces."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), ("▁Hello", -3.0), ("▁world", -3.0)]
    pieces += [("▁▁▁▁", -4.0), ("lo", -4.0)]
    pieces += [(letter, -6.0 - index / 50) for index, letter in enumerate("abcdefghijklmnopqrstuvwxyz.,<>/H")]
    pieces += [(byte, -30.0) for byte in BYTES]
    library = Library(models.Unigram(pieces, unk_id=2, byte_fallback=True))
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    library.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")])
    library.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    library.add_special_tokens(["<pad>", "</s>", "<unk>"])
    return library


def metaspace():
    """Metaspace alone, as XLNet and ALBERT have it."""
    pieces = [("<unk>", 0.0), ("▁", -2.0), ("▁Hello", -3.0), ("▁world", -3.0), ("▁▁▁▁", -4.0)]
    pieces += [(letter, -6.0) for letter in "abcdehlorw.,▁H" if letter != "▁"]
    library = Library(models.Unigram(pieces, unk_id=0))
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Metaspace()
    return library


def word_piece():
    """BERT's shape."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "hello", "world", "play", "##ing", "##s", ".", ",", "'", "don", "t"]
    library = Library(models.WordPiece({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    library.normalizer = normalizers.BertNormalizer()
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece()
    library.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    library.add_special_tokens(words[:4])
    return library


def suffixed():
    """GPT-1's shape: a mark ends each word."""
    tokens = ["<unk>", "a", "b", "c", "a</w>", "b</w>", "c</w>", "ab</w>", "😀</w>"]
    merges = [("a", "b</w>")]
    library = Library(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=merges,
            unk_token="<unk>",
            end_of_word_suffix="</w>",
        )
    )
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.decoder = decoders.BPEDecoder()
    library.add_special_tokens(["<unk>"])
    return library


def with_added():
    """Byte-level, with ordinary added tokens whose letters are also stand-ins for bytes."""
    state = json.loads(Tokenizer.train("byte", [])._library.to_str())
    for index, content in ((257, "é</é>"), (258, "  "), (259, "😀!")):
        state["added_tokens"].append(
            {
                "id": index,
                "content": content,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": False,
            }
        )
    return Library.from_str(json.dumps(state))


def holey():
    """A vocabulary with an id that no token has."""
    library = Library(models.WordLevel({"a": 0, "b": 2, "[UNK]": 4}, unk_token="[UNK]"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    return library


def wordless():
    """A decoder that must see all tokens at once."""
    library = Library(models.WordLevel({"<pad>": 0, "a": 1, "b": 2, "|": 3}, unk_token="<pad>"))
    library.decoder = decoders.CTC()
    return library


def spaced():
    """No decoder at all: tokens with spaces between them."""
    library = Library(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    return library


def flagged():
    """Byte-level, with control tokens that swallow the space around them, as Phi-3 and BERT-like files have them."""
    library = Tokenizer.train("byte", [], control_tokens=["<|endoftext|>"])._library
    library.add_special_tokens([AddedToken("<|end|>", rstrip=True), AddedToken("<|mid|>", lstrip=True, rstrip=True)])
    return library


@pytest.fixture(scope="session")
def zoo():
    """Tokenizers by name."""
    made = [sentencepiece_bpe, unigram, metaspace, word_piece, suffixed, with_added, wordless, spaced, flagged]
    trained = {
        "byte": Tokenizer.train("byte", []),
        "char": Tokenizer.train("char", TEXTS),
        "bpe": Tokenizer.train("bpe", TEXTS * 3, 400, control_tokens=CHATML),
    }
    tidied = {
        f"{make.__name__}_tidied": Tokenizer(make(), Settings(rest={"clean_up_tokenization_spaces": True}))
        for make in (KINDS["bert"], metaspace, wordless)
    }
    published = {name: Tokenizer(make()) for name, make in KINDS.items()}
    own = {make.__name__: Tokenizer(make()) for make in made} | {"holey": Tokenizer(holey())}
    return trained | tidied | published | own


@pytest.fixture(scope="session")
def texts():
    """What the trained tokenizers of the zoo learned from."""
    return TEXTS
