"""Loading takes the memory of the weights and little more, whatever is stacked or converted on the way."""

import statistics
import subprocess
import sys

import pytest

import anyformer as af
from anyformer.checkpoint import Checkpoint

PROBE = """
import sys
import torch
from anyformer.checkpoint import load
def memory(key):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))
load(sys.argv[2])  # what is loaded once for all
open("/proc/self/clear_refs", "w").write("5")
before = memory("VmRSS")
model = load(sys.argv[1], dtype=sys.argv[3]).model
size = sum(p.numel() * p.element_size() for p in model.parameters())
print((memory("VmHWM") - before) / size)
"""
BASE = {
    "vocab_size": 4000,
    "d_model": 512,
    "n_layers": 14,
    "max_positions": 64,
    "norm": "rms",
    "attention": {"n_heads": 8, "n_kv_heads": 2, "position": "rope"},
}
DENSE = {**BASE, "ffn": {"kind": "swiglu", "d_ff": 2048}}
SPARSE = {**BASE, "ffn": {"kind": "moe", "n_experts": 4, "top_k": 2, "expert": {"kind": "swiglu", "d_ff": 512}}}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
@pytest.mark.parametrize("recipe", [DENSE, SPARSE], ids=["dense", "experts"])
def test_the_peak_is_at_most_1_3_times_the_weights(tmp_path, recipe, stored):
    """About 200 MB of weights in float32, loaded as float32 and as stored."""
    spec = af.load_spec(recipe)
    folder = Checkpoint(spec, af.build(spec, dtype=stored)).save(tmp_path / "big", format="hf")
    small = af.load_spec({**recipe, "vocab_size": 40, "d_model": 64, "n_layers": 1})
    other = Checkpoint(small, af.build(small, dtype=stored)).save(tmp_path / "small", format="hf")
    for dtype in ("float32", "stored"):
        command = [sys.executable, "-c", PROBE, folder, other, dtype]
        runs = [subprocess.run(command, capture_output=True, text=True, check=True) for _ in range(3)]
        # How the system counts and keeps pages differs from run to run, by a third of the weights in one of twenty.
        assert statistics.median(float(run.stdout) for run in runs) <= 1.3, dtype
