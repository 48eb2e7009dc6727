"""What a recipe means: every default, shorthand, override and pattern."""

import pytest

from anyformer.errors import UserError
from anyformer.spec import ModelSpec, SpecError, expand, load_recipe, load_spec
from anyformer.spec.idle import without_idle
from anyformer.spec.overrides import parse_override
from anyformer.spec.parts import (
    Causal,
    Dense,
    Gated,
    LayerNorm,
    Learned,
    NoNorm,
    NoPosition,
    Parallel,
    QKNorm,
    RMSNorm,
    Rope,
)
from anyformer.train.run import load_run

BASE = {
    "vocab_size": 11,
    "d_model": 24,
    "n_layers": 3,
    "attention": {"n_heads": 6, "position": "rope"},
    "ffn": "swiglu",
}


def block(**changes):
    return expand({**BASE, **changes}).decoder.blocks[0]


def attention(**changes):
    return block(attention={**BASE["attention"], **changes}).attention


def test_what_is_not_given_follows_from_what_is():
    spec = expand(BASE)
    a = spec.decoder.blocks[0].attention
    assert (a.n_heads, a.n_kv_heads, a.d_head, a.d_value) == (6, 6, 4, 4)
    assert (a.qkv_bias, a.out_bias, a.dropout, a.out_dropout, a.qk_norm) == (False, False, 0.0, 0.0, None)
    assert a.position == Rope(theta=10000.0, fraction=1.0, layout="half")
    assert spec.decoder.n_layers == 3
    assert spec.decoder.max_positions is None
    assert spec.decoder.final_norm == RMSNorm(eps=1e-6)
    assert spec.head is not None
    assert not spec.ties
    norms = spec.decoder.blocks[0].norms
    assert norms.attention.before == norms.ffn.before == RMSNorm()
    assert norms.attention.after == norms.attention.residual == NoNorm()
    assert spec.decoder.embed.position == NoPosition()


def test_d_value_follows_d_head_and_d_head_is_free():
    a = attention(d_head=10, n_kv_heads=2)
    assert (a.d_head, a.d_value, a.n_kv_heads) == (10, 10, 2)
    assert attention(d_head=10, d_value=7).d_value == 7


@pytest.mark.parametrize(
    ("d_model", "ffn", "d_ff"),
    [
        (128, "swiglu", 384),
        (96, "swiglu", 256),
        (192, "geglu", 512),
        (100, {"kind": "gated", "activation": "silu", "multiple_of": 1}, 266),
        (100, {"kind": "reglu", "multiple_of": 7}, 266),
        (100, {"kind": "reglu", "multiple_of": 8}, 272),
        (100, {"kind": "dense", "activation": "relu"}, 400),
        (100, {"kind": "dense", "activation": "relu", "d_ff": 33}, 33),
        (100, {"kind": "swiglu", "d_ff": 33}, 33),
    ],
)
def test_the_width_of_a_feed_forward(d_model, ffn, d_ff):
    """Dense is 4·C; gated is 8/3·C rounded up to a multiple."""
    heads = {"n_heads": 2, "position": "none"}
    assert expand({**BASE, "d_model": d_model, "attention": heads, "ffn": ffn}).decoder.blocks[0].ffn.d_ff == d_ff


@pytest.mark.parametrize(
    ("word", "kind", "activation"),
    [("swiglu", Gated, "silu"), ("geglu", Gated, "gelu"), ("reglu", Gated, "relu")],
)
def test_the_words_for_gated_feed_forwards(word, kind, activation):
    for ffn in (block(ffn=word).ffn, block(ffn={"kind": word, "bias": True}).ffn):
        assert type(ffn) is kind
        assert ffn.activation == activation


