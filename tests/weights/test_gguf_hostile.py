"""B46. GGUF files whose container is sound and whose contents are not: metadata, tensors and numbers."""

import math
import struct
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from gguf_bytes import Tensor, llama

from anyformer.errors import UserError
from anyformer.families.gguf import DIALECTS
from anyformer.weights.gguf.format import Entry, Gguf, read_gguf
from anyformer.weights.gguf.load import load_gguf
from anyformer.weights.gguf.reading import matched, read_place, write_place
from anyformer.weights.gguf.types import HALVES, KIND, KINDS, READ
from anyformer.weights.source import load_spec

gguf = pytest.importorskip("gguf")

GOOD = llama()
Q, TABLE, LAST = "blk.0.attn_q.weight", "token_embd.weight", "output_norm.weight"
CPU = torch.device("cpu")


def loaded(folder, file, dtype=torch.float32, **how):
    path = folder / "hostile.gguf"
    path.write_bytes(file.bytes())
    return load_gguf(path, dtype, CPU, **how).model


def refusal(folder, file, **how):
    """What is said of a file, by each way of loading it, within two seconds and in short lines."""
    said = set()
    for quantize in (None, "keep"):
        start = time.process_time()
        with pytest.raises(UserError) as caught:
            loaded(folder, file, quantize=quantize, **how)
        assert time.process_time() - start < 2
        said.add(str(caught.value))
    (message,) = said
    assert "hostile.gguf" in message
    assert max(map(len, message.splitlines())) < 350
    assert message.replace("\n", "").isprintable()
    return message


def put(**said):
    """The good file with other metadata of its architecture; `_` stands for a point, `__` for itself."""
    names = {name.replace("__", "\0").replace("_", ".").replace("\0", "_"): value for name, value in said.items()}
    return GOOD.put({f"llama.{name}": value for name, value in names.items()})


NAN, INF = float("nan"), float("inf")
WRONG = (
    *(("str", "4"), ("str", ""), ("list of u32", [4]), ("list of u32", [4] * 5000), ("list of str", []), ("bool", 1)),
    *(("i32", -4), ("u32", 0), ("u64", 1 << 40), ("u64", (1 << 64) - 1), ("f32", 4.0), ("f32", NAN), ("f32", INF)),
)
NUMBERS = (*WRONG[:6], ("f32", NAN), ("f32", INF), ("f32", -INF), ("f32", -1.0), ("f64", 1e300), ("f64", 1e-300))
WHOLE_KEYS = (
    *("block_count", "context_length", "embedding_length", "feed_forward_length", "rope.dimension_count"),
    *("attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length"),
)
NUMBER_KEYS = ("attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.scaling.factor", "rope.scaling.attn_factor")


@pytest.mark.parametrize("key", [*WHOLE_KEYS, *NUMBER_KEYS])
def test_a_key_of_a_wrong_value_is_refused(tmp_path, key):
    for said in NUMBERS if key in NUMBER_KEYS else WRONG:
        message = refusal(tmp_path, GOOD.put({f"llama.{key}": said}))
        assert "cannot be used" in message or "problem" in message, said


def test_keys_that_lack_or_that_nobody_knows(tmp_path):
    for key in ("block_count", "context_length", "embedding_length", "attention.head_count"):
        assert f"lacks `{key}`" in refusal(tmp_path, GOOD.put({f"llama.{key}": None}))
    for key in ("foo", "rope.foo", "rope.scaling", "attention", "foo.bar", "", ".", "." * 240, "rope" + "." * 240):
        for said in (("u32", 5), ("list of u32", [5] * 3000), ("str", "\x1b[2J\n" * 300)):
            one = {f"llama.{key}": said}
            for file in (replace(GOOD, metadata=GOOD.metadata | one), replace(GOOD, metadata=one | GOOD.metadata)):
                message = refusal(tmp_path, file)
                assert any(x in message for x in ("is not known", "cannot be used", "lacks")), key


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (None, "the file names no architecture"),
        (("str", ""), "the file names no architecture"),
        (("u32", 7), "general.architecture = 7"),
        (("list of str", ["llama"]), "general.architecture = ['llama']"),
        (("str", "lama"), "did you mean `llama`?"),
        (("str", "\x1b[2J"), r"'\x1b[2J'"),
        (("str", "l" * 1_000_000), "no family of this GGUF architecture is known"),
        (("list of u32", [7] * 100_000), "no family of this GGUF architecture is known"),
    ],
)
def test_an_architecture_that_is_none(tmp_path, said, expected):
    assert expected in refusal(tmp_path, GOOD.put({"general.architecture": said}))


