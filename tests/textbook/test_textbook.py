"""The textbook recipes are the textbook's equations: weights copied across, everything else equal."""

import math

import pytest
import torch
import torch.nn.functional as F

from anyformer.nn.model import build, build_block
from anyformer.planning import plan
from anyformer.spec import load_spec
from textbook.reference_blocks import BiasedBlock, LeanBlock, LearnedPositionDecoder, RotaryDecoder

WIDTH, HEADS, LAYERS, VOCAB, CONTEXT = 30, 3, 3, 23, 17
SMALL = [f"d_model={WIDTH}", f"n_layers={LAYERS}", f"vocab_size={VOCAB}", f"attention.n_heads={HEADS}"]
BACKENDS = ["auto", "reference", "fused"]


def learned_names(index=None):
    """Ours by theirs: for each of our parameters, how to read it (or its gradient) from the reference."""
    at = f"decoder.blocks.{index}." if index is not None else ""
    names = {
        f"{at}attention_norms.before.weight": lambda r: r("gain1"),
        f"{at}attention_norms.before.bias": lambda r: r("shift1"),
        f"{at}ffn_norms.before.weight": lambda r: r("gain2"),
        f"{at}ffn_norms.before.bias": lambda r: r("shift2"),
        f"{at}attention.out.weight": lambda r: r("mix"),
        f"{at}ffn.up.weight": lambda r: r("wide"),
        f"{at}ffn.up.bias": lambda r: r("wide_bias"),
        f"{at}ffn.down.weight": lambda r: r("narrow"),
        f"{at}ffn.down.bias": lambda r: r("narrow_bias"),
    }
    for i, name in enumerate("qkv"):
        names[f"{at}attention.{name}.weight"] = lambda r, i=i: r("qkv").chunk(3)[i]
    return names


def biased_names(index=None):
    at = f"decoder.blocks.{index}." if index is not None else ""
    names = learned_names(index)
    names[f"{at}attention.out.bias"] = lambda r: r("mix_bias")
    for i, name in enumerate("qkv"):
        names[f"{at}attention.{name}.bias"] = lambda r, i=i: r("qkv_bias").chunk(3)[i]
    return names


def rotary_names(index):
    at = f"decoder.blocks.{index}."
    plain = {
        "attention_norms.before": "gain1",
        "ffn_norms.before": "gain2",
        "attention.q": "q",
        "attention.k": "k",
        "attention.v": "v",
        "attention.out": "mix",
        "ffn.gate": "gate",
        "ffn.up": "up",
        "ffn.down": "down",
    }
    return {f"{at}{ours}.weight": lambda r, theirs=theirs: r(theirs) for ours, theirs in plain.items()}


def translated(reference, per_block, outside, *, gradient=False):
    """Every weight, or gradient, of the reference under our names."""

    def reader(module):
        def read(name):
            value = getattr(module, name)
            return (value.grad if gradient else value.detach()).clone()

        return read

    out = {ours: reader(reference)(theirs) for ours, theirs in outside.items()}
    for index, block in enumerate(reference.blocks):
        out |= {ours: read(reader(block)) for ours, read in per_block(index).items()}
    return out


LEARNED_OUTSIDE = {
    "decoder.embed.token.weight": "tokens",
    "decoder.embed.position.weight": "places",
    "decoder.final_norm.weight": "gain",
    "decoder.final_norm.bias": "shift",
    "head.weight": "head",
}
ROTARY_OUTSIDE = {"decoder.embed.token.weight": "tokens", "decoder.final_norm.weight": "gain"}


def reference(name, width=WIDTH, heads=HEADS, layers=LAYERS, vocab=VOCAB, context=CONTEXT):
    torch.manual_seed(len(name))
    if name == "textbook-llama":
        return RotaryDecoder(vocab, width, layers, heads)
    make = (lambda: BiasedBlock(width, heads, 0.1)) if name == "textbook-gpt" else (lambda: LeanBlock(width, heads))
    return LearnedPositionDecoder([make() for _ in range(layers)], vocab, width, context)


TRANSLATIONS = {
    "textbook-gpt": (biased_names, LEARNED_OUTSIDE),
    "textbook-sdpa": (learned_names, LEARNED_OUTSIDE),
    "textbook-llama": (rotary_names, ROTARY_OUTSIDE),
}


def pair(name, backend="auto"):
    """The textbook's model and ours, with the same weights in float64."""
    theirs = reference(name).double().eval()
    ours = build(load_spec(name, [*SMALL, f"max_positions={CONTEXT}"]), dtype="float64").use_backend(backend)
    ours.load_state_dict(translated(theirs, *TRANSLATIONS[name]))
    return theirs, ours


def scores(model, ids):
    out = model(ids)
    return out[0] if isinstance(out, tuple) else out


