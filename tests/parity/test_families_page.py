"""The page on families: its table is what there is, and the family that it builds reads and writes published models."""

import re
from pathlib import Path

import pytest
import torch
from checkpoints import opened, written
from kin import OLMO
from pairs import ids, pair

from anyformer.families import FAMILIES
from anyformer.weights.hf import load_model

PAGE = (Path(__file__).parents[2] / "docs" / "families.md").read_text(encoding="utf-8")


def test_the_table_names_every_family_and_class():
    rows = re.findall(r"^\| (?!family|-)(.+?) \| `(.+?)` \| (.+?) \|$", PAGE, re.M)
    said = {(name, kind): tuple(re.findall(r"`(\w+)`", classes)) for name, kind, classes in rows}
    known: dict[tuple[str, str], dict[str, None]] = {}
    for family in FAMILIES:
        known.setdefault((family.name, family.model_type), {}).update(dict.fromkeys(family.models))
    assert said == {key: tuple(models) for key, models in known.items()}


@pytest.fixture(scope="module")
def family():
    """What the page's own code defines."""
    code = next(
        block for block in re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S) if "OLMO = Family(" in block
    )
    made = {}
    exec(code, made)
    return made["OLMO"]


def test_the_page_s_family_reads_a_published_model_with_equal_logits(family, tmp_path):
    both = pair(OLMO)
    where = written(OLMO, tmp_path / "theirs")
    _, model = load_model(where, torch.float64, torch.device("cpu"), (family,))
    tokens = ids(2, 23, both.vocab_size)
    both.close(both.theirs(tokens).logits, model(tokens).detach())


def test_the_page_s_family_writes_what_transformers_opens(family, tmp_path):
    both = pair(OLMO)
    _, model = load_model(written(OLMO, tmp_path / "theirs"), torch.float64, torch.device("cpu"), (family,))
    again = opened(model, tmp_path / "ours", both.hf, families=(family,))
    before, after = both.hf.state_dict(), again.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert again.config.clip_qkv == 0.8
