"""Where each tensor of a GGUF file goes: kept in the file's quantised values, or dequantised. Imports no torch."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from anyformer.families.family import Interleaved, Joined, Otherwise, Rotated, Twice, Where
from anyformer.nn.blocked import packed_bytes
from anyformer.planning import buffers, parameters
from anyformer.weights.gguf.reading import Place, Understood
from anyformer.weights.gguf.types import KEPT, KIND
from anyformer.weights.shapes import Shape, Step

_WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
_MATRICES = re.compile(
    r"(.*\.(attention|cross)\.(q|k|v|out|q_down|q_up|kv_down)|.*\.ffn\.((shared|experts)\.)?(gate|up|down)"
    r"|head|(.*\.)?embed\.token)\.weight"
)
"""Matrices that are used through a product alone, and the token table."""
_TABLE = re.compile(r"(.*\.)?embed\.token\.weight")
_FOUR_BITS = ("Q4_0", "Q4_1", "Q4_K", "Q2_K", "Q3_K")
_WITH_ZEROS = ("Q4_1", "Q5_1", "Q4_K", "Q5_K", "Q2_K")
"""Kinds whose zeros are no multiple of their scales."""
_FINE = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "MXFP4")
"""Kinds whose scales are no numbers of half precision."""


@dataclass(frozen=True)
class Placed:
    """One of the model's tensors and what becomes of it.

    Attributes:
        name: canonical.
        theirs: the tensors of the file that it is made of.
        kind: their type there.
        shape: of ours.
        kept: whether it stays in the file's quantised values.
        n_bytes: in memory.
        why: why it is not kept, where it is not.
    """

    name: str
    theirs: tuple[str, ...]
    kind: str
    shape: Shape
    kept: bool
    n_bytes: int
    why: str = ""

    @property
    def packed(self) -> bool:
        """Whether it is in memory in quantised values; a table that is only looked up stays in the file."""
        return self.kept and self.n_bytes > 0


def by_rows(step: Step) -> bool:
    """Whether a form moves whole rows of matrices alone, so that it can be done to quantised rows."""
    if any(len(shape) < 2 for shape in step.shapes):
        return False
    match step.form:
        case None | Twice() | Where() | Otherwise() | Rotated() | Interleaved():
            return True
        case Joined(dim=0, transposed=False):
            return True
    return False


def placements(model: Understood, *, quantize: str | None, dtype: str, refusal: str = "") -> list[Placed]:
    """What becomes of each tensor.

    Args:
        model: the file as it was understood.
        quantize: None, or "keep".
        dtype: of what is not kept.
        refusal: why nothing can be kept here, empty where it can.
    """
    place = model.place
    shapes = {p.name: p.shape for p in (*parameters(place.reading.spec), *buffers(place.reading.spec))}
    found: list[Placed] = []
    for step in model.taken:
        kinds = [model.file.tensors[name].kind.name for name in step.theirs]
        for name in step.ours:
            shape = shapes[name]
            why = (_why_not(name, shape, kinds, step) or refusal) if quantize == "keep" else "quantize is None"
            size = _kept_bytes(kinds[0], shape, tied=_is_tied(place, name)) if not why else 0
            plain = prod(shape) * _WIDTHS[dtype]
            said = why if quantize == "keep" and KIND[kinds[0]].quantised else ""
            found.append(Placed(name, step.theirs, kinds[0], shape, not why, size if not why else plain, said))
    return found


def _is_tied(place: Place, name: str) -> bool:
    return _TABLE.fullmatch(name) is None or "head" in place.reading.spec.ties


def _why_not(name: str, shape: Shape, kinds: Sequence[str], step: Step) -> str:
    """Why a tensor does not stay quantised, empty where it does."""
    kind = kinds[0]
    if not KIND[kind].quantised:
        return f"{kind} is not quantised"
    if len(set(kinds)) > 1 or kind not in KEPT:
        return f"no product with {kind} here"
    if _MATRICES.fullmatch(name) is None:
        return "not used through a product alone"
    if not by_rows(step):
        return "the file has it in another order within rows"
    return ""


def _kept_bytes(kind: str, shape: Shape, *, tied: bool) -> int:
    """In memory; a table that is only looked up stays in the file."""
    if not tied:
        return 0
    return packed_bytes(
        shape, 4 if kind in _FOUR_BITS else 8, KEPT[kind], symmetric=kind not in _WITH_ZEROS, half=kind not in _FINE
    )


def table(places: Sequence[Placed]) -> str:
    """Who goes where, a line for each way and the sums."""
    lines = [f"{'file':<6} {'held as':<10} {'tensors':>7} {'numbers':>15} {'MiB':>9}"]
    groups: dict[tuple[str, str, str], list[Placed]] = {}
    for placed in places:
        held = "kept" if placed.kept else "floats"
        groups.setdefault((placed.kind, held, placed.why), []).append(placed)
    for (kind, held, why), some in groups.items():
        numbers, size = sum(prod(p.shape) for p in some), sum(p.n_bytes for p in some)
        line = f"{kind:<6} {held:<10} {len(some):>7,} {numbers:>15,} {size / 2**20:>9,.1f}"
        lines.append(f"{line}  {why}".rstrip())
    total = sum(p.n_bytes for p in places)
    lines.append(f"{'':<6} {'':<10} {len(places):>7,} {sum(prod(p.shape) for p in places):>15,} {total / 2**20:>9,.1f}")
    return "\n".join(lines)