def test_words_stand_for_tables():
    assert block(norm="layer").norms.attention.before == LayerNorm(eps=1e-5)
    assert block(wiring="parallel").wiring == Parallel(shared_norm=True)
    assert attention(position="none").position == NoPosition()
    assert attention(mask="causal").mask.kind == "causal"
    assert attention(qk_norm=True).qk_norm == QKNorm(over="head", order="before", norm=RMSNorm())
    assert attention(qk_norm=False).qk_norm is None
    assert attention(qk_norm={"norm": "layer", "over": "projection"}).qk_norm.norm == LayerNorm()
    spec = expand({**BASE, "final_norm": "layer", "head": "none", "embed": {"norm": "rms", "position": "sinusoidal"}})
    assert spec.decoder.final_norm == LayerNorm()
    assert spec.head is None
    assert spec.decoder.embed.norm == RMSNorm()
    assert spec.decoder.embed.position.kind == "sinusoidal"
    assert block(norms={"ffn": {"after": "layer"}}).norms.ffn.after == LayerNorm()
    assert block(ffn={"kind": "dense", "activation": "relu2"}).ffn == Dense(activation="relu2", d_ff=96)


@pytest.mark.parametrize(
    ("placement", "filled"),
    [("pre", {"before"}), ("post", {"residual"}), ("sandwich", {"before", "after"}), ("output", {"after"})],
)
def test_a_placement_fills_the_slots_it_names(placement, filled):
    norms = block(norm="layer", placement=placement).norms
    for branch in (norms.attention, norms.ffn):
        for slot in ("before", "after", "residual"):
            assert getattr(branch, slot) == (LayerNorm() if slot in filled else NoNorm())


def test_the_final_norm_is_the_norm_unless_the_placement_is_post_or_the_slots_are_given():
    def final(**changes):
        return expand({**BASE, **changes}).decoder.final_norm

    assert final(norm="layer") == LayerNorm()
    assert final(norm="layer", placement="sandwich") == LayerNorm()
    assert final(norm="layer", placement="output") == LayerNorm()
    assert final(norm="layer", placement="post") == NoNorm()
    assert final(norms={"ffn": {"after": "layer"}}) == NoNorm()
    assert final(norm="layer", placement="post", final_norm="rms") == RMSNorm()


def test_bias_and_dropout_are_defaults_of_every_part():
    spec = expand({**BASE, "bias": True, "dropout": 0.2})
    a, f = spec.decoder.blocks[0].attention, spec.decoder.blocks[0].ffn
    assert (a.qkv_bias, a.out_bias, f.bias) == (True, True, True)
    assert (a.dropout, a.out_dropout, f.out_dropout, spec.decoder.embed.dropout) == (0.2, 0.2, 0.2, 0.2)
    assert f.dropout == 0.0
    assert spec.head.bias is False
    own = {"n_heads": 6, "position": "rope", "qkv_bias": False, "dropout": 0.0}
    spec = expand({**BASE, "bias": True, "dropout": 0.2, "attention": own, "embed": {"dropout": 0.0}})
    a = spec.decoder.blocks[0].attention
    assert (a.qkv_bias, a.out_bias, a.dropout, a.out_dropout) == (False, True, 0.0, 0.2)
    assert spec.decoder.embed.dropout == 0.0


def test_a_tie_names_both_tables():
    assert expand({**BASE, "tie": True}).ties == {"decoder.embed", "head"}


def test_a_pattern_repeats_and_lays_its_entries_on_the_root():
    spec = expand(
        {
            **BASE,
            "n_layers": 5,
            "attention": {**BASE["attention"], "qk_norm": True},
            "pattern": [
                {"repeat": 2, "attention": {"position": {"kind": "rope", "theta": 5.0}}},
                {"attention": {"position": "none", "n_kv_heads": 2, "qk_norm": False}, "ffn": "reglu", "norm": "layer"},
            ],
        }
    )
    blocks = spec.decoder.blocks
    assert [b.attention.position.kind for b in blocks] == ["rope", "rope", "none", "rope", "rope"]
    assert blocks[0].attention.position.theta == 5.0
    assert blocks[0].attention.qk_norm is not None
    assert blocks[2].attention.qk_norm is None
    assert (blocks[2].attention.n_kv_heads, blocks[2].attention.n_heads) == (2, 6)
    assert blocks[2].ffn.activation == "relu"
    assert blocks[2].norms.ffn.before == LayerNorm()
    assert blocks[0] is blocks[1] is blocks[3] is blocks[4]
    assert spec.decoder.final_norm == RMSNorm()


