"""GGUF files as we write them: whole or absent, and what the `gguf` package and we ourselves read from them."""

import errno
import math
import os
import struct
from pathlib import Path

import numpy as np
import pytest
from gguf_bytes import rows

from anyformer.errors import UserError
from anyformer.weights.gguf.format import ALIGNMENT, Planned, read_gguf, write_gguf
from anyformer.weights.gguf.types import KIND, WRITTEN

gguf = pytest.importorskip("gguf")

METADATA = {
    "general.architecture": "llama",
    "text": "ñ 語 🙂\n\t\0",
    "empty": "",
    "small": 7,
    "negative": -7,
    "large": (1 << 64) - 1,
    "low": -(1 << 63),
    "number": 0.1,
    "yes": True,
    "no": False,
    "texts": ["a", "", "ñ"],
    "numbers": [0.5, -1, 2.0],
    "whole": [1, -2, 3],
    "wide": [1, 1 << 40],
    "truths": [True, False],
    "bytes": bytes(range(256)),
}
AS_READ = {"number": struct.unpack("<f", struct.pack("<f", 0.1))[0], "bytes": list(range(256))}
"""Where it is not what was written."""
TYPES = {"small": "UINT32", "negative": "INT32", "large": "UINT64", "low": "INT64", "number": "FLOAT32", "yes": "BOOL"}
ITEMS = {"texts": "STRING", "numbers": "FLOAT32", "whole": "INT32", "wide": "INT64", "truths": "BOOL", "bytes": "UINT8"}


def planned():
    """A tensor of every type that is written, of one to four dimensions."""
    made = {}
    for n, name in enumerate(WRITTEN):
        kind = KIND[name]
        shape = ((64,), (3, 32), (2, 3, 32), (2, 1, 3, 32))[n % 4]
        size = math.prod(shape[:-1]) * kind.row_bytes(shape[-1])
        made[f"blk.{n}.{name.lower()}.weight"] = kind, shape, bytes((7 * i + n) % 251 for i in range(size))
    return made


def plans(tensors):
    return [Planned(name, kind, shape, lambda data=data: data) for name, (kind, shape, data) in tensors.items()]