def test_sizes_that_would_take_minutes(tmp_path):
    assert "at most 512" in refusal(tmp_path, put(block__count=("u32", 48641)))
    assert "at most 512" in refusal(tmp_path, put(block__count=("u32", 10**9)))
    assert "lack most tensors" in refusal(tmp_path, put(block__count=("u32", 512)))
    experts = {"expert__count": ("u32", 65536), "expert__used__count": ("u32", 2)}
    assert "at most 1,024" in refusal(tmp_path, put(**experts))
    experts["expert__count"] = ("u32", 1024)
    assert "the weights lack 4 of" in refusal(tmp_path, put(**experts))


def added(*tensors):
    return replace(GOOD, tensors=(*GOOD.tensors, *tensors))


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        (GOOD.without(Q), f"got: no {Q}"),
        (GOOD.without(LAST), f"got: no {LAST}"),
        (GOOD.without(TABLE), f"a table {TABLE}"),
        (replace(GOOD, tensors=()), f"a table {TABLE}"),
        (GOOD.tensor(Q, name="blk.0.attn_q.weighu"), f"got: no {Q}"),
        (added(Tensor("extra", (1,), 0, bytes(4))), "got: extra"),
        (added(Tensor("blk.1.attn_norm.weight", (32,), 0, bytes(128))), "got: blk.1.attn_norm.weight"),
        (added(Tensor("blk.-1.attn_norm.weight", (32,), 0, bytes(128))), "got: blk.-1.attn_norm.weight"),
        (added(Tensor("blk.00.attn_norm.weight", (32,), 0, bytes(128))), "got: blk.00.attn_norm.weight"),
        (GOOD.tensor(Q, sizes=(64, 16)), "got: [16, 64]"),
        (GOOD.tensor(Q, sizes=(1024,)), "got: [1024]"),
        (GOOD.tensor(Q, sizes=(32, 32, 1)), "got: [1, 32, 32]"),
        (GOOD.tensor(TABLE, sizes=(288,)), f"a table {TABLE}"),
        (GOOD.tensor(TABLE, sizes=(32, 3, 3)), f"a table {TABLE}"),
        (GOOD.tensor(LAST, sizes=(16, 2)), "got: [2, 16]"),
    ],
)
def test_tensors_that_are_not_those_of_the_model(tmp_path, file, expected):
    assert expected in refusal(tmp_path, file)


def test_every_type_is_read_or_refused_by_name(tmp_path):
    read = set()
    for number, kind in KINDS.items():
        n = max(32, kind.block)  # Rows that every type fills.
        file = GOOD.put({"llama.embedding_length": ("u32", n), "llama.rope.dimension_count": None})
        file = file.put({"llama.attention.key_length": ("u32", 8)})
        file = replace(file, tensors=tuple(_wide(tensor, n) for tensor in file.tensors))
        file = file.tensor("blk.0.ffn_gate.weight", kind=number, data=bytes(32 * kind.row_bytes(n)))
        if kind.name in READ:
            assert loaded(tmp_path, file)(torch.tensor([[1, 2]])).isfinite().all()
            read.add(kind.name)
        else:
            assert f"got: blk.0.ffn_gate.weight of type {kind.name}" in refusal(tmp_path, file)
    assert read == READ
    assert len(KINDS) > 35


def _wide(tensor, n):
    """A tensor of the good file for a model of width `n`, of zeros in float32."""
    rows = {"blk.0.attn_q": 32, "blk.0.attn_k": 16, "blk.0.attn_v": 16, "token_embd": 9}
    name = tensor.name.removesuffix(".weight")
    if name in ("blk.0.attn_output", "blk.0.ffn_down"):
        sizes = 32, n
    else:
        sizes = (n,) if name.endswith("norm") else (n, rows.get(name, 32))
    return Tensor(tensor.name, sizes, 0, bytes(4 * math.prod(sizes)))


def test_scales_that_are_no_numbers_are_refused(tmp_path):
    data = GOOD.tensors[1].data
    for high in (0x7C, 0x7E, 0xFC, 0xFF):
        at = 17 * 18  # Of one block in the middle.
        bad = data[:at] + bytes([0, high]) + data[at + 2 :]
        message = refusal(tmp_path, GOOD.tensor(Q, data=bad))
        assert "a scale of quantised weights is not finite" in message
        assert f"NaN or infinity in {Q}, of type Q4_0" in message
    largest = data[: 17 * 18] + b"\xff\x7b" + data[17 * 18 + 2 :]
    assert loaded(tmp_path, GOOD.tensor(Q, data=largest))(torch.tensor([[1, 2]])).isfinite().all()


