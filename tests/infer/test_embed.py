"""Sentence vectors: pooling, what is tokenised, rows that do not see one another, and the real all-MiniLM-L6-v2."""

import os
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer as Library
from tokenizers import models, normalizers, pre_tokenizers, processors

import anyformer as af
from anyformer.errors import UserError
from anyformer.infer.embed import Dense, Embedding, embed
from anyformer.infer.pooling import MODES, pool
from anyformer.nn.model import build
from anyformer.spec import expand
from anyformer.text import Tokenizer

NORM = {"kind": "layer", "eps": 1e-3}
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"the a cat dog sat on mat query : s S sσ".split()]
TEXTS = ["the cat sat on the mat", "a dog", "", "the dog sat on a cat on a mat on a mat", "mat"]


def library(*, around=True, lower=True):
    made = Library(models.WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.normalizer = normalizers.Lowercase() if lower else None
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    if around:
        made.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    made.add_special_tokens(WORDS[:4])
    return made


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(library())


@pytest.fixture(scope="module")
def bare():
    return Tokenizer(library(around=False))


BERT = {
    "architecture": "encoder",
    "vocab_size": 19,
    "d_model": 30,
    "n_layers": 2,
    "max_positions": 24,
    "placement": "post",
    "bias": True,
    "norm": NORM,
    "embed": {"position": "learned", "types": 2, "norm": NORM},
    "attention": {"n_heads": 5, "position": "none"},
    "ffn": {"kind": "dense", "activation": "gelu", "d_ff": 41},
    "head": "none",
    "pooler": True,
}
DECODER = {"architecture": "decoder", "embed": {"position": "learned"}, "pooler": False}


def model(**over):
    """A small BERT, or what `over` makes of it, with weights that hide nothing."""
    made = build(expand(BERT | over))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for value in made.parameters():
            value.add_(0.4 * torch.randn(value.shape, generator=generator))
    return made


@pytest.fixture(scope="module")
def bert():
    return model()


def from_theirs(tensors):
    """The weights of `transformers.BertModel` under the names of this package."""
    renamed = {}
    for name, value in tensors.items():
        for theirs, ours in (
            ("embeddings.word_embeddings", "encoder.embed.token"),
            ("embeddings.position_embeddings", "encoder.embed.position"),
            ("embeddings.token_type_embeddings", "encoder.embed.types"),
            ("embeddings.LayerNorm", "encoder.embed.norm"),
            ("encoder.layer.", "encoder.blocks."),
            ("attention.self.query", "attention.q"),
            ("attention.self.key", "attention.k"),
            ("attention.self.value", "attention.v"),
            ("attention.output.dense", "attention.out"),
            ("attention.output.LayerNorm", "attention_norms.residual"),
            ("intermediate.dense", "ffn.up"),
            ("output.dense", "ffn.down"),
            ("output.LayerNorm", "ffn_norms.residual"),
            ("pooler.dense", "pooler"),
        ):
            name = name.replace(theirs, ours)
        renamed[name] = value
    renamed.pop("embeddings.position_ids", None)
    return renamed


def by_hand(hidden, real, mode, skip):
    """One row, token by token, in Python's numbers."""
    places = [place for place, kept in enumerate(real.tolist()) if kept]
    counted = [(order, hidden[place].tolist()) for order, place in enumerate(places, 1) if order > skip]
    if not counted:
        return [0.0] * hidden.shape[-1]
    columns = list(zip(*(state for _, state in counted), strict=True))
    if mode in ("cls", "last"):
        return counted[0 if mode == "cls" else -1][1]
    if mode == "max":
        return [max(column) for column in columns]
    weights = [order if mode == "weighted_mean" else 1 for order, _ in counted]
    over = len(counted) ** 0.5 if mode == "mean_sqrt_len" else sum(weights)
    return [sum(w * x for w, x in zip(weights, column, strict=True)) / over for column in columns]


def test_a_mean_is_over_real_tokens():
    """B58. States [1, 0], [1, 0] and two of padding [0, 2]."""
    hidden = torch.tensor([[[1.0, 0.0], [1.0, 0.0], [0.0, 2.0], [0.0, 2.0]]])
    real = torch.tensor([[True, True, False, False]])
    assert pool(hidden, real, ["mean"]).tolist() == [[1.0, 0.0]]
    assert pool(hidden, real, ["max", "mean_sqrt_len"]).tolist() == [[1.0, 0.0, pytest.approx(2**0.5), 0.0]]
    assert pool(hidden, ~real, ["last"]).tolist() == [[0.0, 2.0]]


@pytest.mark.parametrize("skip", [0, 2])
@pytest.mark.parametrize("mode", MODES)
def test_a_mode_is_its_definition(mode, skip):
    """B58. Padded on either side with numbers that are none, a row of padding alone, negative states."""
    hidden = torch.randn(4, 7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) - 2
    places = torch.arange(7)
    real = torch.stack([places < 5, places >= 3, places < 1, places < 0])
    spoiled = torch.where(real[..., None], hidden, torch.nan)
    expected = torch.tensor([by_hand(h, r, mode, skip) for h, r in zip(hidden, real, strict=True)], dtype=hidden.dtype)
    found = pool(spoiled, real, [mode], skip)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert pool(spoiled.bfloat16(), real, [mode], skip).dtype == torch.float32


def test_several_modes_are_put_side_by_side(bert, tokenizer):
    single = [embed(bert, tokenizer, TEXTS, Embedding(pooling=(mode,))) for mode in ("max", "cls")]
    assert torch.equal(embed(bert, tokenizer, TEXTS, Embedding(pooling=("max", "cls"))), torch.cat(single, -1))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_a_text_alone_is_the_text_among_others(kind, mode, bert, tokenizer):
    """B58."""
    made = bert if kind == "encoder" else model(**DECODER)
    how = Embedding(pooling=(mode,))
    alone = torch.cat([embed(made, tokenizer, [text], how) for text in TEXTS])
    for batch_size in (2, 32):
        torch.testing.assert_close(embed(made, tokenizer, TEXTS, how, batch_size=batch_size), alone, rtol=0, atol=1e-5)
    assert len({tuple(row) for row in alone.tolist()}) == len(TEXTS) or (kind, mode) == ("decoder", "cls")


def test_texts_of_no_tokens_are_zeros(bert, bare):
    """B58. Alone, and beside others, which do not notice."""
    how = Embedding(normalise=True)
    assert torch.equal(embed(bert, bare, ["", ""], how), torch.zeros(2, 30))
    found = embed(bert, bare, ["", "the cat"], how)
    assert torch.equal(found[0], torch.zeros(30))
    torch.testing.assert_close(found[1:], embed(bert, bare, ["the cat"], how), rtol=0, atol=1e-6)


def test_texts_of_like_length_share_a_batch(bert, bare, monkeypatch):
    """The longest first, so that what memory does not hold shows at once."""
    shapes, own = [], bert.hidden
    monkeypatch.setattr(
        bert, "hidden", lambda tokens, padding: shapes.append(tokens.shape) or own(tokens, padding=padding)
    )
    embed(bert, bare, ["a", "a b c d e", "a b", "a b c d", "a b"], Embedding(), batch_size=2)
    assert shapes == [(2, 5), (2, 2), (1, 1)]


def test_no_texts_are_no_rows(bert, tokenizer):
    assert embed(bert, tokenizer, [], Embedding(pooling=("max", "mean"))).shape == (0, 60)
    assert embed(bert, tokenizer, (), Embedding(dense=(Dense(torch.ones(4, 30)),))).shape == (0, 4)


def test_the_vectors_are_those_of_transformers(tokenizer):
    """Their states of their tokens, cut by their rule, averaged here."""
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=19,
        hidden_size=30,
        num_hidden_layers=2,
        num_attention_heads=5,
        intermediate_size=41,
        max_position_embeddings=24,
        layer_norm_eps=1e-3,
    )
    their_model = transformers.BertModel(config).eval()
    ours = model()
    for name, value in from_theirs(their_model.state_dict()).items():
        value.copy_(ours.get_parameter(name).detach())
    their_tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=library(), pad_token="[PAD]")
    batch = their_tokenizer(TEXTS, padding=True, truncation=True, max_length=7, return_tensors="pt")
    with torch.no_grad():
        states = their_model(batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
    weights = batch["attention_mask"][..., None].float()
    expected = F.normalize((states * weights).sum(1) / weights.sum(1), dim=-1)
    found = embed(ours, tokenizer, TEXTS, Embedding(normalise=True, max_length=7))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.fixture
def fed(bert, monkeypatch):
    """What the model is given, row by row of the caller, for a call with these arguments."""

    def run(tokenizer, texts, how, **more):
        seen = []

        def hidden(tokens, padding):
            seen.extend(row[kept].tolist() for row, kept in zip(tokens, padding, strict=True))
            return torch.zeros(*tokens.shape, 30)

        monkeypatch.setattr(bert, "hidden", hidden)
        for text in texts:
            embed(bert, tokenizer, [text], how, **more)
        return seen

    return run


@pytest.mark.parametrize("side", ["right", "left"])
def test_a_long_text_is_cut_within_what_is_around_it(side, fed, tokenizer):
    transformers = pytest.importorskip("transformers")
    peer = transformers.PreTrainedTokenizerFast(tokenizer_object=library(), pad_token="[PAD]", truncation_side=side)
    for most in (3, 5, 14, 15, 100):
        expected = peer(TEXTS, truncation=True, max_length=most)["input_ids"]
        assert fed(tokenizer, TEXTS, Embedding(max_length=most, truncation=side)) == expected


def test_a_text_is_cut_to_the_context(fed, tokenizer):
    long = " ".join(["cat"] * 50)
    cat = WORDS.index("cat")
    for most in (None, 100):
        assert fed(tokenizer, [long], Embedding(max_length=most)) == [[2, *[cat] * 22, 3]]
    with pytest.raises(UserError, match="no token of a text has room"):
        fed(tokenizer, [long], Embedding(max_length=2))


def test_texts_are_made_lower_case_as_tokenizers_do_it(fed):
    """A sigma that ends a word becomes σ; text that is no Unicode is refused as ever."""
    cased = Tokenizer(library(lower=False))
    assert fed(cased, ["S SΣ"], Embedding(lower=True)) == [[2, WORDS.index("s"), WORDS.index("sσ"), 3]]
    assert fed(cased, ["S SΣ"], Embedding()) == [[2, WORDS.index("S"), 1, 3]]
    with pytest.raises(UserError, match="not valid Unicode"):
        fed(cased, ["a\ud800"], Embedding(lower=True))


def test_the_spelling_of_a_control_token_stays_text(fed, tokenizer):
    (row,) = fed(tokenizer, ["a [SEP] cat"], Embedding())
    assert row[0] == 2
    assert row.count(3) == 1
    assert row[-1] == 3


PROMPTED = Embedding(prompts={"query": "query: ", "none": ""}, default_prompt="query")


def test_a_prompt_goes_in_front(fed, tokenizer):
    cat, query, colon = (WORDS.index(word) for word in ("cat", "query", ":"))
    assert fed(tokenizer, ["cat"], PROMPTED) == [[2, query, colon, cat, 3]]
    assert fed(tokenizer, ["cat"], PROMPTED, prompt="none") == [[2, cat, 3]]
    assert fed(tokenizer, ["cat"], replace(PROMPTED, default_prompt=None)) == [[2, cat, 3]]
    with pytest.raises(UserError, match=r"(?s)no prompt of this name.*'doc'.*query, none"):
        fed(tokenizer, ["cat"], PROMPTED, prompt="doc")


def test_a_prompt_is_left_out_of_pooling(bert, tokenizer):
    """Its tokens and the one before it are seen by the others but not counted."""
    how = replace(PROMPTED, pool_prompt=False)
    tokens = torch.tensor([tokenizer.encode("query: the cat")])
    with torch.no_grad():
        expected = bert.hidden(tokens)[:, 3:].mean(1)
    torch.testing.assert_close(embed(bert, tokenizer, ["the cat"], how), expected, rtol=0, atol=1e-6)
    counted = embed(bert, tokenizer, ["the cat"], how, prompt="none")
    torch.testing.assert_close(counted, embed(bert, tokenizer, ["the cat"], Embedding()), rtol=0, atol=1e-6)


def test_dense_layers_come_before_the_norm(bert, tokenizer):
    generator = torch.Generator().manual_seed(3)
    first = Dense(torch.randn(8, 60, generator=generator), torch.randn(8, generator=generator), "gelu")
    second = Dense(torch.randn(5, 8, generator=generator), activation="tanh")
    plain = embed(bert, tokenizer, TEXTS, Embedding(pooling=("cls", "last")))
    expected = torch.tanh(F.gelu(plain @ first.weight.T + first.bias) @ second.weight.T)
    how = Embedding(pooling=("cls", "last"), dense=(first, second), normalise=True)
    found = embed(bert, tokenizer, TEXTS, how)
    torch.testing.assert_close(found, expected / expected.norm(dim=-1, keepdim=True), rtol=0, atol=1e-5)


def test_an_encoder_with_a_decoder_gives_its_own_states(tokenizer):
    both = model(architecture="encoder-decoder", head="language", pooler=False, embed=DECODER["embed"])
    tokens = torch.tensor([tokenizer.encode("the cat")])
    with torch.no_grad():
        expected = both.encode(tokens).mean(1)
    torch.testing.assert_close(embed(both, tokenizer, ["the cat"], Embedding()), expected, rtol=0, atol=1e-6)


def test_a_model_in_training_keeps_its_modes(tokenizer):
    """Dropout is off, no gradients are kept, and a call that fails restores the modes too."""
    dropping = model(embed=BERT["embed"] | {"dropout": 0.5})
    expected = embed(dropping, tokenizer, TEXTS, Embedding())
    dropping.train()
    dropping.encoder.blocks[0].eval()
    modes = [module.training for module in dropping.modules()]
    found = embed(dropping, tokenizer, TEXTS, Embedding())
    assert torch.equal(found, expected)
    assert not found.requires_grad
    assert torch.is_grad_enabled()
    dropping.hidden = lambda *args, **kwargs: 1 / 0
    with pytest.raises(ZeroDivisionError):
        embed(dropping, tokenizer, TEXTS, Embedding())
    assert [module.training for module in dropping.modules()] == modes


def test_another_dtype_gives_float32(tokenizer):
    wide = model().double()
    found = embed(wide, tokenizer, TEXTS, Embedding(dense=(Dense(torch.ones(3, 30)),), normalise=True))
    assert found.dtype == torch.float32
    narrow = embed(model().bfloat16(), tokenizer, TEXTS, Embedding(normalise=True))
    assert narrow.dtype == torch.float32
    cosine = (narrow * embed(model(), tokenizer, TEXTS, Embedding(normalise=True))).sum(-1)
    assert cosine.min() > 0.995


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tokenizer": None}, "need a tokenizer"),
        ({"texts": "the cat"}, "given as a list"),
        ({"texts": iter(["the cat"])}, "given as a list"),
        ({"texts": ["cat", 7]}, "(?s)not a text.*text 1.*7"),
        ({"batch_size": 0}, "at least one text"),
        ({"embedding": Embedding(d_model=31)}, "(?s)another width.*30.*31"),
        ({"embedding": Embedding(dense=(Dense(torch.ones(2, 31)),))}, "another width"),
        ({"model": model(vocab_size=5)}, "(?s)ids that the model does not have.*0 to 4"),
        ({"prompt": "query"}, "(?s)no prompt of this name.*there are no prompts"),
    ],
)
def test_what_cannot_be_embedded_is_refused(change, said, bert, tokenizer):
    call = {"model": bert, "tokenizer": tokenizer, "texts": ["the cat"], "embedding": Embedding(), **change}
    with pytest.raises(UserError, match=said):
        embed(**call)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"pooling": ()}, "unknown pooling"),
        ({"pooling": "mean"}, "unknown pooling"),
        ({"pooling": ("mean", "sum")}, "unknown pooling"),
        ({"max_length": 0}, "max_length is at least 1"),
        ({"d_model": 0}, "d_model is at least 1"),
        ({"truncation": "middle"}, "unknown side"),
        ({"default_prompt": "query"}, "no prompt of this name"),
        ({"d_model": 4, "dense": (Dense(torch.ones(3, 5)),)}, "(?s)another width.*4 numbers.*5"),
        ({"dense": (Dense(torch.ones(3, 5)), Dense(torch.ones(3, 5)))}, "(?s)another width.*3 numbers.*5"),
    ],
)
def test_an_embedding_that_does_not_fit_together_is_refused(given, said):
    with pytest.raises(UserError, match=said):
        Embedding(**given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((torch.ones(3), None), "do not fit"),
        ((torch.ones(3, 5), torch.ones(5)), "do not fit"),
        ((torch.ones(3, 5), None, "cosine"), "unknown activation"),
    ],
)
def test_a_dense_layer_that_does_not_fit_together_is_refused(given, said):
    with pytest.raises(UserError, match=said):
        Dense(*given)


