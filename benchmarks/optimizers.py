"""One update by our Muon and AdamW beside torch's own, on the parameters of a small Llama-like model.

    python benchmarks/optimizers.py [--threads 1] [--runs 30]

Medians of runs taken in turn, so that a change of the machine's speed falls on both. Both sides see the same shapes,
gradients, iterations and rates; torch's Muon iterates in bfloat16, which it cannot be told otherwise, and ours in
float32, as a run on a CPU does. The last line is what the first construction of each AdamW takes in a new process.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch

from anyformer.nn.model import build
from anyformer.nn.roles import roles
from anyformer.spec import load_spec
from anyformer.train.adamw import AdamW
from anyformer.train.muon import Muon

RECIPE = {
    "vocab_size": 512,
    "n_layers": 4,
    "tie": True,
    "ffn": "swiglu",
    "attention": {"n_heads": 4, "position": "rope"},
}
CONSTRUCTION = {
    "ours": "from anyformer.train.adamw import AdamW; make = lambda w: AdamW([(['w'], [w], 1e-3, 0.1)])",
    "torch": "make = lambda w: torch.optim.AdamW([w], lr=1e-3, fused=True)",
}


def duel(ours: Callable[[], object], theirs: Callable[[], object], runs: int) -> tuple[float, float]:
    """Median milliseconds of both, taken in turn."""
    times: tuple[list[float], list[float]] = ([], [])
    for index in range(runs + 5):
        for kept, step in zip(times, (ours, theirs), strict=True):
            start = time.perf_counter()
            step()
            if index >= 5:
                kept.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[0]), statistics.median(times[1])


def parameters(d_model: int, matrices: bool) -> tuple[list[str], list[torch.nn.Parameter]]:
    """The matrices inside blocks, or all parameters, with gradients."""
    model = build(load_spec({**RECIPE, "d_model": d_model}))
    inside = [name for name, role in roles(model).items() if not matrices or role in ("hidden", "residual")]
    chosen = dict(model.named_parameters())
    torch.manual_seed(0)
    for name in inside:
        chosen[name].grad = torch.randn_like(chosen[name])
    return inside, [chosen[name] for name in inside]


def construction(code: str) -> float:
    """Seconds that the first construction of an optimiser takes in a new process, torch being imported."""
    script = (
        f"import time, torch\nw = torch.zeros(4, requires_grad=True)\n{code}\n"
        "start = time.perf_counter(); make(w); print(time.perf_counter() - start)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return float(done.stdout)


def main() -> None:
    """A line a case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--runs", type=int, default=30)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    print(f"{'one update, 4 layers':32} {'ours':>9} {'torch':>9}  ratio   (ms, {chosen.threads} threads)")
    for width in (128, 256):
        names, ours = parameters(width, matrices=True)
        _, theirs = parameters(width, matrices=True)
        mine = Muon(((n, p, 0.02) for n, p in zip(names, ours, strict=True)), weight_decay=0.1)
        other = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, momentum=0.95, ns_steps=5)
        a, b = duel(mine.step, other.step, chosen.runs)
        print(f"{f'Muon, width {width}':32} {a:9.2f} {b:9.2f}  {b / a:5.2f}")
    for width in (128, 256):
        names, ours = parameters(width, matrices=False)
        _, theirs = parameters(width, matrices=False)
        mine_ = AdamW([(names, ours, 1e-3, 0.1)], betas=(0.9, 0.95))
        other_ = torch.optim.AdamW(theirs, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        a, b = duel(mine_.step, other_.step, chosen.runs * 5)
        print(f"{f'AdamW, width {width}':32} {a:9.3f} {b:9.3f}  {b / a:5.2f}")
    a, b = (statistics.median(construction(code) for _ in range(3)) for code in CONSTRUCTION.values())
    print(f"{'AdamW, first construction (s)':32} {a:9.3f} {b:9.3f}")


if __name__ == "__main__":
    main()
