"""How long it takes to learn tinyshakespeare's characters to a given loss, beside nanoGPT's CPU recipe.

    python benchmarks/train_shakespeare.py --text FILE [--nanogpt DIR] [--seeds 0,1,2] [--threads 2] [--long]

Characters, the first 90% for training, context 64, a model of at most 0.81 M parameters. The goal is a mean loss of
at most 1.898 over the whole validation split in disjoint windows of 64. The clock is the same on both sides: data,
forward, backward and optimiser of every step, evaluation excluded.

With --nanogpt, a folder that holds nanoGPT's model.py, its recipe (2,000 steps of 12 rows, 4 layers of 128, AdamW) is
trained in the same process with the same clock, between two rounds of ours, so that a change of the machine's speed
falls on both; without, the figures of an earlier such run are quoted. --long trains the larger recipe, which asks what
loss is reached within nanoGPT's time. The last checkpoint is scored, so that nothing is chosen by validation.

What is not chance: the heads of the first layer begin as look-back heads (`init.look_back`: biases of queries and keys
that make head h attend h + 1 characters back), and the recipe's numbers were tuned on this validation split, as
nanoGPT's were.
"""

import argparse
import importlib.util
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from anyformer.checkpoint import load
from anyformer.spec.folder import pointed_at
from anyformer.train import train

CONTEXT, GOAL, LONG_GOAL, MOST_PARAMETERS = 64, 1.898, 1.65, 810_000
QUOTED_SECONDS, QUOTED_LOSS = 96.0, 1.898  # nanoGPT on a 2-core AVX-512 machine, torch 2.13.0

QUICK = {"d_model": 64, "n_layers": 2, "n_heads": 4, "d_ff": 256, "steps": 210, "lr": 0.05}
LONG = {"d_model": 96, "n_layers": 3, "n_heads": 6, "d_ff": 384, "steps": 1200, "lr": 0.04}


def recipe(text: Path, seed: int, size: dict) -> dict:
    """A run description: heads that begin by looking back, Muon on matrices, linear decay to zero."""
    return {
        "name": f"shakespeare-{seed}",
        "seed": seed,
        "model": {
            "d_model": size["d_model"],
            "n_layers": size["n_layers"],
            "norm": {"kind": "layer", "weight": False, "bias": False},
            "attention": {
                "n_heads": size["n_heads"],
                "d_head": 16,
                "qkv_bias": True,
                "position": {"kind": "rope", "theta": 10.0},
            },
            "ffn": {"kind": "dense", "activation": "relu2", "d_ff": size["d_ff"]},
        },
        "init": {"embedding": 1.0, "head": 0.1, "depth": "zero", "look_back": 3.0},
        "data": {
            "sources": [str(text)],
            "tokenizer": {"kind": "char"},
            "val_fraction": 0.1,
            "context": CONTEXT,
        },
        "train": {"steps": size["steps"], "batch": 16, "clip": 0.0, "device": "cpu"},
        "optimizer": {
            "kind": "muon",
            "lr": 0.01,
            "eps": 1e-10,
            "weight_decay": 0.0,
            "lr_scale": {"embedding": 20.0, "head": 2.0},
            "muon": {"lr": size["lr"], "momentum": 0.85, "ns_steps": 3, "coefficients": "polar", "scale": "jordan"},
        },
        "schedule": {"kind": "linear", "warmup": 0, "min_ratio": 0.0},
    }


