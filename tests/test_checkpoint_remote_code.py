"""A specification that no published family says, in a folder of Hugging Face: opened by `transformers` and by us.

The oracle of every number is the core, which the ejected text does not share a line with.
"""

import json
import logging
import subprocess
import sys

import pytest
import torch
import transformers
from transformers import dynamic_module_utils
from typer import Typer
from typer.testing import CliRunner

import anyformer as af
from anyformer.checkpoint import Checkpoint
from anyformer.cli.convert import convert
from anyformer.errors import UserError
from anyformer.infer.generation import Generation
from anyformer.spec.folder import CODE_FILE
from anyformer.text import Tokenizer

logging.getLogger("transformers").setLevel(logging.ERROR)

SMALL = {"vocab_size": 61, "d_model": 24, "n_layers": 2, "norm": "rms", "ffn": {"kind": "swiglu", "d_ff": 40}}
LATENT = {"kind": "latent", "n_heads": 3, "kv_rank": 12, "d_nope": 6, "d_rope": 4, "d_value": 5, "position": "rope"}
LONG = {
    "kind": "rope",
    "scaling": {"kind": "longrope", "original": 9, "short": [1, 1.2, 1.3, 1.4, 1.5], "long": [2, 3, 4, 5, 6]},
}
"""Two rows of four and seven tokens that get six grow past its original length at different steps."""
DECODERS = {
    "sinks, norms after, capped": {
        "norm": {"kind": "rms", "bias": True},
        "placement": "sandwich",
        "attention": {"n_heads": 4, "n_kv_heads": 2, "position": "alibi", "sink_logit": True, "softcap": 9.0},
    },
    "latent with experts": {
        "attention": LATENT,
        "ffn": {
            "kind": "moe",
            "n_experts": 4,
            "top_k": 2,
            "scoring": "sigmoid",
            "choice_bias": True,
            "expert": {"kind": "swiglu", "d_ff": 14},
        },
        "alpha": 1.25,
    },
    "prefix and types": {
        "attention": {"n_heads": 3, "d_head": 10, "mask": "prefix", "position": "rope"},
        "embed": {"types": 3},
        "norm": {"kind": "rms", "offset": 1.0},
    },
    "longrope, prefix and types": {
        "attention": {"n_heads": 3, "d_head": 10, "mask": "prefix", "position": LONG},
        "embed": {"types": 3},
    },
    "windows and learned positions": {
        "max_positions": 40,
        "embed": {"position": "learned"},
        "attention": {"n_heads": 3, "d_head": 10, "position": "none", "mask": {"kind": "causal", "window": 4}},
        "tie": False,
    },
}
ENCODERS = {
    "masked": ({"head": {"kind": "language", "bias": True}}, "AutoModelForMaskedLM"),
    "sequence": ({"head": {"kind": "sequence", "n_labels": 4, "pool": "mean"}}, "AutoModelForSequenceClassification"),
    "token": ({"head": {"kind": "token", "n_labels": 3}}, "AutoModelForTokenClassification"),
    "span": ({"head": {"kind": "span"}}, "AutoModelForQuestionAnswering"),
    "none": ({"head": "none", "pooler": True, "embed": {"types": 2}}, "AutoModel"),
}


