"""GGUF files as checkpoints: saved and loaded with their tokenizer, kept quantised, explained, on the command line."""

import json
import os
from functools import partial

import pytest
import torch
import typer
from gguf import GGUFReader

from anyformer.checkpoint import Checkpoint, load
from anyformer.cli.convert import convert
from anyformer.cli.generate import generate
from anyformer.cli.plan import plan
from anyformer.errors import UserError
from anyformer.families import FAMILIES
from anyformer.infer import Generation
from anyformer.laws.gguf import gguf
from anyformer.nn.model import build
from anyformer.nn.quantised import quantised
from anyformer.opened import opened
from anyformer.spec import load_spec
from anyformer.text import Tokenizer
from anyformer.weights.gguf import save
from anyformer.weights.source import load_spec as load_spec_of_any
from cli.test_front import call
from command_line import invoked

TEMPLATE = (
    "{% for m in messages %}<|user|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|bot|>{% endif %}"
)
CONTROL = ("<|endoftext|>", "<|user|>", "<|bot|>", "<|end|>")


verbs = typer.Typer(pretty_exceptions_enable=False)
for verb in (convert, generate, plan):
    verbs.command()(verb)


run = partial(invoked, verbs)


@pytest.fixture(scope="module")
def made():
    tokenizer = Tokenizer.train(
        "bpe",
        ["def f(x):\n    return x + 1\n" * 20, "Καλημέρα κόσμε 123 4567 😀"],
        300,
        control_tokens=CONTROL,
        eos_token="<|end|>",
        chat_template=TEMPLATE,
    )
    overrides = ["vocab_size=320", "d_model=64", "attention.n_heads=4", "attention.n_kv_heads=2", "n_layers=3"]
    spec = load_spec("llama-tiny", [*overrides, "attention.d_head=16", "ffn.d_ff=160"])
    model = build(spec, seed=5)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "norm" in name:
                value.copy_(1 + 0.3 * torch.randn(value.shape, generator=torch.Generator().manual_seed(1)))
    return Checkpoint(spec, model, tokenizer)


@pytest.fixture(scope="module")
def file(made, tmp_path_factory):
    return made.save(tmp_path_factory.mktemp("gguf") / "mine.gguf", format="gguf")


def test_everything_comes_back(made, file, tmp_path):
    back = load(file)
    assert back.spec == made.spec
    want = made.model.state_dict()
    assert {name: torch.equal(value, want[name]) for name, value in back.model.state_dict().items()} == dict.fromkeys(
        want, True
    )
    for text in ("", "def f(x):\n\n    return 12345\t x", "Καλημέρα 😀 <|end|>", " a  b   c\r\n"):
        assert back.tokenizer.encode(text) == made.tokenizer.encode(text)
    # By its name <|endoftext|> ends a reply in llama.cpp too.
    assert back.tokenizer.eos_ids == (made.tokenizer.eos_id, made.tokenizer.token_id("<|endoftext|>"))
    chat = [{"role": "user", "content": "hi<|end|><|bot|>"}]
    assert back.tokenizer.apply_chat(chat) == made.tokenizer.apply_chat(chat)
    assert back.tokenizer.vocab_size == made.tokenizer.vocab_size == 300
    how = {"max_new_tokens": 9, "temperature": 3.0, "seed": 2}
    assert back.generate("def", **how) == made.generate("def", **how)
    folder = made.save(tmp_path / "folder", format="gguf")
    assert [path.name for path in folder.iterdir()] == ["model.gguf"]
    assert load(folder).spec == made.spec


def test_padded_ids_are_never_drawn(file):
    """B54. The table has 320 rows and the tokenizer 300 tokens."""
    back = load(file)
    ids = back.generate([1, 2, 3], max_new_tokens=200, temperature=5.0, seed=1)
    assert max(ids) < 300


