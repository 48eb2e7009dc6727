"""GGUF files made byte by byte, with any of their counts, sizes and places wrong."""

import struct
from dataclasses import dataclass, replace

SCALARS = {
    "u8": 0,
    "i8": 1,
    "u16": 2,
    "i16": 3,
    "u32": 4,
    "i32": 5,
    "f32": 6,
    "bool": 7,
    "u64": 10,
    "i64": 11,
    "f64": 12,
}
FORMS = dict(zip(SCALARS, "BbHhIifBQqd", strict=True))
STRING, LIST = 8, 9
F32, F16, Q4_0, Q8_0 = 0, 1, 2, 8
BLOCKS = {F32: (1, 4), F16: (1, 2), Q4_0: (32, 18), Q8_0: (32, 34)}


def text(value):
    data = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(data)) + data


def value(kind, what):
    """A value with its type before it: kind "str", a scalar's, or "list of" either."""
    if kind == "str":
        return struct.pack("<I", STRING) + text(what)
    if kind == "list of str":
        return struct.pack("<IIQ", LIST, STRING, len(what)) + b"".join(map(text, what))
    if kind.startswith("list of "):
        of = kind.removeprefix("list of ")
        return struct.pack(f"<IIQ{len(what)}{FORMS[of]}", LIST, SCALARS[of], len(what), *what)
    return struct.pack(f"<I{FORMS[kind]}", SCALARS[kind], what)


@dataclass(frozen=True)
class Tensor:
    """Sizes as in the file, the row's length first; None for an offset behind the tensor before."""

    name: str
    sizes: tuple
    kind: int
    data: bytes
    offset: int | None = None


@dataclass(frozen=True)
class File:
    metadata: dict  # name -> (kind, value), or the bytes of both
    tensors: tuple
    version: int = 3
    magic: bytes = b"GGUF"
    n_tensors: int | None = None
    n_metadata: int | None = None
    alignment: int = 32
    before: bytes = b""  # Between the metadata and the tensors.
    after: bytes = b""

    def said(self, **changes):
        """With other metadata; `_` and `__` in a name stand for a point and `_`."""
        names = {name.replace("__", "\0").replace("_", ".").replace("\0", "_"): v for name, v in changes.items()}
        return self.put(names)

    def put(self, names):
        """With other metadata, without those that are None."""
        metadata = {**self.metadata, **names}
        return replace(self, metadata={name: v for name, v in metadata.items() if v is not None})

    def tensor(self, name, /, **changes):
        """With one tensor otherwise."""
        assert any(tensor.name == name for tensor in self.tensors)
        return replace(self, tensors=tuple(replace(t, **changes) if t.name == name else t for t in self.tensors))

    def without(self, name):
        return replace(self, tensors=tuple(t for t in self.tensors if t.name != name))

    def header(self):
        n_tensors = len(self.tensors) if self.n_tensors is None else self.n_tensors
        n_metadata = len(self.metadata) if self.n_metadata is None else self.n_metadata
        out = self.magic + struct.pack("<IQQ", self.version, n_tensors, n_metadata)
        for name, said in self.metadata.items():
            out += text(name) + (said if isinstance(said, bytes) else value(*said))
        out += self.before
        offset = 0
        for t in self.tensors:
            out += text(t.name) + struct.pack(f"<I{len(t.sizes)}Q", len(t.sizes), *t.sizes)
            out += struct.pack("<IQ", t.kind, offset if t.offset is None else t.offset)
            offset += len(self._padded(t.data))
        return out

    def bytes(self):
        last = len(self.tensors) - 1
        data = (t.data if n == last else self._padded(t.data) for n, t in enumerate(self.tensors))
        return self._padded(self.header()) + b"".join(data) + self.after

    def _padded(self, data):
        return data + bytes(-len(data) % self.alignment)


def rows(n, width, kind, seed):
    """`n` rows of small numbers: whatever bytes, with scales near 0.01 before each block."""
    if kind == F32:
        return struct.pack(f"<{n * width}f", *(((i * 37 + seed) % 101 - 50) / 100 for i in range(n * width)))
    if kind == F16:
        return struct.pack(f"<{n * width}e", *(((i * 37 + seed) % 101 - 50) / 100 for i in range(n * width)))
    block, size = BLOCKS[kind]
    made = b""
    for i in range(n * width // block):
        made += struct.pack("<e", 0.01 + (i % 7) / 1000) + bytes((i * 5 + j * 3 + seed) % 256 for j in range(size - 2))
    return made


def llama(**more):
    """A LLaMA of one layer, in five kilobytes."""
    width, heads, kv, d_ff, vocabulary = 32, 4, 2, 32, 9
    metadata = {
        "general.architecture": ("str", "llama"),
        "general.name": ("str", "ein kleines Modell: ñ 語 🙂"),
        "llama.block_count": ("u32", 1),
        "llama.context_length": ("u32", 64),
        "llama.embedding_length": ("u32", width),
        "llama.feed_forward_length": ("u32", d_ff),
        "llama.attention.head_count": ("u32", heads),
        "llama.attention.head_count_kv": ("u32", kv),
        "llama.attention.layer_norm_rms_epsilon": ("f32", 1e-5),
        "llama.rope.freq_base": ("f32", 10000.0),
        "llama.rope.dimension_count": ("u32", width // heads),
        "tokenizer.ggml.tokens": ("list of str", [f"t{i}" for i in range(vocabulary)]),
        "tokenizer.ggml.scores": ("list of f32", [-float(i) for i in range(vocabulary)]),
        "tokenizer.ggml.token_type": ("list of i32", [1] * vocabulary),
        "tokenizer.ggml.add_bos_token": ("bool", 1),
    }
    sizes = (
        ("token_embd.weight", vocabulary, width, F16),
        ("blk.0.attn_q.weight", width, width, Q4_0),
        ("blk.0.attn_k.weight", kv * width // heads, width, Q8_0),
        ("blk.0.attn_v.weight", kv * width // heads, width, Q8_0),
        ("blk.0.attn_output.weight", width, width, Q4_0),
        ("blk.0.ffn_gate.weight", d_ff, width, Q4_0),
        ("blk.0.ffn_up.weight", d_ff, width, Q4_0),
        ("blk.0.ffn_down.weight", width, d_ff, Q4_0),
    )
    tensors = [Tensor(name, (m, n), kind, rows(n, m, kind, s)) for s, (name, n, m, kind) in enumerate(sizes)]
    for s, name in enumerate(("blk.0.attn_norm.weight", "blk.0.ffn_norm.weight", "output_norm.weight")):
        tensors.append(Tensor(name, (width,), F32, rows(1, width, F32, 20 + s)))
    return File(metadata | more, tuple(tensors))