@pytest.fixture(autouse=True)
def modules(tmp_path, monkeypatch):
    """What `transformers` copies modelling code to, which is otherwise in the home folder."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))


def built(recipe, **more):
    """A checkpoint of a recipe with numbers that hide nothing: no weight of a norm is 1, no bias is 0."""
    spec = af.load_spec(SMALL | recipe)
    model = af.build(spec, seed=3)
    g = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for value in (*model.parameters(), *model.buffers()):
            value.add_(torch.randn(value.shape, generator=g).mul_(0.2))
    return Checkpoint(spec, model, **more)


def opened(folder, kind, **more):
    """The folder as `transformers` opens it, every tensor used once."""
    model, report = getattr(transformers, kind).from_pretrained(
        folder, trust_remote_code=True, output_loading_info=True, **more
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    return model.eval()


def same(ours, theirs):
    """Whether two checkpoints are bit-equal."""
    assert ours.spec == theirs.spec
    ours, theirs = ours.model.state_dict(), theirs.model.state_dict()
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert value.dtype == theirs[name].dtype, name
        assert torch.equal(value, theirs[name]), name


def padded(vocab, side="left", seed=1):
    tokens = torch.randint(1, vocab, (2, 7), generator=torch.Generator().manual_seed(seed))
    real = torch.ones(2, 7, dtype=torch.bool)
    real[0, :3] = False
    return tokens, real if side == "left" else real.flip(1)


@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_opens_scores_and_generates(name, tmp_path):
    ckpt = built(DECODERS[name])
    folder = ckpt.save(tmp_path / "hf", format="hf")
    same(ckpt, af.load(folder))
    model = opened(folder, "AutoModelForCausalLM")
    for side in ("left", "right"):
        tokens, real = padded(61, side)
        more = {"types": tokens % 3} if ckpt.spec.last.embed.types else {}
        theirs = {"token_type_ids": more["types"]} if more else {}
        if "prefix" in name:
            more["prefix"] = theirs["prefix_lengths"] = torch.tensor([3, 2])
        scores = model(tokens, attention_mask=real.long(), **theirs).logits
        torch.testing.assert_close(scores[real], ckpt.model(tokens, padding=real, **more)[real], atol=2e-5, rtol=1e-5)
    tokens, real = padded(61)
    settings = {"attention_mask": real.long(), "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    out = model.generate(tokens, **settings)[:, 7:]
    alone = [ckpt.generate(row[keep].tolist(), max_new_tokens=6) for row, keep in zip(tokens, real, strict=True)]
    assert out.tolist() == alone
    assert model.generate(tokens, **settings, use_cache=False)[:, 7:].tolist() == alone
    beams = [model.generate(tokens, **settings, num_beams=3, use_cache=cached) for cached in (True, False)]
    assert torch.equal(*beams)
    assert model.generate(tokens, **settings | {"do_sample": True}, num_return_sequences=2).shape == (4, 13)
    if "longrope" in name:
        return  # What is guessed past that length is scored as a part of the longer row.
    guessed = model.generate(tokens[1:], prompt_lookup_num_tokens=2, max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert guessed[0, 7:].tolist() == alone[1]


def test_what_it_cannot_use_is_refused(tmp_path):
    model = opened(built(DECODERS["latent with experts"]).save(tmp_path / "hf", format="hf"), "AutoModelForCausalLM")
    tokens, real = padded(61)
    for mask in (real[:, 1:], real[:1], real[:, None, None], torch.ones(2, 1, 7, 7)):
        with pytest.raises(ValueError, match=r"the mask is \[.*\], and what it is over is \[2, 7\]"):
            model(tokens, attention_mask=mask)
    cache = model(tokens, use_cache=True)
    with pytest.raises(ValueError, match=r"over is \[2, 8\]"):
        model(tokens[:, :1], attention_mask=real, **{k: v for k, v in cache.items() if k != "logits"})
    assert model.resize_token_embeddings(61) is model.get_input_embeddings()
    with pytest.raises(ValueError, match="this file is for 61 words"):
        model.resize_token_embeddings(70)
    with pytest.raises(ValueError, match="this file is for 61 words"):
        model.resize_token_embeddings(61, pad_to_multiple_of=8)
    settings = {"attention_mask": real.long(), "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    whole = model.generate(tokens, **settings)
    assert torch.equal(model.generate(tokens, **settings, prefill_chunk_size=4), whole)


def test_it_learns_and_comes_back(tmp_path):
    """A step of theirs, their folder, and the same numbers here; nothing is tied by name, nothing kept twice."""
    ckpt = built(DECODERS["latent with experts"] | {"tie": True})
    model = opened(ckpt.save(tmp_path / "hf", format="hf"), "AutoModelForCausalLM")
    tokens, _ = padded(61)
    loss = model(tokens, labels=tokens).loss
    expected = torch.nn.functional.cross_entropy(ckpt.model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    torch.testing.assert_close(loss, expected)
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.save_pretrained(tmp_path / "learnt")
    back = af.load(tmp_path / "learnt")
    assert back.spec == ckpt.spec
    torch.testing.assert_close(back.model(tokens), model(tokens).logits, atol=2e-5, rtol=1e-5)
    assert not torch.equal(back.model(tokens), ckpt.model(tokens))
    again = opened(tmp_path / "learnt", "AutoModelForCausalLM")
    assert torch.equal(again(tokens).logits, model(tokens).logits)
    same(back, af.load(back.save(tmp_path / "hf", format="hf")))


def test_half_precision_keeps_what_steers_the_router(tmp_path):
    ckpt = built(DECODERS["latent with experts"])
    folder = ckpt.save(tmp_path / "hf", format="hf")
    model = opened(folder, "AutoModelForCausalLM", dtype=torch.bfloat16)
    half = af.load(folder, dtype="bfloat16")
    ours, theirs = half.model.state_dict(), model.state_dict()
    assert {value.dtype for value in ours.values()} == {value.dtype for value in theirs.values()}
    tokens, _ = padded(61)
    assert model(tokens).logits.dtype == torch.bfloat16
    torch.testing.assert_close(model(tokens).logits, half.model(tokens), atol=0.05, rtol=0.05)


@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoder_opens(name, tmp_path):
    changes, kind = ENCODERS[name]
    base = {
        "architecture": "encoder",
        "attention": {"n_heads": 3, "d_head": 10, "position": "alibi", "sink_logit": True},
    }
    ckpt = built(base | changes)
    folder = ckpt.save(tmp_path / "hf", format="hf")
    same(ckpt, af.load(folder))
    model = opened(folder, kind)
    for side in ("left", "right"):
        tokens, real = padded(61, side)
        types = {"token_type_ids": tokens % 2} if name == "none" else {}
        out = model(tokens, attention_mask=real.long(), **types)
        if name == "none":
            hidden = ckpt.model.hidden(tokens, padding=real, types=tokens % 2)
            pooled = ckpt.model.pooled(tokens, padding=real, types=tokens % 2)
            torch.testing.assert_close(out.pooler_output, pooled, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(out.last_hidden_state[real], hidden[real], atol=1e-5, rtol=1e-5)
            continue
        scores = torch.stack([out.start_logits, out.end_logits], -1) if name == "span" else out.logits
        keep = real if scores.ndim == 3 else slice(None)
        torch.testing.assert_close(scores[keep], ckpt.model(tokens, padding=real)[keep], atol=1e-5, rtol=1e-5)
    labels = {"masked": tokens, "sequence": tokens[:, 0] % 4, "token": tokens % 3}.get(name)
    if labels is not None:
        expected = torch.nn.functional.cross_entropy(ckpt.model(tokens).flatten(0, -2), labels.flatten())
        torch.testing.assert_close(model(tokens, labels=labels).loss, expected)


def test_a_decoder_may_label_or_have_no_head(tmp_path):
    tokens, real = padded(61)
    odd = {"attention": {"n_heads": 3, "d_head": 10, "position": "alibi", "sink_logit": True}}
    ckpt = built(odd | {"head": {"kind": "sequence", "n_labels": 3, "pool": "last"}}, labels=("bad", "so", "good"))
    folder = ckpt.save(tmp_path / "labels", format="hf")
    model = opened(folder, "AutoModelForSequenceClassification")
    assert model.config.id2label == {0: "bad", 1: "so", 2: "good"}
    assert af.load(folder).labels == ckpt.labels
    scores = model(tokens, attention_mask=real.long()).logits
    torch.testing.assert_close(scores, ckpt.model(tokens, padding=real), atol=1e-5, rtol=1e-5)
    ckpt = built(odd | {"head": "none"})
    model = opened(ckpt.save(tmp_path / "states", format="hf"), "AutoModel")
    first = model(tokens[:, :4], use_cache=True)
    then = model(tokens[:, 4:], cache=first.cache)
    states = torch.cat([first.last_hidden_state, then.last_hidden_state], 1)
    torch.testing.assert_close(states, ckpt.model.hidden(tokens), atol=1e-5, rtol=1e-5)


def test_two_stacks_translate(tmp_path):
    recipe = {
        "architecture": "encoder-decoder",
        "attention": {"n_heads": 3, "d_head": 10, "position": "alibi"},
        "norm": {"kind": "rms", "bias": True},
        "tie": True,
    }
    ckpt = built(recipe, generation=Generation(start=(2,), eos_ids=(60,)))
    folder = ckpt.save(tmp_path / "hf", format="hf")
    same(ckpt, af.load(folder))
    assert af.load(folder).generation.start == (2,)
    model = opened(folder, "AutoModelForSeq2SeqLM")
    (source, real), (target, _) = padded(61), padded(61, seed=2)
    scores = model(source, attention_mask=real.long(), decoder_input_ids=target).logits
    torch.testing.assert_close(scores, ckpt.model(target, source=source, source_padding=real), atol=2e-5, rtol=1e-5)
    settings = {"attention_mask": real.long(), "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    for use_cache in (True, False):
        out = model.generate(source, **settings, use_cache=use_cache)
        for row, keep, got in zip(source, real, out, strict=True):
            reply = ckpt.generate(row[keep].tolist(), max_new_tokens=6)
            assert got[1 : 1 + len(reply)].tolist() == reply
    assert torch.equal(*(model.generate(source, **settings, num_beams=3, use_cache=cached) for cached in (True, False)))
    labels = target.masked_fill(torch.arange(7) > 4, -100)
    read = torch.cat([torch.full((2, 1), 2), target[:, :-1]], 1)
    expected = torch.nn.functional.cross_entropy(
        ckpt.model(read, source=source)[:, :5].flatten(0, 1), labels[:, :5].flatten()
    )
    torch.testing.assert_close(model(source, labels=labels).loss, expected)


def test_text_goes_through(tmp_path):
    """The tokenizer opens too and makes what the model takes; the ends are known."""
    tokenizer = Tokenizer.train("byte", [])
    ckpt = built(DECODERS["sinks, norms after, capped"] | {"vocab_size": tokenizer.vocab_size}, tokenizer=tokenizer)
    folder = ckpt.save(tmp_path / "hf", format="hf")
    theirs = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    model = opened(folder, "AutoModelForCausalLM")
    inputs = theirs(["hello"], return_tensors="pt")
    assert set(inputs) == {"input_ids", "attention_mask"}
    reply = model.generate(**inputs, max_new_tokens=5, do_sample=False, pad_token_id=0)[
        0, inputs["input_ids"].shape[1] :
    ]
    assert reply.tolist() == ckpt.generate(tokenizer.encode("hello"), max_new_tokens=5)
    assert model.generation_config.eos_token_id == tokenizer.eos_id
    assert af.load(folder).tokenizer.vocabulary_hash == tokenizer.vocabulary_hash


def test_what_the_model_does_not_take_is_refused(tmp_path):
    model = opened(built(DECODERS["latent with experts"]).save(tmp_path / "hf", format="hf"), "AutoModelForCausalLM")
    tokens, _ = padded(61)
    for more, word in (
        ({"position_ids": tokens}, "position_ids"),
        ({"output_attentions": True}, "output_attentions"),
        ({"cache": transformers.DynamicCache()}, "DynamicCache"),
    ):
        with pytest.raises(TypeError, match=word):
            model(tokens, **more)
    with pytest.raises(ValueError, match="cache_implementation"):
        model.generate(tokens, max_new_tokens=2, cache_implementation="static")
    assert model(tokens, return_dict=False)[0].shape == (2, 7, 61)


def test_the_code_says_only_what_the_model_has(tmp_path):
    """No line of another task, nothing of this package, and the linter has nothing to say."""
    folder = built(DECODERS["latent with experts"]).save(tmp_path / "hf", format="hf")
    code = (folder / CODE_FILE).read_text()
    assert "import anyformer" not in code
    for word in ("decoder_input_ids", "prefix_lengths", "token_type_ids", "pooler", "SequenceClassifier"):
        assert word not in code
    for verb in (["check", "--select=E,F,I,B,UP,RET,SIM,C90"], ["format", "--check"]):
        command = [sys.executable, "-m", "ruff", *verb, "--isolated", "--line-length=120", folder / CODE_FILE]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


def test_a_new_model_of_the_configuration_begins_well(tmp_path):
    """A weight that 1 is added to begins at 0, where `transformers` begins every norm at 1."""
    folder = built(DECODERS["prefix and types"]).save(tmp_path / "hf", format="hf")
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True)
    model = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=True)
    norms = [value for name, value in model.named_parameters() if "norm" in name]
    assert norms
    assert not any(value.any() for value in norms)
    assert model(padded(61)[0]).logits.isfinite().all()


def test_convert_says_why_and_load_spec_reads_the_folder(tmp_path):
    ckpt = built(DECODERS["sinks, norms after, capped"])
    mine = ckpt.save(tmp_path / "mine")
    verbs = Typer(pretty_exceptions_enable=False)
    verbs.command()(convert)
    said = CliRunner().invoke(verbs, [str(mine), str(tmp_path / "hf"), "--to", "hf"])
    assert said.exit_code == 0, said.output
    for word in ("no published family is this model", "the nearest is", "(there: ", "trust_remote_code=True"):
        assert word in " ".join(said.stderr.split())
    assert not said.stdout
    assert af.load_spec(str(tmp_path / "hf")) == ckpt.spec
    (tmp_path / "hf" / CODE_FILE).unlink()  # ours runs no code
    CliRunner().invoke(verbs, [str(tmp_path / "hf"), str(tmp_path / "back"), "--to", "anyformer"])
    same(ckpt, af.load(tmp_path / "back"))


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"spec": None}, "carries a specification"),
        ({"spec": {"format_version": 2}}, "vocab_size"),
        ({"spec": {"format_version": 99}}, "newer"),
        ({"renamed": [["a"]]}, "pairs of names"),
        ({"renamed": [["", "x"]]}, "pairs of names"),
        ({"renamed": [["blocks", "{i}{j}"]]}, "pairs of names"),
        ({"renamed": [["q", "{i!r:>9999999999}"]]}, "pairs of names"),
        ({"renamed": [["decoder.", "x."]]}, "weights lack"),
        ({"renamed": [["e", "eeee"]] * 40}, "without end"),
        ({"architectures": []}, "one class"),
    ],
)
def test_a_configuration_that_carries_nothing_good(changes, word, tmp_path):
    folder = built(DECODERS["latent with experts"]).save(tmp_path / "hf", format="hf")
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=word):
        af.load(folder)