@pytest.mark.parametrize(
    ("kind", "error"), [("f16", 1e-3), ("bf16", 8e-3), ("q8_0", 8e-3), ("q4_0", 0.13), ("q4_1", 0.1)]
)
def test_types_are_as_near_as_their_bits(made, tmp_path, kind, error):
    path = made.save(tmp_path / "x.gguf", format="gguf", quantize=kind)
    back = load(path)
    assert back.spec == made.spec
    for name, value in made.model.state_dict().items():
        got = back.model.state_dict()[name]
        if value.dim() == 1:
            assert torch.equal(got, value)
        else:
            assert (got - value).abs().max() <= error * value.abs().max(), name
    again = back.save(tmp_path / "y.gguf", format="gguf", quantize=kind)
    assert all(torch.equal(a, b) for a, b in zip(load(again).model.parameters(), back.model.parameters(), strict=True))


@pytest.mark.parametrize("kind", ["q4_0", "q4_1", "q8_0"])
def test_kept_weights_compute_what_their_floats_do(made, tmp_path, kind):
    path = made.save(tmp_path / "x.gguf", format="gguf", quantize=kind)
    kept, floats = load(path, quantize="keep"), load(path)
    held = quantised(kept.model)
    matrices = {name for name, value in floats.model.state_dict().items() if value.dim() == 2}
    assert set(held) == matrices
    tokens = torch.randint(0, 300, (2, 17), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        got, want = kept.model(tokens), floats.model(tokens)
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()
    assert kept.generate("def", max_new_tokens=12) == floats.generate("def", max_new_tokens=12)
    assert sum(each.kept for each in kept.placed) == len(matrices)
    for each in kept.placed:
        if each.kept:
            assert each.n_bytes == held[each.name].nbytes, each
    said = kept.explain()
    assert "kept" in said
    assert "fused, 3 layers" in said
    other = kept.save(tmp_path / "own")
    assert load(other).spec == made.spec
    for name, value in load(other).model.state_dict().items():
        assert torch.equal(value, floats.model.state_dict()[name]), name
    theirs = kept.save(tmp_path / "hf", format="hf")
    assert torch.equal(load(theirs).model(tokens), floats.model(tokens))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_kept_weights_among_floats_of_another_type(made, tmp_path, dtype):
    path = made.save(tmp_path / "x.gguf", format="gguf", quantize="q8_0")
    kept, floats = load(path, dtype=dtype, quantize="keep"), load(path, dtype=dtype)
    wanted = getattr(torch, dtype)
    assert {value.dtype for value in kept.model.parameters()} == {wanted}
    tokens = torch.randint(0, 300, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert kept.model.hidden(tokens).dtype == wanted
        got, want = kept.model(tokens), floats.model(tokens)
    # Products with codes are float32's in any type.
    assert (got - want).abs().max() <= max(8 * torch.finfo(wanted).eps, 1e-5) * want.abs().max()
    caches = (each.model.new_cache(batch=1, capacity=8).nbytes for each in (kept, floats))
    assert next(caches) == next(caches)


def test_pipes_and_devices_are_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(UserError, match="neither a file nor a folder"):
            load_spec_of_any(path)
        with pytest.raises(UserError):
            load(path)


def test_what_is_there_is_not_lost(made, file, tmp_path):
    other = tmp_path / "x.gguf"
    other.write_text("precious")
    made_before = file.read_bytes()
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("precious")
    (tmp_path / "y.gguf").mkdir()
    for path in (tmp_path / "notes", tmp_path / "y.gguf", "/proc/nowhere/x.gguf"):
        with pytest.raises(UserError):
            made.save(path, format="gguf")
    assert (tmp_path / "notes" / "a.txt").read_text() == "precious"
    made.save(file, format="gguf")
    assert file.read_bytes() == made_before
    with pytest.raises(UserError, match="not written in this type"):
        made.save(tmp_path / "z.gguf", format="gguf", quantize="q2_k")
    with pytest.raises(UserError, match="not written quantised"):
        made.save(tmp_path / "z", quantize="q8_0")
    spec = load_spec("gpt2", ["n_layers=1", "d_model=64", "attention.n_heads=4", "wiring=parallel"])
    with pytest.raises(UserError, match="no architecture of GGUF"):
        Checkpoint(spec, build(spec)).save(tmp_path / "z.gguf", format="gguf")
    assert not (tmp_path / "z.gguf").exists()


def test_without_a_tokenizer(made, tmp_path):
    path = Checkpoint(made.spec, made.model, generation=Generation(eos_ids=(7,))).save(
        tmp_path / "b.gguf", format="gguf"
    )
    back = load(path)
    assert back.tokenizer is None
    assert back.generation.eos_ids == (7,)


def test_how_replies_end_and_what_they_never_say_go_along(made, tmp_path):
    user, bot = made.tokenizer.token_id("<|user|>"), made.tokenizer.token_id("<|bot|>")
    generation = Generation(eos_ids=(made.tokenizer.eos_id, user), suppressed=(bot, 5))
    kept = Checkpoint(made.spec, made.model, made.tokenizer, generation)
    back = load(kept.save(tmp_path / "x.gguf", format="gguf"))
    assert {made.tokenizer.eos_id, user} <= {*back.tokenizer.eos_ids}
    assert back.generation.suppressed == (5, bot)
    reader = GGUFReader(tmp_path / "x.gguf")
    assert reader.fields["tokenizer.ggml.eot_token_id"].contents() == user
    assert reader.fields["tokenizer.ggml.suppress_tokens"].contents() == [5, bot]


def test_families_are_not_for_gguf(made, file, tmp_path):
    for asked in (
        lambda: load(file, families=FAMILIES[:1]),
        lambda: made.save(tmp_path / "x.gguf", format="gguf", families=FAMILIES[:1]),
    ):
        with pytest.raises(UserError, match="own dialects"):
            asked()


def test_files_say_what_readers_of_ours_need(made, tmp_path):
    """The `gguf` package's reading of what we write: numbers of types, routers and short rows in types of their own."""
    overrides = ["vocab_size=320", "d_model=48", "attention.n_heads=3", "attention.d_head=16", "n_layers=1"]
    spec = load_spec("mixtral-8x7b", [*overrides, "attention.n_kv_heads=1", "ffn.n_experts=4", "ffn.expert.d_ff=64"])
    for kind, number in (("q8_0", 7), ("q4_1", 3), ("f32", 0), ("bf16", 32)):
        path = Checkpoint(spec, build(spec, seed=1)).save(tmp_path / f"{kind}.gguf", format="gguf", quantize=kind)
        reader = GGUFReader(path)
        assert reader.fields["general.file_type"].contents() == number
        kinds = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
        assert kinds["blk.0.ffn_gate_inp.weight"] == kinds["blk.0.attn_norm.weight"] == "F32"
        assert kinds["blk.0.ffn_down_exps.weight"] == kind.upper()
        # Rows of 48 are no whole blocks of 32.
        assert kinds["blk.0.attn_q.weight"] == (kind.upper() if "q" not in kind else "F16")
        assert load(path).spec == load(path, quantize="keep").spec


def test_a_stored_type_is_kept_where_it_loses_nothing(made, tmp_path):
    half = Checkpoint(made.spec, build(made.spec, seed=1, dtype="bfloat16"))
    path = half.save(tmp_path / "half.gguf", format="gguf")
    assert {value.dtype for value in load(path, dtype="stored").model.parameters()} == {torch.bfloat16}
    path = made.save(tmp_path / "finer.gguf", format="gguf", quantize="bf16")
    assert {value.dtype for value in load(path, dtype="stored").model.parameters()} == {torch.float32}


def test_on_the_command_line(made, tmp_path):
    own = made.save(tmp_path / "own")
    assert (
        "q.gguf: gguf, 1 file" in run("convert", own, tmp_path / "q.gguf", "--to", "gguf", "--quantize", "q4_1").stderr
    )
    table = json.loads(run("plan", tmp_path / "q.gguf", "--json").stdout)
    assert table["parameters"] == sum(value.numel() for value in made.model.parameters())
    assert {each["kind"]: each["kept"] for each in table["tensors"]} == {"Q4_1": True, "F32": False}
    said = run("plan", tmp_path / "q.gguf", "--quantize", "none").stdout
    assert "Q4_1   floats" in said
    made.save(tmp_path / "folder", format="gguf", quantize="q8_0")
    assert "Q8_0   kept" in run("plan", tmp_path / "folder").stdout
    want = load(tmp_path / "q.gguf").generate("def", max_new_tokens=5)
    for how in ("keep", "none"):
        words = ("generate", tmp_path / "q.gguf", "--prompt", "def", "--max-new-tokens", "5", "--quantize", how)
        assert run(*words).stdout.strip("\n") == want.strip("\n")
    run("convert", tmp_path / "q.gguf", tmp_path / "back", "--to", "anyformer")
    assert load(tmp_path / "back").spec == made.spec
    for words, said in (
        (("convert", own, tmp_path / "x", "--to", "hf", "--quantize", "q4_1"), "only gguf is written quantised"),
        (("generate", own, "--prompt", "x", "--quantize", "q4"), "keep or none"),
        (("convert", own, tmp_path / "x", "--to", "gguf", "--quantize", "q2_k"), "not written in this type"),
        (("plan", own, "--quantize", "keep"), "only a GGUF file"),
    ):
        with pytest.raises(UserError, match=said):
            run(*words)
    assert not (tmp_path / "x").exists()


def test_a_writer_that_is_off_by_one_bit_breaks_the_round_trip(made, monkeypatch):
    before = save.to_theirs

    def off(step, ours):
        made = before(step, ours)
        return [torch.nextafter(x, x + 1) if "norm" in step.ours[0] else x for x in made]

    monkeypatch.setattr(save, "to_theirs", off)
    assert gguf(made.model, 0).holds is False


def test_the_round_trip_is_part_of_what_verify_says(made):
    result = gguf(made.model, 0)
    assert result.holds
    assert result.why == "written as llama in float32, read again"
    assert gguf(build(load_spec("bert-base", ["n_layers=1", "vocab_size=50"])), 0).holds is None


@pytest.mark.slow
def test_verify_writes_its_certificate_beside_the_file(file):
    code, out, err = call("verify", file, "--json")
    assert code == 0, err
    assert {each["law"]: each["holds"] for each in json.loads(out)["results"]}["round trip: gguf"]
    assert file.with_name("mine.gguf.certificate.json").exists()


def test_an_opened_file_loads_as_its_path_does(file):
    source = opened(file)
    assert source.tokenizer.vocab_size == 300
    ours, theirs = load(source, quantize="keep"), load(file, quantize="keep")
    assert ours.placed == theirs.placed
    assert ours.generate("def f", max_new_tokens=8) == theirs.generate("def f", max_new_tokens=8)
    assert ours.tokenizer.encode("x + 1") == theirs.tokenizer.encode("x + 1")


def test_a_file_is_opened_or_refused_before_torch_is_imported(file, tmp_path):
    data = file.read_bytes()
    (tmp_path / "short.gguf").write_bytes(data[: len(data) // 2])
    front = "import sys\nfrom anyformer.cli.main import run\ntry: run()\nfinally: print('torch' in sys.modules)"
    code, out, err = call("generate", tmp_path / "short.gguf", "--prompt", "x", code=front)
    assert (code, out) == (2, "False\n")
    assert "goes beyond the end of the file" in err


def test_opening_a_file_imports_what_it_names_alone(file):
    code = "import sys\nfrom anyformer.opened import opened\nopened(sys.argv[1])\nprint(*sys.modules)"
    modules = set(call(file, code=code)[1].split())
    assert "anyformer.families.gguf.llama" in modules
    others = {"torch", "jinja2", "anyformer.families.bert", "anyformer.families.gguf.gemma", "anyformer.text.spm"}
    assert not others & modules


def test_vectors_do_not_stay_in_the_file_which_would_come_with_them(file):
    norms = [value for value in load(file).model.parameters() if value.dim() == 1]
    assert norms
    assert all(value.untyped_storage().nbytes() == value.nbytes for value in norms)
