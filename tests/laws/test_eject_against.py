"""An ejected file that was edited, beside the core: the first site that differs, and every mistake in words."""

import json
import math

import pytest
import torch

from anyformer.errors import UserError
from anyformer.laws import mutant as models
from anyformer.laws.against import against
from anyformer.laws.draw import fresh
from anyformer.laws.law import settled
from anyformer.laws.result import error_of_finite
from anyformer.spec import expand
from anyformer.weights.eject import eject

RECIPE = models.recipe()
POOLER = models.ENCODER | {
    "embed": {"scale": 2.0, "position": "learned"},
    "max_positions": 40,
    "pooler": True,
    "head": {"kind": "sequence", "n_labels": 3, "pool": "pooler"},
}
"""Its file multiplies the embedding and bends what is pooled outside the modules of these names."""
LABELS = models.recipe(head={"kind": "token", "n_labels": 3})


@pytest.fixture
def file(tmp_path):
    """Writes the file of a recipe, with words of it replaced, and gives its path."""

    def write(recipe, *edits):
        text = eject(expand(recipe))
        for old, new in edits:
            assert old in text, old
            text = text.replace(old, new)
        path = tmp_path / "model.py"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def compare(recipe, path):
    return against(fresh(expand(recipe), 2), path, 2, "mine")


@pytest.mark.parametrize(
    "recipe",
    [RECIPE, models.LEARNED, models.LATENT, models.EXPERTS, POOLER, models.BOTH, LABELS],
    ids=["decoder", "learned", "latent", "experts", "pooler", "both", "labels"],
)
def test_a_file_as_it_was_written_is_the_same_everywhere(file, recipe):
    found = compare(recipe, file(recipe))
    assert found.holds
    assert found.first is None
    assert (found.core_alone, found.file_alone) == ((), ())
    assert (found.dtype, found.tolerance) == ("float64", 1e-10)
    names = [site.name for site in found.sites]
    stack = "encoder" if recipe is POOLER else "decoder"
    wanted = ["attention.out", "attention", "ffn_norm", "ffn", "1.attention_norm", "1.ffn", "1"]
    places = [names.index(f"{stack}.blocks.{'' if word[0] == '1' else '0.'}{word}") for word in wanted]
    assert places == sorted(places), "in order of execution"
    assert names.index("scores") > max(places)
    assert any("cache" in name for name in names) is (recipe is not POOLER)
    assert any("padded" in name for name in names) is (recipe in (POOLER, models.BOTH, LABELS))
    assert any(site.error for site in found.sites)
    assert found.lines() == [f"{found.file} is the same as the core of mine at all {len(names)} sites"]


FIRST = {
    "epsilon": (("NORM_EPS = 1e-06", "NORM_EPS = 2e-06"), ("0.attention_norm", "decoder.embed")),
    "heads": (
        ("repeat_interleave(q.shape[2] // x.shape[2], dim=2)", "repeat(1, 1, 2, 1)"),
        ("0.attention.out", "0.attention.v"),
    ),
    "between blocks": (
        ("x = block(x, positions, mask, store)", "x = 2 * block(x, positions, mask, store)"),
        ("1.attention_norm", "0"),
    ),
    "sign": (("x + self.ffn(", "x - self.ffn("), ("0", "0.ffn")),
    "activation": (("F.silu(", "F.gelu("), ("0.ffn.down", "0.ffn.up")),
    "scores": (("return self.head(hidden)", "return self.head(hidden) + 1e-8"), ("scores", "head")),
    "cache": (
        ("torch.cat([store[name], x], dim=1)", "torch.cat([x, store[name]], dim=1)"),
        ("call with a cache for tokens 2 to 7", "call with a cache for tokens 0 to 1"),
    ),
    "shape": (("self.final_norm(x)", "self.final_norm(x)[:, 1:]"), ("decoder", "decoder.final_norm")),
}
"""What is written for what, the first site that then differs, and the one before it; those of blocks by number."""


