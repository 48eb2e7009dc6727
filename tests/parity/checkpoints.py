"""Published models written to a folder by `transformers`, and what becomes of them in both directions."""

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from pairs import Family, Pair, pair, wide
from torch import nn

from anyformer.families import FAMILIES
from anyformer.families import Family as Published
from anyformer.nn.model import Model
from anyformer.spec import expand
from anyformer.spec.parts import ModelSpec
from anyformer.weights.config import differences, evaluated, write_config
from anyformer.weights.hf import load_model, save_folder

logging.getLogger("transformers").setLevel(logging.ERROR)


def written(family: Family, folder: Path) -> Path:
    """The family's model in a folder, as `save_pretrained` leaves it, in float64."""
    with wide():
        pair(family).hf.save_pretrained(folder)
    return folder


def imported(family: Family, folder: Path, dtype: torch.dtype = torch.float64) -> Model:
    """What this package makes of that folder."""
    return load_model(written(family, folder), dtype, torch.device("cpu"))[1]


def as_described(family: Family) -> ModelSpec:
    """The specification that the family's hand-written recipe means."""
    return expand(family.recipe)


def unlike(ours: ModelSpec, theirs: ModelSpec) -> list[str]:
    """Where two specifications differ in what they compute; a context that `ours` leaves open is no difference."""
    return [str(difference) for difference in differences(evaluated(ours), evaluated(theirs))]


def opened(
    model: Model, folder: Path, hf: nn.Module, kind: type | None = None, families: Sequence[Published] = FAMILIES
) -> nn.Module:
    """What `transformers` makes of the model as this package writes it; fails where it misses or ignores a tensor.

    `kind`: their class, that of `hf` where it is not given.
    """
    config, reading = write_config(model.spec, families)
    folder.mkdir()
    save_folder(folder, model, reading, config)
    with wide():
        again, report = (kind or type(hf)).from_pretrained(folder, output_loading_info=True, dtype=torch.float64)
    fixed = {name for name, value in hf.named_parameters() if not value.requires_grad}  # Tables of sines.
    assert not set(report["missing_keys"]) - fixed, report
    assert not report["unexpected_keys"], report
    assert not report["mismatched_keys"], report
    again.config._attn_implementation = hf.config._attn_implementation
    again.config._experts_implementation = hf.config._experts_implementation
    return again.eval()


def greedy(hf: Any, tokens: torch.Tensor, real: torch.Tensor, n: int, **more: Any) -> torch.Tensor:
    """Their own greedy continuation of left-padded prompts; `more` goes to `GenerationConfig`."""
    settings = transformers.GenerationConfig(max_new_tokens=n, do_sample=False, pad_token_id=0, **more)
    return hf.generate(tokens, attention_mask=real.long(), generation_config=settings)[:, tokens.shape[1] :]


_MADE: dict[str, nn.Module] = {}


def both(make: Callable[..., nn.Module], case: tuple[str, dict[str, Any]], folder: Path) -> Pair:
    """Theirs in float64, made once of a class's name and settings, and what is read of its folder."""
    key = json.dumps(case)
    with wide():
        if key not in _MADE:
            name, settings = json.loads(key)
            _MADE[key] = make(name, **settings)
        _MADE[key].save_pretrained(folder)
    our = load_model(folder, torch.float64, torch.device("cpu"))[1]
    return Pair(Family(case[0], "", case[0], "", {}, {}, []), _MADE[key], our)


def result(pair: Pair, tokens: torch.Tensor, real: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What either gives: scores, or the output of the body."""
    out = pair.theirs(tokens, real)
    if "start_logits" in out:
        return torch.stack([out.start_logits, out.end_logits], -1), pair.our(tokens, padding=real).detach()
    if "logits" in out:
        return out.logits, pair.our(tokens, padding=real).detach()
    return out.last_hidden_state, pair.our.hidden(tokens, padding=real).detach()
