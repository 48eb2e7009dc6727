"""`anyformer eject`: one file of a specification or a checkpoint, which runs where it is written."""

import os
import subprocess
import sys
from functools import partial

import pytest
import torch
import typer

from anyformer.checkpoint import Checkpoint, load
from anyformer.cli.eject import eject
from anyformer.cli.eject import eject as command
from anyformer.errors import UserError
from anyformer.infer import Generation
from anyformer.nn.model import build
from anyformer.spec import load_spec
from anyformer.text import Tokenizer
from command_line import invoked

verbs = typer.Typer(pretty_exceptions_enable=False)
verbs.command()(eject)
TOKENS = torch.tensor([[3, 1, 2]])
SMALL = ["d_model=24", "n_layers=1", "attention.n_heads=2", "attention.n_kv_heads=1"]


run = partial(invoked, verbs)


def saved(folder, form="anyformer", *, tokenizer=True, **more):
    """A small LLaMA with a tokenizer of bytes, of which 65 ends a reply and 66 never comes."""
    words = Tokenizer.train("byte", []) if tokenizer else None
    spec = load_spec("llama-tiny", [*SMALL, "vocab_size=257"])
    told = Generation(eos_ids=(65,), suppressed=(66, 4000))
    return Checkpoint(spec, build(spec, seed=3, init="scaled", **more), words, told).save(folder, format=form)


def module_of(file):
    """The file's names, as an import of it would give them."""
    names = {"__name__": "model", "__file__": str(file)}
    exec(compile(file.read_text(encoding="utf-8"), str(file), "exec"), names)
    return names


class Stop(BaseException):
    """Enough has been seen."""


@pytest.fixture
def scores(monkeypatch):
    """What a file makes of three tokens with the weights that it reads by itself where it lies."""

    def of(file):
        names, found = module_of(file), []
        read = names["load"]

        def load(*given):
            found.append(read(*given))
            raise Stop

        names["load"] = load
        monkeypatch.chdir(file.parent)
        monkeypatch.setattr(sys, "argv", [file.name, "--prompt", "x"])
        with pytest.raises(Stop):
            names["main"]()
        with torch.no_grad():
            return found[0](TOKENS)

    return of


def expected(source):
    with torch.no_grad():
        return load(source).model.use_backend("reference")(TOKENS)


def test_a_specification_becomes_a_file(tmp_path):
    said = run("llama-tiny", "--out", tmp_path / "model.py")
    text = (tmp_path / "model.py").read_text(encoding="utf-8")
    n, *rest = said.stdout.splitlines()
    assert n == f"{tmp_path / 'model.py'}: {len(text.splitlines())} lines"
    assert rest == [
        f'run it: python {tmp_path / "model.py"}, or python {tmp_path / "model.py"} --checkpoint DIR --prompt "…"'
    ]
    assert text.startswith('"""llama-tiny: ')
    assert list(tmp_path.iterdir()) == [tmp_path / "model.py"]
    assert run("llama-tiny", "--out", "-").stdout == text


def test_nothing_is_overwritten_unless_asked(tmp_path):
    (tmp_path / "model.py").write_text("mine")
    with pytest.raises(UserError, match="a file of this name") as caught:
        run("llama-tiny", "--out", tmp_path / "model.py")
    assert "--force" in caught.value.remedy
    assert (tmp_path / "model.py").read_text() == "mine"
    run("llama-tiny", "--out", tmp_path / "model.py", "--force")
    assert "class Model" in (tmp_path / "model.py").read_text()


