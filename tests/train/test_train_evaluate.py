import json
import math
import re

import pytest
import torch
from training_runs import RECIPE, table, text

from anyformer.errors import UserError
from anyformer.nn.model import build
from anyformer.spec import load_spec
from anyformer.text import Tokenizer
from anyformer.text.corpus import prepare
from anyformer.train.evaluate import Score, evaluate_split, evaluating, score_ids, score_texts, strided

SPEC = load_spec({**RECIPE, "vocab_size": 257, "dropout": 0.5, "max_positions": 12})


def model(dtype="float32"):
    return build(SPEC, seed=2, dtype=dtype)


def one_by_one(net, ids, context, stride, first=1):
    """The oracle: each token by itself, from the window that is the first to reach it."""
    total, count = 0.0, 0
    for t in range(first, len(ids)):
        begin = 0 if t <= context else math.ceil((t - context) / stride) * stride
        logits = net(torch.tensor([ids[begin:t]]))[0, -1]
        total -= float(torch.log_softmax(logits, -1)[ids[t]].detach())
        count += 1
    return total, count


@pytest.mark.parametrize("n", [2, 3, 8, 9, 12, 13, 14, 30, 41])
@pytest.mark.parametrize(("context", "stride"), [(8, 8), (8, 3), (8, 1), (12, 5), (1, 1)])
def test_strided_scores_equal_one_token_at_a_time(n, context, stride):
    ids = torch.randint(257, (n,), generator=torch.Generator().manual_seed(n)).tolist()
    net = model("float64")
    wanted = one_by_one(net, ids, context, stride)
    for rows in (1, 3):
        nats, count = score_ids(net, ids, context=context, stride=stride, rows=rows)
        assert count == wanted[1] == n - 1
        assert nats == pytest.approx(wanted[0], rel=1e-6)


@pytest.mark.parametrize(("context", "stride"), [(8, 8), (8, 3), (5, 2)])
def test_every_token_is_scored_once_and_with_enough_before_it(context, stride):
    ids = list(range(50))
    seen = []
    for batch in strided(ids, context, stride, rows=4, first=3):
        for row, target, mask in zip(batch.tokens, batch.targets, batch.mask, strict=True):
            for place in torch.nonzero(mask).flatten().tolist():
                seen.append(int(target[place]))
                assert place + 1 >= min(seen[-1], context - stride + 1)
                assert int(row[place]) == seen[-1] - 1
    assert seen == list(range(3, 50))


def test_less_to_score_than_a_pair_is_nothing():
    assert score_ids(model(), [4], context=8) == (0.0, 0)
    with pytest.raises(UserError, match="stride"):
        score_ids(model(), [1, 2, 3], context=8, stride=9)


def test_a_document_begins_after_its_mark_or_without_its_first_token():
    """With an EOS token every byte is scored; without any mark the first token and its bytes are left out."""
    said = "naïve — text\n"
    net = model("float64")
    marked = Tokenizer.train("byte", [said])
    assert marked.eos_id is not None
    ids = [marked.eos_id, *marked.encode(said, bare=True)]
    score = score_texts(net, marked, [said], context=12, stride=6)
    nats, count = one_by_one(net, ids, 12, 6)
    assert score.n_tokens == count == len(said.encode())
    assert score.n_bytes == len(said.encode())
    assert score.loss == pytest.approx(nats / count, rel=1e-6)
    assert score.perplexity == pytest.approx(math.exp(nats / count), rel=1e-6)
    assert score.bits_per_byte == pytest.approx(nats / math.log(2) / len(said.encode()), rel=1e-6)
    bare = Tokenizer.train("char", [said])
    assert bare.eos_id is None
    assert bare.bos_id is None
    score = score_texts(net, bare, [said], context=12, stride=6)
    nats, count = one_by_one(net, bare.encode(said), 12, 6)
    assert score.n_tokens == count == len(said) - 1
    assert score.n_bytes == len(said[1:].encode())
    assert score.bits_per_byte == pytest.approx(nats / math.log(2) / len(said[1:].encode()), rel=1e-6)


