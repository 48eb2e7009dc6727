"""The quantised types of GGUF against the `gguf` package: to numbers, to codes, and back to bytes."""

import mmap
import warnings
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants

from anyformer.errors import UserError
from anyformer.weights.gguf import spans
from anyformer.weights.gguf.blocks import dequantised, grouped, quantised
from anyformer.weights.gguf.types import FILE_TYPES, KEPT, KIND, KINDS, READ, WRITTEN, Kind

PLAIN = ("F32", "F16", "BF16", "F64")
BLOCKED = sorted(READ - set(PLAIN))
BLOCKED_WRITTEN = [name for name in WRITTEN if name not in PLAIN]


def random_rows(kind: Kind, rows: int, blocks: int, seed: int = 0) -> np.ndarray:
    """Every bit pattern: scales are also denormal, infinite and NaN."""
    return np.random.default_rng(seed).integers(0, 256, (rows, blocks * kind.n_bytes), dtype=np.uint8)


def expected(data: np.ndarray, kind: Kind) -> np.ndarray:
    with np.errstate(all="ignore"):
        return quants.dequantize(data, GGMLQuantizationType[kind.name])


def expected_bytes(values: np.ndarray, kind: Kind) -> np.ndarray:
    with np.errstate(all="ignore"):
        return quants.quantize(values, GGMLQuantizationType[kind.name]).view(np.uint8)


def assert_same_bits(got: torch.Tensor, wanted: np.ndarray) -> None:
    assert got.dtype == torch.float32
    assert tuple(got.shape) == wanted.shape
    bits = got.numpy().view(np.uint32) == wanted.view(np.uint32)
    assert (bits | (np.isnan(got.numpy()) & np.isnan(wanted))).all()


def weights(rows: int, n: int, seed: int = 0) -> np.ndarray:
    """As trained: each row its own size, a few numbers far out."""
    generator = np.random.default_rng(seed)
    values = generator.standard_t(4, (rows, n)) * generator.lognormal(-4, 1, (rows, 1))
    return values.astype(np.float32)


def test_types_have_the_sizes_and_numbers_of_ggml() -> None:
    for number, (block, n_bytes) in gguf.GGML_QUANT_SIZES.items():
        kind = KINDS[number]
        assert (kind.name, kind.block, kind.n_bytes) == (number.name, block, n_bytes)
        assert KIND[kind.name] is kind
    assert {*READ, *KEPT, *WRITTEN} <= set(KIND)
    assert set(FILE_TYPES) == set(WRITTEN)
    for name, number in FILE_TYPES.items():
        assert gguf.LlamaFileType(number).name in (f"MOSTLY_{name}", f"ALL_{name}")


@pytest.mark.parametrize("name", BLOCKED)
def test_any_bytes_mean_the_numbers_of_the_reference(name: str) -> None:
    kind = KIND[name]
    seen = []
    for rows, blocks in ((1, 1), (3, 1), (17, 5), (1, 7), (40, 41)):
        data = random_rows(kind, rows, blocks)
        wanted = expected(data, kind)
        assert_same_bits(dequantised(torch.from_numpy(data), kind), wanted)
        seen.append(wanted.ravel())
    numbers = np.concatenate(seen)
    assert not np.isfinite(numbers).all()
    assert (np.signbit(numbers) & (numbers == 0)).any() or name in ("Q4_1", "Q5_1", "MXFP4", "IQ4_NL")