def test_a_table_of_the_same_kind_keeps_what_an_entry_does_not_say():
    recipe = {
        **BASE,
        "attention": {"n_heads": 6, "position": {"kind": "rope", "theta": 5.0, "layout": "interleaved"}},
        "ffn": {"kind": "gated", "activation": "relu", "d_ff": 9},
        "pattern": [
            {"attention": {"position": {"theta": 7.0}}},
            {"ffn": {"kind": "dense", "activation": "relu"}},
        ],
    }
    first, second, third = expand(recipe).decoder.blocks
    assert (first.attention.position.theta, first.attention.position.layout) == (7.0, "interleaved")
    assert (second.ffn.kind, second.ffn.d_ff) == ("dense", 96)
    assert third is first


WINDOWED = {"n_heads": 6, "position": "rope", "mask": {"kind": "causal", "window": 5, "sinks": 2}}


@pytest.mark.parametrize(
    "entry",
    [
        {},
        {"attention": {}},
        # Differences, and words that leave nothing of the root's unsaid, may say again what is so.
        {"attention": {"n_heads": 6}},
        {"attention": {"mask": {"window": 5}}},
        {"attention": {"mask": {"kind": "causal", "window": 5, "sinks": 2}}},
        {"attention": {"position": "rope"}},
        {"ffn": "swiglu", "placement": "pre"},
        {"attention": {"kind": "grouped"}, "norm": "rms"},
    ],
)
def test_an_entry_may_say_again_what_the_root_says(entry):
    recipe = {**BASE, "attention": {**WINDOWED, "mask": WINDOWED["mask"]}, "placement": "pre"}
    if entry.get("attention", {}).get("kind"):
        recipe["attention"] = BASE["attention"]
    first, second, _ = expand({**recipe, "pattern": [{}, entry]}).decoder.blocks
    assert first is second


@pytest.mark.parametrize("mask", [{"window": 5}, {"kind": "causal", "window": 5}])
def test_a_kind_that_is_left_out_is_the_one_it_follows_to(mask):
    """An entry lays on the same mask whether the root names its kind or not."""
    recipe = {**BASE, "attention": {**WINDOWED, "mask": mask}}
    entry = {"attention": {"mask": {"kind": "causal", "sinks": 1}}}
    assert expand({**recipe, "pattern": [{}, entry]}).decoder.blocks[1].attention.mask == Causal(window=5, sinks=1)
    with pytest.raises(SpecError, match="changes nothing"):
        expand({**recipe, "pattern": [{}, {"attention": {"mask": "causal"}}]})


def test_what_changes_nothing_can_be_left_out_at_every_depth():
    entry = {"attention": {"kind": "grouped", "mask": "causal"}, "norm": "rms", "ffn": "reglu"}
    recipe = {
        **BASE,
        "attention": WINDOWED,
        "norm": {"kind": "rms", "eps": 0.1},
        "pattern": [{"repeat": 2}, entry],
    }
    with pytest.raises(SpecError) as caught:
        expand(recipe)
    assert [problem.path for problem in caught.value.problems] == ["pattern.1.attention.mask", "pattern.1.norm"]
    plain = without_idle(recipe)
    assert plain["pattern"] == [{"repeat": 2}, {"ffn": "reglu"}]
    assert recipe["pattern"][1] is entry
    assert expand(plain).decoder.blocks[2].attention.mask.window == 5


