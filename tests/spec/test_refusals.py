"""What cannot be is refused when it is described: the value, the reason, the nearest legal choice, all at once."""

import copy
import json

import pytest

from anyformer.errors import UserError
from anyformer.spec import ModelSpec, Problem, SpecError, expand, load_spec
from anyformer.spec.problems import did_you_mean, neighbours

BASE = {
    "vocab_size": 11,
    "d_model": 96,
    "n_layers": 3,
    "attention": {"n_heads": 6, "position": "rope"},
    "ffn": "swiglu",
}


def problems(*removed, **changes):
    recipe = copy.deepcopy({**BASE, **changes})
    for key in removed:
        del recipe[key]
    with pytest.raises(SpecError) as caught:
        expand(recipe)
    return [str(problem) for problem in caught.value.problems]


def heads(**changes):
    return {**BASE["attention"], **changes}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"attention": heads(n_heads=9, n_kv_heads=4, d_head=16)},
            "attention.n_kv_heads = 4: n_heads=9 is not a multiple of n_kv_heads=4; 3 or 9 would do",
        ),
        (
            {"attention": heads(n_kv_heads=7)},
            "attention.n_kv_heads = 7: n_heads=6 is not a multiple of n_kv_heads=7; 6 would do",
        ),
        (
            {"attention": heads(n_heads=5)},
            "attention.n_heads = 5: d_model=96 is not a multiple of n_heads=5 and attention.d_head is not given; "
            "4 or 6 would do, or give attention.d_head",
        ),
        (
            {"attention": heads(d_head=15)},
            "attention.d_head = 15: rotary positions turn pairs of channels and d_head=15 is odd; "
            "14 or 16, or a fraction below 1, would do",
        ),
        (
            {"attention": heads(d_head=1)},
            "attention.d_head = 1: a head of one channel has no pair to rotate; 2 would do",
        ),
        (
            {"attention": heads(position={"kind": "rope", "fraction": 0.3125})},
            "attention.position.fraction = 0.3125: of d_head=16 it turns 5 channels, which do not make pairs; "
            "0.25 (4 channels) would do",
        ),
        (
            {"attention": heads(position={"kind": "rope", "fraction": 0.01})},
            "attention.position.fraction = 0.01: of d_head=16 it turns 0 channels, which do not make pairs; "
            "0.125 (2 channels) would do",
        ),
        (
            {"wiring": "parallel", "placement": "post"},
            "norms.attention.residual: parallel wiring adds both branches at once, so that no branch has a residual "
            'sum of its own to norm; placement = "pre", or wiring = "serial", would do',
        ),
        (
            {"wiring": "parallel", "norms": {"attention": {"before": "rms"}, "ffn": {"before": "layer"}}},
            "norms.ffn.before = 'layer': the branches share one norm but describe two; "
            "wiring.shared_norm = false would do",
        ),
        (
            {"embed": {"position": "learned"}},
            "max_positions: learned positions need the length of their table; max_positions = 1024, say, would do",
        ),
        (
            {"embed": {"position": "sinusoidal"}, "d_model": 95, "attention": {"n_heads": 5, "position": "none"}},
            "d_model = 95: sinusoidal positions fill pairs of channels and d_model=95 is odd; 94 or 96 would do",
        ),
        ({"tie": True, "head": "none"}, "tie: there is no head to tie to the embedding; tie = false would do"),
        (
            {"pattern": [{"repeat": 2}, {"repeat": 3}]},
            "pattern: is 5 layers long and the stack has 3, so that its end is never used; "
            "n_layers = 5 or a shorter pattern would do",
        ),
        ({"pattern": [{"repeat": 0}]}, "pattern.0.repeat = 0: is a number of layers, at least 1"),
        ({"pattern": [{"repeat": True}]}, "pattern.0.repeat = True: is a number of layers, at least 1"),
        (
            {"pattern": [{"attention": {"n_kv_heads": 5}}]},
            "pattern.0.attention.n_kv_heads = 5: n_heads=6 is not a multiple of n_kv_heads=5; 3 or 6 would do",
        ),
        ({"pattern": [{"atention": {}}]}, "pattern.0.atention: unknown key `atention`; did you mean `attention`?"),
        ({"pattern": [3]}, "pattern.0 = 3: should be a table"),
        ({"pattern": [{"attention": 3}]}, "pattern.0.attention = 3: should be a table"),
    ],
)
def test_each_rule_says_value_reason_and_remedy(changes, said):
    assert problems(**changes) == [said]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"vocab_size": 0}, "vocab_size = 0: should be greater than or equal to 1"),
        ({"n_layers": 0}, "n_layers = 0: should be greater than or equal to 1"),
        ({"n_layers": 10**12}, "n_layers = 1000000000000: should be less than or equal to 100000"),
        ({"d_model": 2**70}, f"d_model = {2**70}: should be less than or equal to 1048576"),
        ({"vocab_size": 2**70}, f"vocab_size = {2**70}: should be less than or equal to 16777216"),
        ({"max_positions": 2**31 + 1}, "max_positions = 2147483649: should be less than or equal to 2147483648"),
        ({"attention": heads(n_heads=2**70)}, f"attention.n_heads = {2**70}: should be less than or equal to 65536"),
        ({"attention": heads(n_kv_heads=2**70)}, f"attention.n_kv_heads = {2**70}: should be less than or equal to"),
        ({"attention": heads(d_head=2**70)}, f"attention.d_head = {2**70}: should be less than or equal to 1048576"),
        ({"attention": heads(d_value=2**70)}, f"attention.d_value = {2**70}: should be less than or equal to 1048576"),
        ({"ffn": {"kind": "swiglu", "d_ff": 2**70}}, f"ffn.d_ff = {2**70}: should be less than or equal to 4194304"),
        ({"ffn": {"kind": "swiglu", "multiple_of": 2**70}}, f"ffn.multiple_of = {2**70}: should be less than or equal"),
        ({"n_layers": True}, "n_layers = True: should be a valid integer"),
        ({"d_model": "wide"}, "d_model = 'wide': should be a valid integer"),
        ({"d_model": 96.0}, "d_model = 96.0: should be a valid integer"),
        ({"max_positions": 0}, "max_positions = 0: should be greater than or equal to 1"),
        ({"bias": 1}, "bias = 1: should be a valid boolean"),
        ({"dropout": 1.0}, "dropout = 1.0: should be less than 1"),
        ({"dropout": -0.1}, "dropout = -0.1: should be greater than or equal to 0"),
        ({"attention": heads(dropout=1.5)}, "attention.dropout = 1.5: should be less than 1"),
        ({"embed": {"dropout": 1.0}}, "embed.dropout = 1.0: should be less than 1"),
        ({"norm": {"kind": "rms", "eps": 0}}, "norm.eps = 0: should be greater than 0"),
        ({"norm": {"kind": "rms", "eps": float("nan")}}, "norm.eps = nan: should be a finite number"),
        ({"norm": {"kind": "layer", "eps": float("inf")}}, "norm.eps = inf: should be a finite number"),
        (
            {"attention": heads(position={"kind": "rope", "theta": 0})},
            "attention.position.theta = 0: should be greater",
        ),
        (
            {"attention": heads(position={"kind": "rope", "fraction": 1.5})},
            "attention.position.fraction = 1.5: should be",
        ),
        ({"ffn": {"kind": "swiglu", "multiple_of": 0}}, "ffn.multiple_of = 0: should be greater than or equal to 1"),
        ({"ffn": {"kind": "swiglu", "d_ff": 0}}, "ffn.d_ff = 0: should be greater than or equal to 1"),
        ({"attention": 4}, "attention = 4: should be a table"),
    ],
)
def test_each_field_says_its_value_and_its_range(changes, said):
    (problem,) = problems(**changes)
    assert problem.startswith(said)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"ffn": "swigluu"}, "ffn.kind: unknown choice `swigluu`; did you mean `swiglu`?"),
        ({"ffn": {"kind": "dens", "activation": "relu"}}, "ffn.kind: unknown choice `dens`; did you mean `dense`?"),
        (
            {"ffn": {"kind": "dense", "activation": "gelu_new"}},
            "ffn.activation: unknown choice `gelu_new`; did you mean",
        ),
        (
            {"attention": heads(position="roppe")},
            "attention.position.kind: unknown choice `roppe`; did you mean `rope`?",
        ),
        (
            {"attention": heads(position="polar")},
            "attention.position.kind: unknown choice `polar`; known: alibi, none, relative, rope",
        ),
        ({"attention": heads(mask="causl")}, "attention.mask.kind: unknown choice `causl`; did you mean `causal`?"),
        (
            {"attention": heads(qk_norm={"over": "heads"})},
            "attention.qk_norm.over: unknown choice `heads`; did you mean",
        ),
        (
            {"attention": heads(position={"kind": "rope", "layout": "halves"})},
            "attention.position.layout: unknown choice",
        ),
        ({"norm": "rmss"}, "norm.kind: unknown choice `rmss`; did you mean `rms`?"),
        ({"final_norm": "layr"}, "final_norm.kind: unknown choice `layr`; did you mean `layer`?"),
        ({"norms": {"ffn": {"after": "rmz"}}}, "norms.ffn.after.kind: unknown choice `rmz`; did you mean `rms`?"),
        ({"placement": "middle"}, "placement: unknown choice `middle`; known: output, post, pre, sandwich"),
        ({"wiring": "parallell"}, "wiring.kind: unknown choice `parallell`; did you mean `parallel`?"),
        ({"head": "languag"}, "head.kind: unknown choice `languag`; did you mean `language`?"),
        ({"embed": {"position": "learnt"}}, "embed.position.kind: unknown choice `learnt`; did you mean `learned`?"),
        ({"d_modell": 4}, "d_modell: unknown key `d_modell`; did you mean `d_model`?"),
        ({"ffn": {"kind": "swiglu", "dff": 4}}, "ffn.dff: unknown key `dff`; did you mean `d_ff`?"),
        ({"attention": heads(n_kv_head=4)}, "attention.n_kv_head: unknown key `n_kv_head`; did you mean `n_kv_heads`?"),
        ({"embed": {"positions": "none"}}, "embed.positions: unknown key `positions`; did you mean `position`?"),
        (
            {"norm": {"kind": "rms", "mean": True}},
            "norm.mean: unknown key `mean`; known: bias, eps, kind, offset, weight",
        ),
        ({"attention": heads(qk_norm={"normm": "rms"})}, "attention.qk_norm.normm: unknown key `normm`; did you mean"),
        (
            {"wiring": {"kind": "parallel", "share_norm": True}},
            "wiring.share_norm: unknown key `share_norm`; did you mean",
        ),
        ({"colour": 50.0}, "colour: unknown key `colour`; known: alpha, architecture, attention, beta, bias,"),
        ({"attention": heads(colour=64)}, "attention.colour: unknown key `colour`; known: clip, d_head,"),
    ],
)
def test_an_unknown_word_is_answered_with_the_nearest(changes, said):
    """An unknown activation too is refused rather than dropped."""
    (problem,) = problems(**changes)
    assert problem.startswith(said)


