"""Latent attention: against its equations in numpy, folded and unfolded, whole and in any split, with every option."""

import math

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import anyformer.nn.latent as module
from anyformer.nn.attend.bias import alibi_slopes
from anyformer.nn.cache import Cache, Layout
from anyformer.nn.frame import Frame
from anyformer.nn.latent import LatentAttention, absorbs
from anyformer.nn.roles import roles
from anyformer.nn.tap import Tap
from anyformer.spec.attention import Bidirectional, Causal, Latent
from anyformer.spec.norms import LayerNorm, NoNorm, RMSNorm
from anyformer.spec.positions import (
    Alibi,
    DynamicNTKScaling,
    LongRopeScaling,
    NoPosition,
    RelativeBias,
    Rope,
    YarnScaling,
)

C = 11
SMALL = {"n_heads": 3, "kv_rank": 7, "d_nope": 5, "d_rope": 4, "d_value": 6}
STILL = {**SMALL, "d_rope": 0}
LONGROPE = LongRopeScaling(original=5, short=(1.0, 1.5), long=(1.0, 9.0), attention_factor=1.2)
SPECS = {
    "interleaved": Latent(**SMALL, position=Rope(layout="interleaved")),
    "half, queries from a latent, biases": Latent(
        **SMALL, q_rank=9, position=Rope(theta=100.0), bias=True, out_bias=True, norm=LayerNorm()
    ),
    "yarn, soft-cap, sink, window, own scale": Latent(
        **{**SMALL, "n_heads": 5},
        position=Rope(layout="interleaved", scaling=YarnScaling(factor=4.0, original=16)),
        softcap=1.5,
        sink_logit=True,
        mask=Causal(window=4, sinks=1),
        scale=0.9,
        norm=RMSNorm(offset=1, bias=True),
    ),
    "dynamic": Latent(**SMALL, position=Rope(scaling=DynamicNTKScaling(factor=3.0, original=5))),
    "longrope": Latent(**SMALL, q_rank=2, position=Rope(layout="interleaved", scaling=LONGROPE), norm=NoNorm()),
    "alibi": Latent(**STILL, position=Alibi(), mask=Causal(window=5)),
    "own buckets": Latent(
        **{**STILL, "kv_rank": 3}, position=RelativeBias(n_buckets=6, max_distance=5, shared=False), sink_logit=True
    ),
    "shared buckets": Latent(**STILL, q_rank=4, position=RelativeBias(n_buckets=5, max_distance=7)),
    "no position": Latent(**SMALL | {"d_rope": 0}, position=NoPosition()),
}
every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


def made(spec, seed=0, dtype=torch.float64):
    """A layer with values that hide nothing."""
    layer = LatentAttention(spec, C).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, role in roles(layer).items():
            p = layer.get_parameter(name)
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            start = {"norm": 1 + 0.4 * noise, "bias": 0.5 * noise, "position": noise}
            p.copy_(start.get(role, noise * 1.5 * p.shape[-1] ** -0.5))
    return layer.eval()


