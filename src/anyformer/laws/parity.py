"""Parity: what the published implementation of a model's family makes of the same weights.

It is no law of the space: it speaks of models that a published family can say, where `transformers` is installed.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from anyformer.errors import UserError
from anyformer.laws.draw import Draw, by_length, dtype_of, longest, outputs, rows, wide
from anyformer.laws.result import Findings, Result, exempt
from anyformer.nn.model import Model
from anyformer.weights.config import Reading, write_config
from anyformer.weights.hf import load_model, save_folder

NAMES = ("parity: files", "parity: logits", "parity: padding", "parity: cache")
TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-6}
"""Relative to max(1, |value|). The published implementations round to float32 within, whatever the weights' dtype."""


def parity(model: Model, seed: int) -> list[Result]:
    """The files that `transformers` opens and that come back bit for bit, its logits, of padded rows and cached steps.

    Weights in half precision are compared in float32 on both sides.
    """
    if find_spec("transformers") is None:
        return [exempt(name, "transformers is not installed") for name in NAMES]
    try:
        config, reading = write_config(model.spec)
    except UserError:
        return [exempt(name, "no published family is this model") for name in NAMES]
    exact = model if dtype_of(model) in TOLERANCES else wide(model, torch.float32)
    with tempfile.TemporaryDirectory() as place, torch.no_grad(), _offline():
        folder = Path(place)
        save_folder(folder, exact, reading, config)
        try:
            peer, files = _opened(folder, exact, reading)
        except Exception as error:  # Whatever the other implementation raises is a finding about what we wrote.
            first = str(error).strip().splitlines()[:1]
            what = f"transformers does not open it: {type(error).__name__} {' '.join(first)}"
            broken = Result(NAMES[0], False, inf, 0.0, what, f"written as {reading.model}")
            return [broken, *(exempt(name, "transformers does not open what was written") for name in NAMES[1:])]
        return [files, *_compared(Draw(exact, seed), peer)]


@contextmanager
def _offline() -> Iterator[None]:
    """Nothing is looked up anywhere, and nothing is told on the way."""
    before = {name: os.environ.get(name) for name in ("HF_HUB_OFFLINE", "HF_HUB_DISABLE_PROGRESS_BARS")}
    os.environ.update(dict.fromkeys(before, "1"))
    try:
        logging = import_module("transformers.utils.logging")
        verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        try:
            yield
        finally:
            logging.set_verbosity(verbosity)
            if bars:
                logging.enable_progress_bar()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _opened(folder: Path, model: Model, reading: Reading) -> tuple[nn.Module, Result]:
    """Their model, and whether every tensor found its place there and is the same when it comes back."""
    findings = Findings(NAMES[0], 0.0)
    cls = getattr(import_module("transformers"), reading.model)
    dtype = dtype_of(model)
    peer, report = cls.from_pretrained(
        folder, dtype=dtype, attn_implementation=reading.family.peer, output_loading_info=True, local_files_only=True
    )
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        findings.require(not report.get(what), f"{what} there: {sorted(report.get(what) or ())[:3]}")
    again = Path(folder, "again")
    peer.save_pretrained(again)
    back = load_model(again, None, torch.device("cpu"))[1].state_dict()
    for name, value in model.state_dict().items():
        same = name in back and torch.equal(back[name].view(torch.uint8), value.cpu().contiguous().view(torch.uint8))
        findings.require(same, f"{name} after both directions")
    return peer.eval(), findings.result(f"written as {reading.model}, opened by transformers, written there, read here")


def _compared(draw: Draw, peer: nn.Module) -> Iterator[Result]:
    model, spec = draw.model, draw.spec
    tolerance = TOLERANCES[dtype_of(model)]
    length = longest(draw.stack)
    inputs = draw.inputs(3, length, prefix=False)
    _avoid(inputs, peer, spec.vocab_size)
    theirs = torch.cat([_theirs(peer, rows(inputs, slice(row, row + 1))) for row in range(3)])
    whole = Findings(NAMES[1], tolerance)
    whole.near(outputs(model, inputs), theirs, f"rows of {length} tokens")
    yield whole.result("a whole pass, row by row there")
    yield _padded(draw, peer, inputs, tolerance)
    if draw.stack is not spec.decoder or theirs.dim() < 3:
        yield exempt(NAMES[3], "the model scores no token after another")
        return
    cached = Findings(NAMES[3], tolerance)
    first = length if by_length(draw.stack) else length // 2
    cache = model.new_cache(3, length)
    parts = []
    for start, stop in ((0, first), *((i, i + 1) for i in range(first, length))):
        part = {name: x if name == "source" else x[:, start:stop] for name, x in inputs.items()}
        if start:
            part.pop("source", None)
        parts.append(outputs(model, part, cache=cache))
    cached.near(torch.cat(parts, 1), theirs, f"{first} tokens, then one at a time")
    yield cached.result("a prefill and single steps against their whole pass")


def _padded(draw: Draw, peer: nn.Module, inputs: dict[str, Any], tolerance: float) -> Result:
    """Rows of several lengths in one batch here, each alone there."""
    findings = Findings(NAMES[2], tolerance)
    length = inputs["tokens"].shape[1]
    lengths = [length, max(1, length // 2), 1]
    for side in ("left", "right"):
        places = torch.arange(length)
        real = torch.stack([places < n if side == "right" else places >= length - n for n in lengths])
        out = outputs(draw.model, inputs, padding=real)
        for row, n in enumerate(lengths):
            alone = rows(inputs, slice(row, row + 1))
            alone = {name: x if name == "source" else x[:, real[row]] for name, x in alone.items()}
            ours = out[row : row + 1]
            ours = ours[:, real[row]] if out.dim() > 2 else ours
            findings.near(ours, _theirs(peer, alone), f"{n} tokens padded on the {side} to {length}")
    return findings.result("padded rows here, the same rows alone there")


def _avoid(inputs: dict[str, Any], peer: Any, n_ids: int) -> None:
    """Other ids in place of those that a published implementation takes for padding wherever they stand."""
    special = {getattr(peer.config, name, None) for name in ("pad_token_id", "eos_token_id", "bos_token_id")}
    special |= {x for value in special if isinstance(value, list) for x in value}
    free = [i for i in range(n_ids) if i not in {x for x in special if isinstance(x, int)}]
    for name in ("tokens", "source"):
        if name in inputs and free:
            inputs[name] = torch.tensor(free)[inputs[name] % len(free)]


def _theirs(peer: nn.Module, inputs: dict[str, Any]) -> Tensor:
    """Their scores (or states without a head) for one row that is all real."""
    given = {"input_ids": inputs["tokens"]}
    if "source" in inputs:
        given = {"input_ids": inputs["source"], "decoder_input_ids": inputs["tokens"]}
    if "types" in inputs:
        given["token_type_ids"] = inputs["types"]
    out = peer(**given, use_cache=False) if "source" in inputs else peer(**given)
    for name in ("logits", "last_hidden_state"):
        if getattr(out, name, None) is not None:
            scores: Tensor = getattr(out, name)
            return scores
    return torch.stack([out.start_logits, out.end_logits], -1)