PAIRS = [
    ("A man is eating food.", "Someone has a meal."),
    ("The stock market fell sharply today.", "Shares lost much of their value this afternoon."),
    ("How do I sort a list in Python?", "Ordering the elements of a Python sequence"),
    ("A girl is playing the violin.", "A young musician performs on a string instrument."),
]


@pytest.mark.slow
def test_minilm():
    """The published model: states and vectors of `transformers`, alone and in padded batches; like sentences meet."""
    transformers = pytest.importorskip("transformers")
    folder = os.environ.get("ANYFORMER_MINILM")
    if not folder:
        pytest.skip("ANYFORMER_MINILM does not name the folder of all-MiniLM-L6-v2")
    checkpoint = af.load(folder)
    assert checkpoint.embedding == Embedding(normalise=True, max_length=256, d_model=384)
    their_model = transformers.BertModel.from_pretrained(folder).eval()
    texts = [text for pair in PAIRS for text in pair] + ["", "deep learning " * 300]
    their_tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    batch = their_tokenizer(texts, padding=True, truncation=True, max_length=256, return_tensors="pt")
    real = batch["attention_mask"].bool()
    with torch.no_grad():
        states = their_model(**batch).last_hidden_state
        mine = checkpoint.model.hidden(batch["input_ids"], padding=real)
    torch.testing.assert_close(mine[real], states[real], rtol=0, atol=1e-5)
    expected = torch.stack([F.normalize(s[r].mean(0), dim=-1) for s, r in zip(states, real, strict=True)])
    found = checkpoint.embed(texts)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    alone = torch.cat([checkpoint.embed([text]) for text in texts])
    torch.testing.assert_close(found, alone, rtol=0, atol=1e-6)
    likeness = found[:8:2] @ found[1:8:2].T
    assert likeness.argmax(0).tolist() == likeness.argmax(1).tolist() == [0, 1, 2, 3]
    assert likeness.diagonal().min() > 0.4 > 0.2 > (likeness - torch.diag(likeness.diagonal())).max()