def test_a_place_that_no_file_can_have_is_refused(tmp_path):
    with pytest.raises(UserError, match="this is a folder") as caught:
        run("llama-tiny", "--out", tmp_path, "--force")
    assert caught.value.remedy == f"--out {tmp_path / 'model.py'}"
    with pytest.raises(UserError, match="no such folder") as caught:
        run("llama-tiny", "--out", tmp_path / "no" / "model.py")
    assert caught.value.where == tmp_path / "no"
    os.mkfifo(tmp_path / "pipe.py")
    with pytest.raises(UserError, match="something else than a file"):
        run("llama-tiny", "--out", tmp_path / "pipe.py", "--force")
    assert [path.name for path in tmp_path.iterdir()] == ["pipe.py"]


def test_a_folder_that_may_not_be_written_to_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(UserError, match="nothing can be written here"):
        run("llama-tiny", "--out", tmp_path / "model.py")


def test_a_checkpoint_of_ours_is_read_where_it_lies(tmp_path, scores):
    folder = saved(tmp_path / "runs" / "mine")
    (tmp_path / "out").mkdir()
    file = tmp_path / "out" / "model.py"
    said = run(folder, "--out", file)
    text = file.read_text(encoding="utf-8")
    assert text.startswith('"""mine: ')
    assert "../runs/mine" in text
    assert "END_IDS = (256, 65)" in text
    assert "SUPPRESSED_IDS = (66,)" in text, "an id without a row cannot be looked up"
    assert not said.stderr
    assert said.stdout.endswith(f'or python {file} --prompt "…"\n')
    assert [path.name for path in file.parent.iterdir()] == ["model.py"]
    torch.testing.assert_close(scores(file), expected(folder), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", ["hf", "gguf"])
def test_weights_of_other_forms_are_written_beside_the_file(tmp_path, form, scores):
    source = saved(tmp_path / "theirs", form, dtype="bfloat16")
    if form == "gguf":
        source = load(source).save(tmp_path / "small.gguf", format="gguf", quantize="q8_0")
    file = tmp_path / "out.py"
    said = run(source, "--out", file)
    assert said.stderr.startswith(f"{tmp_path / 'out-checkpoint'}: the weights")
    text = file.read_text(encoding="utf-8")
    assert text.startswith(f'"""{"theirs" if form == "hf" else "small"}: ')
    assert '"out-checkpoint"' in text
    mine = load(tmp_path / "out-checkpoint", dtype="stored")
    assert next(mine.model.parameters()).dtype == (torch.bfloat16 if form == "hf" else torch.float32)
    assert mine.tokenizer.encode("ab") == [97, 98]
    torch.testing.assert_close(scores(file), expected(source), rtol=1e-5, atol=1e-5)
    if form == "hf":
        assert run(source / "config.json", "--out", "-").stdout.startswith('"""theirs: ')
    file.unlink()
    with pytest.raises(UserError, match="the weights would be written here"):
        run(source, "--out", file)
    assert not file.exists()
    run(source, "--out", file, "--force")
    with pytest.raises(UserError, match="written beside the file"):
        run(source, "--out", "-")


def test_weights_kept_in_codes_are_written_as_floats(tmp_path, scores):
    saved(tmp_path / "one.gguf", "gguf")
    load(tmp_path / "one.gguf").save(tmp_path / "small.gguf", format="gguf", quantize="q8_0")
    kept = load(tmp_path / "small.gguf", quantize="keep").save(tmp_path / "kept")
    run(kept, "--out", tmp_path / "model.py")
    assert (tmp_path / "model-checkpoint" / "spec.json").exists()
    torch.testing.assert_close(scores(tmp_path / "model.py"), expected(kept), rtol=1e-5, atol=1e-5)


def test_a_checkpoint_without_a_tokenizer_says_that_no_prompt_is_read(tmp_path):
    said = run(saved(tmp_path / "mine", tokenizer=False), "--out", tmp_path / "model.py")
    assert "no tokenizer" in said.stderr
    assert "--prompt" not in said.stdout


def test_a_bare_encoder_decoder_is_told_how_answers_begin(tmp_path):
    assert '--prompt "…" --start ID' in run("t5-small", "--out", tmp_path / "model.py").stdout


def test_a_file_where_a_folder_is_meant_is_named(tmp_path):
    (tmp_path / "m.py").touch()
    with pytest.raises(UserError, match="a folder is meant, and this is a file") as caught:
        run("llama-tiny", "--out", tmp_path / "m.py" / "x" / "y.py")
    assert caught.value.where == tmp_path / "m.py"


def test_a_mistake_about_the_source_is_that_of_other_verbs(tmp_path):
    with pytest.raises(UserError, match="a run description"):
        run("demo", "--out", tmp_path / "model.py")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="the folder holds no checkpoint"):
        run(tmp_path / "empty", "--out", tmp_path / "model.py")
    folder = saved(tmp_path / "mine")
    (folder / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(UserError, match="cannot read the weights"):
        run(folder, "--out", tmp_path / "model.py")
    assert not (tmp_path / "model.py").exists()


def test_a_name_that_would_end_the_docstring_does_not(tmp_path, scores):
    folder = saved(tmp_path / 'my """ na\\me')
    run(folder, "--out", tmp_path / "model.py")
    assert module_of(tmp_path / "model.py")["__doc__"].startswith("my ")
    assert scores(tmp_path / "model.py").shape == (1, 3, 257)


def test_no_torch_is_loaded_and_every_process_writes_the_same(tmp_path):
    code = (
        "import sys; from anyformer.cli.main import run\n"
        "for words in (['--help'], ['llama-tinny', '--out', 'a.py'], ['llama-tiny', '--out', sys.argv[1]]):\n"
        "    sys.argv = ['anyformer', 'eject', *words]\n"
        "    try: run()\n"
        "    except SystemExit: pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    file = tmp_path / "model.py"
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    words = [sys.executable, "-c", code, str(file)]
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "--force" in done.stdout
    assert "did you mean `llama-tiny`?" in done.stderr
    assert file.read_text(encoding="utf-8") == run("llama-tiny", "--out", "-").stdout


def python(file, *words):
    """What the file prints, run by itself in a process that knows nothing of anyformer's folder."""
    done = subprocess.run(
        [sys.executable, "-I", file.name, *words], cwd=file.parent, capture_output=True, text=True, encoding="utf-8"
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_file_continues_a_text_as_generate_does(tmp_path):
    folder = saved(tmp_path / "mine")
    run(folder, "--out", tmp_path / "model.py")
    want = load(folder).generate("Once upon", max_new_tokens=24)
    assert len(want) > 8
    assert python(tmp_path / "model.py", "--prompt", "Once upon", "--max-new-tokens", "24") == want + "\n"


@pytest.mark.slow
def test_the_file_by_itself_shows_a_forward_pass(tmp_path):
    folder = saved(tmp_path / "mine")
    run(folder, "--out", tmp_path / "model.py")
    said = python(tmp_path / "model.py")
    assert "257]" in said
    assert f"{sum(p.numel() for p in load(folder).model.parameters()):,} parameters" in said


def test_what_a_file_is_made_from_is_never_replaced(tmp_path):
    import anyformer as af
    from anyformer.errors import UserError

    spec = af.load_spec("llama-tiny", ["d_model=24", "attention.n_heads=2", "attention.n_kv_heads=1", "vocab_size=31"])
    made = af.Checkpoint(spec, af.build(spec, seed=0))
    hf, own = made.save(tmp_path / "m-checkpoint", format="hf"), made.save(tmp_path / "own")
    (tmp_path / "d").mkdir()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for source, out in (
        (hf, tmp_path / "m.py"),
        (hf, tmp_path / "d" / ".." / "m.py"),
        (hf, hf / "config.json"),
        (own, own / "model.safetensors"),
        (own, own / "spec.json"),
    ):
        with pytest.raises(UserError, match="take the place"):
            command(str(source), out=str(out), force=True)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    command(str(own), out=str(own / "model.py"), force=True)
    assert (own / "model.py").exists()
