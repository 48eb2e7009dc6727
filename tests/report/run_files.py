"""The two files of a run folder, as training writes them."""

import math
from typing import Any

from anyformer.planning import plan
from anyformer.spec import load_spec

Records = list[dict[str, Any]]


def train_record(step: int, **more: Any) -> dict[str, Any]:
    """One update of a run with 300 targets a step and 0.25 s each, all numbers different from step to step."""
    return {
        "kind": "train",
        "step": step,
        "loss": 1.5 + 4.0 / step + 0.01 * math.sin(step),
        "lr": 0.003 * min(1, step / 10),
        "grad_norm": 0.5 + 3.0 / step,
        "targets": 300,
        "tokens": 300 * step,
        "tokens_per_second": 1200.0 + step,
        "seconds": 0.25 * step,
        "batch": "c0ffee",
        **more,
    }


def eval_record(step: int, loss: float, **more: Any) -> dict[str, Any]:
    """An evaluation; 700 tokens of 2,000 bytes."""
    bits = loss / math.log(2) * 700 / 2000
    numbers = {"perplexity": math.exp(loss), "bits_per_byte": bits, "n_tokens": 700, "n_bytes": 2000, "seconds": 0.7}
    return {"kind": "eval", "step": step, "loss": loss, **numbers, **more}


def sample_record(step: int, text: str, prompt: str = "def ") -> dict[str, Any]:
    """A text written at a step."""
    return {"kind": "sample", "step": step, "prompt": prompt, "text": text}


def settings(**more: Any) -> dict[str, Any]:
    """A run.json of a finished run."""
    made = plan(load_spec("llama-tiny"), batch=3, context=100)
    return {
        "format": "anyformer run",
        "format_version": 1,
        "name": "small-run",
        "run": {
            "name": "small-run",
            "seed": 4321,
            "model": {"d_model": 96, "attention": {"n_heads": 6}},
            "train": {"steps": 40, "tokens": None, "clip": 1.0},
        },
        "steps": 40,
        "parameters": made.parameters,
        "plan": made.to_dict(),
        "data": {
            "vocab_size": 512,
            "train": {"tokens": 91234, "bytes": 261234, "documents": 17},
            "val": {"tokens": 700},
        },
        "device": "cpu",
        "processes": 1,
        "versions": {"anyformer": "0.1.0", "torch": "2.13.0+cpu"},
        "result": {"step": 40, "steps": 40, "finished": True, "signum": None, "tokens": 12000, "seconds": 10.0},
        **more,
    }


def usual_records() -> Records:
    """Forty updates, two evaluations of which the first is the best, and a sample at each."""
    records: Records = []
    for step in range(1, 41):
        records.append(train_record(step))
        if step % 20 == 0:
            records += [eval_record(step, 1.2345 + step / 1000), sample_record(step, f"step_{step}(x):\n\treturn  x")]
    return records
