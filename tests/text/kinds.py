"""Tokenizers in the shapes of published ones, with vocabularies of a few hundred tokens."""

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Library

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
LEARNED = [
    "Hello world, hello there. The quick brown fox jumps over the lazy dog; don't panic! We've 3 of 1,234.5\n",
    "def f(x):\n    return x + 1  # größer → 😀 数学\n\nfor i in range(10):\n        print(f(i))\n",
    "user system assistant tool It's the best of times, it was the worst of times ... 1234567 and 3.14159\r\n\ttabs\n",
]
TEXTS = [
    "",
    " ",
    "Hello world",
    " Hello  world ",
    "two\n\nlines\r\n\tand a tab   ",
    "          ten spaces, then\n\n\n\nfour lines",
    "It's 3.14159, we've 1234567 of 12,345 — don't!",
    "größer Ünïcödé naïve ﬁ ½ Å Å e\u0301",
    "数学は楽しい, 한국어, العربية, हिन्दी",
    "😀 👩‍👩‍👧‍👦 🇩🇪 a\u200bb \ufeff c\u00a0d \u3000e",
    "\x00\x01 null \x7f",
    "▁ under ▁▁score _ __",
    "<|not a token|> <0x41> [NOT] ##ing",
    "a" * 300,
    "x <New> word, <new>  WORD<New> word",
]


def sentencepiece_pieces():
    """A vocabulary of SentencePiece's BPE: control tokens, bytes, letters, merges."""
    merges = [("▁", "H"), ("e", "l"), ("▁H", "el"), ("l", "o"), ("▁Hel", "lo"), ("▁", "▁"), ("▁▁", "▁▁"), ("o", "r")]
    merges += [("l", "d"), ("▁", "w"), ("▁w", "or"), ("▁wor", "ld"), ("t", "h"), ("▁", "th"), ("1", "2"), ("H", "el")]
    letters = sorted(set("▁HelowrdthinasINSTYuyg.,!<>/[]12\n"))
    tokens = ["<unk>", "<s>", "</s>", *BYTES, *letters, *("".join(pair) for pair in merges)]
    return {token: index for index, token in enumerate(dict.fromkeys(tokens))}, merges


def llama():
    """Llama 2 by Metaspace, as later files have it: only the very start of a text gets its ▁."""
    vocab, merges = sentencepiece_pieces()
    library = Library(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    return library


def llama_prepend():
    """Llama 2 by normalisers, as its first files have it."""
    library = llama()
    library.pre_tokenizer = None
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return library


def gemma():
    """No ▁ at the start, turns marked by control tokens."""
    library = llama()
    library.normalizer = normalizers.Replace(" ", "▁")
    library.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    library.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return library


def byte_level(pre_tokenizer, control, normalizer=None):
    """A byte-level BPE that has learned a little."""
    library = Library(models.BPE())
    library.normalizer, library.pre_tokenizer, library.decoder = normalizer, pre_tokenizer, decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=control,
        show_progress=False,
    )
    library.train_from_iterator(LEARNED, trainer)
    return library


def gpt2():
    """Its own regular expression, and no token around a text."""
    library = byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False), ["<|endoftext|>"])
    library.post_processor = processors.ByteLevel(trim_offsets=False)
    return library


def roberta():
    """A space before every text."""
    library = byte_level(pre_tokenizers.ByteLevel(add_prefix_space=True), ["<s>", "</s>", "<pad>", "<unk>"])
    library.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    library.post_processor = processors.RobertaProcessing(("</s>", 1), ("<s>", 0))
    return library


def llama3():
    """Splitting by a regular expression, BOS behind the account of bytes."""
    words = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"
    steps = [pre_tokenizers.Split(Regex(words), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    control = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    library = byte_level(pre_tokenizers.Sequence(steps), control)
    bos = processors.TemplateProcessing(single=f"{control[0]} $A", special_tokens=[(control[0], 0)])
    library.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), bos])
    return library


def falcon():
    """A chain of four splits, digits by themselves, composed letters."""
    steps = [pre_tokenizers.Punctuation("contiguous"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    steps += [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated")]
    return byte_level(pre_tokenizers.Sequence(steps), ["<|endoftext|>"], normalizers.NFC())


def bert(lowercase=True, cleanup=True):
    """Words and their continuations."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "Hello", "world", "two", "lines", "don", "it", "It"]
    words += [
        *"abcdefghijklmnopqrstuvwxyz0123456789.,!?'-_数学",
        "##ing",
        "##s",
        *(f"##{c}" for c in "abcdefgrotins0123"),
    ]
    words = list(dict.fromkeys(words))
    library = Library(models.WordPiece({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    library.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece(cleanup=cleanup)
    around = [("[CLS]", 2), ("[SEP]", 3)]
    library.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=around)
    library.add_special_tokens(words[:5])
    return library


def bert_cased():
    """Letters as they are, decoded without tidying."""
    return bert(lowercase=False, cleanup=False)


def pieces(control, more=()):
    """A Unigram vocabulary."""
    found = [(token, 0.0) for token in control] + [("▁", -2.0), ("▁Hello", -3.0), ("▁world", -3.0), ("lo", -4.0)]
    found += [
        (letter, -6.0 - index / 50) for index, letter in enumerate("abcdefghijklmnopqrstuvwxyz.,!?'<>/H1234567890")
    ]
    return found + [(piece, -30.0) for piece in more]


def t5():
    """Unigram without bytes: runs of spaces become one, unknown text one token."""
    library = Library(models.Unigram(pieces(["<pad>", "</s>", "<unk>"]), unk_id=2))
    library.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    library.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    library.decoder = decoders.Metaspace()
    library.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    library.add_special_tokens(["<pad>", "</s>", "<unk>"])
    return library


def unigram_bytes():
    """Unigram that falls back to bytes, as XLM-like and newer models have it."""
    library = Library(models.Unigram(pieces(["<unk>", "<s>", "</s>"], BYTES), unk_id=0, byte_fallback=True))
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    library.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")])
    around = [("<s>", 1), ("</s>", 2)]
    library.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=around)
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    return library


def albert():
    """Unigram over letters without accents and capitals."""
    library = Library(models.Unigram(pieces(["<pad>", "<unk>", "[CLS]", "[SEP]"]), unk_id=1))
    library.normalizer = normalizers.Sequence([normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()])
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Metaspace()
    around = [("[CLS]", 2), ("[SEP]", 3)]
    library.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=around)
    library.add_special_tokens(["<pad>", "<unk>", "[CLS]", "[SEP]"])
    return library


def words_alone():
    """Whole words, without decoder or post-processor."""
    library = Library(models.WordLevel({"[UNK]": 0, "Hello": 1, "world": 2, "two": 3, "lines": 4}, unk_token="[UNK]"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.add_special_tokens(["[UNK]"])
    return library


def added(library):
    """With an ordinary added token, which is matched in normalised text."""
    library.add_tokens([AddedToken("<New> word", normalized=True, special=False)])
    return library


def bert_added():
    """An added token of small letters."""
    return added(bert())


def llama_added():
    """An added token that begins with a space."""
    return added(llama_prepend())


def gpt2_added():
    """An added token among bytes."""
    return added(gpt2())


KINDS = {
    make.__name__: make
    for make in (
        *(llama, llama_prepend, gemma, gpt2, roberta, llama3, falcon),
        *(bert, bert_cased, t5, unigram_bytes, albert, words_alone),
        *(bert_added, llama_added, gpt2_added),
    )
}