@pytest.mark.parametrize("key", ["vocab_size", "d_model", "n_layers", "attention", "ffn"])
def test_a_missing_key_is_named(key):
    assert problems(key) == [f"{key}: is required and not given"]


@pytest.mark.parametrize(
    ("key", "misspelt"),
    [("vocab_size", "vocabsize"), ("attention", "atention"), ("n_layers", "n_layer"), ("ffn", "fnn")],
)
def test_a_misspelt_key_is_not_also_reported_as_missing(key, misspelt):
    assert problems(key, **{misspelt: BASE[key]}) == [f"{misspelt}: unknown key `{misspelt}`; did you mean `{key}`?"]


def test_a_misspelt_key_in_a_table_is_not_also_reported_as_missing():
    (problem,) = problems(attention={"n_head": 6, "position": "rope"})
    assert problem == "attention.n_head: unknown key `n_head`; did you mean `n_heads`?"


def test_a_table_without_its_kind():
    assert problems(norm={"eps": 1e-5}) == ["norm.kind: is required and not given; known: layer, none, rms"]
    assert problems(ffn={"activation": "relu"}) == [
        "ffn.kind: is required and not given; known: dense, gated, geglu, moe, reglu, swiglu"
    ]
    assert problems(norms={"ffn": {"after": {}}}) == [
        "norms.ffn.after.kind: is required and not given; known: layer, none, rms"
    ]
    assert problems(attention={"n_heads": 6}) == ["attention.position: is required and not given"]


