"""A GGUF file read here and by llama.cpp: ids of texts, logits, and greedy text, side by side; and files written here.

Token ids must be equal for every text. Greedy text must be equal for as long as the first two logits are further apart
than the two arithmetics differ: llama.cpp rounds activations to 8 bits for products with quantised weights, so that its
logits are off by a few hundredths to tenths; the largest difference seen is printed beside the gap at the first token
that differs. With --types the model is also written in these types and each file is compared.

    python benchmarks/gguf_against_llama_cpp.py FILE.gguf --peer PYTHON_WITH_LLAMA_CPP --types f32 f16 q8_0 q4_0 q4_1
"""

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

import torch

from anyformer.checkpoint import Checkpoint, load

TEXTS = {
    "empty": "",
    "plain": "The capital of France is",
    "unicode": "naïve café — Ελληνικά, русский, 中文字符, العربية, हिन्दी, ไทย, 한국어",
    "combining": "e\u0301 a\u0308 \u200b zero\u200dwidth \ufeff bom",
    "code": "def f(x: int) -> int:\n\tif x > 10:\n        return x**2  # square\n    return {'a': [1, 2]}\n",
    "spaces": "a  b   c    d          e \t\t f",
    "newlines": "one\n\ntwo\n\n\n\nthree\r\nfour\r\r\n\n ",
    "digits": "1 12 123 1234 12345 3.14159 1,000,000 0x1F 2026-11-29 ٣٤٥ ½",
    "emoji": "😀👩‍👩‍👧‍👦🏳️‍🌈👍🏽 ok",
    "special": "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "punctuation": "!!! ??? ... -- __ 'tis don't we'll I'M \"x\" (y) [z] {w} <v>",
    "long word": "a" * 300 + " " + "=" * 300,
}
PROMPTS = ("The capital of France is", "def fibonacci(n):\n", "Once upon a time", "1 2 3 4 5", "Ο Σωκράτης")


class Peer:
    def __init__(self, python: str, file: Path, threads: int, n_ctx: int = 1024) -> None:
        script = Path(__file__).with_name("llama_cpp_peer.py")
        command = [python, str(script), str(file), str(n_ctx), str(threads)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)

    def ask(self, **asked: object) -> list:
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()


def compare_tokens(ours: Checkpoint, peer: Peer) -> bool:
    equal = True
    for control in (False, True):
        for name, text in TEXTS.items():
            here = ours.tokenizer.encode(text, bare=True, control=control)
            there = peer.ask(do="tokens", text=text, special=control)
            same = here == there
            equal = equal and same
            print(f"  ids  {name:<12} control={control!s:<5} {len(here):>4}  {'equal' if same else 'DIFFER'}")
            if not same:
                print(f"       here  {here[:24]}\n       there {there[:24]}")
    return equal


def compare_greedy(ours: Checkpoint, peer: Peer, n: int) -> None:
    for prompt in PROMPTS:
        ids = ours.tokenizer.encode(prompt)
        with torch.no_grad():
            logits = ours.model(torch.tensor([ids]), last_only=True)[0, -1].double()
        theirs = torch.tensor(peer.ask(do="logits", ids=ids), dtype=torch.float64)
        off = float((logits - theirs[: len(logits)]).abs().max())
        there = peer.ask(do="greedy", ids=ids, n=n)
        here = ours.generate(ids, max_new_tokens=n)
        same = next((i for i, (a, b) in enumerate(zip(here, there)) if a != b[0]), min(len(here), len(there)))
        gap = "" if same >= len(here) else f", then a gap of {there[same][1]:.3f}"
        print(f"  text {prompt[:14]!r:<18} logits off {off:.4f}; greedy equal for {same} of {len(here)}{gap}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--peer", required=True, help="a Python that has llama-cpp-python")
    parser.add_argument("--types", nargs="*", default=[], help="also write and compare these")
    parser.add_argument("--quantize", default="keep", help="how files are held here: keep or none")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1, help="of llama.cpp, which waits badly for busy cores")
    args = parser.parse_args()
    how = None if args.quantize == "none" else args.quantize
    with tempfile.TemporaryDirectory() as place:
        files = [args.file]
        if args.types:
            whole = load(args.file)
            files += [whole.save(Path(place, f"{kind}.gguf"), format="gguf", quantize=kind) for kind in args.types]
        equal = True
        for file in files:
            print(f"{file.name}, {file.stat().st_size / 1e6:.1f} MB, held here: {args.quantize}")
            ours, peer = load(file, quantize=how), Peer(args.peer, file, args.threads)
            equal = compare_tokens(ours, peer) and equal
            compare_greedy(ours, peer, args.tokens)
            peer.close()
    if not equal:
        raise SystemExit("ids differ")


if __name__ == "__main__":
    main()
