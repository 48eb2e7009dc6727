"""What cannot be between fields, of every architecture: the place, the value, the reason and the remedy, word for word.

`refusals.txt` holds the cases: a base, what is set on it, and under it every problem.
"""

from importlib import import_module
from pathlib import Path

import pytest

from anyformer.spec import SpecError, load_spec
from anyformer.spec.rules import BLOCK_RULES, MODEL_RULES, apply

draft, expand = import_module("anyformer.spec.draft"), import_module("anyformer.spec.expand")
DECODER = {
    "vocab_size": 11,
    "d_model": 96,
    "n_layers": 3,
    "attention": {"n_heads": 6, "position": "rope"},
    "ffn": "swiglu",
}
BASES = {
    "decoder": DECODER,
    "encoder": {**DECODER, "architecture": "encoder"},
    "both": {**DECODER, "architecture": "encoder-decoder", "attention": {"n_heads": 6, "position": "none"}},
}
CASES = (Path(__file__).parent / "refusals.txt").read_text(encoding="utf-8").strip().split("\n\n")


@pytest.mark.parametrize("case", CASES, ids=[case.splitlines()[0][:60] for case in CASES])
def test_each_rule_says_place_value_reason_and_remedy(case):
    what, *said = case.splitlines()
    base, *overrides = what.split(" | ")
    with pytest.raises(SpecError) as caught:
        load_spec(BASES[base], overrides)
    assert [str(problem) for problem in caught.value.problems] == [line.strip() for line in said]


@pytest.mark.parametrize("base", BASES)
def test_the_bases_are_legal(base):
    assert load_spec(BASES[base])


def wrong(part, **changes):
    """What is said of a part made in Python with these values."""
    table = {name: getattr(part, name) for name in type(part).model_fields}
    with pytest.raises(ValueError) as caught:
        type(part)(**{**table, **changes})
    return str(caught.value)


def test_parts_made_in_python_obey_every_rule():
    both = load_spec(BASES["both"])
    encoder, decoder = both.encoder, both.decoder
    assert "a model has an encoder, a decoder, or both" in wrong(both, encoder=None, decoder=None)
    assert "decoder.blocks.0.cross: there is no encoder to attend to" in wrong(both, encoder=None)
    assert "encoder.blocks.0.cross: an encoder attends to itself" in wrong(both, encoder=decoder)
    assert "decoder.blocks.0.attention.mask = 'bidirectional'" in wrong(both, decoder=encoder)
    assert "ties = ['decoder.embed']: one table alone is not tied" in wrong(both, ties=frozenset({"decoder.embed"}))
    assert "norms.cross: the block has no cross" in wrong(decoder.blocks[0], cross=None)
    identity = decoder.model_copy(update={"owners": (0, 1, 2)})
    assert "decoder.owners: every layer has its own parameters" in wrong(both, decoder=identity)
    behind = decoder.model_copy(update={"owners": (0, 2, 2)})
    assert "decoder.owners.1 = 2: a layer uses its own" in wrong(both, decoder=behind)


def test_every_rule_speaks_in_some_case(monkeypatch):
    """So that none is there for nothing; a model without a stack is no recipe's."""
    silent = {rule: rule.__doc__ for rule in (*BLOCK_RULES, *MODEL_RULES)}

    def listening(rules, read):
        for rule in rules:
            found = list(apply((rule,), read))
            if found:
                silent.pop(rule, None)
            yield from found

    for module in (draft, expand):
        monkeypatch.setattr(module, "apply", listening)
    for case in CASES:
        base, *overrides = case.splitlines()[0].split(" | ")
        with pytest.raises(SpecError):
            load_spec(BASES[base], overrides)
    # The owners' rule is heard of in a recipe without its stack's name.
    assert sorted(silent.values()) == [
        "A layer uses its own parameters or those of an earlier layer that is described alike.",
        "A model is at least an encoder or a decoder.",
    ]
