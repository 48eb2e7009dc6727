"""The law of cross-attention: a source is what its real tokens are, however it comes."""

import torch

from anyformer.laws.caches import splits
from anyformer.laws.draw import Draw, dtype_of, rows, states
from anyformer.laws.result import TOLERANCES, Findings, Result, exempt
from anyformer.nn.model import Model

NAME = "cross"


def cross(model: Model, seed: int) -> Result:
    """Padding in a source, on either side, is invisible; a source, its encoded memory and a cache's copy are the same.

    A padded source gives what each row gives with its real source tokens alone; one that is all padding gives finite
    numbers. With a cache the first call alone takes the source, as tokens or as memory.
    """
    draw = Draw(model, seed)
    if not draw.crossed:
        return exempt(NAME, "there is no encoder beside a decoder")
    findings = Findings(NAME, TOLERANCES[dtype_of(model)])
    least, length, said = splits(draw)
    inputs = draw.inputs(4, length)
    s = inputs["source"].shape[1]
    spans = [(0, s), (0, max(1, s - 3)), (min(2, s - 1), s), (0, 0)]
    real = torch.zeros(4, s, dtype=torch.bool)
    for row, (start, stop) in enumerate(spans):
        real[row, start:stop] = True
    inputs["source_padding"] = real
    with torch.no_grad():
        out = states(model, inputs)
        findings.require(bool(torch.isfinite(out).all()), "a batch with a source that is all padding is finite")
        for row, (start, stop) in enumerate(spans[:3]):
            alone = rows({k: v for k, v in inputs.items() if k != "source_padding"}, slice(row, row + 1))
            alone["source"] = alone["source"][:, start:stop]
            where = f"a source with {start} padding tokens before it and {s - stop} after"
            findings.near(out[row : row + 1], states(model, alone), where)
        source = inputs.pop("source")
        given = inputs | {"memory": model.encode(source, padding=real)}
        findings.near(states(model, given), out, "the encoder's output given as memory")
        first = max(least, length // 2, int(inputs["prefix"].max()) if "prefix" in inputs else 1)
        for words, begin in (("source", inputs | {"source": source}), ("memory", given)):
            store = model.new_cache(4, length)
            parts = []
            for start, stop in ((0, first), (first, length - 1), (length - 1, length)):
                if stop <= start:
                    continue
                part = {n: x[:, start:stop] for n, x in inputs.items() if n in ("tokens", "types")}
                if not start:
                    part |= {n: x for n, x in begin.items() if n not in part}
                parts.append(states(model, part, cache=store))
            findings.near(torch.cat(parts, 1), out, f"cached cross-attention, its first call given {words}")
    return findings.result(
        f"padded sources against their real tokens; memory and cached sources against the source{said}"
    )
