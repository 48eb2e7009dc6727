import copy
from itertools import product

import pytest
import torch
from torch import Tensor, nn

import anyformer as af
from anyformer.errors import UserError
from anyformer.nn.blocked import packed_bytes
from anyformer.nn.layers import Linear
from anyformer.nn.quantised import (
    Codes,
    Quantised,
    can_keep,
    dequantised_state,
    keep,
    load_rest,
    quantised,
)
from anyformer.nn.tap import Tap

SMALL = {
    "vocab_size": 83,
    "d_model": 64,
    "n_layers": 2,
    "max_positions": 64,
    "norm": "rms",
    "ffn": {"kind": "swiglu", "d_ff": 96},
    "attention": {"n_heads": 4, "n_kv_heads": 2, "d_head": 16, "position": "rope"},
}
TOKENS = torch.tensor([[5, 82, 0, 17, 33, 2, 9, 61, 4, 70, 8]])


def codes(shape: tuple[int, ...], bits: int, seed: int = 0, group: int = 32, symmetric: bool = False) -> Codes:
    """Numbers of size 0.1 or so."""
    g = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 2**bits, shape, dtype=torch.uint8, generator=g)
    groups = (*shape[:-1], shape[-1] // group)
    scales = (torch.rand(groups, generator=g) + 0.1) * 0.4 / 2**bits
    zeros = -scales * 2 ** (bits - 1)
    if not symmetric:
        zeros = zeros + 0.02 * torch.randn(groups, generator=g)
    return Codes(values, scales, zeros, bits)


def exactly(c: Codes) -> Tensor:
    """The oracle: each number by itself, in float64."""
    wide = c.codes.double()
    spread = c.codes.shape[-1] // c.scales.shape[-1]
    return wide * c.scales.double().repeat_interleave(spread, -1) + c.zeros.double().repeat_interleave(spread, -1)


def kept_model(bits: int = 4, recipe: dict | None = None, rows: bool = False) -> tuple[nn.Module, dict[str, Codes]]:
    """A model whose matrices are all kept, and its codes."""
    spec = af.load_spec(SMALL | (recipe or {}))
    model = af.build(spec, seed=1)
    given = {}
    for i, (name, value) in enumerate(model.state_dict().items()):
        if value.dim() >= 2 and "router" not in name and "position" not in name:
            given[name] = codes(tuple(value.shape), bits, seed=i, symmetric=i % 2 == 0)
            table = given[name].dequantised() if rows and "token" in name else None
            keep(model, name, given[name], None if table is None else lambda ids, table=table: table[ids])
    return model, given


def floats_of(model: nn.Module) -> nn.Module:
    """The same model with the same numbers as float32."""
    plain = af.build(model.spec, device="meta")
    plain.load_state_dict(dequantised_state(model), assign=True)
    return plain


def far(a: Tensor, b: Tensor) -> float:
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize(
    ("shape", "bits", "group"),
    [*product([(3, 32), (70, 96), (2100, 64)], (4, 8), (32,)), ((40, 96), 8, 16), ((90, 20000 * 2), 4, 32)],
)
@pytest.mark.parametrize("symmetric", [False, True])
def test_product_equals_float64_for_any_number_of_vectors(
    shape: tuple[int, int], bits: int, group: int, symmetric: bool
) -> None:
    c = codes(shape, bits, group=group, symmetric=symmetric)
    weight = Quantised(c, shape)
    for m in (1, 3, 8, 9, 64) if shape[1] < 1000 else (1, 9):
        x = torch.randn(m, shape[1], generator=torch.Generator().manual_seed(m))
        assert far(weight(x), x.double() @ exactly(c).T) < 2e-6, m


def test_wide_outputs_are_cut_into_pieces_and_come_back_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anyformer.nn.packed.SUMS", 3500)
    c = codes((5000, 64), 4)
    weight = Quantised(c, (5000, 64))
    x = torch.randn(2, 64)
    assert far(weight(x), x.double() @ exactly(c).T) < 2e-6


@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (2, 3, 1)])
def test_product_takes_any_leading_shape_and_strides(shape: tuple[int, ...]) -> None:
    c = codes((48, 64), 8)
    x = torch.randn(*shape, 64)
    out = Quantised(c, (48, 64))(x)
    assert out.shape == (*shape, 48)
    assert torch.allclose(out.double(), x.double() @ exactly(c).T, atol=1e-5)
    turned = torch.randn(64, 5).T
    assert far(Quantised(c, (48, 64))(turned), turned.double() @ exactly(c).T) < 2e-6