@pytest.mark.parametrize(
    ("text", "keys", "value"),
    [
        ("a=1", ("a",), 1),
        ("a.b = 1e-3", ("a", "b"), 1e-3),
        ("a=true", ("a",), True),
        ("a=[1, 2]", ("a",), [1, 2]),
        ('a="x y"', ("a",), "x y"),
        ("a=rope", ("a",), "rope"),
        ("a=path=with=equals", ("a",), "path=with=equals"),
        ('a={kind = "rope"}', ("a",), {"kind": "rope"}),
    ],
)
def test_an_override_is_toml_or_a_word(text, keys, value):
    assert parse_override(text) == (keys, value)


def test_overrides_reach_every_depth():
    overrides = [
        "d_model=48",
        "attention.n_kv_heads=2",
        "attention.position.theta=500",
        "ffn.d_ff=33",
        "embed.position=learned",
        "max_positions=17",
        "pattern=[{repeat = 1}, {ffn = 'reglu'}]",
        "pattern.1.ffn=geglu",
        "pattern.0.attention.position=none",
    ]
    spec = load_spec(BASE, overrides)
    first, second, third = spec.decoder.blocks
    assert spec.decoder.d_model == 48
    assert spec.decoder.embed.position == Learned()
    assert (second.attention.n_kv_heads, second.attention.position.theta) == (2, 500.0)
    assert (first.ffn.d_ff, first.ffn.activation, first.attention.position.kind) == (33, "silu", "none")
    assert second.ffn.activation == "gelu"
    assert third == first
    assert BASE["attention"] == {"n_heads": 6, "position": "rope"}


def test_a_word_on_the_way_keeps_its_kind():
    """`position.theta` set on `position = "rope"` keeps the rope; `ffn.d_ff` on "swiglu" keeps the gate."""
    spec = load_spec(BASE, ["attention.position.layout=interleaved", "ffn.bias=true"])
    assert spec.decoder.blocks[0].attention.position == Rope(layout="interleaved")
    assert spec.decoder.blocks[0].ffn.kind == "gated"


def test_overrides_apply_to_an_expanded_specification(tmp_path):
    spec = expand(BASE)
    assert load_spec(spec) is spec
    changed = load_spec(spec, ["n_layers=2", "attention.n_kv_heads=3"])
    assert changed.decoder.n_layers == 2
    assert changed.decoder.blocks[0].attention.n_kv_heads == 3
    path = tmp_path / "spec.json"
    path.write_text(spec.to_json())
    assert load_spec(path) == load_spec(str(path)) == load_spec(tmp_path) == spec
    assert load_spec(path, ["n_layers=2"]).decoder.n_layers == 2


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("attention", "KEY.KEY=VALUE"),
        ("=3", "KEY.KEY=VALUE"),
        ("a..b=3", "KEY.KEY=VALUE"),
        ("d_model.x=3", "is a value, not a table"),
        ("pattern.4.ffn=reglu", "does not name an entry of a list of 1"),
        ("pattern.x.ffn=reglu", "does not name an entry of a list of 1"),
    ],
)
def test_an_override_that_leads_nowhere_is_refused(override, said):
    with pytest.raises(UserError, match=said) as caught:
        load_spec({**BASE, "pattern": [{}]}, [override])
    assert override in str(caught.value)


def test_a_value_on_the_way_is_shown_with_the_table_that_would_do():
    moe = {"kind": "moe", "n_experts": 4, "top_k": 2, "expert": "swiglu", "shared": 2}
    with pytest.raises(UserError, match=r"`ffn\.shared` is a value") as caught:
        load_spec({**BASE, "ffn": moe}, ["ffn.shared.d_ff=9"])
    assert (caught.value.got, caught.value.remedy) == (2, "--set ffn.shared='{ d_ff = … }' gives a whole table")


def test_a_problem_of_a_condensed_recipe_says_whose_it_is(tmp_path):
    """Its words are none that the user wrote."""
    spec = expand({**BASE, "n_layers": 5, "share": [0, 0, 2, 2, 0]})
    (tmp_path / "spec.json").write_text(spec.to_json())
    for source, name in ((spec, "the specification"), (tmp_path, str(tmp_path))):
        with pytest.raises(SpecError) as caught:
            load_spec(source, ["n_layers=4"])
        said = f"1 problem in the recipe made of {name}\n  share: names 5 owners for 4 layers; a list of 4, or none,"
        assert str(caught.value).startswith(said)


