"""FlexAttention: what it refuses at once, its blocks, and (slow: a compiler works) its values on the CPU."""

import pytest
import torch

from anyformer.nn.attend import AlibiBias, BucketBias, DenseBias, Unsupported, alibi_slopes, attend, flex, masks
from anyformer.nn.attend.call import checked
from nn.test_attend import inputs

N = 150
IDS = torch.tensor([[0] * 70 + [1] * 80, [2] * 20 + [3] * 130])
REAL = torch.ones(2, N, dtype=torch.bool)
REAL[0, :20] = REAL[1, 60:90] = False


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dropout": 0.1}, "no dropout"),
        ({"sinks": torch.zeros(6)}, "log-sum-exp"),
        ({"dtype": torch.float64}, "float64"),
        ({"grad": True}, "no backward pass on the CPU"),
        ({"bias": DenseBias(torch.zeros(5, 7, requires_grad=True))}, "no backward pass on the CPU"),
    ],
)
def test_what_it_cannot_is_refused_before_anything_is_compiled(options, said):
    options = dict(options)
    q, k, v = inputs(dtype=options.pop("dtype", torch.float32), grad=options.pop("grad", False))
    with pytest.raises(Unsupported, match=said):
        attend(q, k, v, visible=masks.Causal(), backend="flex", **options)


def test_a_compiler_that_fails_is_an_unsupported_call(monkeypatch):
    def broken(*_, **__):
        raise torch._dynamo.exc.Unsupported("no compiler here")

    monkeypatch.setattr(flex, "_compiled", lambda device: broken)
    q, k, v = inputs(dtype=torch.float32)
    with pytest.raises(Unsupported, match=r"did not compile for this call here: .*no compiler here"):
        attend(q, k, v, visible=masks.Causal(), backend="flex")


@pytest.mark.parametrize(
    "visible",
    [
        masks.Causal(),
        masks.Causal() & masks.Window(40, first=2) & masks.Padding(REAL),
        masks.Causal() & masks.Segments(IDS),
        masks.PrefixKeys(~REAL),
        masks.Prefix(torch.tensor([3, 100])) & masks.Dense(torch.eye(N, dtype=torch.bool)),
        (masks.Causal() & masks.Window(9)).at(queries=torch.arange(N) * 2, keys=torch.arange(N)),
    ],
)
def test_blocks_and_conditions_are_the_mask(visible, monkeypatch):
    """Written out by torch from the condition, block by block, against the description's own mask."""
    monkeypatch.setattr(flex, "BLOCK", 16)
    q, k, v = inputs(2, N, N, 6, 3, 4, 4, dtype=torch.float32)
    blocks = flex._blocks(checked(q, k, v, visible, None, None, None, None, 0.0))
    want = visible.mask(N, N).expand(2, 1, N, N)
    grid = torch.meshgrid(torch.arange(2), torch.arange(N), torch.arange(N), indexing="ij")
    condition = blocks.mask_mod(grid[0], torch.zeros_like(grid[0]), grid[1], grid[2])
    assert torch.equal(condition[:, None], want)
    dense = blocks.to_dense().expand(2, 1, -1, -1).repeat_interleave(16, 2).repeat_interleave(16, 3)[..., :N, :N] > 0
    assert (dense | ~want).all()
    assert not dense.all() or want.any(-1).all()


def test_scores_are_capped_then_biased():
    table = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    biases = [BucketBias(table, 30, True), AlibiBias(alibi_slopes(6), False), DenseBias(torch.randn(1, 6, 1, 7))]
    q, k, v = inputs(dtype=torch.float32)
    b, h, i, j = torch.meshgrid(*(torch.arange(n) for n in (2, 6, 5, 7)), indexing="ij")
    score = torch.randn(2, 6, 5, 7)
    for bias in biases:
        call = checked(q, k, v, masks.Causal(), bias, None, 0.7, None, 0.0)
        got = flex._score(call)(score, b, h, i, j)
        torch.testing.assert_close(got, 0.7 * torch.tanh(score / 0.7) + bias.added(5, 7))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@torch.no_grad()
def test_values_are_those_of_reference():
    """Everything at once, grouped heads and values of another width; then a decoded token."""
    everything = masks.Causal() & masks.Window(40, first=2) & masks.Segments(IDS) & masks.Padding(REAL)
    options = {"softcap": 0.8, "bias": AlibiBias(alibi_slopes(6), True)}
    for visible, t, more in ((everything, N, options), (masks.Causal() & masks.Padding(REAL), 1, {})):
        q, k, v = inputs(2, t, N, 6, 3, 16, 8, dtype=torch.float32)
        want = attend(q, k, v, visible=visible, backend="reference", **more)
        torch.testing.assert_close(attend(q, k, v, visible=visible, backend="flex", **more), want, atol=1e-5, rtol=1e-5)
