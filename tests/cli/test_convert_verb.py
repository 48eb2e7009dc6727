"""`anyformer convert`: what goes from one form to the other and back is the same."""

import json
from functools import partial

import pytest
import torch
import typer
from typer.testing import CliRunner

from anyformer.checkpoint import Checkpoint, load
from anyformer.cli.convert import convert
from anyformer.errors import UserError
from anyformer.nn.model import build
from anyformer.spec import load_spec
from anyformer.text import Tokenizer
from anyformer.weights.source import load_spec as load_any
from command_line import invoked

verbs = typer.Typer(pretty_exceptions_enable=False)
verbs.command()(convert)


run = partial(invoked, verbs)


@pytest.fixture
def mine(tmp_path):
    """A small LLaMA in bfloat16 with a tokenizer that ends texts and chats."""
    tokenizer = Tokenizer.train("byte", [], chat_template="{% for m in messages %}{{ m.content }}{% endfor %}")
    spec = load_spec("llama-tiny", ["d_model=24", "n_layers=1", f"vocab_size={tokenizer.vocab_size}"])
    return Checkpoint(spec, build(spec, seed=3, dtype="bfloat16"), tokenizer).save(tmp_path / "mine")


def test_there_and_back_changes_no_bit(mine, tmp_path):
    said = run(mine, tmp_path / "hf", "--to", "hf")
    assert "LlamaForCausalLM" in said.stderr
    assert not said.stdout
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["torch_dtype"] == "bfloat16"
    run(tmp_path / "hf", tmp_path / "again", "--to", "anyformer")
    before, after = load(mine, dtype="stored"), load(tmp_path / "again", dtype="stored")
    assert after.spec == before.spec
    assert config["eos_token_id"] == before.tokenizer.eos_id
    for name, value in before.model.state_dict().items():
        assert torch.equal(value, after.model.state_dict()[name])
        assert after.model.state_dict()[name].dtype == torch.bfloat16
    assert after.tokenizer.vocabulary_hash == before.tokenizer.vocabulary_hash
    assert after.tokenizer.chat_template == before.tokenizer.chat_template
    assert after.tokenizer.eos_ids == before.tokenizer.eos_ids


def test_a_dtype_is_that_of_the_file(mine, tmp_path):
    run(mine, tmp_path / "wide", "--to", "hf", "--dtype", "float32")
    assert {p.dtype for p in load(tmp_path / "wide", dtype="stored").model.parameters()} == {torch.float32}


def test_a_published_folder_is_a_specification_too(mine, tmp_path):
    """The folder, its configuration, and changes laid on it; no weights are needed."""
    run(mine, tmp_path / "hf", "--to", "hf")
    (tmp_path / "hf" / "model.safetensors").unlink()
    for source in (tmp_path / "hf", tmp_path / "hf" / "config.json"):
        assert load_any(source) == load_spec(mine)
    assert load_any(tmp_path / "hf", ["n_layers=3"]).decoder.n_layers == 3


def test_nothing_is_overwritten_unless_asked(mine, tmp_path):
    run(mine, tmp_path / "hf", "--to", "hf")
    with pytest.raises(UserError, match="--force"):
        run(mine, tmp_path / "hf", "--to", "hf")
    run(mine, tmp_path / "hf", "--to", "hf", "--force")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "one.jpg").write_text("precious")
    for more in ([], ["--force"]):
        with pytest.raises(UserError):
            run(mine, tmp_path / "photos", "--to", "hf", *more)
    assert (tmp_path / "photos" / "one.jpg").read_text() == "precious"


def test_what_cannot_be_said_is_refused_or_named_before_anything_is_read(mine, tmp_path):
    table = json.loads((mine / "spec.json").read_text())
    table["decoder"]["blocks"][0]["block"]["norms"]["attention"]["alpha"] = 1.5
    (mine / "spec.json").write_text(json.dumps(table))
    with pytest.raises(UserError, match="anyformer, hf, gguf"):
        run(mine, tmp_path / "hf", "--to", "gguf2")
    with pytest.raises(UserError, match=r"alpha = 1\.5"):
        run(mine, tmp_path / "one.gguf", "--to", "gguf")
    said = " ".join(run(mine, tmp_path / "hf", "--to", "hf").stderr.split())
    for word in ("no published family is this model", "alpha = 1.5", "trust_remote_code=True"):
        assert word in said
    run(mine, tmp_path / "hf", "--to", "hf", "--force")
    (mine / "model.safetensors").unlink()
    result = CliRunner().invoke(verbs, [str(mine), str(tmp_path / "other"), "--to", "hf"])
    assert isinstance(result.exception, UserError)
    assert "alpha = 1.5" in result.stderr
    assert not (tmp_path / "other").exists()


def test_an_embedding_may_have_more_rows_than_the_tokenizer_has_tokens(tmp_path):
    """B54. All rows go there and back, all tokens stay, and the padded rows are never drawn."""
    tokenizer = Tokenizer.train("byte", [])
    spec = load_spec("llama-tiny", ["d_model=24", "n_layers=1", "vocab_size=300"])
    folder = Checkpoint(spec, build(spec, seed=3), tokenizer).save(tmp_path / "mine")
    run(folder, tmp_path / "hf", "--to", "hf")
    run(tmp_path / "hf", tmp_path / "again", "--to", "anyformer")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    back = load(tmp_path / "again")
    assert config["vocab_size"] == back.spec.vocab_size == 300
    assert back.tokenizer.vocab_size == tokenizer.vocab_size == 257
    ids = back.generate([1, 2, 3], max_new_tokens=200, temperature=5.0, seed=1)
    assert max(ids) < 257