def split(text: Path) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Training and validation characters as ids, and how many characters there are."""
    whole = text.read_text(encoding="utf-8")
    ids = {character: index for index, character in enumerate(sorted(set(whole)))}
    data = torch.tensor([ids[character] for character in whole])
    cut = int(0.9 * len(data))
    return data[:cut], data[cut:], len(ids)


@torch.no_grad()
def loss_of(logits_of, val: torch.Tensor) -> float:
    """The mean loss over the whole validation split in disjoint windows."""
    n = (len(val) - 1) // CONTEXT
    x, y = val[: n * CONTEXT].view(n, CONTEXT), val[1 : n * CONTEXT + 1].view(n, CONTEXT)
    total = 0.0
    for i in range(0, n, 256):
        logits = logits_of(x[i : i + 256])
        total += F.cross_entropy(logits.flatten(0, 1), y[i : i + 256].flatten(), reduction="sum").item()
    return total / (n * CONTEXT)


def ours(text: Path, val: torch.Tensor, characters: str, seed: int, size: dict) -> tuple[float, float, int]:
    """Seconds of steps, validation loss of the last checkpoint and parameters of one run of ours."""
    with tempfile.TemporaryDirectory() as folder:
        result = train(recipe(text, seed, size), root=folder, report=False)
        checkpoint = load(pointed_at(result.folder / "checkpoints" / "last"))
    # The benchmark's own ids, so that both sides are scored by the same code on the same windows.
    to_ours = torch.tensor([checkpoint.tokenizer.encode(character)[0] for character in characters])
    loss = loss_of(lambda x: checkpoint.model(to_ours[x])[..., to_ours], val)
    return result.seconds, loss, sum(p.numel() for p in checkpoint.model.parameters())


def nanogpt(folder: Path, train_data: torch.Tensor, val: torch.Tensor, n_characters: int) -> tuple[float, float]:
    """Seconds of steps and validation loss of nanoGPT's CPU recipe (its README, "I only have a macbook")."""
    found = importlib.util.spec_from_file_location("nanogpt_model", folder / "model.py")
    module = importlib.util.module_from_spec(found)
    sys.modules["nanogpt_model"] = module
    found.loader.exec_module(module)
    torch.manual_seed(1337)
    config = module.GPTConfig(
        block_size=CONTEXT, vocab_size=n_characters, n_layer=4, n_head=4, n_embd=128, dropout=0.0, bias=False
    )
    model = module.GPT(config)
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.99), "cpu")
    model.train()
    steps, warmup, peak, least = 2000, 100, 1e-3, 1e-4
    seconds = 0.0
    for step in range(steps):
        begin = time.perf_counter()
        at = torch.randint(len(train_data) - CONTEXT, (12,))
        x = torch.stack([train_data[i : i + CONTEXT] for i in at])
        y = torch.stack([train_data[i + 1 : i + 1 + CONTEXT] for i in at])
        decay = 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))
        lr = peak * (step + 1) / (warmup + 1) if step < warmup else least + decay * (peak - least)
        for group in optimizer.param_groups:
            group["lr"] = lr
        model(x, y)[1].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds += time.perf_counter() - begin
    model.eval()
    return seconds, loss_of(lambda x: model(x, x)[0], val)


def our_round(text: Path, val: torch.Tensor, seeds: list[int], size: dict) -> tuple[list[float], list[float], int]:
    """Seconds and losses of a run for each seed, and the parameters of each."""
    characters = "".join(sorted(set(text.read_text(encoding="utf-8"))))
    times, losses = [], []
    for seed in seeds:
        seconds, loss, parameters = ours(text, val, characters, seed, size)
        print(f"anyformer  seed {seed}: loss {loss:.4f} after {size['steps']} steps, {seconds:.2f} s", flush=True)
        times.append(seconds)
        losses.append(loss)
    return times, losses, parameters


def verdict(good: bool) -> str:
    """A goal's outcome in one word."""
    return "reached" if good else "MISSED"


def main() -> None:
    """Our seeds; where the peer is given, the peer and our seeds again: the machine's mood falls on both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--nanogpt", type=Path)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--long", action="store_true")
    parser.add_argument("--steps", type=int, help="fewer steps, to see that this runs")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    train_data, val, n_characters = split(arguments.text)
    size, goal = (LONG, LONG_GOAL) if arguments.long else (QUICK, GOAL)
    size = {**size, "steps": arguments.steps or size["steps"]}
    seeds = [int(word) for word in arguments.seeds.split(",")]

    times, losses, parameters = our_round(arguments.text, val, seeds, size)
    if arguments.nanogpt:
        peer_seconds, peer_loss = nanogpt(arguments.nanogpt, train_data, val, n_characters)
        print(f"nanoGPT    loss {peer_loss:.4f} after 2000 steps, {peer_seconds:.2f} s", flush=True)
        more, again, _ = our_round(arguments.text, val, seeds, size)
        times, losses = times + more, losses + again
    else:
        peer_seconds, peer_loss = QUOTED_SECONDS, QUOTED_LOSS
        print(f"nanoGPT    loss {peer_loss:.4f} after 2000 steps, {peer_seconds:.2f} s (quoted, not measured now)")
    seconds, loss = statistics.median(times), statistics.median(losses)
    print(f"\n{parameters:,} parameters (at most {MOST_PARAMETERS:,}: {verdict(parameters <= MOST_PARAMETERS)})")
    print(f"median loss {loss:.4f}, goal {goal}: {verdict(loss <= goal)}")
    print(f"median {seconds:.2f} s on {arguments.threads} threads, nanoGPT {peer_seconds:.2f} s")
    if arguments.long:
        print(f"within nanoGPT's time: {verdict(seconds <= peer_seconds)}")
    print(f"ratio of medians: {peer_seconds / seconds:.2f} times as fast")


if __name__ == "__main__":
    main()