def test_toml_files_and_shipped_names(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        'vocab_size = 11\nd_model = 24\nn_layers = 3\nffn = "swiglu"\n[attention]\nn_heads = 6\nposition = "rope"\n'
    )
    assert load_spec(path) == load_spec(str(path)) == expand(BASE)
    run = tmp_path / "run.toml"
    run.write_text(f"steps = 5\n[model]\n{path.read_text().replace('[attention]', '[model.attention]')}")
    assert load_spec(run) == expand(BASE)
    run.write_text('model = "llama-tiny"\n')
    assert load_spec(run) == load_spec("llama-tiny")
    assert load_recipe("llama-tiny")["d_model"] == load_spec("llama-tiny").decoder.d_model


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"d_model = = 3", "not TOML"), (b"d_model = 3 # \xff", "not UTF-8 at byte 14")],
)
def test_a_file_that_is_not_toml_is_named(tmp_path, content, said):
    path = tmp_path / "broken.toml"
    path.write_bytes(content)
    with pytest.raises(UserError, match=said) as caught:
        load_spec(path)
    assert str(path) in str(caught.value)


def test_a_name_or_file_that_is_not_there(tmp_path):
    with pytest.raises(UserError, match="did you mean `llama-tiny`"):
        load_spec("llama-tini")
    with pytest.raises(UserError, match="no such file"):
        load_spec("folder/none.toml")
    with pytest.raises(UserError, match="holds no"):
        load_spec(tmp_path)
    with pytest.raises(UserError):
        load_spec(tmp_path / "none.json")


def test_specifications_are_frozen_and_hashable():
    spec = expand(BASE)
    with pytest.raises(ValueError, match="frozen"):
        spec.vocab_size = 3
    assert hash(spec) == hash(expand(BASE))
    assert spec != expand({**BASE, "bias": True})
    assert isinstance(spec, ModelSpec)
    assert issubclass(SpecError, UserError)


def test_a_recipe_is_found_beside_the_file_that_names_it(tmp_path, monkeypatch):
    """From any working folder; then as given, then by a shipped name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "run.toml").write_text('model = "mm.toml"\n', encoding="utf-8")
    recipe = 'vocab_size = 7\nd_model = 8\nn_layers = 1\nffn = "swiglu"\n[attention]\nn_heads = 2\nposition = "rope"\n'
    (tmp_path / "sub" / "mm.toml").write_text(recipe, encoding="utf-8")
    (tmp_path / "mm.toml").write_text(recipe.replace("vocab_size = 7", "vocab_size = 9"), encoding="utf-8")
    assert load_spec("sub/run.toml").vocab_size == 7
    (tmp_path / "sub" / "mm.toml").unlink()
    assert load_spec("sub/run.toml").vocab_size == 9
    (tmp_path / "sub" / "run.toml").write_text('model = "llama-tiny"\n', encoding="utf-8")
    assert load_spec("sub/run.toml") == load_spec("llama-tiny")


@pytest.mark.parametrize("loader", [load_spec, load_run])
def test_files_that_name_each_other_in_a_ring_are_refused(tmp_path, loader):
    (tmp_path / "rec.toml").write_text('model = "rec.toml"\n', encoding="utf-8")
    with pytest.raises(UserError, match="names itself") as caught:
        loader(tmp_path / "rec.toml")
    assert str(caught.value).count("rec.toml →") == 1
    for here, there in (("a", "b"), ("b", "c"), ("c", "b")):
        (tmp_path / f"{here}.toml").write_text(f'model = "{there}.toml"\n', encoding="utf-8")
    with pytest.raises(UserError) as caught:
        loader(tmp_path / "a.toml")
    assert "a.toml → b.toml → c.toml → b.toml" in str(caught.value).replace(f"{tmp_path}/", "")