def test_what_is_written_is_read_by_the_gguf_package_and_by_us(tmp_path):
    path, tensors = tmp_path / "x.gguf", planned()
    write_gguf(path, METADATA, plans(tensors))
    theirs, ours = gguf.GGUFReader(path), read_gguf(path)
    said = {name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert said == ours.metadata == METADATA | AS_READ
    assert [said["yes"], said["no"]] == [True, False]
    assert {name: theirs.fields[name].types[0].name for name in TYPES} == TYPES
    assert {name: theirs.fields[name].types[1].name for name in ITEMS} == ITEMS
    assert [t.name for t in theirs.tensors] == list(ours.tensors) == list(tensors)
    for tensor, entry in zip(theirs.tensors, ours.tensors.values(), strict=True):
        kind, shape, data = tensors[tensor.name]
        assert (tensor.tensor_type.name, tuple(reversed(tensor.shape.tolist()))) == (kind.name, shape)
        assert (entry.kind, entry.shape, entry.n_bytes) == (kind, shape, len(data))
        assert entry.offset == tensor.data_offset
        assert entry.offset % ALIGNMENT == 0
        assert np.ascontiguousarray(tensor.data).tobytes() == path.read_bytes()[entry.offset :][: len(data)] == data


def test_a_file_without_tensors(tmp_path):
    write_gguf(tmp_path / "x.gguf", {"general.architecture": "llama", "none": []}, [])
    assert read_gguf(tmp_path / "x.gguf").metadata == {"general.architecture": "llama", "none": []}
    assert gguf.GGUFReader(tmp_path / "x.gguf").tensors == []


@pytest.mark.parametrize(
    "value", ["\ud800", ["a", "\udfff"], 1 << 64, -(1 << 63) - 1, [1, 1 << 63], 1e39, [0.5, -1e39], [1 << 200, 0.5]]
)
def test_metadata_that_the_format_has_no_room_for(tmp_path, value):
    with pytest.raises(UserError, match=r"(?s)the metadata a.key cannot be written.*x.gguf"):
        write_gguf(tmp_path / "x.gguf", {"a.key": value}, [])
    assert list(tmp_path.iterdir()) == []


def refuse(number):
    def fail():
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize(("number", "said"), [(errno.ENOSPC, "free some space"), (errno.EIO, "Input/output")])
def test_a_write_that_fails_leaves_what_was_there(tmp_path, number, said):
    path, (first, *_) = tmp_path / "x.gguf", plans(planned())
    for before in (None, b"old"):
        if before is not None:
            path.write_bytes(before)
        with pytest.raises(UserError, match=said):
            write_gguf(path, METADATA, [first, Planned("late", KIND["F32"], (8,), refuse(number))])
        assert [p.read_bytes() for p in tmp_path.iterdir()] == ([] if before is None else [before])


def test_numbers_that_a_type_cannot_hold_leave_no_file(tmp_path):
    def fail():
        raise UserError("too large")

    with pytest.raises(UserError, match="too large"):
        write_gguf(tmp_path / "x.gguf", METADATA, [Planned("late", KIND["F32"], (8,), fail)])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
def test_a_disk_that_is_full_while_the_file_is_written(tmp_path, monkeypatch):
    opened = Path.open
    monkeypatch.setattr(Path, "open", lambda self, mode="r": opened(Path("/dev/full"), mode))
    with pytest.raises(UserError, match=r"(?s)No space left.*free some space"):
        write_gguf(tmp_path / "x.gguf", METADATA, plans(planned()))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_may_not_be_written_to(tmp_path):
    (tmp_path / "locked").mkdir(mode=0o555)
    tmp_path.chmod(0o755)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)  # The owner of everything may write anywhere.
    try:
        with pytest.raises(UserError, match="cannot write: Permission denied"):
            write_gguf(tmp_path / "locked" / "x.gguf", METADATA, [])
    finally:
        os.seteuid(user)
    assert list((tmp_path / "locked").iterdir()) == []


def test_what_the_gguf_package_writes_is_read(tmp_path):
    path = tmp_path / "theirs.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    adders = {"u8": 200, "i8": -7, "u16": 60000, "i16": -30000, "u32": 1 << 31, "i32": -(1 << 31)}
    adders |= {"u64": 1 << 63, "i64": -(1 << 63), "f32": 0.5, "f64": 0.1}
    names = {"u": "uint", "i": "int", "f": "float"}
    for name, value in adders.items():
        getattr(writer, f"add_{names[name[0]]}{name[1:]}")(name, value)
    writer.add_bool("bool", True)
    writer.add_string("str", "é")
    for name, value in {"strs": ["a", "é"], "floats": [0.5, 1.5], "ints": [1, -2], "bools": [True, False]}.items():
        writer.add_array(name, value)
    tensors = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.arange(5, dtype=np.float16)}
    for name, array in tensors.items():
        writer.add_tensor(name, array)
    codes = np.frombuffer(rows(3, 32, 2, 0), np.uint8).reshape(3, 18)
    writer.add_tensor("c", codes, raw_dtype=gguf.GGMLQuantizationType.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found, whole = read_gguf(path), path.read_bytes()
    expected = adders | {"bool": True, "str": "é", "strs": ["a", "é"], "floats": [0.5, 1.5], "ints": [1, -2]}
    assert found.metadata == expected | {"bools": [True, False], "general.architecture": "llama"}
    assert {name: (e.kind.name, e.shape) for name, e in found.tensors.items()} == {
        "a": ("F32", (2, 3)),
        "b": ("F16", (5,)),
        "c": ("Q4_0", (3, 32)),
    }
    for name, array in {**tensors, "c": codes}.items():
        entry = found.tensors[name]
        assert whole[entry.offset : entry.offset + entry.n_bytes] == array.tobytes()
