from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import anyformer as af
from anyformer.errors import UserError
from anyformer.nn.quantised import Codes, keep, quantised
from anyformer.weights.own import read_weights, write_weights

RECIPE = {
    "vocab_size": 51,
    "d_model": 64,
    "n_layers": 2,
    "max_positions": 32,
    "tie": True,
    "norm": "rms",
    "ffn": {"kind": "swiglu", "d_ff": 96},
    "attention": {"n_heads": 4, "n_kv_heads": 2, "d_head": 16, "position": "rope"},
}
TOKENS = torch.tensor([[3, 50, 0, 7, 21]])
CPU = torch.device("cpu")
NAME = "decoder.blocks.1.ffn.down.weight"


@pytest.fixture
def model() -> nn.Module:
    """Half of its matrices in codes of 4 or 8 bits, the token table among them."""
    model = af.build(af.load_spec(RECIPE), seed=1)
    g = torch.Generator().manual_seed(2)
    names = [name for name, value in model.named_parameters() if value.dim() == 2]
    for i, name in enumerate(names):
        if i % 2 == 0 or name == NAME:
            n, k = model.get_parameter(name).shape
            bits = 4 if i % 4 == 0 else 8
            values = torch.randint(0, 2**bits, (n, k), generator=g).to(torch.uint8)
            scales = torch.rand(n, k // 32, generator=g) * 0.4 / 2**bits
            keep(model, name, Codes(values, scales, -scales * 7.3, bits))
    return model


@pytest.fixture
def file(model: nn.Module, tmp_path: Path) -> Path:
    write_weights(tmp_path / "model.safetensors", model)
    return tmp_path / "model.safetensors"


def test_codes_are_written_and_kept_again_or_made_floats(model: nn.Module, file: Path) -> None:
    stored = load_file(file)
    assert stored[NAME].dtype == torch.uint8
    assert stored[f"{NAME}.scales"].shape == stored[f"{NAME}.zeros"].shape == (64, 3)
    again = read_weights(file, model.spec, dtype=torch.float32, device=CPU, quantize="keep")
    assert set(quantised(again)) == set(quantised(model)) > {NAME, "decoder.embed.token.weight"}
    assert not again.training
    assert torch.equal(again(TOKENS), model(TOKENS))
    back = again.state_dict()
    assert back.keys() == stored.keys()
    assert all(torch.equal(back[name], value) for name, value in stored.items())
    for dtype, expected in ((None, torch.float32), (torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)):
        plain = read_weights(file, model.spec, dtype=dtype, device=CPU)
        assert not quantised(plain)
        assert plain.get_parameter(NAME).dtype == expected
        value = stored[NAME].float().view(64, 3, 32) * stored[f"{NAME}.scales"][..., None]
        value += stored[f"{NAME}.zeros"][..., None]
        assert torch.equal(plain.get_parameter(NAME), value.view(64, 96).to(expected))
    assert torch.allclose(read_weights(file, model.spec, dtype=None, device=CPU)(TOKENS), model(TOKENS), atol=1e-4)


def test_the_type_of_the_floats_is_that_of_what_goes_through_kept_weights(model: nn.Module, file: Path) -> None:
    again = read_weights(file, model.spec, dtype=torch.bfloat16, device=CPU, quantize="keep")
    assert again(TOKENS).dtype == torch.bfloat16
    assert quantised(again)[NAME].codes().scales.dtype == torch.float32


def test_a_weight_that_no_product_takes_becomes_floats(model: nn.Module, file: Path) -> None:
    stored = load_file(file)
    norm = "decoder.final_norm.weight"
    stored |= {norm: torch.ones(64, dtype=torch.uint8)}
    stored |= {f"{norm}.scales": torch.full((2,), 0.5), f"{norm}.zeros": torch.zeros(2)}
    save_file(stored, file)
    with pytest.raises(UserError, match="do not go together"):
        read_weights(file, model.spec, dtype=None, device=CPU, quantize="keep")


Change = dict[str, Tensor | None]
NIBBLES = torch.zeros(64, 96, dtype=torch.uint8)


@pytest.mark.parametrize("quantize", [None, "keep"])
@pytest.mark.parametrize(
    "change",
    [
        {f"{NAME}.zeros": None},
        {f"{NAME}.scales": None},
        {NAME: None},
        {NAME: NIBBLES.float()},
        {NAME: NIBBLES[:-1]},
        {NAME: NIBBLES[:, :-1].contiguous()},
        {NAME: NIBBLES.flatten()},
        {f"{NAME}.scales": torch.zeros(64, 5)},
        {f"{NAME}.scales": torch.zeros(63, 3)},
        {f"{NAME}.scales": torch.zeros(64, 0)},
        {f"{NAME}.zeros": torch.zeros(64, 3, dtype=torch.float16)},
        {f"{NAME}.zeros": torch.zeros(())},
        {f"{NAME}.extra": torch.zeros(1)},
        {"nonsense.scales": torch.zeros(1)},
    ],
)
def test_parts_that_do_not_fit_are_one_error(
    model: nn.Module, file: Path, change: Change, quantize: str | None
) -> None:
    stored = load_file(file)
    assert {key for key in change if "nonsense" not in key and "extra" not in key} <= stored.keys()
    save_file({key: value for key, value in (stored | change).items() if value is not None}, file)
    with pytest.raises(UserError) as raised:
        read_weights(file, model.spec, dtype=None, device=CPU, quantize=quantize)
    assert str(file) in str(raised.value)


def test_a_file_cut_short_is_one_error(model: nn.Module, file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])
    with pytest.raises(UserError, match="cut short"):
        read_weights(file, model.spec, dtype=None, device=CPU, quantize="keep")
