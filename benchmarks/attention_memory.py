"""Memory of attention beyond its inputs, forward and backward, and how it grows with T.

    python benchmarks/attention_memory.py [--threads 2] [--smallest]

Every point is a process of its own: the peak of resident memory during the call less what was resident once inputs,
output gradient and kernels were there. The slope is that of log memory on log T: 1 is linear, 2 is quadratic. The
gradients of q, k and v, and the output, are part of it. 8 heads × 64, float32, one row.
"""

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path

H, D = 8, 64
CASES = {
    "reference, causal": ("reference", "causal", 4096),
    "fused, causal": ("fused", "causal", 16384),
    "tiled, causal": ("tiled", "causal", 16384),
    "tiled, causal + ALiBi": ("tiled", "alibi", 16384),
    "tiled, window of 256": ("tiled", "window", 16384),
    "tiled, packed documents of 512": ("tiled", "packed", 16384),
}


def resident(key: str) -> int:
    """A line of /proc/self/status in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise RuntimeError(key)


def measure(backend: str, what: str, t: int, threads: int) -> int:
    """Bytes at the peak of one forward and backward pass."""
    import torch

    from anyformer.nn.attend import AlibiBias, alibi_slopes, attend, masks

    torch.set_num_threads(threads)
    visible, options = masks.Causal(), {}
    if what == "alibi":
        options["bias"] = AlibiBias(alibi_slopes(H), False)
    elif what == "window":
        visible = visible & masks.Window(256)

    def run(n: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, up: torch.Tensor) -> None:
        seen = visible & masks.Segments(torch.arange(n)[None] // 512) if what == "packed" else visible
        attend(q, k, v, visible=seen, backend=backend, **options).backward(up)

    def inputs(n: int) -> list[torch.Tensor]:
        return [torch.randn(1, n, H, D, requires_grad=i < 3) for i in range(4)]

    run(64, *inputs(64))  # threads and kernels come up outside the measured stretch
    made = inputs(t)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    run(t, *made)
    return resident("VmHWM") - before


def slope(points: dict[int, int]) -> float:
    """The least-squares slope of log memory on log T."""
    xs, ys = [math.log(t) for t in points], [math.log(max(1, size)) for size in points.values()]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    rise = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    return rise / sum((x - mean_x) ** 2 for x in xs)


def main() -> None:
    """A line a case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--smallest", action="store_true", help="two short lengths, to see that this runs")
    parser.add_argument("--point", help=argparse.SUPPRESS)  # what a process of its own is started with
    arguments = parser.parse_args()
    if arguments.point:
        print(measure(*json.loads(arguments.point), arguments.threads))
        return
    lengths = [256, 512] if arguments.smallest else [1024, 2048, 4096, 8192, 16384]
    print(f"{'MiB beyond the inputs':34}" + "".join(f"{f'T={t:,}':>11}" for t in lengths) + "  slope  slope from 4,096")
    for name, (backend, what, longest) in CASES.items():
        points: dict[int, int] = {}
        for t in (t for t in lengths if t <= longest):
            command = [sys.executable, __file__, "--threads", str(arguments.threads)]
            run = subprocess.run([*command, "--point", json.dumps([backend, what, t])], capture_output=True, check=True)
            points[t] = int(run.stdout)
        cells = "".join(f"{points[t] / 2**20:11.1f}" if t in points else f"{'—':>11}" for t in lengths)
        late = {t: size for t, size in points.items() if t >= 4096}
        tail = f"{slope(late):8.2f}" if len(late) > 1 else f"{'—':>8}"
        print(f"{name:34}{cells}{slope(points):7.2f}{tail}", flush=True)


if __name__ == "__main__":
    main()
