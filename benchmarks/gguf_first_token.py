"""From a cold shell to the first generated token of a GGUF file, and the peak of memory on the way.

Each run is a process of its own: `anyformer generate FILE --max-new-tokens 1` from its start to its first byte of text,
and its peak resident memory, beside a process that imports torch alone and (with --peer) llama.cpp doing the same.
Runs alternate; medians are printed, of the time beyond torch's that of the pairs. The file is in the page cache, as
after a first use. Pages of a mapped file count as resident once they are touched, torch's own library among them: the
second row runs the operations of a first token, each on a few numbers, and so touches what torch needs for itself.

    python benchmarks/gguf_first_token.py FILE.gguf [--peer PYTHON_WITH_LLAMA_CPP] [--runs 7]
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

PROMPT = "The capital of France is"
PEER = """
import sys
from llama_cpp import Llama
model = Llama(model_path=sys.argv[1], n_ctx=512, n_threads=2, verbose=False)
print(model.create_completion(sys.argv[2], max_tokens=1, temperature=0.0)["choices"][0]["text"], flush=True)
"""
KERNELS = """
import torch
import torch.nn.functional as F
with torch.inference_mode():
    x, w = torch.randn(1, 5, 9, 64), torch.randn(64, 64)
    F.scaled_dot_product_attention(F.linear(x, w).transpose(1, 2), x.transpose(1, 2), x.transpose(1, 2), is_causal=True)
    F.silu(x).half().float().sum(-1).mul_(2).addcmul_(x[..., 0], x[..., 0])
    F.embedding(torch.tensor([1]), w), x.argmax()
    codes, bytes = torch.zeros(64, 36, dtype=torch.uint8), torch.zeros(64, 40, dtype=torch.uint8)
    index, starts = torch.arange(64, dtype=torch.int32).repeat(1), torch.arange(0, 64, 32, dtype=torch.int32)
    ops = torch.ops.quantized
    ops.embedding_bag_4bit_rowwise_offsets(codes, index, starts, per_sample_weights=torch.ones(64))
    ops.embedding_bag_byte_rowwise_offsets(bytes, index, starts, per_sample_weights=torch.ones(64))
    r = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(64).add_(1e-5).rsqrt_()
    y = (x * r).mul_(w[0]) + x
    y.copy_(x), torch.cat([x, x], 1), x.abs().max(-1), x == y, x != 0, x[:, torch.tensor([1])]
    p = torch.arange(5)
    angles = (1.0 / 10000.0 ** (torch.arange(0, 64, 2) / 64)) * p[:, None]
    angles.cos(), -angles.sin(), p.clamp(0, 3).max(), p.min(), torch.where(p > 2, p, p + 1), (p > 1) * (p < 3)
    torch.zeros(4, 4).copy_(torch.zeros(4, 4, dtype=torch.int8)), codes[torch.tensor([1])] >> 4 & 15
    int(p[0]), x.transpose(1, 2).clone(), x[:, :, None].expand(1, 5, 2, 9, 64).reshape(-1)
print(1)
"""
"""The operations of a first token, each on a few numbers."""


def run(command: list[str]) -> tuple[float, float]:
    """Seconds to the first byte on standard output (or to the end without one), and the peak in MB."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    process.stdout.read(1)
    first = time.perf_counter() - start
    process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return first, usage.ru_maxrss * 1024 / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--peer", help="a Python that has llama-cpp-python")
    parser.add_argument("--runs", type=int, default=7)
    args = parser.parse_args()
    verb = str(Path(sys.executable).with_name("anyformer"))
    generate = [verb, "generate", str(args.file), "--prompt", PROMPT, "--max-new-tokens", "1"]
    ways = {
        "torch imported": [sys.executable, "-c", "import torch; print(1)"],
        "and its kernels": [sys.executable, "-c", KERNELS],
        "keep": [*generate, "--quantize", "keep"],
        "none": [*generate, "--quantize", "none"],
    }
    if args.peer:
        ways["llama.cpp"] = [args.peer, "-c", PEER, str(args.file), PROMPT]
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for _ in range(args.runs):
        for way, command in ways.items():
            found[way].append(run(command))
    size = args.file.stat().st_size / 1e6
    bare, warm = (statistics.median(peak for _, peak in found[way]) for way in ("torch imported", "and its kernels"))
    print(f"{args.file.name}, {size:.1f} MB, medians of {args.runs}")
    print("                first token  fastest  beyond torch   peak MB  × the file beyond torch  and its kernels")
    for way, runs in found.items():
        seconds, peak = (statistics.median(each[i] for each in runs) for i in (0, 1))
        best = min(first for first, _ in runs)
        later = statistics.median(a - b for (a, _), (b, _) in zip(runs, found["torch imported"], strict=True))
        times = f"{seconds:>10.2f} s {best:>6.2f} s {later:>11.2f} s"
        print(f"{way:<15} {times} {peak:>9.0f} {(peak - bare) / size:>23.2f} {(peak - warm) / size:>16.2f}")


if __name__ == "__main__":
    main()