def test_field_errors_do_not_hide_rule_errors_and_nothing_is_said_twice():
    found = problems(
        vocab_size=-1,
        dropout=2.0,
        attention=heads(n_heads=9, n_kv_heads=4, position="roppe"),
        ffn="swigluu",
        norm={"kind": "rms", "eps": -1.0},
        tie=True,
        head="none",
        embed={"position": "learned"},
        pattern=[{"attention": {"n_kv_heads": 2}}, {"atention": 1}, {"repeat": 5}],
        colour="red",
    )
    assert len(found) == len(set(found))
    for start in (
        "vocab_size = -1:",
        "dropout = 2.0:",
        "attention.position.kind: unknown choice `roppe`",
        "ffn.kind: unknown choice `swigluu`",
        "norm.eps = -1.0:",
        "colour: unknown key",
        "attention.n_heads = 9: d_model=96 is not a multiple of n_heads=9",
        "attention.n_kv_heads = 4: n_heads=9 is not",
        "tie: there is no head",
        "max_positions: learned positions",
        "pattern.0.attention.n_kv_heads = 2: n_heads=9 is not",
        "pattern.1.atention: unknown key",
        "pattern: is 7 layers long",
    ):
        assert sum(p.startswith(start) for p in found) == 1, start
    assert len(found) == 13


