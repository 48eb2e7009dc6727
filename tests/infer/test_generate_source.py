"""Generation by encoder–decoders: the prompt is the source, against one full uncached pass for every token."""

import pytest
import torch
from tokenizers import AddedToken, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Library

from anyformer.errors import UserError
from anyformer.infer import Completion, Generation, Sampling, encode_prompt, generate, generate_ids
from anyformer.infer.decode import decoder_of
from anyformer.nn.model import build
from anyformer.spec import expand
from anyformer.text import Tokenizer

POSITIONS = {
    "relative": {"attention": {"n_heads": 5, "d_head": 6, "position": {"kind": "relative", "n_buckets": 8}}},
    "learned": {"embed": {"position": "learned"}, "attention": {"n_heads": 5, "d_head": 6, "position": "none"}},
    "sinusoidal": {"embed": {"position": "sinusoidal"}, "attention": {"n_heads": 5, "d_head": 6, "position": "none"}},
}
SOURCES = [[3, 1, 4], [2, 7, 1, 8, 2, 8, 1], [5, 9, 2, 6, 5]]
T5 = Generation(start=(0,))


def tiny(name="relative", vocab_size=31, seed=0, **over):
    """Different depths, blocks of three times their weights: greedy text then depends on the source and moves on."""
    recipe = {
        "architecture": "encoder-decoder",
        "vocab_size": vocab_size,
        "d_model": 20,
        "ffn": "swiglu",
        "encoder": {"n_layers": 2},
        "decoder": {"n_layers": 3},
        **({} if name == "relative" else {"max_positions": 40}),
        **POSITIONS[name],
        **over,
    }
    model = build(expand(recipe), seed=seed)
    with torch.no_grad():
        for stack in (model.encoder, model.decoder):
            for parameter in stack.blocks.parameters():
                parameter.mul_(3.0)
    return model


@torch.no_grad()
def full_passes(model, source, n, start=(0,), eos=(), suppressed=()):
    """Greedy without cache, batch or padding."""
    ids = list(start)
    for _ in range(n):
        logits = model(torch.tensor([ids]), source=torch.tensor([source]))[0, -1]
        logits[list(suppressed)] = -torch.inf
        token = int(logits.argmax())
        if token in eos:
            break
        ids.append(token)
    return ids[len(start) :]


def new_ids(model, prompts, sampling, generation=T5, **options):
    ids = [[] for _ in prompts]
    for step in generate_ids(model, prompts, sampling, generation=generation, **options):
        if step.token is not None:
            ids[step.row].append(step.token)
    return ids


@pytest.mark.parametrize("name", POSITIONS)
@pytest.mark.parametrize("start", [(0,), (2, 0)])
def test_padded_sources_write_what_they_write_alone(name, start):
    """B05. Sources of 3, 7 and 5 ids, and a row that ends earlier."""
    model = tiny(name)
    budgets = [Sampling(max_new_tokens=n) for n in (20, 20, 6)]
    expected = [full_passes(model, p, s.max_new_tokens, start) for p, s in zip(SOURCES, budgets, strict=True)]
    assert len({tuple(ids) for ids in expected}) == 3
    assert min(len(set(ids)) for ids in expected) > 2
    says = Generation(start=start)
    assert new_ids(model, SOURCES, budgets, says) == expected
    assert [new_ids(model, [p], s, says)[0] for p, s in zip(SOURCES, budgets, strict=True)] == expected


def test_rows_that_end_take_their_source_along():
    """B37. Every row ends at another time, in an order that is not theirs; both ends count."""
    model = tiny()
    free = [full_passes(model, source, 12) for source in SOURCES]
    eos = (free[1][6], free[2][2])
    expected = [full_passes(model, source, 12, eos=eos) for source in SOURCES]
    assert [len(ids) for ids in expected] == [12, 6, 2]
    assert new_ids(model, SOURCES, Sampling(max_new_tokens=12), Generation((0,), eos)) == expected
    assert new_ids(model, SOURCES, Sampling(max_new_tokens=12), Generation((0,), eos[:1]), eos_ids=eos[1:]) == expected
    longer = Sampling(max_new_tokens=12, ignore_eos=True)
    assert new_ids(model, SOURCES, longer, Generation((0,), eos)) == free
    least = new_ids(model, SOURCES, Sampling(max_new_tokens=12, min_new_tokens=6), Generation((0,), eos))
    assert all(len(ids) >= 6 and not set(eos) & set(ids) for ids in least)


