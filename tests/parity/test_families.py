"""Published checkpoints: what the families' rules read is the model that the other tests compare, and it goes back."""

import json

import pytest
import torch
from checkpoints import as_described, imported, opened, unlike, written
from dense import DENSE
from dense_other import OTHERS
from encoders import ENCODERS
from encoders_more import MORE_ENCODERS
from mixtures import LATENTS, MIXTURES
from pairs import ids, pair
from seq2seq import PAIRS
from seq2seq_more import ENCODER_ALONE, MORE_PAIRS, STATES

from anyformer.families import FAMILIES
from anyformer.spec import load_spec
from anyformer.weights.config import read_config, write_config

TYPES = {family.model_type.removesuffix("_text") for family in FAMILIES}
INTERLEAVED_BY_HAND = ("llama, interleaved",)
"""The same checkpoint as another, its rows turned by the map."""
CASES = [
    case
    for case in (
        *DENSE,
        *OTHERS,
        *MIXTURES,
        *LATENTS,
        *ENCODERS,
        *PAIRS,
        *MORE_ENCODERS,
        *MORE_PAIRS,
        *STATES,
        *ENCODER_ALONE,
    )
    if case.module in TYPES and case.name not in INTERLEAVED_BY_HAND
]
cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@cases
def test_a_folder_of_theirs_is_the_model_described_by_hand(case, tmp_path):
    """Specification and every number; the tests of parity compare that model's logits with theirs."""
    model = imported(case, tmp_path)
    assert unlike(as_described(case), model.spec) == []
    ours, described = model.state_dict(), pair(case).our.state_dict()
    assert ours.keys() == described.keys()
    assert [name for name in ours if not torch.equal(ours[name], described[name])] == []


@cases
def test_what_is_written_opens_there_with_equal_tensors(case, tmp_path):
    """And reads as the same specification again."""
    hf = pair(case).hf
    model = imported(case, tmp_path / "theirs")
    again = opened(model, tmp_path / "ours", hf)
    before, after = hf.state_dict(), again.state_dict()
    assert before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    assert unlike(model.spec, write_config(model.spec)[1].spec) == []


@cases
def test_settings_that_came_back_give_equal_logits(case, tmp_path):
    """The configuration says everything: a setting that was lost would show."""
    both = pair(case)
    again = opened(imported(case, tmp_path / "theirs"), tmp_path / "ours", both.hf)
    both_again = type(both)(case, again, both.our)
    tokens = ids(2, 23, both.vocab_size)
    more = {"decoder_input_ids": ids(2, 11, both.vocab_size, seed=3)} if again.config.is_encoder_decoder else {}
    before, after = both.theirs(tokens, **more), both_again.theirs(tokens, **more)
    for name in ("logits", "start_logits", "last_hidden_state", "pooler_output"):
        if getattr(before, name, None) is not None:
            both.close(getattr(before, name), getattr(after, name))


@cases
def test_an_unknown_setting_is_refused_by_name(case, tmp_path):
    table = json.loads((written(case, tmp_path) / "config.json").read_text())
    with pytest.raises(ValueError, match="wormhole_depth = 3"):
        read_config({**table, "wormhole_depth": 3}, "config.json")


@pytest.mark.parametrize(("family", "preset"), [(f, name) for f in FAMILIES for name in f.presets])
def test_a_shipped_recipe_of_a_published_model_is_said_by_its_family(family, preset):
    assert write_config(load_spec(preset))[1].family is family