@pytest.mark.parametrize("edit", FIRST)
def test_the_first_site_that_differs_is_named(file, edit):
    words, names = FIRST[edit]
    first, before = (f"decoder.blocks.{name}" if name[0].isdigit() else name for name in names)
    found = compare(RECIPE, file(RECIPE, words))
    assert not found.holds
    assert found.first.name == first
    (said, counted, *_) = found.lines()
    assert f"first differs at {first}, by " in said
    assert f"{before} before it is the same" in said
    assert counted.startswith(f"{sum(not site.holds for site in found.sites)} of {len(found.sites)} sites differ")


def test_the_largest_difference_and_its_place_are_named(file):
    path = file(RECIPE)
    more = "plain = FeedForward.forward\n\n\ndef forward(self, x):\n    y = plain(self, x)\n    y[2, 3, 5] += 7\n"
    path.write_text(f"{path.read_text()}\n\n{more}    return y\n\n\nFeedForward.forward = forward\n")
    found = compare(RECIPE, path)
    assert (found.first.name, found.first.place) == ("decoder.blocks.0.ffn", (2, 3, 5))
    assert 0.1 < found.first.error < 7
    clean = found.sites[[site.name for site in found.sites].index("decoder.blocks.0.ffn.down")]
    assert clean.holds, "what is changed in place afterwards was right when it was made"


def test_another_shape_differs_and_is_named(file):
    found = compare(RECIPE, file(RECIPE, ("return self.final_norm(x)", "return self.final_norm(x)[:, 1:]")))
    assert (found.first.shape, found.first.got) == ((3, 17, 20), (3, 16, 20))
    assert "shape [3, 16, 20] in the file, [3, 17, 20] in the core" in found.lines()[0]
    table = json.loads(found.to_json())
    assert (table["first"], table["holds"]) == ("decoder", False)
    assert next(site for site in table["sites"] if site["name"] == "decoder")["error"] is None


def test_a_difference_below_what_float32_rounds_says_so(file):
    edit = ("return self.head(hidden)", "return self.head(hidden.float().to(hidden.dtype))")
    found = compare(RECIPE, file(RECIPE, edit))
    assert 1e-10 < found.first.error < 1e-6
    assert found.lines()[-1] == "no difference is larger than float32 may round"


def test_a_file_that_computes_in_float32_alone_is_compared_in_it(file):
    found = compare(RECIPE, file(RECIPE, ("return self.head(hidden)", "return self.head(hidden.float())")))
    assert found.holds
    assert (found.dtype, found.tolerance) == ("float32", 1e-5)


def test_sites_without_a_partner_are_named(file):
    more = ("self.final_norm = RMSNorm(D_MODEL)", "self.final_norm = RMSNorm(D_MODEL)\n        self.extra = nn.ReLU()")
    used = ("return self.final_norm(x)", "self.extra(x)\n        return self.final_norm.forward(x)")
    found = compare(RECIPE, file(RECIPE, more, used))
    assert found.holds
    assert (found.core_alone, found.file_alone) == (("decoder.final_norm",), ("decoder.extra",))
    assert found.lines()[1:] == [
        "of the core without a partner, 1: decoder.final_norm",
        "of the file without a partner, 1: decoder.extra",
    ]


def test_a_file_without_its_cache_is_compared_without_calls_that_have_one(file):
    found = compare(RECIPE, file(RECIPE, ("Cache", "Memory")))
    assert found.holds
    assert not any("cache" in site.name for site in found.sites)


def test_a_block_that_computes_two_layers_is_a_site_of_each(file):
    recipe = models.recipe(n_layers=4, share={"distinct": 2, "order": "cycle"})
    found = compare(recipe, file(recipe))
    assert found.holds
    assert {"decoder.blocks.1", "decoder.blocks.1 #2"} <= {site.name for site in found.sites}


