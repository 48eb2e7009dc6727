"""B46. GGUF files that are cut short, contradict themselves or mean harm: one clear error, and bounded work."""

import json
import os
import random
import signal
import struct
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace

import pytest
from gguf_bytes import LIST, STRING, File, llama, text, value

from anyformer.errors import UserError
from anyformer.weights.gguf.format import MOST_ITEMS, MOST_NAMES, read_gguf
from anyformer.weights.gguf.reading import matched, read_place

gguf = pytest.importorskip("gguf")

GOOD = llama()
Q, TABLE, LAST = "blk.0.attn_q.weight", "token_embd.weight", "output_norm.weight"


def refusal(path, file, read=read_gguf):
    """What is said of a file, which is one message of a few short lines that names it."""
    path.write_bytes(file.bytes() if isinstance(file, File) else file)
    with pytest.raises(UserError) as caught:
        read(path)
    said = str(caught.value)
    assert path.name in said
    assert said.count("where:") == 1
    assert max(map(len, said.splitlines())) < 300
    assert said.isprintable() or said.replace("\n", "").isprintable()
    return said


@contextmanager
def within(seconds):
    """Fails, rather than hangs, where the block takes longer."""

    def late(*_):
        raise AssertionError(f"longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def listed(kind, n, data=b""):
    """A list with `n` items of a type, and whatever data."""
    return struct.pack("<IIQ", LIST, kind, n) + data


def more(said, name="x"):
    """The good file with one more metadata."""
    return GOOD.put({name: said})


def versioned(number):
    return replace(GOOD, version=number), "2 or 3"


def sized(*sizes):
    return GOOD.tensor(Q, sizes=sizes)


def aligned(kind, number):
    return GOOD.put({"general.alignment": (kind, number)}), "expected: a power of two from 8"


TWICE = replace(GOOD, tensors=(*GOOD.tensors, GOOD.tensors[0]))
SHORT, NUMBERED = "the file ends within", "than it can hold"
NO_NAME, NO_DIMENSIONS = "1 to 256 printable characters", "a number of dimensions that none has"
NO_SIZE, NO_TYPE = "a size that no tensor has", "of a type that is not known"
NOT_READ, ITEMS = "of a type that is not read", "more items than any has"
UNOWNED, OVER, BEYOND = "bytes that belong to no tensor", "lie over each other", "goes beyond the end of the file"
HEADERS = {
    "nothing": (b"", "got: 0 bytes"),
    "another magic": (replace(GOOD, magic=b"FUGG"), "begins with b'FUGG'"),
    "a pointer of git": (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n", "git lfs pull"),
    **{f"version {n}": versioned(n) for n in (0, 1, 4, (1 << 32) - 1)},
    "big-endian": (replace(GOOD, version=3 << 24), "a little-endian file"),
    "2^60 tensors": (replace(GOOD, n_tensors=1 << 60), NUMBERED),
    "2^64 - 1 tensors": (replace(GOOD, n_tensors=(1 << 64) - 1), NUMBERED),
    "a tensor more": (replace(GOOD, n_tensors=12), NO_NAME),
    "a tensor less": (replace(GOOD, n_tensors=10), UNOWNED),
    "no tensors": (replace(GOOD, n_tensors=0), UNOWNED),
    "2^60 metadata": (replace(GOOD, n_metadata=1 << 60), NUMBERED),
    "metadata more": (replace(GOOD, n_metadata=16), SHORT),
    "metadata less": (replace(GOOD, n_metadata=14), NO_DIMENSIONS),
    "more names than any": (replace(GOOD, n_metadata=MOST_NAMES + 1, after=bytes(14 * MOST_NAMES)), NUMBERED),
    "a text of 2^63": (more(struct.pack("<IQ", STRING, 1 << 63)), f"{SHORT} the metadata x"),
    "a text of 2^64 - 1": (more(struct.pack("<IQ", STRING, (1 << 64) - 1)), f"{SHORT} the metadata x"),
    "a name of 2^63": (replace(GOOD, before=struct.pack("<Q", 1 << 63)), f"{SHORT} a tensor's name"),
    "0 dimensions": (sized(), NO_DIMENSIONS),
    "5 dimensions": (sized(32, 1, 1, 1, 32), NO_DIMENSIONS),
    "9 dimensions": (sized(*[32] * 9), NO_DIMENSIONS),
    "a product of 2^64": (sized(1 << 32, 1 << 32), NO_SIZE),
    "a product of 2^64 + 1024": (sized(1 << 63, 2, 1, 1), NO_SIZE),
    "rows of 2^62": (sized(1 << 62, 1), NO_SIZE),
    "no rows": (sized(32, 0), NO_SIZE),
    "empty rows": (sized(0, 32), NO_SIZE),
    "part of a block": (sized(31, 32), "does not fill blocks of Q4_0"),
    "rows too many": (sized(32, 1 << 40), BEYOND),
    "an offset of 2^40": (GOOD.tensor(Q, offset=1 << 40), BEYOND),
    "an offset before the data": (GOOD.tensor(Q, offset=(1 << 64) - 32), BEYOND),
    "an offset of 33": (GOOD.tensor(Q, offset=33), "a multiple of 32 bytes"),
    "an offset of another": (GOOD.tensor(Q, offset=0), OVER),
    "an offset within another": (GOOD.tensor(Q, offset=32), OVER),
    "a gap": (GOOD.without(Q).tensor(TABLE, data=GOOD.tensors[0].data + GOOD.tensors[1].data), UNOWNED),
    "a tail": (replace(GOOD, after=bytes(33)), UNOWNED),
    **{f"alignment {n}": aligned("u32", n) for n in (0, 1, 3, 4, 48, 1 << 31)},
    "alignment 2^40": aligned("u64", 1 << 40),
    "alignment -32": aligned("i32", -32),
    **{f"alignment {kind}": aligned(kind, n) for kind, n in (("f32", 32.0), ("bool", 1), ("str", "32"))},
    "alignment list": aligned("list of u32", [32]),
    "alignment 64 of 32": (GOOD.put({"general.alignment": ("u32", 64)}), "a multiple of 64 bytes"),
    **{f"type {n}": (GOOD.tensor(Q, kind=n), NO_TYPE) for n in (4, 5, 43, 99, (1 << 32) - 1)},
    **{f"metadata of type {n}": (more(struct.pack("<IQ", n, 0)), NOT_READ) for n in (13, (1 << 32) - 1)},
    "a list of type 13": (more(listed(13, 1, bytes(8))), NOT_READ),
    "a list in a list": (more(listed(LIST, 1, listed(4, 1, bytes(4)))), "a list inside a list"),
    **{f"2^{p} of type {kind}": (more(listed(kind, 1 << p)), ITEMS) for p in (40, 61, 63) for kind in (0, 8, 10)},
    "more numbers than the file": (more(listed(10, MOST_ITEMS - 100)), SHORT),
    "more empty texts than the file": (more(listed(STRING, MOST_ITEMS - 100, bytes(800))), SHORT),
    "an item of 2^63": (more(listed(STRING, 2, text("a") + struct.pack("<Q", 1 << 63))), SHORT),
    "a text not UTF-8": (more(("str", b"ab\xff")), "the metadata x is not valid UTF-8"),
    "an item not UTF-8": (more(("list of str", ["a", b"\xc3("])), "not valid UTF-8\n  where"),
    "a name not UTF-8": (more(("u8", 1), b"\xff"), "a name of metadata is not valid UTF-8"),
    "a tensor not UTF-8": (GOOD.tensor(Q, name=b"\xed\xa0\x80"), "a tensor's name is not valid UTF-8"),
    **{f"the name {n[:9]!r}": (more(("u8", 1), n), NO_NAME) for n in ("", "a\nb", "a\0b", "\x1b[2J", "x" * 257)},
    **{f"the tensor {n[:9]!r}": (GOOD.tensor(Q, name=n), NO_NAME) for n in ("", "a\nb", "a\0b", "\x1b[2J", "x" * 257)},
    "a tensor twice": (TWICE, "one tensor twice"),
    "metadata twice": (
        replace(GOOD, n_metadata=16, before=text("general.name") + value("str", "b")),
        "one name of metadata twice",
    ),
    "neither true nor false": (more(struct.pack("<IB", 7, 2)), "neither true nor false"),
    "some neither true nor false": (more(listed(7, 3, b"\0\1\xff")), "neither true nor false"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_hostile_header_is_refused(tmp_path, name):
    file, expected = HEADERS[name]
    assert expected in refusal(tmp_path / "hostile.gguf", file)


def test_the_good_file_is_what_the_gguf_package_reads(tmp_path):
    path = tmp_path / "good.gguf"
    for file in (GOOD, replace(GOOD, version=2), replace(GOOD.put({"general.alignment": ("u32", 64)}), alignment=64)):
        path.write_bytes(file.bytes())
        ours, theirs = read_gguf(path), gguf.GGUFReader(path)
        assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
        for entry, tensor in zip(ours.tensors.values(), theirs.tensors, strict=True):
            assert entry.kind.name == tensor.tensor_type.name
            assert entry.shape == tuple(reversed(tensor.shape.tolist()))
            assert (entry.offset, entry.n_bytes) == (tensor.data_offset, tensor.n_bytes)
        said = {name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
        assert ours.metadata == said
        assert len(matched(read_place(ours), ours).taken) == 11


def test_every_type_of_metadata_is_read(tmp_path):
    kinds = {"u8": 200, "i8": -7, "u16": 60000, "i16": -30000, "u32": 1 << 31, "i32": -(1 << 31), "u64": (1 << 64) - 1}
    kinds |= {"i64": -(1 << 63), "f32": 0.5, "f64": 0.1, "bool": True, "str": "é 🙂\n\0"}
    said = {kind: (kind, x) for kind, x in kinds.items()} | {
        f"{k}s": (f"list of {k}", [x, x]) for k, x in kinds.items()
    }
    (tmp_path / "x.gguf").write_bytes(GOOD.put(said | {"none": ("list of str", [])}).bytes())
    found = read_gguf(tmp_path / "x.gguf").metadata
    assert {k: found[k] for k in kinds} == kinds
    assert {k: found[f"{k}s"] for k in kinds} == {k: [x, x] for k, x in kinds.items()}
    assert found["none"] == []
    assert [type(found[k]) for k in ("u8", "f32", "bool", "str")] == [int, float, bool, str]


def test_a_file_cut_short_anywhere_is_refused(tmp_path):
    whole, header = GOOD.bytes(), len(GOOD.header())
    path = tmp_path / "short.gguf"
    path.write_bytes(whole)
    assert len(read_gguf(path).tensors) == 11
    lengths = {*range(header), *range(header, len(whole), 32), len(whole) - 1}
    for length in sorted(lengths, reverse=True):
        os.truncate(path, length)
        with pytest.raises(UserError, match="fetch (it|the file) again" if length else "0 bytes") as caught:
            read_gguf(path)
        assert "short" in str(caught.value) or length == 0


def test_what_is_no_file_is_refused_at_once(tmp_path):
    (tmp_path / "folder.gguf").mkdir()
    os.mkfifo(tmp_path / "pipe.gguf")
    (tmp_path / "link.gguf").symlink_to(tmp_path / "folder.gguf")
    (tmp_path / "loop.gguf").symlink_to(tmp_path / "loop.gguf")
    (tmp_path / "dangling.gguf").symlink_to(tmp_path / "nowhere")
    (tmp_path / "null.gguf").symlink_to("/dev/null")
    (tmp_path / "zero.gguf").symlink_to("/dev/zero")
    expected = {"folder": "a folder", "link": "a folder", "pipe": "a pipe", "null": "a device", "zero": "a device"}
    expected |= {
        "dangling": "there is no such file",
        "missing": "there is no such file",
        "loop": "cannot be read",
        "x\0": "null",
    }
    for name, words in expected.items():
        path = tmp_path / f"{name}.gguf"
        with within(2), pytest.raises(UserError, match=words) as caught:
            read_gguf(path)
        assert str(path) in str(caught.value)


def test_a_file_that_may_not_be_read_is_refused(tmp_path):
    path = tmp_path / "locked.gguf"
    path.write_bytes(GOOD.bytes())
    path.chmod(0)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)  # The owner of everything may read anything.
    try:
        with pytest.raises(UserError, match=r"cannot be read: Permission denied\n.*locked.gguf"):
            read_gguf(path)
    finally:
        os.seteuid(user)


SCRIPT = """
import json, re, sys, time
from pathlib import Path
from anyformer.errors import UserError
from anyformer.weights.gguf.format import read_gguf
def memory(what):
    return int(re.search(what + r":\\s*(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024
found = {"torch": "torch" in sys.modules}
for path in sorted(Path(sys.argv[1]).iterdir()):
    Path("/proc/self/clear_refs").write_text("5")
    before, start = memory("VmRSS"), time.process_time()
    try:
        read_gguf(path)
        said = "reads"
    except UserError:
        said = "refused"
    found[path.name] = said, time.process_time() - start, memory("VmHWM") - before
print(json.dumps(found))
"""


def test_hostile_headers_cost_little(tmp_path):
    for n, (file, _) in enumerate(HEADERS.values()):
        (tmp_path / f"{n:03}").write_bytes(file.bytes() if isinstance(file, File) else file)
    endless = replace(more(listed(STRING, MOST_ITEMS - 100)), tensors=()).header()
    text_of = replace(more(struct.pack("<IQ", STRING, 1 << 32)), tensors=()).header()
    for name, header in (("empty texts", endless), ("long text", text_of)):
        (tmp_path / name).write_bytes(header)
        os.truncate(tmp_path / name, 1 << 33)  # With a hole of eight gigabytes.
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert not found.pop("torch")
    assert len(found) == len(HEADERS) + 2
    assert found["empty texts"][2] > 20  # The measure sees what a list takes.
    for name, (said, seconds, megabytes) in found.items():
        assert said == "refused", name
        assert seconds < 2, name
        assert megabytes < 200, name


WORDS = (0, 1, 3, 4, 8, 9, 31, 32, 255, 1 << 15, 1 << 31, (1 << 32) - 1, 1 << 40, 1 << 60, 1 << 63, (1 << 64) - 1)


SEEDS = range(300)


def damaged(data, header, seed):
    """The file with some of its header changed: bits, bytes, words, and what lies between moved."""
    pick, data = random.Random(seed), bytearray(data)
    for _ in range(pick.choice((1, 1, 2, 5))):
        at = pick.randrange(header)
        match pick.randrange(5):
            case 0:
                data[at] ^= 1 << pick.randrange(8)
            case 1:
                data[at] = pick.randrange(256)
            case 2:
                data[at : at + 4] = struct.pack("<I", pick.choice(WORDS) & 0xFFFFFFFF)
            case 3:
                data[at : at + 8] = struct.pack("<Q", pick.choice(WORDS))
            case 4:
                data[at : at + pick.randrange(9)] = pick.randbytes(pick.randrange(9))
    return bytes(data)


def read_all(path):
    file = read_gguf(path)
    return file, matched(read_place(file), file)


def test_damaged_headers_are_refused_or_read(tmp_path):
    whole, header, path = GOOD.bytes(), len(GOOD.header()), tmp_path / "fuzz.gguf"
    outcomes = {"refused": 0, "read": 0}
    for seed in SEEDS:
        path.write_bytes(damaged(whole, header, seed))
        with within(2):
            try:
                file, matching = read_all(path)
            except UserError:
                outcomes["refused"] += 1
                continue
        assert len(file.tensors) == len(matching.taken) == 11, seed
        outcomes["read"] += 1
    assert min(outcomes.values()) > 10


def parts(n=3):
    """The good file as several, by the name of each."""
    tensors, files = GOOD.tensors, {}
    for part in range(n):
        said = {"split.no": ("u16", part), "split.count": ("u16", n), "split.tensors.count": ("i32", len(tensors))}
        metadata = {**GOOD.metadata, **said} if part == 0 else said
        files[f"m-{part + 1:05}-of-{n:05}.gguf"] = File(metadata, tensors[part::n])
    return files


def stored(folder, files):
    folder.mkdir(exist_ok=True)
    for name, file in files.items():
        (folder / name).write_bytes(file.bytes())
    return folder / "m-00001-of-00003.gguf"


def test_a_model_in_several_files(tmp_path):
    path = stored(tmp_path / "ours", parts())
    file, matching = read_all(path)
    assert len(matching.taken) == 11
    assert {entry.file.name for entry in file.tensors.values()} == set(parts())
    by_name = {tensor.name: tensor.data for tensor in GOOD.tensors}
    for name, entry in file.tensors.items():
        assert entry.file.read_bytes()[entry.offset :][: entry.n_bytes] == by_name[name]


def test_the_parts_that_the_gguf_package_writes(tmp_path):
    (tmp_path / "whole.gguf").write_bytes(GOOD.bytes())
    whole = gguf.GGUFReader(tmp_path / "whole.gguf")
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama", split_max_tensors=4)
    for name, field in whole.fields.items():
        if not name.startswith(("GGUF.", "general.architecture")):
            of = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=of)
    for tensor in whole.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file, matching = read_all(tmp_path / "m-00001-of-00003.gguf")
    assert len(matching.taken) == 11
    good = read_gguf(tmp_path / "whole.gguf")
    assert {k: v for k, v in file.metadata.items() if not k.startswith("split.")} == good.metadata
    for name, entry in file.tensors.items():
        mine = good.tensors[name]
        assert (entry.kind, entry.shape) == (mine.kind, mine.shape)
        here, there = (e.file.read_bytes()[e.offset :][: e.n_bytes] for e in (entry, mine))
        assert here == there


def test_parts_that_do_not_fit_are_refused(tmp_path):
    first, second, third = parts()
    for change, said in (
        ({second: None}, f"a part of the model is missing.*no {second}"),
        ({first: parts()[first].put({"split.count": ("u16", 2)})}, "the first part, m-00001-of-00002"),
        ({first: parts()[first].put({"split.count": ("u32", 1 << 31)})}, "one of several"),
        ({first: parts()[first].put({"split.count": ("str", "3")})}, "split.count cannot be used"),
        ({first: parts()[first].put({"split.count": ("i8", -3)})}, "split.count cannot be used"),
        ({first: parts()[first].put({"split.count": ("list of u16", [3])})}, "split.count cannot be used"),
        ({first: parts()[first].put({"split.count": None})}, "the file's name is that of a part"),
        ({first: parts()[first].put({"split.no": ("u16", 1)})}, "another part than its name says"),
        ({second: parts()[second].put({"split.no": ("u16", 2)})}, "another part than its name says"),
        ({second: parts()[second].put({"split.no": None})}, "another part than its name says"),
        ({third: parts()[third].put({"split.count": ("u16", 4)})}, "another part than its name says"),
        ({third: parts()[second]}, "another part than its name says"),
        ({second: replace(parts()[second], tensors=parts()[first].tensors)}, "two files hold one tensor"),
        ({second: replace(parts()[second], tensors=())}, "expected: split.tensors.count = 11"),
        ({first: parts()[first].put({"split.tensors.count": ("i32", 12)})}, "expected: split.tensors.count = 12"),
        ({first: parts()[first].put({"split.tensors.count": ("f32", 11.0)})}, "split.tensors.count cannot be used"),
    ):
        files = {name: file for name, file in {**parts(), **change}.items() if file is not None}
        path = stored(tmp_path, files)
        for name in set(parts()) - set(files):
            (tmp_path / name).unlink(missing_ok=True)
        with pytest.raises(UserError, match=f"(?s){said}"):
            read_gguf(path)
    stored(tmp_path, parts())
    for other in (second, third):
        with pytest.raises(UserError, match=f"expected: the first part, {first}"):
            read_gguf(tmp_path / other)
    (tmp_path / first).rename(tmp_path / "model.gguf")
    with pytest.raises(UserError, match=r"expected: the first part, model-00001-of-00003.gguf"):
        read_gguf(tmp_path / "model.gguf")


def test_parts_that_were_joined_are_a_whole(tmp_path):
    said = {"split.no": ("u16", 0), "split.count": ("u16", 0), "split.tensors.count": ("i32", 11)}
    (tmp_path / "m-00001-of-00003.gguf").write_bytes(GOOD.put(said).bytes())
    assert len(read_gguf(tmp_path / "m-00001-of-00003.gguf").tensors) == 11