def test_documents_are_scored_apart():
    tokenizer = Tokenizer.train("byte", ["ab"])
    net = model("float64")
    both = score_texts(net, tokenizer, ["abc", "defg"], context=12)
    alone = [score_texts(net, tokenizer, [t], context=12) for t in ("abc", "defg")]
    assert both.n_tokens == 7
    assert both.loss * 7 == pytest.approx(alone[0].loss * 3 + alone[1].loss * 4)


def test_nothing_to_score_is_refused():
    with pytest.raises(UserError, match="nothing to score"):
        score_texts(model(), Tokenizer.train("char", ["ab"]), ["a"], context=8)


@pytest.mark.parametrize("documents", [False, True])
def test_validation_is_the_whole_split_however_it_is_batched(tmp_path, documents):
    """The last, partial window counts, and every token weighs the same."""
    for index in range(8):
        (tmp_path / f"{index}.txt").write_text(text(61 + 7 * index)[index:], encoding="utf-8")
    corpus = prepare([str(tmp_path)], tmp_path / "corpus", "byte", val_fraction=0.5)
    split, net = corpus.val, model("float64")
    ids, starts = split.tokens[:].tolist(), split.documents.tolist()
    total, count, n_bytes = 0.0, 0, 0
    for begin in range(0, len(ids) - 1, 12):
        for t in range(begin + 1, min(begin + 13, len(ids))):
            if documents and t in starts:
                continue
            from_ = max([begin, *(s for s in starts if documents and s <= t)])
            logits = net(torch.tensor([ids[from_:t]]))[0, -1]
            total -= float(torch.log_softmax(logits, -1)[ids[t]].detach())
            count += 1
            n_bytes += ids[t] < 256
    for rows in (1, 5):
        score = evaluate_split(net, split, context=12, documents=documents, rows=rows)
        assert score.n_tokens == count
        assert score.loss == pytest.approx(total / count, rel=1e-6)
        assert score.n_bytes == n_bytes
        assert score.bits_per_byte == pytest.approx(total / math.log(2) / n_bytes, rel=1e-6)


def test_b65_evaluation_drops_nothing_and_gives_the_mode_back(tmp_path):
    """Dropout 0.5, and a model left in training mode comes back so; random state is not touched."""
    run = table(tmp_path)
    corpus = prepare(run["data"]["sources"], tmp_path / "c", "byte", val_fraction=0.2)
    net = model().train()
    net.decoder.final_norm.eval()
    state = torch.get_rng_state()
    first = evaluate_split(net, corpus.val, context=12)
    second = evaluate_split(net, corpus.val, context=12)
    plain = build(load_spec({**RECIPE, "vocab_size": 257, "max_positions": 12}), seed=2)
    assert first == second == evaluate_split(plain, corpus.val, context=12)
    assert net.training
    assert net.decoder.blocks[1].training
    assert not net.decoder.final_norm.training
    assert torch.equal(torch.get_rng_state(), state)


def test_the_mode_comes_back_after_a_fault():
    net = model().train()

    def fail():
        with evaluating(net):
            assert not net.training
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert net.training


def test_evaluation_can_be_given_up(tmp_path):
    run = table(tmp_path)
    corpus = prepare(run["data"]["sources"], tmp_path / "c", "byte", val_fraction=0.2)
    assert evaluate_split(model(), corpus.val, context=12, abandon=lambda: True) is None


def test_weights_that_are_not_numbers_are_named():
    model = build(load_spec({**RECIPE, "vocab_size": 257, "max_positions": 16}), seed=1)
    tokenizer = Tokenizer.train("byte", [])
    name, parameter = list(model.named_parameters())[3]
    with torch.no_grad():
        parameter.view(-1)[0] = float("nan")
    with pytest.raises(UserError, match=f"parameter {re.escape(name)}"):
        score_texts(model, tokenizer, ["some text"], context=16)


def test_a_perplexity_too_large_for_a_float_is_none_in_json():
    score = Score.of(8000.0, 10, 10)
    assert score.perplexity == math.inf
    text = json.dumps(score.to_dict(), allow_nan=False)
    assert json.loads(text)["perplexity"] is None
    assert Score.from_dict(json.loads(text)) == score