def test_the_model_stays_as_it_was_and_the_file_may_print_and_import_its_neighbours(file, tmp_path, capsys):
    (tmp_path / "beside_it.py").write_text("HALF = 0.5\n")
    more = '@dataclass\nclass Also:\n    half: "float" = HALF\n\n\nprint(Also().half)\n\n\nclass Model('
    more = f"from dataclasses import dataclass\n\nfrom beside_it import HALF\n\n\n{more}"
    path = file(RECIPE, ("class Model(", more))
    model = fresh(expand(RECIPE), 2)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    assert against(model, path).holds
    assert {block.attention.backend for block in model.layers()} == {"auto"}
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "0.5\n")


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_weights_of_other_types_keep_their_values(file, dtype):
    found = against(fresh(expand(RECIPE), 2, dtype), file(RECIPE))
    assert found.holds
    assert found.dtype == "float64"


MODEL = "import torch\nclass Model(torch.nn.Module):\n    "


@pytest.mark.parametrize(
    ("text", "what", "where", "got"),
    [
        ("def f(:\n", "the file is not Python", "model.py, line 1", "invalid syntax def f(:"),
        (b"\xff\xfe", "the file is not text", "model.py", "byte 0xff at offset 0"),
        ("x = 1\n", "the file has no model", "model.py", "nothing of that name"),
        ("def Model(): ...\n", "the file has no model", "model.py", "something else of that name"),
        ("import nowhere_at_all\n", "while it is imported", "model.py, line 1", "ModuleNotFoundError: No module named"),
        ("\nraise SystemExit\n", "while it is imported", "model.py, line 2", "SystemExit"),
        (f"{MODEL}def __init__(self, width): ...\n", "while it builds its Model", "model.py", "TypeError"),
        (
            f"{MODEL}def __init__(self):\n        1 / 0\n",
            "while it builds its Model",
            "model.py, line 4",
            "ZeroDivision",
        ),
        (f"RENAMED = ('a', 'b')\n{MODEL}pass\n", "RENAMED is not what it should be", "model.py", None),
    ],
)
def test_a_file_that_is_no_model_says_so_and_where(tmp_path, text, what, where, got):
    path = tmp_path / "model.py"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=what) as caught:
        compare(RECIPE, path)
    assert str(caught.value.where).endswith(where)
    assert got is None or got in str(caught.value.got)
    assert not (tmp_path / "__pycache__").exists()


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(UserError, match="there is no such file"):
        compare(RECIPE, tmp_path / "model.py")
    with pytest.raises(UserError, match="there is no such file") as caught:
        compare(RECIPE, tmp_path)
    assert caught.value.got == "a folder"


def test_a_file_that_raises_while_it_runs_names_its_line(file):
    path = file(RECIPE, ("F.silu(", "silly("))
    (line,) = [n for n, text in enumerate(path.read_text().splitlines(), 1) if "silly(" in text]
    with pytest.raises(UserError, match="while it is run") as caught:
        compare(RECIPE, path)
    assert caught.value.where == f"{path}, line {line}"
    assert caught.value.got == "NameError: name 'silly' is not defined"
    with pytest.raises(UserError, match="while it is run with padding and a cache"):
        compare(RECIPE, file(RECIPE, ("torch.cat([store[name], x], dim=1)", "store[name].gone")))
    with pytest.raises(UserError, match="something else than a tensor"):
        compare(RECIPE, file(RECIPE, ("return self.head(hidden)", "return [self.head(hidden)]")))


@pytest.mark.parametrize(
    ("edit", "got"),
    [
        (("self.gate", "self.gates"), "without a place in the file: decoder.blocks.0.ffn.gate.weight, "),
        (("self.gate", "self.gates"), "not in the checkpoint: decoder.blocks.0.ffn.gates.weight, "),
        (("D_FF = 21", "D_FF = 22"), "decoder.blocks.0.ffn.gate.weight is [22, 20], and [21, 20] in the checkpoint"),
        (("N_LAYERS = 2", "N_LAYERS = 1"), "without a place in the file: decoder.blocks.1.attention.k.weight, "),
    ],
)
def test_weights_that_do_not_fit_are_named(file, edit, got):
    with pytest.raises(UserError, match="the weights do not fit") as caught:
        compare(RECIPE, file(RECIPE, edit))
    assert got in caught.value.got


