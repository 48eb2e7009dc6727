"""`anyformer verify --against`: an ejected file that was edited, beside the checkpoint it came from."""

import json
import subprocess
import sys
from functools import partial

import pytest
import typer

from anyformer.checkpoint import Checkpoint
from anyformer.cli.verify import verify
from anyformer.errors import UserError
from anyformer.laws.draw import fresh
from anyformer.spec import load_spec
from anyformer.weights.eject import eject
from command_line import invoked

verbs = typer.Typer(pretty_exceptions_enable=False)
verbs.command()(verify)
SMALL = ["d_model=18", "n_layers=2", "vocab_size=19", "attention.n_heads=3", "attention.n_kv_heads=1"]
SPEC = load_spec("llama-tiny", SMALL)


run = partial(invoked, verbs)


@pytest.fixture
def checkpoint(tmp_path):
    return Checkpoint(SPEC, fresh(SPEC, 3)).save(tmp_path / "mine")


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "model.py"
    path.write_text(eject(SPEC), encoding="utf-8")
    return path


def test_the_file_of_a_checkpoint_is_the_same_and_no_law_is_checked(checkpoint, file):
    said = run(checkpoint, "--against", file)
    assert f"{file} is the same as the core of {checkpoint} at all " in said.stdout
    assert "scores" in said.stdout
    assert "causality" not in said.stdout
    assert not (checkpoint / "certificate.json").exists()


def test_what_was_edited_is_named_and_exits_with_1(checkpoint, file):
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace("x + self.ffn(", "x + 1.01 * self.ffn("), encoding="utf-8")
    said = run(checkpoint, "--against", file, code=1)
    first, counted = said.stdout.splitlines()[-2:]
    assert f"{file} first differs at decoder.blocks.0, by " in first
    assert "decoder.blocks.0.ffn before it is the same" in first
    assert "sites differ" in counted
    rows = [line.split()[:2] for line in said.stdout.splitlines() if "same " in line or "DIFFERS" in line]
    assert rows[:2] == [["decoder.blocks.0.ffn", "same"], ["decoder.blocks.0", "DIFFERS"]]
    assert ["scores", "DIFFERS"] in rows
    assert len(rows) == 10, "the site before, the first eight, and the scores"
    table = json.loads(run(checkpoint, "--against", file, "--json", code=1).stdout)
    assert (table["first"], table["holds"], table["file"]) == ("decoder.blocks.0", False, str(file))
    assert not (checkpoint / "certificate.json").exists()


def test_a_specification_is_compared_with_weights_that_hide_nothing(tmp_path):
    (tmp_path / "spec.json").write_text(SPEC.to_json(), encoding="utf-8")
    path = tmp_path / "model.py"
    text = eject(SPEC)
    path.write_text(text, encoding="utf-8")
    assert json.loads(run(tmp_path / "spec.json", "--against", path, "--json").stdout)["holds"]
    old = "(normed * self.weight)"
    assert old in text
    path.write_text(text.replace(old, "(normed)"), encoding="utf-8")
    assert "attention_norm" in run(tmp_path / "spec.json", "--against", path, code=1).stdout


def test_what_a_file_prints_past_python_is_no_part_of_the_json(checkpoint, file, capfd):
    text = "import os\nimport sys\n" + file.read_text(encoding="utf-8")
    loud = "        os.write(1, b'written')\n        print('to stdout', file=sys.__stdout__)\n        normed = wide"
    file.write_text(text.replace("        normed = wide", loud), encoding="utf-8")
    verify(str(checkpoint), None, 0, file, as_json=True)
    said = capfd.readouterr()
    assert json.loads(said.out)["holds"] is True
    assert "written" in said.err


def test_laws_and_a_file_do_not_go_together(checkpoint, file):
    with pytest.raises(UserError, match="one of them"):
        run(checkpoint, "--against", file, "--laws", "plan")


def test_mistakes_come_without_torch(tmp_path):
    (tmp_path / "broken.py").write_text("class Model(\n")
    code = (
        "import sys; from anyformer.cli.main import run\n"
        "for words in (['--help'], ['--against', 'nowhere.py'], ['--against', 'broken.py']):\n"
        "    sys.argv = ['anyformer', 'verify', 'llama-tiny', *words]\n"
        "    try: run()\n"
        "    except SystemExit: pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Its code is executed" in " ".join(done.stdout.split())
    assert "there is no such file" in done.stderr
    assert "broken.py, line 1" in done.stderr