@pytest.mark.parametrize("name", sorted(name for name in READ if KIND[name].block > 1 and name != "MXFP4"))
def test_where_the_scales_of_a_block_lie(name):
    kind, of = KIND[name], gguf.GGMLQuantizationType[name]
    for other in (0, 0x11, 0x80, 0xFF):
        block = np.full((1, kind.n_bytes), other, np.uint8)
        for at in HALVES[name]:
            block[0, at : at + 2] = 0, 0x3C
        assert np.isfinite(gguf.quants.dequantize(block, of)).all()
    for at in HALVES[name]:
        block = np.full((1, kind.n_bytes), 0x11, np.uint8)
        block[0, at + 1] = 0x7E
        with np.errstate(invalid="ignore"):
            assert np.isnan(gguf.quants.dequantize(block, of)).any()


def divided(*divisors):
    return added(Tensor("rope_freqs.weight", (len(divisors),), 0, struct.pack(f"<{len(divisors)}f", *divisors)))


def test_divisors_of_frequencies(tmp_path):
    for divisors in ((0, 0, 0, 0), (NAN, 1, 1, 1), (1, 1, NAN, 4), (INF, 1, 1, 1), (1, INF, 2, 3), (-1, -2, 1, 3)):
        for base in (1e4, 1e30):
            file = divided(*divisors).put({"llama.rope.freq_base": ("f32", base)})
            assert "scaling" in refusal(tmp_path, file)
    for divisors in ((1,), (1, 2), (1, 2, 3), (1, 2, 3, 4, 5), (1,) * 1000):
        assert "4, one for each pair" in refusal(tmp_path, divided(*divisors))
    for base in (0.0, -5.0):
        assert "a positive number" in refusal(
            tmp_path, divided(1, 2, 3, 8).put({"llama.rope.freq_base": ("f32", base)})
        )
    half = Tensor("rope_freqs.weight", (4,), 1, bytes(8))
    assert "F32 [n]" in refusal(tmp_path, added(half))
    assert "F32 [n]" in refusal(tmp_path, added(Tensor("rope_freqs.weight", (70000,), 0, bytes(280000))))


VALUES = ("8", ["8"], [8, 8], [], True, -8, 0, 1 << 40, (1 << 64) - 1, 8.0, NAN, INF, -1.0, 1e300, "x" * 50_000)


@pytest.mark.parametrize(
    "dialect", [d for d in DIALECTS if d.family.presets and d.architecture != "deepseek2"], ids=lambda d: d.family.name
)
def test_every_key_of_every_architecture_with_every_kind_of_value(tmp_path, dialect):
    spec = load_spec(dialect.family.presets[0])
    blocks = spec.decoder.blocks[: 6 if dialect.architecture == "gemma3" else 2]
    spec = spec.model_copy(update={"decoder": spec.decoder.model_copy(update={"blocks": blocks})})
    place = write_place(spec, (dialect,))
    meta = {"general.architecture": dialect.architecture, **place.meta}
    path = tmp_path / "x.gguf"
    entries = {"token_embd.weight": Entry(path, KIND["F32"], (spec.vocab_size, spec.decoder.d_model), 0)}
    assert read_place(Gguf(path, meta, entries)).reading.spec.decoder.d_model == spec.decoder.d_model
    keys = {f"{dialect.architecture}.{key.key}" for key in dialect.keys if hasattr(key, "key")}
    said = []
    for key in sorted(keys | set(meta)):
        for value in VALUES:
            try:
                read_place(Gguf(path, {**meta, key: value}, entries))
            except UserError as error:
                said.append(str(error))
    assert len(said) > len(meta) * len(VALUES) // 2
    assert max(map(len, said)) < 9000


def test_the_good_file_loads_alike_in_every_way(tmp_path):
    ids = torch.tensor([[1, 2, 3]])
    expected = loaded(tmp_path, GOOD)(ids)
    eight = replace(GOOD.put({"general.alignment": ("u32", 8), "x": ("str", "abc")}), alignment=8)
    assert read_gguf(tmp_path / "hostile.gguf").tensors[TABLE].offset % 32 == 0
    for file in (GOOD, replace(GOOD, version=2), eight):
        for quantize in (None, "keep"):
            torch.testing.assert_close(loaded(tmp_path, file, quantize=quantize)(ids), expected, rtol=0, atol=1e-5)
    file = read_gguf(tmp_path / "hostile.gguf")
    assert len(matched(read_place(file), file).taken) == 11
    assert expected.std() > 0.1