def test_an_unknown_number_silences_only_the_rules_that_need_it():
    found = problems(attention=heads(n_heads="six", n_kv_heads=4), tie=True, head="none")
    assert found == [
        "attention.n_heads = 'six': should be a valid integer",
        "tie: there is no head to tie to the embedding; tie = false would do",
    ]


def test_the_message_counts_the_problems_and_names_the_source(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("vocab_size = 0\nd_model = 0\n")
    with pytest.raises(SpecError, match=r"^5 problems in .*mine\.toml\n  ") as caught:
        load_spec(path)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, UserError)
    assert all(isinstance(problem, Problem) for problem in caught.value.problems)
    with pytest.raises(SpecError, match=r"^1 problem in llama-tiny\n"):
        load_spec("llama-tiny", ["attention.n_kv_heads=4"])


def stored(change):
    table = json.loads(load_spec("llama-tiny").to_json())
    change(table)
    with pytest.raises(SpecError) as caught:
        ModelSpec.from_json(json.dumps(table))
    return [str(problem) for problem in caught.value.problems]


def _block(table):
    return table["decoder"]["blocks"][0]["block"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop("format_version"), "format_version = None: is not a format version"),
        (lambda t: t.update(format_version=True), "format_version = True: is not a format version"),
        (
            lambda t: t.update(format_version=99),
            "format_version = 99: is newer than 2, the newest that this release knows; "
            "a newer release of anyformer reads it",
        ),
        (lambda t: t.pop("vocab_size"), "vocab_size: is required and not given"),
        (lambda t: t.update(vocab_size=0), "vocab_size = 0: should be greater than or equal to 1"),
        (lambda t: t["decoder"].update(d_modle=4), "decoder.d_modle: unknown key `d_modle`; did you mean `d_model`?"),
        (lambda t: t["decoder"].update(blocks=[]), "decoder.blocks = []: tuple should have at least 1 item"),
        (
            lambda t: t["decoder"]["blocks"][0].update(repeat=0),
            'decoder.blocks.0: is not a run {"repeat": 1 or more, "block": {…}}',
        ),
        (lambda t: t["decoder"].update(blocks=[3]), "decoder.blocks.0: is not a run"),
        (
            lambda t: t.update(ties=["head"]),
            "(the whole): ties = ['head']: one table alone is not tied; name two or none",
        ),
        (
            lambda t: _block(t)["attention"].update(n_kv_heads=4),
            "decoder.blocks.0: attention.n_kv_heads = 4: n_heads=6 is not a multiple of n_kv_heads=4; 3 or 6 would do",
        ),
        (lambda t: _block(t)["attention"].update(sofcap=4), "decoder.blocks.0.attention.sofcap: unknown key `sofcap`"),
        (
            lambda t: _block(t)["ffn"].update(activation="swish"),
            "decoder.blocks.0.ffn.activation: unknown choice `swish`",
        ),
        (lambda t: _block(t).update(wiring={"kind": "paralel"}), "decoder.blocks.0.wiring.kind: unknown choice"),
        (lambda t: _block(t).update(attention=None), "decoder.blocks.0.attention = None: should be a table"),
    ],
)
def test_a_stored_specification_is_checked_as_strictly(change, said):
    """An unknown key of a stored model is refused, not dropped; said once however many layers share it."""
    (problem,) = stored(change)
    assert problem.startswith(said)


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", "3", '{"format_version": 1'])
def test_text_that_is_no_specification(text):
    with pytest.raises(SpecError, match=r"is not (a )?JSON"):
        ModelSpec.from_json(text)