IDS = torch.randint(0, VOCAB, (3, CONTEXT), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", list(TRANSLATIONS))
def test_outputs_and_gradients_of_every_weight(name, backend):
    theirs, ours = pair(name, backend)
    for model in (theirs, ours):
        loss = F.cross_entropy(scores(model, IDS)[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())
        loss.backward()
    torch.testing.assert_close(ours(IDS), scores(theirs, IDS), atol=1e-10, rtol=1e-9)
    gradients = translated(theirs, *TRANSLATIONS[name], gradient=True)
    assert gradients.keys() == dict(ours.named_parameters()).keys()
    for key, parameter in ours.named_parameters():
        assert parameter.grad.abs().max() > 0
        torch.testing.assert_close(parameter.grad, gradients[key], atol=1e-11, rtol=1e-7)


@pytest.mark.parametrize("name", list(TRANSLATIONS))
def test_parameter_counts_at_the_recipes_own_size(name):
    spec = load_spec(name)
    stack = spec.decoder
    theirs = reference(
        name, stack.d_model, stack.blocks[0].attention.n_heads, stack.n_layers, spec.vocab_size, stack.max_positions
    )
    count = sum(p.numel() for p in theirs.parameters())
    assert plan(spec).parameters == count
    assert sum(p.numel() for p in build(spec, device="meta").parameters()) == count


def test_parameter_counts_by_hand():
    overrides = ["vocab_size=500", "d_model=128", "n_layers=2", "attention.n_heads=4"]
    assert plan(load_spec("textbook-llama", overrides)).parameters == 490_624
    c = 256
    gpt, lean = (load_spec(name).decoder.blocks[0] for name in ("textbook-gpt", "textbook-sdpa"))
    counted = [sum(p.numel() for p in build_block(block, c, device="meta").parameters()) for block in (gpt, lean)]
    assert counted == [12 * c * c + 13 * c, 12 * c * c + 9 * c]


@pytest.mark.parametrize(("name", "names"), [("textbook-gpt", biased_names), ("textbook-sdpa", learned_names)])
def test_one_block_alone(name, names):
    theirs = reference(name).double().eval().blocks[0]
    ours = build_block(load_spec(name, SMALL).decoder.blocks[0], WIDTH, dtype="float64")
    ours.load_state_dict({key: read(lambda n: getattr(theirs, n).detach()) for key, read in names().items()})
    x = torch.randn(2, 9, WIDTH, dtype=torch.float64)
    torch.testing.assert_close(ours(x), theirs(x), atol=1e-11, rtol=1e-9)


@pytest.mark.parametrize("training", [True, False])
def test_dropout_falls_where_the_textbook_says(training, monkeypatch):
    """A dropout that always drops the same third shows the place of every one."""

    def every_third(x, p=0.5, training=True, inplace=False):
        if not training:
            return x
        assert p == 0.1
        kept = torch.arange(x.numel()).reshape(x.shape) % 3 != 0
        return x * kept / (1 - p)

    monkeypatch.setattr(F, "dropout", every_third)
    theirs, ours = pair("textbook-gpt", "reference")
    out = ours.train(training)(IDS)
    torch.testing.assert_close(out, theirs.train(training)(IDS), atol=1e-10, rtol=1e-9)
    ours.eval()
    assert torch.equal(ours(IDS), out) == (not training)


@pytest.mark.parametrize("backend", BACKENDS)
def test_greedy_generation_gives_the_same_ids(backend):
    """With the cache on both sides, and without any."""
    theirs, ours = pair("textbook-llama", backend)
    prompt, n = IDS[:, :6], 24
    want = theirs.greedy(prompt, n)
    with torch.no_grad():
        cache = ours.new_cache(batch=3, capacity=6 + n)
        token = ours(prompt, cache=cache, last_only=True).argmax(-1)
        got = [token]
        while len(got) < n:
            token = ours(token, cache=cache, last_only=True).argmax(-1)
            got.append(token)
        whole = prompt
        for _ in range(n):
            whole = torch.cat([whole, ours(whole)[:, -1:].argmax(-1)], 1)
    assert torch.cat(got, 1).tolist() == want.tolist() == whole[:, 6:].tolist()
    assert len(set(want.flatten().tolist())) > 3


def test_the_recipes_say_what_the_textbooks_say():
    gpt, lean, llama = (load_spec(name) for name in TRANSLATIONS)
    a, f = gpt.decoder.blocks[0].attention, gpt.decoder.blocks[0].ffn
    assert (a.dropout, a.out_dropout, f.dropout, f.out_dropout, gpt.decoder.embed.dropout) == (0.1, 0, 0, 0.1, 0)
    assert (a.n_heads, a.d_head, f.d_ff, f.activation) == (8, 32, 1024, "gelu")
    assert lean.decoder.blocks[0].attention.qkv_bias is lean.decoder.blocks[0].attention.out_bias is False
    block = llama.decoder.blocks[0]
    assert (block.ffn.d_ff, block.ffn.activation, block.norms.ffn.before.eps) == (704, "silu", 1e-6)
    assert block.ffn.d_ff == 64 * math.ceil(8 * 256 / 3 / 64)
    assert block.attention.position.layout == "half"
    assert llama.ties