@pytest.mark.parametrize("name", ["Q4_1", "Q5_0", "Q8_0", "Q4_K", "Q6_K", "MXFP4"])
def test_spans_and_threads_do_not_show(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = KIND[name]
    monkeypatch.setattr(spans, "_SPAN", 3 * 2**10)
    monkeypatch.setattr(spans, "STEP", 2**10)
    data = random_rows(kind, 11, 7 * 1024 // kind.block)
    wanted = expected(data, kind)
    stored = torch.from_numpy(data)
    for threads in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert_same_bits(dequantised(stored, kind), wanted)
        with torch.inference_mode():
            assert_same_bits(dequantised(stored, kind), wanted)
        wide = torch.full((11, 7 * 1024 + 3), 7.0)
        assert_same_bits(dequantised(stored, kind, out=wide[:, 1:-2]).contiguous(), wanted)
        assert (wide[:, [0, -2, -1]] == 7).all()
        if name in WRITTEN:
            values = weights(11, 7 * 1024)
            assert np.array_equal(quantised(torch.from_numpy(values), kind).numpy(), expected_bytes(values, kind))


@pytest.mark.parametrize("name", BLOCKED)
def test_strides_and_odd_places_do_not_show(name: str) -> None:
    kind = KIND[name]
    wide = torch.from_numpy(random_rows(kind, 9, 7))
    span = 4 * kind.n_bytes
    for data in (
        wide[::2, 3 : 3 + span],
        wide[:, :span].t().contiguous().t(),
        wide.view(-1)[1 : 1 + 8 * span].view(8, -1),
    ):
        assert_same_bits(dequantised(data, kind), expected(data.contiguous().numpy(), kind))


@pytest.mark.parametrize("name", [*BLOCKED, "F32", "F16", "BF16"])
def test_a_mapped_file_is_only_read(name: str, tmp_path: Path) -> None:
    """A write would end the process."""
    kind = KIND[name]
    rows = random_rows(kind, 2, 4)
    path = tmp_path / "rows"
    path.write_bytes(rows.tobytes())
    with path.open("rb") as file, warnings.catch_warnings(action="ignore"):  # Of torch, which cannot know.
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        data = torch.frombuffer(memory, dtype=torch.uint8).view(2, -1)
    assert_same_bits(dequantised(data, kind), expected(rows, kind))
    if name in KEPT:
        grouped(data, kind)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_types_are_rounded_from_float32(dtype: torch.dtype) -> None:
    for name in ("Q4_K", "Q8_0", "F16", "F32"):
        data = torch.from_numpy(random_rows(KIND[name], 5, 40))
        wanted = torch.from_numpy(expected(data.numpy(), KIND[name])).to(dtype)
        got = dequantised(data, KIND[name], dtype=dtype)
        assert got.dtype == dtype
        torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)
        out = torch.empty(40 * KIND[name].block, 5, dtype=dtype).t()
        assert dequantised(data, KIND[name], out=out) is out
        torch.testing.assert_close(out, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", ["F16", "BF16"])
def test_all_numbers_of_two_bytes(name: str) -> None:
    data = np.arange(2**16, dtype=np.uint16).reshape(64, 1024)
    assert_same_bits(
        dequantised(torch.from_numpy(data.view(np.uint8)), KIND[name]), expected(data.view(np.uint8), KIND[name])
    )


def test_plain_numbers_are_views_where_they_can_be() -> None:
    memory = torch.arange(8 * 24, dtype=torch.uint8)
    for name, dtype in (
        ("F32", torch.float32),
        ("F16", torch.float16),
        ("BF16", torch.bfloat16),
        ("F64", torch.float64),
    ):
        data = memory[8:].view(-1, 8)
        got = dequantised(data, KIND[name], dtype=dtype)
        assert got.data_ptr() == data.data_ptr()
        odd = memory[1:-7].view(-1, 8)
        got = dequantised(odd, KIND[name], dtype=dtype)
        assert got.data_ptr() % 8 == 0
        assert got.view(torch.uint8).equal(odd)
    wide = torch.tensor([[1.0, 1 / 3]], dtype=torch.float64)
    assert dequantised(wide.view(torch.uint8), KIND["F64"]).equal(wide.float())


@pytest.mark.parametrize("name", sorted(KEPT))
def test_codes_have_the_exact_value(name: str) -> None:
    """Rounded once to float32, code · scale + zero is the reference's number."""
    kind = KIND[name]
    data = random_rows(kind, 23, 9, seed=5)
    if name == "MXFP4":
        data.reshape(-1, 17)[:, 0] = np.arange(23 * 9) % 250  # Above, 24 · scale leaves float32.
    wanted = expected(data, kind)
    codes = grouped(torch.from_numpy(data), kind)
    n = wanted.shape[1]
    assert codes.bits == (4 if name in ("Q4_0", "Q4_1", "Q4_K", "Q2_K", "Q3_K") else 8)
    assert codes.codes.dtype == torch.uint8
    assert codes.codes.shape == (23, n)
    assert int(codes.codes.max()) < 2**codes.bits
    assert codes.scales.shape == codes.zeros.shape == (23, n // KEPT[name])
    assert codes.scales.dtype == codes.zeros.dtype == torch.float32
    exact = (
        codes.codes.double().view(23, -1, KEPT[name]) * codes.scales.double()[..., None]
        + codes.zeros.double()[..., None]
    )
    finite = np.isfinite(wanted)
    assert finite.mean() > 0.8
    assert np.array_equal(exact.float().view(23, n).numpy()[finite], wanted[finite])
    found = codes.dequantised().numpy()
    if name == "Q6_K":  # code · scale has 25 bits.
        allowed = 2**-24 * 64 * codes.scales.abs().repeat_interleave(16, 1).numpy()
        assert (np.abs(found[finite] - wanted[finite]) <= allowed[finite]).all()
    else:
        assert np.array_equal(found[finite], wanted[finite])


def tied(rows: int, n: int) -> np.ndarray:
    """Small integers: in each block the furthest number comes with both signs."""
    return np.random.default_rng(3).integers(-3, 4, (rows, n)).astype(np.float32)


def halves() -> np.ndarray:
    """Blocks whose Q8_0 scale is 1, with every half below 127 and its two neighbours."""
    middle = np.arange(-126.5, 127.0, 1.0, dtype=np.float32)
    near = np.stack([middle, np.nextafter(middle, np.float32(np.inf)), np.nextafter(middle, np.float32(-np.inf))], 1)
    values = np.full((near.size // 6, 32), 127.0, np.float32)
    values[:, :6] = near.reshape(-1, 6)
    return values


SAMPLES = {
    "weights": weights(37, 1056),
    "bfloat16 weights": torch.from_numpy(weights(17, 96, seed=2)).bfloat16().float().numpy(),
    "ties": tied(9, 640),
    "halves": halves(),
    "zeros": np.zeros((2, 64), np.float32) * np.float32([[1], [-1]]),
    "constants": np.repeat(np.float32([[1.5], [-0.3], [6e4]]), 32, 1),
    "scales below half's range": weights(5, 64, seed=4) * np.float32(1e-7),
    "one number": np.eye(32, dtype=np.float32) * np.float32(-3.3),
}


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("sample", SAMPLES)
def test_numbers_are_stored_as_the_reference_stores_them(name: str, sample: str) -> None:
    kind, values = KIND[name], SAMPLES[sample]
    given = torch.from_numpy(values.copy()).requires_grad_()
    got = quantised(given, kind)
    assert got.shape == (len(values), kind.row_bytes(values.shape[1]))
    assert np.array_equal(got.numpy(), expected_bytes(values, kind))
    assert np.array_equal(given.detach().numpy(), values)
    spread = torch.from_numpy(np.repeat(values, 2, 1))[:, ::2]
    assert quantised(spread, kind).equal(got)
    assert quantised(given.double(), kind).equal(got)


@pytest.mark.parametrize("name", WRITTEN)
def test_numbers_come_back_within_half_a_step(name: str) -> None:
    kind, values = KIND[name], torch.from_numpy(weights(33, 256, seed=9))
    back = dequantised(quantised(values, kind), kind)
    by_block = values.view(-1, 32)
    furthest, width = by_block.abs().amax(1), by_block.amax(1) - by_block.amin(1)
    # Half a step, or a whole one at the end with one level less; the scale is rounded to half precision.
    bounds = {
        "F32": 0 * furthest,
        "F16": furthest * 2.0**-11 + 2.0**-25,
        "BF16": furthest * 2.0**-8,
        "Q8_0": furthest / 127 * 0.57,
        "Q4_0": furthest / 8 * 1.01,
        "Q4_1": width / 15 * 0.52,
        "Q5_0": furthest / 16 * 1.02,
        "Q5_1": width / 31 * 0.54,
    }
    assert ((back - values).abs().view(-1, 32).amax(1) <= bounds[name]).all()


@pytest.mark.parametrize("name", BLOCKED_WRITTEN)
def test_numbers_that_half_precision_cannot_scale_become_zero(name: str) -> None:
    values = torch.full((2, 32), 1e-40) * torch.tensor([[1.0], [-1.0]])
    values[:, ::3] *= -0.5
    assert (dequantised(quantised(values, KIND[name]), KIND[name]) == 0).all()


def test_no_rows_and_no_columns() -> None:
    for name in WRITTEN:
        kind = KIND[name]
        assert quantised(torch.empty(0, 64), kind).shape == (0, kind.row_bytes(64))
        assert quantised(torch.empty(2, 0), kind).shape == (2, 0)
        assert dequantised(torch.empty(2, 0, dtype=torch.uint8), kind).shape == (2, 0)
        assert dequantised(torch.empty(0, kind.row_bytes(64), dtype=torch.uint8), kind).shape == (0, 64)


def test_a_default_device_does_not_show() -> None:
    """Models are built with `meta` as the default device."""
    values = torch.from_numpy(weights(3, 512))
    with torch.device("meta"):
        for name in ("Q5_1", "Q8_0"):
            stored = quantised(values, KIND[name])
            assert dequantised(stored, KIND[name]).device.type == "cpu"
            assert grouped(stored, KIND[name]).dequantised().equal(dequantised(stored, KIND[name]))
        with pytest.raises(UserError, match="too large"):
            quantised(values * 1e9, KIND["F16"])


def test_not_finite_numbers_stay_in_plain_kinds() -> None:
    values = torch.tensor([[1.0, float("inf"), float("-inf"), float("nan")]])
    for name in ("F32", "F16", "BF16"):
        assert dequantised(quantised(values, KIND[name]), KIND[name]).equal(values) is False  # NaN differs from itself.
        torch.testing.assert_close(dequantised(quantised(values, KIND[name]), KIND[name]), values, equal_nan=True)


@pytest.mark.parametrize("name", BLOCKED_WRITTEN)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_not_finite_numbers_are_refused_in_blocks(name: str, bad: float) -> None:
    values = torch.zeros(4, 64)
    values[2, 41] = bad
    with pytest.raises(UserError, match=f"{name} stores finite numbers") as refusal:
        quantised(values, KIND[name])
    assert refusal.value.got == f"{bad} at row 2, column 41"


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("F16", 65520.0),
        ("BF16", 3.4e38),
        ("F32", 1e39),
        ("Q8_0", 65520.0 * 127),
        ("Q4_0", 65520.0 * 8),
        ("Q5_0", 65520.0 * 16),
        ("Q4_1", 65520.0),
        ("Q4_1", -65520.0),
        ("Q5_1", 65520.0),
    ],
)
def test_numbers_that_would_become_infinite_are_refused(name: str, size: float) -> None:
    values = torch.full((2, 64), 0.0, dtype=torch.float64)
    values[1, 3] = size
    if size > 0 and name in ("Q4_1", "Q5_1"):
        values[1] = size  # Their zero is stored in half precision.
    with pytest.raises(UserError, match=f"too large for {name}"):
        quantised(values, KIND[name])
    fits = quantised(values * 0.99, KIND[name]) if name != "F32" else quantised(values * 0.1, KIND[name])
    assert dequantised(fits, KIND[name]).isfinite().all()


def test_what_does_not_fit_is_refused() -> None:
    stored, values = torch.zeros(2, 36, dtype=torch.uint8), torch.zeros(2, 40)
    for refused, words in (
        (lambda: dequantised(stored, KIND["IQ2_XS"]), "IQ2_XS is not read"),
        (lambda: dequantised(stored, KIND["Q4_1"]), "no rows of Q4_1"),
        (lambda: dequantised(stored[0], KIND["Q4_0"]), "no rows of Q4_0"),
        (lambda: dequantised(stored.float(), KIND["Q4_0"]), "no rows of Q4_0"),
        (lambda: dequantised(stored, KIND["Q4_0"], out=torch.empty(2, 32)), "another shape"),
        (lambda: dequantised(stored, KIND["F16"], out=torch.empty(36)), "another shape"),
        (lambda: grouped(stored, KIND["TQ2_0"]), "TQ2_0 is not kept in codes"),
        (lambda: grouped(stored, KIND["Q8_0"]), "no rows of Q8_0"),
        (lambda: quantised(values, KIND["Q4_K"]), "not written in Q4_K"),
        (lambda: quantised(values, KIND["Q4_0"]), "do not fill blocks of Q4_0"),
        (lambda: quantised(values[0], KIND["F16"]), "no rows of floating-point numbers"),
        (lambda: quantised(values.int(), KIND["F16"]), "no rows of floating-point numbers"),
    ):
        with pytest.raises(UserError, match=words):
            refused()