def test_a_row_without_budget_leaves_the_others_their_sources():
    model = tiny()
    budgets = [Sampling(max_new_tokens=n) for n in (0, 5, 5)]
    assert new_ids(model, SOURCES, budgets) == [[], *(full_passes(model, source, 5) for source in SOURCES[1:])]


def test_the_source_is_read_once(monkeypatch):
    model, calls = tiny(), []
    encode = model.encode
    monkeypatch.setattr(model, "encode", lambda *args, **kwargs: calls.append(1) or encode(*args, **kwargs))
    new_ids(model, SOURCES, Sampling(max_new_tokens=9))
    assert calls == [1]


def test_sampled_rows_do_not_depend_on_their_companions():
    model = tiny()
    sampled = Sampling(temperature=0.9, top_p=0.9, repetition_penalty=1.2, seed=11, max_new_tokens=25)
    (alone,) = new_ids(model, SOURCES[:1], sampled)
    batch = new_ids(model, [*SOURCES[1:], SOURCES[0]], [Sampling(max_new_tokens=5), sampled, sampled])
    assert batch[2] == alone


def test_suppressed_ids_are_never_written():
    """B54. Padded rows and suppressed ids, 10,000 draws at T = 5; all others occur."""
    model = tiny()
    assert full_passes(model, SOURCES[0], 8)[0] == 12
    says = Generation((0,), suppressed=(12, 3))
    expected = [full_passes(model, source, 9, suppressed=(12, 3)) for source in SOURCES]
    assert new_ids(model, SOURCES, Sampling(max_new_tokens=9), says) == expected
    samplings = [Sampling(temperature=5.0, seed=seed, max_new_tokens=40) for seed in range(250)]
    found = new_ids(model, [[1]] * 250, samplings, says, n_allowed=29)
    assert sum(len(ids) for ids in found) == 10_000
    assert {token for ids in found for token in ids} == set(range(29)) - {12, 3}


@pytest.mark.parametrize(("n_start", "n_new"), [(1, 39), (2, 38), (40, 1)])
def test_the_context_counts_the_target_alone(n_start, n_new):
    """A source that fills its own context leaves the reply all of its room."""
    model = tiny("learned", encoder={"n_layers": 2, "max_positions": 45})
    start = tuple(i % 31 for i in range(n_start))
    source = [(7 * i) % 31 for i in range(45)]
    (ids,) = new_ids(model, [source], Sampling(max_new_tokens=100), Generation(start))
    assert ids == full_passes(model, source, n_new, start)
    with pytest.raises(UserError, match="46 tokens, context 45") as caught:
        generate_ids(model, [[1], [1] * 46], Sampling(), generation=T5)
    assert caught.value.where == "prompt 1"


def test_a_model_that_needs_a_start_token_says_so():
    model = tiny("learned")
    with pytest.raises(UserError, match="nothing says with which token") as caught:
        generate_ids(model, [[1]], Sampling())
    assert caught.value.where == "decoder_start_token_id"
    assert "generation_config.json" in caught.value.remedy
    first, second = caught.value.where, "forced_bos_token_id"
    for start, words, where in (
        ((31,), "outside the vocabulary", first),
        ((0, 31), "outside the vocabulary", second),
        ((0,) * 41, "41 tokens, context 40", first),
    ):
        with pytest.raises(UserError, match=words) as caught:
            generate_ids(model, [[1]], Sampling(), generation=Generation(start))
        assert caught.value.where == where
    with pytest.raises(UserError, match="no tokens"):
        generate_ids(model, [[1], []], Sampling(), generation=T5)
    with pytest.raises(UserError, match="reads a source"):
        decoder_of(model.spec)


def test_a_decoder_does_not_use_the_start_tokens(prefix_model):
    model = prefix_model()
    plain = new_ids(model, [[1, 2]], Sampling(max_new_tokens=9), Generation())
    assert new_ids(model, [[1, 2]], Sampling(max_new_tokens=9), Generation(start=(99,))) == plain
    assert new_ids(model, [[1, 2]], Sampling(max_new_tokens=9), Generation(eos_ids=plain[0][4:5]))[0] == plain[0][:4]


def test_a_model_in_training_is_deterministic_and_stays_in_training():
    model = tiny(dropout=0.5)
    expected = full_passes(model, SOURCES[1], 12)
    model.train()
    assert new_ids(model, SOURCES[1:2], Sampling(max_new_tokens=12)) == [expected]
    assert all(module.training for module in model.modules())


