"""Time and memory from a folder of Hugging Face to a model that is ready: this package and `transformers`.

Each measurement is a process of its own that imports torch and the package first, so that what is timed is loading
alone. The checkpoint is a LLaMA of random weights, 134 M parameters, in float32 (538 MB) and in bfloat16; its pages are
in the file cache, as after a first use. Peak memory is resident memory beyond what the imports took, mapped pages of
the file counted as they are touched. `ready` is the load alone, `first` with one forward pass of 8 tokens.

    python benchmarks/loading.py --folder /tmp/loading
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

PROBE = """
import json, sys, time
import torch
torch.set_num_threads(2)
how, folder, dtype = sys.argv[1:]
if how == "anyformer":
    import anyformer as af
    from anyformer.checkpoint import load
    begin = lambda: load(folder, dtype=dtype).model
else:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging
    logging.set_verbosity_error(); logging.disable_progress_bar()
    import transformers.models.llama.modeling_llama
    begin = lambda: AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
def memory(key):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))
torch.ones(64, 64) @ torch.ones(64, 64)
open("/proc/self/clear_refs", "w").write("5")  # the peak begins here
before, start = memory("VmRSS"), time.perf_counter()
model = begin()
ready = time.perf_counter() - start
with torch.no_grad():
    model(torch.arange(8)[None])
first = time.perf_counter() - start
print(json.dumps({"ready_s": ready, "first_s": first, "peak_bytes": memory("VmHWM") - before}))
"""
SPEC = {
    "vocab_size": 49152,
    "d_model": 576,
    "n_layers": 30,
    "max_positions": 2048,
    "tie": True,
    "norm": {"kind": "rms", "eps": 1e-5},
    "ffn": {"kind": "swiglu", "d_ff": 1536},
    "attention": {"n_heads": 9, "n_kv_heads": 3, "position": {"kind": "rope", "theta": 100000.0}},
}
"""SmolLM2-135M's sizes."""


def make(folder: Path, dtype: str) -> int:
    """Writes the checkpoint where it is not there yet; its bytes of weights."""
    if not folder.exists():
        import anyformer as af
        from anyformer.checkpoint import Checkpoint

        spec = af.load_spec(SPEC)
        Checkpoint(spec, af.build(spec, seed=0, dtype=dtype)).save(folder, format="hf")
    return (folder / "model.safetensors").stat().st_size


def probe(how: str, folder: Path, dtype: str) -> dict[str, float]:
    """One load in a process of its own."""
    done = subprocess.run([sys.executable, "-c", PROBE, how, str(folder), dtype], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Prints a line for each way of loading."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where the checkpoints are made")
    parser.add_argument("--repeat", type=int, default=5)
    given = parser.parse_args()
    print(f"{'':12}{'file':>10}{'in memory':>12}{'ready':>9}{'first':>9}{'peak / weights':>16}")
    for stored, dtype in (("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")):
        folder = given.folder / stored
        size = make(folder, stored) * (2 if stored != dtype else 1)
        runs: dict[str, list[dict[str, float]]] = {"anyformer": [], "transformers": []}
        for _ in range(given.repeat):
            for how, found in runs.items():
                found.append(probe(how, folder, dtype))
        for how, found in runs.items():
            ready, first = (statistics.median(run[key] for run in found) for key in ("ready_s", "first_s"))
            peak = statistics.median(run["peak_bytes"] for run in found) / size
            print(f"{how:12}{stored:>10}{dtype:>12}{ready:8.3f}s{first:8.3f}s{peak:16.2f}")


if __name__ == "__main__":
    main()
