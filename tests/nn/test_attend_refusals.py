"""What the operation refuses: each argument of another kind, dtype or size, with what it wants."""

import pytest
import torch

from anyformer.nn.attend import AlibiBias, alibi_slopes, attend, masks


def tensors(t=3, s=5, h=2, g=2, d=4, dtype=torch.float32):
    return torch.randn(1, t, h, d).to(dtype), torch.randn(1, s, g, d).to(dtype), torch.randn(1, s, g, d).to(dtype)


@pytest.mark.parametrize("backend", ["auto", "reference", "tiled", "fused"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_only_floats_attend(backend, dtype):
    with pytest.raises(ValueError, match="attend takes floating-point numbers"):
        attend(*tensors(dtype=dtype), visible=masks.Causal(), backend=backend)


@pytest.mark.parametrize("backend", ["auto", "reference", "tiled", "fused"])
def test_dtypes_are_mixed_under_autocast_alone(backend):
    q, k, v = tensors()
    with pytest.raises(ValueError, match=r"of one dtype outside torch\.autocast"):
        attend(q.bfloat16(), k, v, visible=masks.Causal(), backend=backend)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attend(q.bfloat16(), k, v, visible=masks.Causal(), backend=backend).dtype == torch.bfloat16


@pytest.mark.parametrize("backend", ["auto", "reference", "tiled", "fused"])
@pytest.mark.parametrize("size", [{"t": 0}, {"s": 0}, {"d": 0}, {"h": 0}, {"g": 0}])
def test_nothing_is_no_size(size, backend):
    with pytest.raises(ValueError, match="nothing to attend to"):
        attend(*tensors(**size), visible=masks.Causal(), backend=backend)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"visible": torch.ones(3, 5, dtype=torch.bool)}, "wrap a tensor in Dense"),
        ({"bias": torch.zeros(3, 5)}, "bias is a description"),
        ({"sinks": [0.0, 0.0]}, "sinks holds one float logit a head"),
        ({"sinks": torch.zeros(2, dtype=torch.int64)}, "sinks holds one float logit a head"),
        ({"scale": "0.5"}, "scale is a finite number"),
        ({"softcap": True}, "softcap is a finite number above 0"),
        ({"softcap": float("nan")}, "softcap is a finite number above 0"),
        ({"dropout": "0.1"}, "dropout is a rate"),
        ({"visible": masks.Padding(None)}, "padding is torch.bool"),
        ({"visible": masks.Segments(1.0)}, "segments of queries is torch.int64"),
    ],
)
def test_arguments_of_another_kind(given, words):
    with pytest.raises(ValueError, match=words):
        attend(*tensors(), **{"visible": masks.Causal(), **given})


def test_descriptions_of_another_kind():
    for make in (lambda: masks.Window(2.5), lambda: masks.Window(True), lambda: masks.Window(3, first=-1)):
        with pytest.raises(ValueError, match="a window needs whole numbers"):
            make()
    for length in (-1, 2.5):
        with pytest.raises(ValueError, match="a prefix's length is a whole number"):
            masks.Prefix(length)
    with pytest.raises(ValueError, match="joins descriptions"):
        masks.Causal() & 3
    with pytest.raises(ValueError, match="n_heads ≥ 1"):
        alibi_slopes(2.5)


@pytest.mark.parametrize("option", ["softcap", "sinks", "window", "alibi"])
def test_a_compiled_call_takes_other_lengths(option):
    """Sizes are symbols after the second length, and no message may spell them."""

    def call(q, k, v):
        more = {
            "softcap": {"softcap": 2.0},
            "sinks": {"sinks": torch.ones(2)},
            "window": {"visible": masks.Causal() & masks.Window(2)},
            "alibi": {"bias": AlibiBias(alibi_slopes(2), True)},
        }[option]
        return attend(q, k, v, **{"visible": masks.Causal(), **more})

    torch.compiler.reset()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    for t in (5, 7, 9):
        q, k, v = tensors(t=t, s=t)
        torch.testing.assert_close(compiled(q, k, v), call(q, k, v))
