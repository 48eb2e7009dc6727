"""Named activation sites: what is recorded is what flows, what is edited is what goes on."""

import pytest
import torch

from anyformer.nn.tap import Tap
from nn.helpers import GPT, KINDS, LLAMA, PARALLEL, ids, made

SITES = ("resid_pre", "q", "k", "v", "z", "attn_out", "resid_mid", "mlp_out", "resid_post")


@pytest.mark.parametrize("kind", list(KINDS))
@torch.no_grad()
def test_every_site_is_recorded_and_changes_nothing(kind):
    model = made(KINDS[kind])
    tokens = ids(2, 6, 19)
    tap = Tap(record=["*"])
    out = model(tokens, tap=tap)
    torch.testing.assert_close(out, model(tokens), atol=1e-5, rtol=1e-5)
    stack = model.spec.decoder
    shapes = {"embed": (2, 6, stack.d_model), "final_norm": (2, 6, stack.d_model), "logits": (2, 6, 19)}
    for index, block in enumerate(stack.blocks):
        a = block.attention
        heads = {
            "q": (2, 6, a.n_heads, a.d_head),
            "k": (2, 6, a.n_kv_heads, a.d_head),
            "v": (2, 6, a.n_kv_heads, a.d_value),
            "z": (2, 6, a.n_heads, a.d_value),
            "pattern": (2, a.n_heads, 6, 6),
        }
        for site in (*SITES, "pattern"):
            if site != "resid_mid" or block.wiring.kind == "serial":
                shapes[f"blocks.{index}.{site}"] = heads.get(site, (2, 6, stack.d_model))
    assert {name: tuple(value.shape) for name, value in tap.values.items()} == shapes
    assert torch.equal(tap.values["logits"], out)
    assert torch.equal(tap.values["blocks.0.resid_post"], tap.values["blocks.1.resid_pre"])
    assert torch.equal(tap.values["embed"], tap.values["blocks.0.resid_pre"])


@torch.no_grad()
def test_the_stream_is_the_sum_of_what_is_written():
    for recipe in (LLAMA, PARALLEL):
        tap = Tap(record=["*"])
        made(recipe)(ids(1, 5, 19), tap=tap)
        for i in range(3):
            pre, attn, mlp, post = (
                tap.values[f"blocks.{i}.{site}"] for site in ("resid_pre", "attn_out", "mlp_out", "resid_post")
            )
            torch.testing.assert_close(pre + attn + mlp, post)


@torch.no_grad()
def test_only_what_is_asked_for_is_kept():
    model = made(LLAMA)
    tap = Tap(record=["blocks.1.resid_post", "blocks.*.z"])
    model(ids(1, 4, 19), tap=tap)
    assert set(tap.values) == {"blocks.1.resid_post", *(f"blocks.{i}.z" for i in range(3))}
    assert tap.wants("blocks.7.z")
    assert not tap.wants("blocks.7.pattern")


