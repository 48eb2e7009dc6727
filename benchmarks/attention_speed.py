"""The attention backends beside each other: tiled against fused, a window against full, and which is fastest where.

    python benchmarks/attention_speed.py [--threads 2] [--rounds 7] [--part causal|window|choice] [--smallest]

Backends take turns within a round, so that a change of the machine's speed falls on all; a time is the median over the
rounds, a ratio the median of the rounds' ratios. 8 heads × 64, float32, one row.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from anyformer.nn.attend import AlibiBias, BucketBias, Unsupported, alibi_slopes, attend, masks

H, D = 8, 64
Run = Callable[[], None]


def made(t: int, s: int, grad: bool, backend: str, visible: masks.Visible, **options: object) -> Run:
    """One call, with its backward pass where `grad`."""
    q, k, v = (torch.randn(1, n, H, D, requires_grad=grad) for n in (t, s, s))
    up = torch.randn(1, t, H, D)

    def run() -> None:
        out = attend(q, k, v, visible=visible, backend=backend, **options)
        if grad:
            out.backward(up)

    return run


def race(runs: dict[str, Run], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each round for every run that can be."""
    times: dict[str, list[float]] = {}
    for name, run in runs.items():
        try:
            run()
            times[name] = []
        except Unsupported:
            continue
    for _ in range(rounds):
        for name in times:
            start = time.perf_counter()
            runs[name]()
            times[name].append((time.perf_counter() - start) * 1e3)
    return times


def ratio(a: list[float], b: list[float]) -> float:
    """The median over the rounds of a / b."""
    return statistics.median(x / y for x, y in zip(a, b, strict=True))


def causal(lengths: list[int], rounds: int) -> None:
    """Tiled against fused, both causal and without a mask."""
    print(f"\n{'causal':24} {'fused ms':>10} {'tiled ms':>10} {'tiled / fused':>14}")
    for t in lengths:
        for grad in (False, True):
            runs = {name: made(t, t, grad, name, masks.Causal()) for name in ("fused", "tiled")}
            times = race(runs, rounds)
            fused, tiled = (statistics.median(times[name]) for name in ("fused", "tiled"))
            what = f"T={t:,} {'forward+backward' if grad else 'forward'}"
            print(f"{what:24} {fused:10.1f} {tiled:10.1f} {ratio(times['tiled'], times['fused']):14.2f}", flush=True)


def window(lengths: list[int], rounds: int) -> None:
    """Tiled: a window of 256, and documents of 512, against full causal attention; forward and backward."""
    print(f"\n{'tiled, fwd+bwd':24} {'full ms':>10} {'window':>10} {'packed':>10}   as a share of full")
    for t in lengths:
        documents = torch.arange(t)[None] // 512
        runs = {
            "full": made(t, t, True, "tiled", masks.Causal()),
            "window": made(t, t, True, "tiled", masks.Causal() & masks.Window(256)),
            "packed": made(t, t, True, "tiled", masks.Causal() & masks.Segments(documents)),
        }
        times = race(runs, rounds)
        shares = [ratio(times[name], times["full"]) for name in ("window", "packed")]
        full = statistics.median(times["full"])
        print(f"{f'T={t:,}':24} {full:10.1f} {shares[0]:10.2f} {shares[1]:10.2f}", flush=True)


def choice(lengths: list[int], rounds: int) -> None:
    """Every backend on calls that need more than a causal flag."""
    slopes, table = alibi_slopes(H), torch.randn(32, H, requires_grad=True)
    causal = masks.Causal()
    calls: dict[str, Callable[[int], tuple[masks.Visible, dict[str, object]]]] = {
        "window 128": lambda t: (causal & masks.Window(128), {}),
        "prefix": lambda t: (masks.Prefix(t // 2), {}),
        "ALiBi": lambda t: (causal, {"bias": AlibiBias(slopes, False)}),
        "buckets": lambda t: (causal, {"bias": BucketBias(table, 128, False)}),
        "softcap": lambda t: (causal, {"softcap": 30.0}),
        "sinks": lambda t: (causal, {"sinks": torch.zeros(H)}),
    }
    names = ("reference", "fused", "tiled")
    print(f"\n{'ms':44}" + "".join(f"{name:>11}" for name in names) + "  fastest")
    for label, make in calls.items():
        for s in lengths:
            for t, grad in ((s, True), (s, False), (1, False)):
                visible, options = make(s)
                with torch.set_grad_enabled(grad):
                    times = race({name: made(t, s, grad, name, visible, **options) for name in names}, rounds)
                best = {name: statistics.median(x) for name, x in times.items()}
                cells = "".join(f"{best[name]:11.2f}" if name in best else f"{'—':>11}" for name in names)
                what = f"{label}, T={t:,} S={s:,} {'forward+backward' if grad else 'forward'}"
                print(f"{what:44}{cells}  {min(best, key=best.__getitem__)}", flush=True)


def main() -> None:
    """The asked parts, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--part", choices=["causal", "window", "choice"])
    parser.add_argument("--smallest", action="store_true", help="tiny lengths, to see that this runs")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    parts = {
        "causal": (causal, [1024, 2048, 4096]),
        "window": (window, [2048, 4096, 8192]),
        "choice": (choice, [32, 64, 128, 256, 512, 1024, 2048]),
    }
    for name, (part, lengths) in parts.items():
        if arguments.part in (None, name):
            part([32] if arguments.smallest else lengths, 1 if arguments.smallest else arguments.rounds)


if __name__ == "__main__":
    main()
