"""Planned against measured peak memory of a training step on the CPU, each case in a process of its own.

    python benchmarks/memory.py [--smallest]

The measured figure is the peak of resident memory during two steps (forward, loss, backward, our optimiser) less the
resident memory before the model was built.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

SMALLEST = "llama 2 × 64, vocabulary 256"

CASES = {
    SMALLEST: dict(
        recipe={
            "vocab_size": 256,
            "d_model": 64,
            "n_layers": 2,
            "tie": True,
            "ffn": "swiglu",
            "attention": {"n_heads": 2, "position": "rope"},
        },
        batch=2,
        context=64,
    ),
    "llama 6 × 384, vocabulary 8,192": dict(
        recipe={
            "vocab_size": 8192,
            "d_model": 384,
            "n_layers": 6,
            "tie": True,
            "ffn": "swiglu",
            "attention": {"n_heads": 6, "n_kv_heads": 2, "position": "rope"},
        },
        batch=8,
        context=512,
    ),
    "llama 12 × 512, vocabulary 1,024": dict(
        recipe={
            "vocab_size": 1024,
            "d_model": 512,
            "n_layers": 12,
            "ffn": "swiglu",
            "attention": {"n_heads": 8, "n_kv_heads": 4, "position": "rope"},
        },
        batch=4,
        context=1024,
    ),
    "gpt-2 8 × 512, vocabulary 2,048": dict(
        recipe={
            "vocab_size": 2048,
            "d_model": 512,
            "n_layers": 8,
            "max_positions": 512,
            "tie": True,
            "bias": True,
            "norm": "layer",
            "ffn": {"kind": "dense", "activation": "gelu_tanh"},
            "embed": {"position": "learned"},
            "attention": {"n_heads": 8, "position": "none"},
        },
        batch=8,
        context=512,
    ),
    "wide vocabulary 32,768, 2 × 256": dict(
        recipe={
            "vocab_size": 32768,
            "d_model": 256,
            "n_layers": 2,
            "tie": True,
            "ffn": "swiglu",
            "attention": {"n_heads": 4, "position": "rope"},
        },
        batch=4,
        context=512,
    ),
    "many weights, few tokens": dict(
        recipe={
            "vocab_size": 8192,
            "d_model": 1024,
            "n_layers": 8,
            "ffn": "swiglu",
            "attention": {"n_heads": 8, "position": "rope"},
        },
        batch=1,
        context=128,
    ),
    "sandwich norms, QK-norm, parallel-free 6 × 512": dict(
        recipe={
            "vocab_size": 1024,
            "d_model": 512,
            "n_layers": 6,
            "placement": "sandwich",
            "ffn": "geglu",
            "attention": {"n_heads": 8, "n_kv_heads": 2, "position": "rope", "qk_norm": True},
        },
        batch=8,
        context=512,
    ),
    "demo-like 6 × 192, vocabulary 2,048": dict(
        recipe={
            "vocab_size": 2048,
            "d_model": 192,
            "n_layers": 6,
            "tie": True,
            "ffn": "swiglu",
            "attention": {"n_heads": 6, "n_kv_heads": 2, "position": "rope"},
        },
        batch=32,
        context=256,
    ),
    "llama 6 × 512, Muon": dict(
        recipe={
            "vocab_size": 4096,
            "d_model": 512,
            "n_layers": 6,
            "tie": True,
            "ffn": "swiglu",
            "attention": {"n_heads": 8, "n_kv_heads": 4, "position": "rope"},
        },
        batch=8,
        context=256,
        optimizer="muon",
    ),
}


def resident(key: str) -> int:
    """A line of /proc/self/status in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise RuntimeError(key)


def measure(case: dict) -> dict:
    """Peak memory of two training steps of one case, and the plan's word on it."""
    import torch
    import torch.nn.functional as F

    import anyformer as af
    from anyformer.train.loss import summed_loss
    from anyformer.train.optim import Optimizer
    from anyformer.train.run import AdamW, Muon

    spec = af.load_spec(case["recipe"])
    kind = case.get("optimizer", "adamw")
    choice = {"adamw": AdamW, "muon": Muon}[kind]()
    # Threads, kernels and allocator come up outside the measured stretch.
    warm = torch.nn.Linear(8, 8)
    torch.optim.AdamW(warm.parameters(), fused=True)
    warm(torch.randn(4, 8)).sum().backward()
    F.scaled_dot_product_attention(*(torch.randn(1, 2, 8, 8),) * 3, is_causal=True)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    model = af.build(spec).train()
    optimizer = Optimizer(model, choice)
    tokens = torch.randint(0, spec.vocab_size, (case["batch"], case["context"] + 1))
    for _ in range(2):
        optimizer.zero_grad()
        loss = summed_loss(model(tokens[:, :-1]), tokens[:, 1:])
        (loss / tokens[:, 1:].numel()).backward()
        optimizer.step()
    memory = af.plan(spec, batch=case["batch"], context=case["context"], optimizer=kind).memory
    return {"measured": resident("VmHWM") - before, "planned": memory.peak}


def main() -> None:
    """Every case in its own process, one line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smallest", action="store_true", help="one tiny case alone, to see that this runs")
    parser.add_argument("--case", help=argparse.SUPPRESS)  # what a process of its own is started with
    arguments = parser.parse_args()
    if arguments.case:
        print(json.dumps(measure(json.loads(arguments.case))))
        return
    print(f"{'case':50} {'planned':>10} {'measured':>10}   ratio")
    for name, case in CASES.items():
        if arguments.smallest != (name == SMALLEST):  # too small to say anything of the plan
            continue
        run = subprocess.run([sys.executable, __file__, "--case", json.dumps(case)], stdout=subprocess.PIPE, check=True)
        found = json.loads(run.stdout)
        planned, measured = found["planned"] / 2**20, found["measured"] / 2**20
        ratio = f"{planned / measured:.2f}" if measured > 0 else "(too small to see)"
        print(f"{name:50} {planned:7.0f} MiB {measured:7.0f} MiB   {ratio}", flush=True)


if __name__ == "__main__":
    main()
