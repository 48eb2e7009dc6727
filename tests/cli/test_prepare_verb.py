"""`anyformer prepare`, run as a user runs it."""

import json
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from anyformer.cli.prepare import prepare
from anyformer.errors import UserError
from anyformer.text.corpus import Corpus

app = typer.Typer()
app.command()(prepare)


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def texts(tmp_path):
    for index in range(4):
        (tmp_path / f"{index}.txt").write_text(f"Text number {index} says grüezi. " * (index + 3))
    return tmp_path


def test_a_corpus_is_made_and_described(texts):
    (texts / "picture.png").write_bytes(b"\0")
    result = run(texts, "--out", texts / "out", "--tokenizer", "bpe", "--vocab-size", "270", "--val-fraction", "0.3")
    assert result.exit_code == 0
    corpus = Corpus.open(texts / "out")
    assert corpus.tokenizer.vocab_size == 270
    assert f"{corpus.train.n_tokens:,} tokens" in result.stdout
    assert f"{corpus.val.n_bytes:,} bytes" in result.stdout
    assert "1 not text by suffix" in result.stderr
    assert "picture" not in result.stdout


def test_json_is_one_document_on_stdout(texts):
    result = run(texts / "1.txt", texts / "2.txt", "--out", texts / "out", "--tokenizer", "char", "--json")
    report = json.loads(result.stdout)
    assert report["folder"] == str(texts / "out")
    assert report["train"]["n_documents"] == 1
    assert report["vocab_size"] == Corpus.open(texts / "out").tokenizer.vocab_size


def test_a_tokenizer_is_taken_from_a_corpus(texts):
    run(texts, "--out", texts / "one", "--vocab-size", "270")
    result = run(texts / "1.txt", "--out", texts / "two", "--tokenizer", texts / "one" / "tokenizer")
    assert result.exit_code == 0
    hashes = {Corpus.open(texts / name).tokenizer.vocabulary_hash for name in ("one", "two")}
    assert len(hashes) == 1


def test_a_mistake_is_a_user_error(texts):
    for arguments in (("missing.txt",), (texts / "1.txt", "--tokenizer", "nonsense"), (texts, "--val-fraction", "2")):
        result = run(*arguments, "--out", texts / "out")
        assert isinstance(result.exception, UserError)
    result = run(texts / "1.txt", "--out", texts)
    assert isinstance(result.exception, UserError)


def test_importing_the_verb_loads_nothing_heavy():
    code = (
        "import sys, anyformer.cli.prepare; print(sorted({'torch','numpy','tokenizers','jinja2'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