def test_a_stored_file_that_cannot_be_read_is_named(tmp_path):
    path = tmp_path / "spec.json"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(SpecError, match="cannot be read") as caught:
        load_spec(path)
    assert str(path) in str(caught.value)


def test_parts_check_themselves():
    """A specification made in Python obeys the same rules."""
    spec = load_spec("llama-tiny")
    table = spec.model_dump()
    table["decoder"]["max_positions"] = None
    table["decoder"]["embed"]["position"] = {"kind": "learned"}
    with pytest.raises(ValueError, match="learned positions need the length"):
        ModelSpec.model_validate(table)


def test_the_words_of_remedies():
    assert neighbours(4, [1, 3, 9]) == "3 or 9 would do"
    assert neighbours(10, [1, 3, 9]) == "9 would do"
    assert neighbours(1, []) == "no value would do"
    assert did_you_mean("atention", ["attention", "ffn"]) == "attention"
    assert did_you_mean("zzz", ["attention", "ffn"]) is None


@pytest.mark.parametrize(
    "ffn", ["swiglu", {"kind": "dense", "activation": "relu"}, {"kind": "geglu", "multiple_of": 2**20}]
)
def test_the_widest_model_is_still_a_model(ffn):
    """Numbers that follow from the largest d_model are inside their own bounds."""
    spec = expand({**BASE, "d_model": 2**20, "attention": heads(n_heads=1), "ffn": ffn})
    assert spec.decoder.blocks[0].ffn.d_ff >= 8 * 2**20 // 3


def test_slips_of_one_or_two_letters_are_matched_and_other_words_are_not():
    known = ["kind", "n_heads", "d_head", "position", "mask", "ffn", "rms", "layer", "activation"]
    for word, meant in (
        ("fnn", "ffn"), ("rmz", "rms"), ("knid", "kind"), ("lyaer", "layer"), ("nhead", "n_heads"), ("msk", "mask"),
        ("postiion", "position"), ("positon", "position"), ("activaton", "activation"), ("acctivatoin", "activation"),
    ):  # fmt: skip
        assert did_you_mean(word, known) == meant, word
    for word in ("window", "softcap", "alibi", "bias", "x", "relu", "groups", "head_dim_per_group"):
        assert did_you_mean(word, known) is None, word


def test_what_is_no_table_of_words_is_refused():
    """Python's tables may have keys that no file can have."""
    for wrong in (None, 3, [], "llama-tiny"):
        with pytest.raises(SpecError, match=r"\(the whole\).*should be a table"):
            expand(wrong)
    assert problems(attention=heads(position={"kind": "rope", 4: 1})) == ["attention.position.4 = 4: a key is a word"]
    assert problems(pattern=[{}, {"attention": {None: 1}}]) == ["pattern.1.attention.None = None: a key is a word"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"attention": heads(scale=1e-300)}, "attention.scale = 1e-300: should be at least 1e-30"),
        ({"attention": heads(scale=1e300)}, "attention.scale = 1e+300: should be less than or equal to"),
        ({"attention": heads(softcap=1e300)}, "attention.softcap = 1e+300: should be less than or equal to"),
        ({"alpha": 1e300}, "alpha = 1e+300: should be less than"),
        ({"norm": {"kind": "rms", "eps": 1e-300}}, "norm.eps = 1e-300: should be at least 1e-30: smaller numbers are"),
        ({"ffn": {"kind": "swiglu", "up_offset": -1e300}}, "ffn.up_offset = -1e+300: should be greater than or equal"),
        (
            {
                "attention": heads(
                    position={
                        "kind": "rope",
                        "scaling": {"kind": "yarn", "factor": 2.0, "original": 9, "beta_slow": 5e-324},
                    }
                )
            },
            "attention.position.scaling.beta_slow = 5e-324: should be at least 1e-30",
        ),
    ],
)
def test_numbers_that_float32_does_not_hold(changes, said):
    """They became 0 or infinity, and 0 times infinity is no number."""
    assert problems(**changes)[0].startswith(said)


def test_a_default_that_follows_from_what_is_missing_is_not_said():
    scaling = {"kind": "yarn", "factor": 2.0}
    assert problems(attention=heads(position={"kind": "rope", "scaling": scaling})) == [
        "attention.position.scaling.original: is required and not given"
    ]