WORDS = ["<pad>", "</s>", "<unk>", "a", "b", "c", "d", "e", "f", "g", "h"]


def words(tmp_path, pieces=WORDS):
    """A tokenizer that closes every text with </s>, as T5's does."""
    library = Library(models.WordLevel(vocab={word: i for i, word in enumerate(pieces)}, unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.add_special_tokens([AddedToken(word, special=True) for word in pieces[:3]])
    library.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    library.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    return Tokenizer.load(tmp_path)


def test_a_source_is_a_whole_text(tmp_path):
    """With the end that the tokenizer writes; the reply's text is its own, without start tokens and end."""
    tokenizer, model = words(tmp_path), tiny(vocab_size=13, seed=6)
    assert encode_prompt(tokenizer, "a b", whole=True) == [3, 4, 1]
    assert encode_prompt(tokenizer, "a b") == [3, 4]
    texts = ["a b c", "g", "h e e h d a"]
    sources = [tokenizer.encode(text) for text in texts]
    says = Generation((0,), (6,), (11, 12, 2))
    found = generate(model, tokenizer, texts, Sampling(max_new_tokens=9, ignore_eos=True), says)
    for completion, source in zip(found, sources, strict=True):
        ids = full_passes(model, source, 9, suppressed=(11, 12, 2))
        assert completion == Completion(tokenizer.decode(ids), tuple(ids), "length", len(source), 9)
    assert len({completion.ids for completion in found}) == 3
    assert generate(model, tokenizer, sources, Sampling(max_new_tokens=9, ignore_eos=True), says) == found
    ended = generate(model, tokenizer, texts, Sampling(), says)
    assert [(c.text, c.finish_reason) for c in ended] == [("c", "stop"), ("f c f b e c", "stop"), ("f c", "stop")]
    for completion, source in zip(ended, sources, strict=True):
        assert list(completion.ids) == full_passes(model, source, 9, eos=(1, 6), suppressed=(11, 12, 2))
    assert generate(model, tokenizer, "", Sampling(max_new_tokens=1), says)[0].n_prompt_tokens == 1


def test_ids_without_a_token_or_without_an_embedding_are_refused(tmp_path):
    """B54. Eleven tokens: 13 rows generate none of the two others, 9 rows read none of the last two tokens."""
    tokenizer = words(tmp_path)
    wide, narrow = tiny(vocab_size=13), tiny(vocab_size=9)
    samplings = [Sampling(temperature=5.0, seed=seed, max_new_tokens=40, ignore_eos=True) for seed in range(250)]
    found = generate(wide, tokenizer, ["a"] * 250, samplings, T5)
    assert sum(len(completion.ids) for completion in found) == 10_000
    assert {token for completion in found for token in completion.ids} == set(range(11))
    with pytest.raises(UserError, match="stands for no token") as caught:
        generate(wide, tokenizer, [[3], [3, 12]], Sampling(), T5)
    assert (caught.value.where, caught.value.got) == ("prompt 1", 12)
    assert {i for c in generate(narrow, tokenizer, ["a"] * 30, samplings[:30], T5) for i in c.ids} == set(range(9))
    with pytest.raises(UserError, match="no embedding for a token") as caught:
        generate(narrow, tokenizer, ["f", "a g"], Sampling(), T5)
    assert caught.value.where == "prompt 1"
    assert caught.value.got == "'g', id 9, of a tokenizer of 11 ids"
    assert caught.value.expected == "ids from 0 to 8"
    with pytest.raises(UserError, match="outside the vocabulary"):
        generate(narrow, tokenizer, [[3, 9]], Sampling(), T5)


def test_a_decoder_refuses_the_same_ids(tmp_path, scripted):
    """B54."""
    tokenizer = words(tmp_path)
    with pytest.raises(UserError, match="no embedding for a token"):
        generate(scripted([3], tokenizer, vocab_size=9), tokenizer, "a g", Sampling())
    with pytest.raises(UserError, match="stands for no token"):
        generate(scripted([3], tokenizer, vocab_size=13), tokenizer, [[12]], Sampling())
    script = scripted([3, 4, 5], tokenizer)
    assert generate(script, tokenizer, "a", Sampling(), Generation(eos_ids=(4,)))[0].ids == (3,)
    assert generate(script, tokenizer, "a", Sampling(max_new_tokens=2), Generation(suppressed=(3,)))[0].ids[0] != 3
