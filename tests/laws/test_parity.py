"""The comparison with a published implementation: it holds for what is right, and catches what is not."""

import importlib.util

import pytest
import torch

from anyformer.laws import parity as book
from anyformer.laws.draw import fresh
from anyformer.laws.parity import NAMES, parity
from anyformer.spec import load_spec
from anyformer.weights import hf

SMALL = ["d_model=18", "n_layers=2", "vocab_size=19", "attention.n_heads=3", "attention.n_kv_heads=1"]
pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def model():
    return fresh(load_spec("llama-tiny", SMALL), 3)


def test_a_published_kind_of_model_is_compared(model):
    results = parity(model, 0)
    assert [result.law for result in results] == list(NAMES)
    assert all(result.holds for result in results)
    assert all(result.error < 2e-6 for result in results)


def test_weights_in_half_precision_are_compared_in_float32(model):
    import copy

    assert all(result.holds for result in parity(copy.deepcopy(model).bfloat16(), 0))


def test_what_no_family_says_has_no_case():
    results = parity(fresh(load_spec("llama-tiny", [*SMALL, "alpha=1.5"])), 0)
    assert {result.holds for result in results} == {None}
    assert "no published family" in results[0].why


def test_without_transformers_there_is_no_case(model, monkeypatch):
    monkeypatch.setattr(book, "find_spec", lambda name: None)
    assert {result.why for result in parity(model, 0)} == {"transformers is not installed"}
    assert importlib.util.find_spec("transformers") is not None


def test_a_wrong_weight_is_caught(model, monkeypatch):
    """What is written is a little off: the logits say so, and so does what comes back."""
    before = hf.to_theirs

    def off(step, ours):
        return [value * 1.001 if "q_proj" in step.theirs[0] else value for value in before(step, ours)]

    monkeypatch.setattr(hf, "to_theirs", off)
    files, logits, padding, cache = parity(model, 0)
    assert not files.holds
    assert "attention.q.weight after both directions" in files.where
    assert not logits.holds
    assert not padding.holds
    assert not cache.holds


def test_a_wrong_setting_is_caught(model, monkeypatch):
    def write(spec):
        config, reading = before(spec)
        return {**config, "rope_theta": 9000.0}, reading

    before = book.write_config
    monkeypatch.setattr(book, "write_config", write)
    files, logits, *_ = parity(model, 0)
    assert files.holds
    assert not logits.holds


def test_a_folder_that_does_not_open_there_is_a_finding(model, monkeypatch):
    def write(spec):
        config, reading = before(spec)
        return {**config, "hidden_size": 17}, reading

    before = book.write_config
    monkeypatch.setattr(book, "write_config", write)
    results = parity(model, 0)
    assert results[0].holds is False
    assert torch.tensor([r.holds is True for r in results[1:]]).sum() == 0
