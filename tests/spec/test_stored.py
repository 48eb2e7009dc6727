"""Specifications that earlier releases wrote are the same models."""

import json

import pytest

from anyformer.spec import ModelSpec, SpecError, expand, load_spec

VERSION_1 = """
{"format_version": 1, "vocab_size": 19, "decoder": {"d_model": 12, "max_positions": 9, "embed": {"position":
{"kind": "learned"}, "norm": {"kind": "rms", "eps": 1e-06, "weight": true}, "dropout": 0.1}, "blocks": [{"repeat":
2, "block": {"attention": {"kind": "grouped", "n_heads": 3, "position": {"kind": "rope", "theta": 50.0, "fraction":
0.8, "layout": "half"}, "mask": {"kind": "causal"}, "qk_norm": {"over": "head", "order": "after", "norm": {"kind":
"rms", "eps": 1e-06, "weight": true}}, "n_kv_heads": 1, "d_head": 5, "d_value": 2, "qkv_bias": false, "out_bias":
false, "dropout": 0.1, "out_dropout": 0.1}, "ffn": {"kind": "gated", "activation": "silu", "d_ff": 7, "bias": true,
"dropout": 0.0, "out_dropout": 0.1}, "norms": {"attention": {"before": {"kind": "layer", "eps": 1e-05, "weight":
true, "bias": true}, "after": {"kind": "none"}, "residual": {"kind": "none"}}, "ffn": {"before": {"kind": "layer",
"eps": 1e-05, "weight": true, "bias": true}, "after": {"kind": "none"}, "residual": {"kind": "none"}}}, "wiring":
{"kind": "serial"}}}, {"repeat": 1, "block": {"attention": {"kind": "grouped", "n_heads": 3, "position": {"kind":
"none"}, "mask": {"kind": "causal"}, "qk_norm": {"over": "head", "order": "after", "norm": {"kind": "rms", "eps":
1e-06, "weight": true}}, "n_kv_heads": 1, "d_head": 5, "d_value": 2, "qkv_bias": false, "out_bias": false,
"dropout": 0.1, "out_dropout": 0.1}, "ffn": {"kind": "dense", "activation": "relu2", "d_ff": 48, "bias": false,
"dropout": 0.0, "out_dropout": 0.1}, "norms": {"attention": {"before": {"kind": "layer", "eps": 1e-05, "weight":
true, "bias": true}, "after": {"kind": "none"}, "residual": {"kind": "none"}}, "ffn": {"before": {"kind": "layer",
"eps": 1e-05, "weight": true, "bias": true}, "after": {"kind": "none"}, "residual": {"kind": "none"}}}, "wiring":
{"kind": "serial"}}}], "final_norm": {"kind": "layer", "eps": 1e-05, "weight": true, "bias": true}}, "head":
{"kind": "language", "bias": false}, "ties": ["decoder.embed", "head"]}
"""


def test_version_1_is_the_same_model():
    spec = ModelSpec.from_json(VERSION_1)
    assert spec == expand(
        {
            "vocab_size": 19,
            "d_model": 12,
            "n_layers": 3,
            "max_positions": 9,
            "tie": True,
            "norm": "layer",
            "dropout": 0.1,
            "attention": {
                "n_heads": 3,
                "n_kv_heads": 1,
                "d_head": 5,
                "d_value": 2,
                "position": {"kind": "rope", "fraction": 0.8, "theta": 50.0},
                "qk_norm": {"order": "after"},
            },
            "ffn": {"kind": "swiglu", "d_ff": 7, "bias": True},
            "embed": {"position": "learned", "norm": "rms"},
            "pattern": [
                {"repeat": 2},
                {"attention": {"position": "none"}, "ffn": {"kind": "dense", "activation": "relu2"}},
            ],
        }
    )
    first, second, third = spec.decoder.blocks
    assert first is second
    assert first.attention.scale == pytest.approx(5**-0.5)
    assert (first.attention.softcap, first.attention.clip, first.cross, spec.decoder.owners) == (None,) * 4
    assert third.attention.position.kind == "none"
    assert (spec.encoder, spec.pooler, spec.ties) == (None, None, {"decoder.embed", "head"})
    assert (spec.decoder.embed.scale, spec.decoder.embed.types, spec.head.scale) == (1.0, 0, 1.0)


def test_an_old_file_is_written_anew_in_the_present_version():
    text = ModelSpec.from_json(VERSION_1).to_json()
    assert json.loads(text)["format_version"] == 2
    assert ModelSpec.from_json(text) == ModelSpec.from_json(VERSION_1)


def test_an_old_file_is_checked_as_strictly():
    with pytest.raises(SpecError, match="unknown key `d_modle`; did you mean `d_model`"):
        ModelSpec.from_json(VERSION_1.replace('"d_model"', '"d_modle"'))


@pytest.mark.parametrize("stack", ["encoder", "decoder"])
def test_what_is_wrong_in_a_stack_is_said_at_its_place(stack):
    """Once, however many layers have it."""
    recipe = {
        "architecture": "encoder-decoder",
        "vocab_size": 9,
        "d_model": 12,
        "n_layers": 5,
        "attention": {"n_heads": 3, "position": "none"},
        "ffn": "swiglu",
    }
    table = json.loads(load_spec(recipe).to_json())
    assert [run["repeat"] for run in table[stack]["blocks"]] == [5]
    table[stack]["blocks"][0]["block"]["attention"]["mask"]["sinks"] = 2
    with pytest.raises(SpecError) as caught:
        ModelSpec.from_json(json.dumps(table))
    (problem,) = caught.value.problems
    assert str(problem).startswith(f"{stack}.blocks.0: attention.mask.sinks = 2: without a window")
    table[stack]["blocks"] = 3
    with pytest.raises(SpecError, match=rf"{stack}\.blocks = 3: should be a list"):
        ModelSpec.from_json(json.dumps(table))


def test_text_that_is_no_stored_form_is_refused():
    """An integer of 5,000 digits, and what is no text."""
    table = load_spec("llama-tiny").to_json()
    for wrong in (table.replace("512", "9" * 5000, 1), None, 7, ""):
        with pytest.raises(SpecError, match="is not JSON"):
            ModelSpec.from_json(wrong)


def test_runs_are_added_up_before_they_are_written_out():
    """Fifty runs of 100,000 layers took minutes to be validated."""
    table = json.loads(load_spec("llama-tiny").to_json())
    (run,) = table["decoder"]["blocks"]
    table["decoder"]["blocks"] = [{**run, "repeat": 100_000}] * 50
    with pytest.raises(SpecError, match=r"decoder\.blocks: has more than 100,000 layers"):
        ModelSpec.from_json(json.dumps(table))