def some(*shape, seed=1, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


SHARED = some(5, 3, seed=9)


def run(layer, x, tap=None, **context):
    frame = Frame.of(x, **context)
    frame.shared_table = SHARED.to(x.dtype)
    out = layer(x, frame, 0, tap)
    if frame.cache is not None:
        frame.cache.advance(frame.step)
    return out


def new_cache(layer, batch=2, capacity=16, dtype=torch.float64, ring=False):
    mask = layer.spec.mask
    layout = Layout(layer.stores(), mask.window, mask.sinks) if ring else Layout(layer.stores())
    by_length = isinstance(layer.spec.position, Rope) and layer.spec.position.by_length
    return Cache([layout], batch, capacity, dtype=dtype, device=torch.device("cpu"), positions=by_length)


class Textbook:
    """The equations one token, head and key at a time, in numpy."""

    def __init__(self, layer):
        self.spec = layer.spec
        self.w = {name: p.detach().double().numpy() for name, p in layer.named_parameters()}

    def normed(self, x, name):
        norm = self.spec.norm
        if norm.kind == "none":
            return x
        if norm.kind == "layer":
            x = x - x.mean()
        x = x / np.sqrt((x**2).mean() + norm.eps) * (norm.offset + self.w[f"{name}.weight"])
        return x + self.w.get(f"{name}.bias", 0.0)

    def turned(self, x, position, length):
        rope, d = self.spec.position, len(x)
        if d == 0:
            return x
        theta, factor, divisors = rope.theta, 1.0, np.ones(d // 2)
        match rope.scaling:
            case YarnScaling() as s:
                turns = s.original * theta ** (-2 * np.arange(d // 2) / d) / (2 * np.pi)
                ends = [d * math.log(s.original / (b * 2 * math.pi)) / (2 * math.log(theta)) for b in (32.0, 1.0)]
                low, high = max(math.floor(ends[0]), 0), math.ceil(ends[1])
                assert turns[0] > 1 > turns[1]
                ramp = np.clip((np.arange(d // 2) - low) / (high - low), 0, 1)
                divisors, factor = 1 / (1 - ramp + ramp / s.factor), 0.1 * math.log(s.factor) + 1
            case DynamicNTKScaling() as s if length > s.original:
                theta *= (s.factor * length / s.original - (s.factor - 1)) ** (d / (d - 2))
            case LongRopeScaling() as s:
                divisors, factor = np.array(s.long if length > s.original else s.short), s.attention_factor
        out = np.empty(d)
        for i in range(d // 2):
            a, b = (i, i + d // 2) if rope.layout == "half" else (2 * i, 2 * i + 1)
            angle = position * theta ** (-2 * i / d) / divisors[i]
            turn = (x[a] + 1j * x[b]) * np.exp(1j * angle) * factor
            out[a], out[b] = turn.real, turn.imag
        return out

    def bias(self, head, query, key):
        position = self.spec.position
        if position.kind == "alibi":
            return -float(alibi_slopes(self.spec.n_heads)[head]) * (query - key)
        if position.kind == "relative":
            table = SHARED.numpy() if position.shared else self.w["relative_bias.weight"]
            n, half = query - key, position.n_buckets // 2
            if n >= half:
                grown = math.log(n / half) / math.log(position.max_distance / half) * (position.n_buckets - half)
                n = min(half + int(grown), position.n_buckets - 1)
            return table[n, head]
        return 0.0

    def sees(self, query, key):
        mask = self.spec.mask
        return key <= query and (mask.window is None or query - key < mask.window or key < mask.sinks)

    def heads(self, token):
        """Queries, latent and turning key of one token, before rotation."""
        spec, w = self.spec, self.w
        if spec.q_rank is None:
            q = w["q.weight"] @ token
        else:
            down = w["q_down.weight"] @ token + w.get("q_down.bias", 0.0)
            q = w["q_up.weight"] @ self.normed(down, "q_norm")
        kv = w["kv_down.weight"] @ token + w.get("kv_down.bias", 0.0)
        return q.reshape(spec.n_heads, -1), self.normed(kv[: spec.kv_rank], "kv_norm"), kv[spec.kv_rank :]

    def __call__(self, x):
        """[T, C] at positions 0 … T−1 -> [T, C]."""
        spec, w, length = self.spec, self.w, len(x)
        made = [self.heads(token) for token in x]
        out = np.zeros((length, C))
        for i, (q, _, _) in enumerate(made):
            z = np.zeros((spec.n_heads, spec.d_value))
            for h in range(spec.n_heads):
                scores, values = [], []
                for j, (_, latent, turning) in enumerate(made):
                    if not self.sees(i, j):
                        continue
                    k = w["k_up.weight"][h * spec.d_nope : (h + 1) * spec.d_nope] @ latent
                    score = q[h, : spec.d_nope] @ k
                    score += self.turned(q[h, spec.d_nope :], i, length) @ self.turned(turning, j, length)
                    score *= spec.scale
                    if spec.softcap:
                        score = spec.softcap * math.tanh(score / spec.softcap)
                    scores.append(score + self.bias(h, i, j))
                    values.append(w["v_up.weight"][h * spec.d_value : (h + 1) * spec.d_value] @ latent)
                total = sum(math.exp(s) for s in scores) + (math.exp(w["sink"][h]) if spec.sink_logit else 0.0)
                z[h] = sum(math.exp(s) / total * v for s, v in zip(scores, values, strict=True))
            out[i] = w["out.weight"] @ z.flatten() + w.get("out.bias", 0.0)
        return out


@every_spec
def test_the_layer_is_its_equations(spec):
    layer, x = made(spec), some(2, 7, C)
    with torch.no_grad():
        got = run(layer, x)
    for row in range(2):
        np.testing.assert_allclose(got[row], Textbook(layer)(x[row].numpy()), atol=1e-10)


@every_spec
@pytest.mark.parametrize("form", ["chosen", "absorbed", "unfolded"])
def test_any_split_with_a_cache_equals_the_whole(spec, form, monkeypatch):
    """Chunks and single steps, in either form; frequencies by length are those of the length so far."""
    if form != "chosen":
        monkeypatch.setattr(module, "absorbs", lambda *sizes: form == "absorbed")
    layer, x = made(spec), some(2, 9, C)
    with torch.no_grad():
        for split in ([9], [4, 5], [3, 1, 2, 1, 1, 1], [1] * 9):
            for ring in (False, True) if spec.mask.window else (False,):
                cache, at = new_cache(layer, ring=ring), 0
                for n in split:
                    got = run(layer, x[:, at : at + n], cache=cache)
                    at += n
                    want = run(layer, x[:, :at])[:, at - n :]
                    torch.testing.assert_close(got, want, atol=1e-10, rtol=0)


@every_spec
def test_ragged_rows_are_the_rows_alone(spec):
    """Padding on either side in the first call, then chunks and steps of unequal rows."""
    layer, x = made(spec), some(3, 8, C)
    real = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]).bool()
    with torch.no_grad():
        cache = new_cache(layer, batch=3)
        first = run(layer, x[:, :5], padding=real, cache=cache)
        torch.testing.assert_close(first[real], run(layer, x[:, :5], padding=real)[real], atol=1e-10, rtol=0)
        chunk = run(layer, x[:, 5:7], cache=cache)
        step = run(layer, x[:, 7:], cache=cache)
        for row in range(3):
            alone = torch.cat([x[row, :5][real[row]], x[row, 5:]])[None]
            n = int(real[row].sum())
            torch.testing.assert_close(first[row, real[row]], run(layer, alone[:, :n])[0], atol=1e-10, rtol=0)
            torch.testing.assert_close(chunk[row], run(layer, alone[:, : n + 2])[0, n:], atol=1e-10, rtol=0)
            torch.testing.assert_close(step[row], run(layer, alone)[0, n + 2 :], atol=1e-10, rtol=0)


@every_spec
def test_packed_documents_are_the_documents_apart(spec):
    layer, x = made(spec), some(1, 11, C)
    segments = torch.tensor([[4] * 7 + [1] * 4])
    packed = run(layer, x, segments=segments)[0]
    torch.testing.assert_close(packed[:7], run(layer, x[:, :7])[0], atol=1e-10, rtol=0)
    torch.testing.assert_close(packed[7:], run(layer, x[:, 7:])[0], atol=1e-10, rtol=0)


@every_spec
@pytest.mark.parametrize("backend", ["reference", "fused"])
def test_gradients_of_both_forms_are_finite_differences(spec, backend, monkeypatch):
    """Into the input and every parameter, through a cache that holds three tokens, and without one."""
    if backend == "fused" and (spec.softcap or spec.sink_logit):
        backend = "auto"
    layer = made(spec)
    layer.backend = backend
    names = [name for name, _ in layer.named_parameters()]
    values = tuple(p.detach().clone().requires_grad_() for p in layer.parameters())
    before, x = some(1, 3, C, seed=3), some(1, 2, C).requires_grad_()

    def called(x, *values, stored):
        cache = new_cache(layer, batch=1) if stored else None
        if stored:
            with torch.no_grad():
                run(layer, before, cache=cache)
        frame = Frame.of(x, cache=cache)
        frame.shared_table = SHARED
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x, frame))

    for form, stored in (("unfolded", False), ("unfolded", True), ("absorbed", True)):
        monkeypatch.setattr(module, "absorbs", lambda *sizes, form=form: form == "absorbed")
        assert torch.autograd.gradcheck(
            lambda *inputs, stored=stored: called(*inputs, stored=stored), (x, *values), fast_mode=True
        )


def test_decoding_never_unfolds_what_is_stored():
    """A step's projections see one token, and the cache holds r + d_rope numbers a token."""
    layer, x = made(SPECS["interleaved"]), some(2, 9, C)
    cache = new_cache(layer, capacity=13)
    assert cache.nbytes == 2 * 13 * (7 + 4) * 8
    lengths = []
    for up in (layer.k_up, layer.v_up):
        up.register_forward_hook(lambda module, inputs, output: lengths.append(inputs[0].shape[1]))
    with torch.no_grad():
        run(layer, x[:, :6], cache=cache)
        assert lengths == [6, 6]
        for at in range(6, 9):
            run(layer, x[:, at : at + 1], cache=cache)
    assert lengths == [6, 6]


def test_the_form_with_fewer_operations_is_chosen(monkeypatch):
    """The formula agrees with counted operations on the reference backend."""
    spec = Latent(n_heads=3, kv_rank=10, d_nope=8, d_rope=4, d_value=6, position=Rope())
    layer = made(spec)
    layer.backend = "reference"
    choices = set()
    for stored, new in ((1, 1), (20, 1), (20, 3), (20, 8), (3, 9), (2, 20)):
        counts = {}
        for form in (True, False):
            monkeypatch.setattr(module, "absorbs", lambda *sizes, form=form: form)
            cache = new_cache(layer, batch=1, capacity=64)
            with torch.no_grad():
                run(layer, some(1, stored, C), cache=cache)
                with FlopCounterMode(display=False) as counter:
                    run(layer, some(1, new, C), cache=cache)
            counts[form] = counter.get_total_flops()
        assert absorbs(spec, new, stored + new) == (counts[True] < counts[False]), (stored, new, counts)
        choices.add(counts[True] < counts[False])
    assert choices == {True, False}


def test_interleaved_weights_permuted_are_half_weights():
    """The turning channels of queries, after those that do not turn, and of the key, after the latent."""
    options = {**SMALL, "d_rope": 6, "q_rank": 9, "bias": True}
    half = made(Latent(**options, position=Rope()))
    interleaved = made(Latent(**options, position=Rope(layout="interleaved")))
    order = torch.tensor([0, 3, 1, 4, 2, 5])
    state = half.state_dict()
    heads = torch.cat([h * 11 + torch.cat([torch.arange(5), 5 + order]) for h in range(3)])
    state["q_up.weight"] = state["q_up.weight"][heads]
    for name in ("kv_down.weight", "kv_down.bias"):
        state[name] = state[name][torch.cat([torch.arange(7), 7 + order])]
    x = some(2, 6, C)
    before = run(interleaved, x)
    interleaved.load_state_dict(state)
    torch.testing.assert_close(run(interleaved, x), run(half, x), atol=1e-12, rtol=0)
    assert (before - run(half, x)).abs().max() > 1e-2


def test_the_latent_part_has_no_position_and_the_turning_part_only_distances():
    """A shift of all positions changes nothing; without turning channels, nor does their order."""
    layer, x = made(SPECS["interleaved"]), some(1, 6, C)
    at = torch.arange(6)[None]
    torch.testing.assert_close(run(layer, x, positions=at + 41), run(layer, x, positions=at), atol=1e-10, rtol=0)
    assert (run(layer, x, positions=2 * at) - run(layer, x, positions=at)).abs().max() > 1e-3
    still = made(SPECS["no position"].model_copy(update={"mask": Bidirectional()}))
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    torch.testing.assert_close(run(still, x)[:, order], run(still, x[:, order]), atol=1e-12, rtol=0)


SITES = {"q": (3, 9), "k": (3, 9), "v": (3, 6), "latent": (7,), "z": (3, 6)}


@pytest.mark.parametrize("site", [*SITES, "pattern"])
def test_taps_see_the_same_whole_and_in_steps(site):
    layer, x = made(SPECS["interleaved"]), some(2, 6, C)
    whole, cache = Tap(record=[site]), new_cache(layer)
    with torch.no_grad():
        plain = run(layer, x)
        torch.testing.assert_close(run(layer, x, tap=whole), plain)
        shape = SITES.get(site)
        if shape is not None:
            assert whole.values[site].shape == (2, 6, *shape)
        at = 0
        for n in (3, 2, 1):
            steps = Tap(record=[site])
            got = run(layer, x[:, at : at + n], tap=steps, cache=cache)
            torch.testing.assert_close(got, plain[:, at : at + n])
            if site == "pattern":
                want = whole.values[site][:, :, at : at + n, : at + n]
            else:
                want = whole.values[site][:, at : at + n]
            torch.testing.assert_close(steps.values[site], want)
            at += n


@pytest.mark.parametrize("site", [*SITES, "pattern"])
def test_taps_change_what_goes_on(site):
    """A zero at any site but queries and keys takes the values away; at those the pattern becomes even."""
    layer, x = made(Latent(**SMALL, position=Rope())), some(2, 4, C)
    out = run(layer, x, tap=Tap(edit={site: torch.zeros_like}))
    if site in ("q", "k"):
        tap = Tap(record=["v", "z"])
        run(layer, x, tap=tap)
        even = tap.values["v"].cumsum(1) / torch.arange(1, 5).reshape(1, 4, 1, 1)
        torch.testing.assert_close(out, layer.out(even.flatten(-2)))
        assert (tap.values["z"] - even).abs().max() > 0.1
    else:
        assert torch.equal(out, torch.zeros_like(out))


@pytest.mark.parametrize("site", ["k", "v"])
def test_a_cache_has_no_place_for_changed_keys_and_values(site):
    layer = made(SPECS["interleaved"])
    with pytest.raises(ValueError, match="change the site `latent` instead, or run without a cache"):
        run(layer, some(2, 4, C), tap=Tap(edit={site: torch.zeros_like}), cache=new_cache(layer))
    changed = Tap(edit={"latent": torch.zeros_like})
    got = run(layer, some(2, 4, C), tap=changed, cache=new_cache(layer))
    assert torch.equal(got, torch.zeros_like(got))


def test_names_shapes_and_roles():
    spec = Latent(**SMALL, q_rank=9, position=Rope(), bias=True, out_bias=True, sink_logit=True)
    layer = LatentAttention(spec, C)
    found = {name: (tuple(p.shape), roles(layer)[name]) for name, p in layer.named_parameters()}
    assert found == {
        "q_down.weight": ((9, C), "hidden"),
        "q_down.bias": ((9,), "bias"),
        "q_norm.weight": ((9,), "norm"),
        "q_up.weight": ((3 * 9, 9), "hidden"),
        "kv_down.weight": ((7 + 4, C), "hidden"),
        "kv_down.bias": ((7 + 4,), "bias"),
        "kv_norm.weight": ((7,), "norm"),
        "k_up.weight": ((3 * 5, 7), "hidden"),
        "v_up.weight": ((3 * 6, 7), "hidden"),
        "out.weight": ((C, 3 * 6), "residual"),
        "out.bias": ((C,), "bias"),
        "sink": ((3,), "bias"),
    }
    direct = LatentAttention(Latent(**STILL, position=RelativeBias(n_buckets=6, shared=False), bias=True), C)
    shapes = {name: tuple(p.shape) for name, p in direct.named_parameters()}
    assert shapes["q.weight"] == (3 * 5, C)
    assert shapes["relative_bias.weight"] == (6, 3)
    assert "q.bias" not in shapes
    assert direct.stores() == {"latent": (7,)}


@every_spec
def test_half_precision_is_finite_and_near(spec):
    exact, x = made(spec), some(2, 9, C, dtype=torch.bfloat16)
    near = made(spec, dtype=torch.bfloat16)
    exact.load_state_dict(near.state_dict())
    with torch.no_grad():
        want, got = run(exact, x.double()), run(near, x)
        cache = new_cache(near, dtype=torch.bfloat16)
        steps = torch.cat([run(near, x[:, at : at + 1], cache=cache) for at in range(9)], 1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            auto = run(made(spec, dtype=torch.float32), x.float())
    by_length = isinstance(spec.position, Rope) and spec.position.by_length
    for out in (got, auto, *([] if by_length else [steps])):
        assert torch.isfinite(out).all()
        assert (out.double() - want).abs().mean() < 0.05 * want.abs().mean()
    assert got.dtype == steps.dtype == torch.bfloat16


def test_dropout_falls_in_training_alone():
    layer, x = made(Latent(**SMALL, position=Rope(), dropout=0.4, out_dropout=0.4)), some(1, 4, C)
    assert torch.equal(run(layer, x), run(layer, x))
    layer.train()
    torch.manual_seed(0)
    out = run(layer, x)
    assert (out == 0).any()
    torch.manual_seed(1)
    assert not torch.equal(out, run(layer, x))


@pytest.mark.parametrize("name", ["interleaved", "yarn, soft-cap, sink, window, own scale", "alibi"])
def test_a_compiler_takes_training_as_one_graph(name):
    torch._dynamo.reset()
    layer, x = made(SPECS[name]).train(), some(2, 6, C)

    def trained(x):
        frame = Frame.of(x)
        return layer(x, frame)

    compiled = torch.compile(trained, backend="aot_eager", fullgraph=True)
    out = compiled(x)
    out.square().sum().backward()
    got = {n: p.grad.clone() for n, p in layer.named_parameters()}
    layer.zero_grad()
    whole = trained(x)
    whole.square().sum().backward()
    torch.testing.assert_close(out, whole)
    for n, p in layer.named_parameters():
        torch.testing.assert_close(got[n], p.grad)
    torch._dynamo.reset()


def test_the_layer_is_built_on_the_meta_device():
    for spec in SPECS.values():
        with torch.device("meta"):
            layer = LatentAttention(spec, C)
        assert all(p.is_meta for p in layer.parameters())
