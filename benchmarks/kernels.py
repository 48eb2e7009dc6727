"""Our RMSNorm and rotation beside the same mathematics written with torch's own operations, forward and backward.

    python benchmarks/kernels.py [--threads 2]

Medians of alternating runs, so that a change of the machine's speed falls on both.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from anyformer.nn.position import rotate, rotation
from anyformer.nn.rms import rms_norm
from anyformer.spec.parts import Rope


def duel(ours: Callable[[], torch.Tensor], theirs: Callable[[], torch.Tensor], runs: int = 60) -> tuple[float, float]:
    """Median microseconds of forward + backward of both, taken in turn."""
    times: tuple[list[float], list[float]] = ([], [])
    grad = torch.randn_like(ours())
    for index in range(runs + 10):
        for kept, make in zip(times, (ours, theirs), strict=True):
            start = time.perf_counter()
            make().backward(grad)
            if index >= 10:
                kept.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times[0]), statistics.median(times[1])


def torch_rotation(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x·cos + rotate_half(x)·sin, as commonly written."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


def main() -> None:
    """A line a case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    torch.set_num_threads(parser.parse_args().threads)
    print(f"{'case':38} {'ours':>9} {'torch ops':>10}  ratio   (µs, forward + backward)")
    for shape in ((16, 64, 128), (8, 256, 192), (4, 512, 512)):
        x = torch.randn(shape, requires_grad=True)
        w = torch.ones(shape[-1], requires_grad=True)
        a, b = duel(lambda: rms_norm(x, w, 1e-6), lambda: F.rms_norm(x, (shape[-1],), w, 1e-6))
        print(f"{f'rms norm {list(shape)}':38} {a:9.0f} {b:10.0f}  {b / a:5.2f}")
    for shape in ((16, 64, 4, 32), (8, 256, 6, 32), (4, 512, 8, 64)):
        x = torch.randn(shape, requires_grad=True)
        tables = rotation(Rope(), shape[-1], torch.arange(shape[1])[None], torch.float32)
        cos, signed = tables
        sin = signed.abs() * signed[..., shape[-1] // 2 :].sign().repeat(1, 1, 1, 2)
        a, b = duel(lambda: rotate(x, tables, "half"), lambda: torch_rotation(x, cos, sin))
        print(f"{f'rotation {list(shape)}':38} {a:9.0f} {b:10.0f}  {b / a:5.2f}")


if __name__ == "__main__":
    main()