def test_what_is_no_number_differs_without_a_fault(file):
    found = compare(RECIPE, file(RECIPE, ("F.silu(", "torch.log(")))
    assert found.first.name == "decoder.blocks.0.ffn.down"
    assert found.first.error == math.inf


def test_weights_that_are_no_numbers_are_no_edit(file):
    """What both make nothing of is the same, and an edit before it is found."""
    model = fresh(expand(RECIPE), 2)
    with torch.no_grad():
        model.decoder.blocks[1].ffn.up.weight[3] = math.nan
    found = against(model, file(RECIPE), 2, "mine")
    assert found.holds
    found = against(model, file(RECIPE, ("x + self.ffn(", "x + 1.01 * self.ffn(")), 2, "mine")
    assert (found.first.name, len(found.first.place)) == ("decoder.blocks.0", 3)
    found = against(model, file(RECIPE, ("F.silu(", "torch.nan_to_num(")), 2, "mine")
    assert found.first.name == "decoder.blocks.0.ffn.down"


def test_where_nothing_can_be_compared_is_said(file):
    """A table of NaN makes every activation one: an edit cannot be seen, which is no agreement."""
    model = fresh(expand(RECIPE), 2)
    with torch.no_grad():
        model.decoder.embed.token.weight.fill_(math.nan)
    found = against(model, file(RECIPE, ("F.silu(", "F.relu(")), 2, "mine")
    assert not any(site.compared for site in found.sites)
    assert "the core makes no finite number: the weights are damaged" in " ".join(found.lines())
    result = settled(model, "round trip", 3)
    assert "the scores are no numbers to compare" in result.why
    assert "no numbers" not in settled(fresh(expand(RECIPE), 2), "round trip", 3).why


@pytest.mark.parametrize(
    ("got", "want", "error"),
    [
        ([1.0, math.nan], [1.0, math.inf], 0.0),
        ([1.0, math.inf], [1.0, -math.inf], math.inf),
        ([1.0, 2.0], [1.0, math.nan], math.inf),
        ([1.0, math.nan], [1.0, 2.0], math.inf),
        ([8.0, math.nan], [4.0, math.nan], 1.0),
        ([-math.inf, 1.5], [-math.inf, 1.0], 0.5),
    ],
)
def test_numbers_are_compared_where_one_is_there(got, want, error):
    assert error_of_finite(torch.tensor(got), torch.tensor(want)) == error


def test_whatever_a_file_raises_is_said(file):
    """Even what is no Exception; an interrupt is the user's."""
    wordless = "type('Bad', (Exception,), {'__str__': None})()"
    for raised in ("BaseException('so')", "SystemExit(3)", "GeneratorExit()", wordless):
        with pytest.raises(UserError, match="while it is run"):
            compare(RECIPE, file(RECIPE, ("normed = wide", f"raise {raised}\n        normed = wide")))
    with pytest.raises(KeyboardInterrupt):
        compare(RECIPE, file(RECIPE, ("normed = wide", "raise KeyboardInterrupt\n        normed = wide")))


def test_parameters_that_an_edit_adds_keep_what_the_file_makes_of_them(file):
    """A second norm of ones is no identity: the first site after it differs, and its weights are named."""
    edited = file(
        RECIPE,
        (
            "        self.ffn = FeedForward()\n",
            "        self.ffn = FeedForward()\n        self.second_norm = RMSNorm(D_MODEL)\n",
        ),
        ("self.ffn(self.ffn_norm(x))", "self.second_norm(self.ffn(self.ffn_norm(x)))"),
    )
    found = compare(RECIPE, edited)
    assert found.first.name == "decoder.blocks.0"
    assert found.new[0] == "decoder.blocks.0.second_norm.weight"
    assert "not in the checkpoint" in found.lines()[-1]