@pytest.mark.parametrize(("dtype", "within"), [("float64", 2e-6), ("bfloat16", 4e-3), ("float16", 5e-4)])
def test_linear_computes_in_float32_and_answers_in_the_type_of_its_input(dtype: str, within: float) -> None:
    layer = Linear(64, 35, bias=True, role="hidden")
    c = codes((35, 64), 4)
    nn.init.normal_(layer.bias)
    keep(layer, "weight", c)
    layer = layer.to(getattr(torch, dtype))
    x = torch.randn(2, 3, 64, dtype=getattr(torch, dtype))
    out = layer(x)
    assert out.dtype == x.dtype
    assert far(out, x.double() @ exactly(c).T + layer.bias.double()) < within
    assert quantised(layer)["weight"].codes().scales.dtype == torch.float32


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", [(3, 32), (2100, 64), (3, 2100, 64)])
@pytest.mark.parametrize("symmetric", [False, True])
def test_codes_come_back_bit_for_bit_and_memory_is_what_the_formula_says(
    bits: int, shape: tuple[int, ...], symmetric: bool
) -> None:
    c = codes(shape, bits, symmetric=symmetric)
    weight = Quantised(c, shape)
    back = weight.codes()
    assert torch.equal(back.codes, c.codes)
    assert torch.equal(back.scales, c.scales)
    assert torch.equal(back.zeros, c.zeros)
    assert back.bits == bits
    assert weight.nbytes == packed_bytes(shape, bits, 32, symmetric=symmetric, half=False)
    assert far(weight.dequantised(), exactly(c)) < 1e-7
    if len(shape) == 2:
        ids = torch.tensor([[0, shape[0] - 1], [1, shape[0] // 2]])
        assert torch.equal(weight.lookup(ids), c.dequantised()[ids])
    else:
        x = torch.randn(2, shape[-1])
        for part, matrix in zip(weight.unbind(), exactly(c), strict=True):
            assert far(part(x), x.double() @ matrix.T) < 2e-6


def test_a_large_weight_takes_little_more_than_its_codes() -> None:
    """Per number in 4 bits: half a byte, 8/32 for scale and zero, 1/64 for each row's own."""
    n, k = 49152, 576
    assert packed_bytes((n, k), 4, 32, symmetric=False, half=False) / (n * k) < 0.77
    assert packed_bytes((n, k), 4, 32, symmetric=True, half=False) / (n * k) < 0.64
    assert packed_bytes((n, k), 8, 32, symmetric=True, half=False) / (n * k) < 1.15


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("tie", [False, True])
def test_a_whole_model_in_codes_equals_the_same_numbers_as_floats(bits: int, rows: bool, tie: bool) -> None:
    """B57. The stated tolerance is 1e-5 of the logits' size in float32."""
    model, _ = kept_model(bits, {"tie": tie}, rows=rows)
    plain = floats_of(model)
    assert {name for name, value in plain.state_dict().items() if value.dim() == 2} == set(quantised(model))
    whole, expected = model(TOKENS), plain(TOKENS)
    assert far(whole, expected) < 1e-5
    assert torch.equal(whole.argmax(-1), expected.argmax(-1))
    cache = model.new_cache(batch=1, capacity=16)
    steps = [model(TOKENS[:, :6], cache=cache)]
    steps += [model(TOKENS[:, i : i + 1], cache=cache) for i in range(6, TOKENS.shape[1])]
    assert far(torch.cat(steps, 1), expected) < 1e-5
    assert far(model(TOKENS, last_only=True), expected[:, -1:]) < 1e-5


def test_head_and_embedding_keep_all_that_goes_with_them() -> None:
    recipe = {
        "tie": True,
        "head": {"kind": "language", "bias": True, "softcap": 3.0, "scale": 0.7},
        "embed": {"scale": 2.5, "norm": "layer"},
    }
    model, _ = kept_model(8, recipe)
    torch.nn.init.normal_(model.head.bias)
    assert far(model(TOKENS), floats_of(model)(TOKENS)) < 1e-5


def test_experts_in_codes_equal_experts_in_floats() -> None:
    moe = {"kind": "moe", "n_experts": 3, "top_k": 2, "expert": {"kind": "gated", "activation": "silu", "d_ff": 96}}
    model, given = kept_model(4, {"ffn": moe})
    name = "decoder.blocks.0.ffn.experts.up.weight"
    assert given[name].codes.shape == (3, 96, 64)
    plain = floats_of(model)
    assert far(model(TOKENS), plain(TOKENS)) < 1e-5
    c = given[name]
    other = af.build(model.spec, seed=1)
    keep(other, name, Codes(c.codes.flatten(0, 1), c.scales.flatten(0, 1), c.zeros.flatten(0, 1), 4))
    assert torch.equal(quantised(other)[name].dequantised(), c.dequantised())


def test_an_untied_table_read_from_elsewhere_takes_no_memory_and_makes_codes_only_when_asked() -> None:
    model = af.build(af.load_spec(SMALL | {"tie": False}), seed=1)
    c, made = codes((83, 64), 4), []

    def make() -> Codes:
        made.append(1)
        return c

    table = c.dequantised()
    keep(model, "decoder.embed.token.weight", make, lambda ids: table[ids])
    assert model(TOKENS).shape == (1, 11, 83)
    kept = quantised(model)["decoder.embed.token.weight"]
    assert (made, kept.nbytes) == ([], 0)
    assert torch.equal(model.state_dict()["decoder.embed.token.weight"], c.codes)
    assert len(made) == 1
    with pytest.raises(ValueError, match="row by row"):
        kept(torch.zeros(1, 64))


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("bad", [-1, 83, 95])
def test_an_id_outside_a_kept_table_is_refused_by_number(bad: int, rows: bool) -> None:
    model, _ = kept_model(rows=rows)
    with pytest.raises(ValueError, match=f"token id {bad} is outside the vocabulary of 83"):
        model(torch.tensor([[0, bad]]))


def test_the_model_s_type_is_that_of_what_is_looked_up() -> None:
    model, given = kept_model(4)
    model = model.to(torch.bfloat16)
    assert model.new_cache(batch=1, capacity=4).dtype == torch.bfloat16
    assert model(TOKENS).dtype == torch.bfloat16
    assert far(model(TOKENS).float(), floats_of(kept_model(4)[0])(TOKENS)) < 0.03
    for name, c in given.items():
        assert torch.equal(quantised(model)[name].codes().scales, c.scales)


def test_state_dict_holds_codes_scales_and_zeros_and_loads_them_again() -> None:
    model, given = kept_model(4)
    state = model.state_dict()
    for name, c in given.items():
        assert torch.equal(state[name], c.codes)
        assert torch.equal(state[f"{name}.scales"], c.scales)
        assert torch.equal(state[f"{name}.zeros"], c.zeros)
    assert not any("packed" in name for name in state)
    other, _ = kept_model(8, rows=True)
    assert far(other(TOKENS), model(TOKENS)) > 0.1
    other.load_state_dict(state)
    assert torch.equal(other(TOKENS), model(TOKENS))


def test_loading_what_does_not_fit_says_so() -> None:
    model, _ = kept_model(4)
    name = "decoder.blocks.1.ffn.up.weight"
    state = dict(model.state_dict())
    with pytest.raises(RuntimeError, match=rf"Missing.*{name}\.zeros"):
        model.load_state_dict({key: value for key, value in state.items() if key != f"{name}.zeros"})
    with pytest.raises(RuntimeError, match=rf"Missing.*\"{name}\""):
        model.load_state_dict({key: value for key, value in state.items() if not key.startswith(name)})
    with pytest.raises(RuntimeError, match=rf"Unexpected.*{name}\.other"):
        model.load_state_dict(state | {f"{name}.other": torch.zeros(1)})
    with pytest.raises(RuntimeError, match="do not go together"):
        model.load_state_dict(state | {name: state[name].float()})
    with pytest.raises(RuntimeError, match="another shape"):
        model.load_state_dict(state | {part: state[part][:-1] for part in (name, f"{name}.scales", f"{name}.zeros")})


def test_the_rest_of_a_model_loads_by_assignment_and_whole() -> None:
    spec = af.load_spec(SMALL)
    source = af.build(spec, seed=3).state_dict()
    model, c = af.build(spec, device="meta"), codes((96, 64), 4)
    name = "decoder.blocks.0.ffn.up.weight"
    keep(model, name, c)
    rest = {key: value for key, value in source.items() if key != name}
    load_rest(model, rest)
    plain = af.build(spec, device="meta")
    plain.load_state_dict(rest | {name: c.dequantised()}, assign=True)
    assert far(model(TOKENS), plain(TOKENS)) < 1e-5
    with pytest.raises(RuntimeError, match=r"decoder.final_norm.weight"):
        load_rest(model, {key: value for key, value in rest.items() if key != "decoder.final_norm.weight"})
    with pytest.raises(RuntimeError, match="nonsense"):
        load_rest(model, rest | {"nonsense": torch.zeros(1)})


def test_gradients_pass_through_to_activations_and_training_is_refused() -> None:
    model, _ = kept_model(4)
    plain = floats_of(model)
    x = torch.randn(1, 12, 64)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    model(embeddings=a).square().sum().backward()
    plain(embeddings=b).square().sum().backward()
    assert far(a.grad, b.grad) < 1e-5
    wide = codes((2100, 64), 8)
    c = torch.randn(3, 64, requires_grad=True)
    Quantised(wide, (2100, 64))(c).square().sum().backward()
    assert far(c.grad, 2 * (c.double() @ exactly(wide).T) @ exactly(wide)) < 1e-5
    with pytest.raises(ValueError, match="cannot be trained; load the model with quantize=None"):
        model.train()
    assert not any(module.training for module in model.modules())
    assert model.eval() is model


def test_a_copy_is_apart_and_equal() -> None:
    model, _ = kept_model(4)
    expected = model(TOKENS)
    other = copy.deepcopy(model)
    other.load_state_dict(kept_model(8)[0].state_dict())
    assert torch.equal(model(TOKENS), expected)
    assert torch.equal(copy.deepcopy(model)(TOKENS), expected)


def test_taps_see_and_change_activations() -> None:
    model, _ = kept_model(4)
    plain = floats_of(model)
    names = ("embed", "blocks.0.q", "blocks.1.mlp_out", "logits")
    taps = [Tap(names, {"blocks.0.q": lambda q: 0.5 * q}) for _ in range(2)]
    model(TOKENS, tap=taps[0])
    plain(TOKENS, tap=taps[1])
    for name in names:
        assert far(taps[0].values[name], taps[1].values[name]) < 1e-5, name


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 9])
def test_compiled_steps_equal_eager_ones(n: int) -> None:
    model, _ = kept_model(4)
    with torch.no_grad():
        assert far(torch.compile(model, backend="aot_eager")(TOKENS[:, :n]), model(TOKENS[:, :n])) < 1e-5


def test_what_cannot_be_kept_says_why() -> None:
    assert can_keep((5, 64)) is None
    assert can_keep((3, 5, 64)) is None
    assert "cuda" in (can_keep((5, 64), "cuda") or "")
    assert "32" in (can_keep((5, 48)) or "")
    assert can_keep((5, 48), group=16) is None
    assert can_keep((64,)) is not None
    model = af.build(af.load_spec(SMALL), seed=1)
    for name in ("decoder.final_norm.weight", "nothing", "decoder.nothing.weight", "decoder.blocks.0.ffn.up.bias"):
        with pytest.raises(UserError, match="no weight"):
            keep(model, name, codes((1, 32), 4))
    with pytest.raises(UserError, match="another shape"):
        keep(model, "decoder.blocks.0.ffn.up.weight", codes((64, 96), 4))
    with pytest.raises(ValueError, match="stay on the CPU"):
        kept_model()[0].to("meta")


def test_latent_attention_keeps_what_it_multiplies_with_from_one_side() -> None:
    latent = {
        "kind": "latent",
        "n_heads": 4,
        "kv_rank": 32,
        "d_nope": 16,
        "d_rope": 16,
        "d_value": 16,
        "position": "rope",
    }
    model = af.build(af.load_spec(SMALL | {"attention": latent}), seed=1)
    keep(model, "decoder.blocks.0.attention.kv_down.weight", codes((48, 64), 4))
    with pytest.raises(UserError, match="no weight"):
        keep(model, "decoder.blocks.0.attention.k_up.weight", codes((64, 32), 4))
    assert far(model(TOKENS), floats_of(model)(TOKENS)) < 1e-5


def test_hostile_codes_are_one_error() -> None:
    good = codes((6, 64), 4)
    name = "decoder.blocks.0.attention.k.weight"
    model = af.build(af.load_spec(SMALL), seed=1)
    for bad in (
        Codes(good.codes + 16, good.scales, good.zeros, 4),
        Codes(good.codes, good.scales[:-1], good.zeros, 4),
        Codes(good.codes, good.scales, good.zeros[:, :1], 4),
        Codes(good.codes, good.scales[:, :0], good.zeros[:, :0], 4),
        Codes(good.codes.int(), good.scales, good.zeros, 4),
        Codes(good.codes, good.scales.half(), good.zeros, 4),
        Codes(good.codes, good.scales, good.zeros, 5),
        Codes(good.codes[:, :40], good.scales[:, :3], good.zeros[:, :3], 4),
        Codes(good.codes[0], good.scales[0], good.zeros[0], 4),
    ):
        with pytest.raises(UserError):
            keep(model, name, bad)
    with pytest.raises(UserError, match="4 bits"):
        Quantised(Codes(good.codes + 16, good.scales, good.zeros, 4), (6, 64))


def test_scales_that_are_zero_or_not_finite_stay_what_they_are() -> None:
    for scales, zeros in ((0.0, 0.0), (0.0, 1.0), (float("inf"), 0.0), (float("nan"), 0.0)):
        c = Codes(torch.ones(3, 32, dtype=torch.uint8), torch.full((3, 1), scales), torch.full((3, 1), zeros), 4)
        back = Quantised(c, (3, 32)).codes()
        assert torch.equal(back.scales, c.scales) or scales != scales
        assert torch.equal(back.zeros, c.zeros)
        assert torch.equal(back.dequantised().isnan(), c.dequantised().isnan())