@pytest.mark.parametrize("backend", ["auto", "fused", "reference"])
@torch.no_grad()
def test_the_pattern_is_the_softmax_by_hand(backend):
    """On every backend: asking for weights selects the reference. Values mixed by them are z."""
    recipe = {**GPT, "attention": {"n_heads": 6, "n_kv_heads": 2, "position": "none"}}
    model = made(recipe, backend=backend, dtype="float64")
    tokens, real = ids(2, 6, 19), torch.ones(2, 6, dtype=torch.bool)
    real[1, :2] = False
    tap = Tap(record=["*"])
    model(tokens, padding=real, tap=tap)
    q, k, v, z, pattern = (tap.values[f"blocks.1.{site}"] for site in ("q", "k", "v", "z", "pattern"))
    for row, head, i in ((0, 0, 0), (0, 4, 5), (1, 2, 4), (1, 5, 2)):
        seen = [j for j in range(i + 1) if real[row, j]]
        scores = torch.stack([q[row, i, head] @ k[row, j, head // 3] for j in seen]) / 3**0.5
        torch.testing.assert_close(pattern[row, head, i, seen], scores.softmax(0))
        torch.testing.assert_close(z[row, i, head], scores.softmax(0) @ v[row, seen, head // 3])
    assert (pattern.triu(1) == 0).all()
    assert (pattern[1, :, :, :2] == 0).all()


@pytest.mark.parametrize("backend", ["auto", "reference"])
@torch.no_grad()
def test_zeroing_a_head_prunes_its_columns(backend):
    model = made(LLAMA, dtype="float64", backend=backend)
    tokens = ids(2, 7, 19)

    def silence(z):
        z = z.clone()
        z[:, :, 4] = 0
        return z

    tapped = model(tokens, tap=Tap(edit={"blocks.1.z": silence}))
    assert (tapped - model(tokens)).abs().max() > 1e-3
    model.layers()[1].attention.out.weight[:, 4 * 5 : 5 * 5] = 0
    torch.testing.assert_close(tapped, model(tokens))


@torch.no_grad()
def test_an_edited_pattern_mixes_the_values():
    """Every token attends to the first alone: z is its value. Grouped heads keep their own."""
    model = made(LLAMA, dtype="float64")
    tokens = ids(2, 5, 19)

    def first(pattern):
        return torch.zeros_like(pattern).index_fill_(-1, torch.tensor([0]), 1.0)

    tap = Tap(record=["blocks.0.v", "blocks.0.z", "blocks.0.pattern"], edit={"blocks.0.pattern": first})
    model(tokens, tap=tap)
    value = tap.values["blocks.0.v"][:, :1].repeat_interleave(3, 2).expand(2, 5, 6, 5)
    torch.testing.assert_close(tap.values["blocks.0.z"], value)
    assert (tap.values["blocks.0.pattern"][..., 0] == 1).all()
    same = model(tokens, tap=Tap(edit={"blocks.*.pattern": lambda p: p * 1.0}))
    torch.testing.assert_close(same, model(tokens))


@torch.no_grad()
def test_activations_are_patched_from_another_run():
    """The stream after block 0, carried over whole, makes the rest of one run the rest of the other."""
    model = made(PARALLEL)
    one, two = ids(1, 6, 19, seed=1), ids(1, 6, 19, seed=2)
    tap = Tap(record=["blocks.0.resid_post"])
    want = model(one, tap=tap)
    got = model(two, tap=Tap(edit={"blocks.0.resid_post": lambda _: tap.values["blocks.0.resid_post"]}))
    assert torch.equal(got, want)


def test_gradients_pass_through_a_tap():
    model = made(LLAMA)
    tap = Tap(record=["blocks.0.resid_post"])
    out = model(ids(1, 5, 19), tap=tap)
    (gradient,) = torch.autograd.grad(out.sum(), tap.values["blocks.0.resid_post"])
    assert gradient.abs().max() > 0


@torch.no_grad()
def test_a_tap_sees_cached_steps():
    model = made(LLAMA)
    tokens = ids(1, 6, 19)
    whole = Tap(record=["blocks.2.pattern", "blocks.2.z", "logits"])
    model(tokens, tap=whole)
    cache = model.new_cache(batch=1, capacity=6)
    model(tokens[:, :4], cache=cache)
    step = Tap(record=["blocks.2.pattern", "blocks.2.z", "logits"])
    model(tokens[:, 4:], cache=cache, tap=step)
    torch.testing.assert_close(step.values["blocks.2.pattern"], whole.values["blocks.2.pattern"][:, :, 4:])
    torch.testing.assert_close(step.values["blocks.2.z"], whole.values["blocks.2.z"][:, 4:], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("site", ["embed", "blocks.1.q", "blocks.1.k", "blocks.2.v", "blocks.0.mlp_out", "logits"])
def test_the_first_site_that_is_not_finite_is_named(site):
    """The fault is put in by a wrapped module; the tracer itself is not told where."""
    model = made(LLAMA)
    tokens = ids(2, 4, 19)
    assert model.trace_nonfinite(tokens) is None
    homes = {
        "embed": "decoder.embed",
        "blocks.1.q": "decoder.blocks.1.attention.q",
        "blocks.1.k": "decoder.blocks.1.attention.k",
        "blocks.2.v": "decoder.blocks.2.attention.v",
        "blocks.0.mlp_out": "decoder.blocks.0.ffn.down",
        "logits": "head",
    }
    handle = model.get_submodule(homes[site]).register_forward_hook(lambda m, i, out: out / 0.0)
    assert model.trace_nonfinite(tokens) == site
    assert model.trace_nonfinite(tokens, padding=torch.ones(2, 4, dtype=torch.bool)) == site
    handle.remove()
    assert model.trace_nonfinite(tokens) is None


def test_a_broken_parameter_is_named_first():
    model = made(GPT)
    with torch.no_grad():
        model.layers()[1].ffn.up.bias[3] = float("nan")
    assert model.trace_nonfinite(ids(1, 3, 19)) == "parameter decoder.blocks.1.ffn.up.bias"


def test_overflow_in_half_precision_is_named():
    model = made(GPT, dtype="float16")
    with torch.no_grad():
        model.layers()[1].ffn.up.weight.mul_(2000)
        model.layers()[1].ffn.down.weight.mul_(2000)
    assert model.trace_nonfinite(ids(1, 3, 19)) == "blocks.1.mlp_out"


def test_a_name_that_meets_no_site_is_refused():
    model = made(LLAMA)
    tokens = ids(1, 3, 19)
    with pytest.raises(ValueError, match=r"resid_pots'; did you mean 'blocks.0.resid_post'"):
        model(tokens, tap=Tap(record=["blocks.0.resid_pots"]))
    with pytest.raises(ValueError, match=r"sites end in .*attn_out"):
        model(tokens, tap=Tap(edit={"xyz": lambda x: x}))
    with pytest.raises(ValueError, match="logits"):
        model.hidden(tokens, tap=Tap(record=["logits"]))


@torch.no_grad()
def test_a_pattern_edited_in_place_mixes_the_values():
    model = made(LLAMA)
    tokens = ids(1, 5, 19)

    def zero(p):
        p.zero_()
        return p

    inside = model(tokens, tap=Tap(edit={"blocks.0.pattern": zero}))
    outside = model(tokens, tap=Tap(edit={"blocks.0.pattern": torch.zeros_like}))
    torch.testing.assert_close(inside, outside)
    assert (inside - model(tokens)).abs().max() > 1e-2


@torch.no_grad()
def test_a_model_without_a_head_is_traced_too():
    model = made({**LLAMA, "head": "none", "tie": False})
    model.decoder.blocks[0].ffn.down.weight.fill_(3e38)
    assert model.trace_nonfinite(ids(1, 3, 19)) == "blocks.0.mlp_out"


@pytest.mark.parametrize(("edit", "got"), [(lambda x: None, "a NoneType"), (lambda x: x[:1], r"\[1, 5, 20\]")])
def test_an_edit_gives_a_tensor_of_the_same_shape(edit, got):
    model, tokens = made(PARALLEL), ids(2, 5, 19)
    with pytest.raises(ValueError, match=rf"an edit of blocks\.1\.resid_post gives a tensor \[2, 5, 20\].*got {got}"):
        model(tokens, tap=Tap(edit={"blocks.1.resid_post": edit}))
