"""The code and the recipes of the book are what a reader can run."""

import re
import runpy
import tomllib
from pathlib import Path

import pytest

from anyformer.spec import load_spec
from anyformer.train.run import load_run
from anyformer.weights.eject import Surroundings, eject

DOCS = Path(__file__).parent.parent / "docs"

# The run that pages take as finished, much smaller than the real one.
DEMO = {
    "name": "demo",
    "model": {"d_model": 32, "n_layers": 1, "ffn": "swiglu", "attention": {"n_heads": 2, "position": "rope"}},
    "data": {"sources": ["text.txt"], "tokenizer": "byte", "context": 32},
    "train": {"steps": 2, "batch": 2},
}


def blocks(page, language):
    text = page.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)


def pages(language):
    return [page for page in sorted(DOCS.glob("*.md")) if blocks(page, language)]


@pytest.mark.parametrize("page", pages("python"), ids=lambda p: p.name)
def test_the_python_of_a_page_runs_in_order(page, tmp_path, monkeypatch):
    """Where a page reads a finished run, there is one."""
    code = "\n".join(blocks(page, "python"))
    monkeypatch.chdir(tmp_path)
    if "runs/demo" in code:
        from anyformer.train import train

        Path("text.txt").write_text("def area(width, height):\n    return width * height\n" * 40, encoding="utf-8")
        train(load_run(DEMO), root="runs")
    Path("page.py").write_text(code, encoding="utf-8")
    runpy.run_path("page.py", run_name="__main__")  # warnings are errors here, too


@pytest.mark.parametrize("page", pages("toml"), ids=lambda p: p.name)
def test_every_recipe_and_run_of_a_page_loads_and_its_pattern_fits_the_recipe_before(page):
    recipe, whole = "", 0
    for text in blocks(page, "toml"):
        table = tomllib.loads(text)
        if "data" in table:
            run = load_run(table)
            size = getattr(run.data.tokenizer, "vocab_size", 256)
            assert run.spec(size).vocab_size >= size
        elif "d_model" in table:
            load_spec(table)
            recipe = text
        elif "pattern" in table:
            load_spec(tomllib.loads(f"{recipe}\n{text}"))
        else:
            continue
        whole += 1
    assert whole


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda p: p.name)
def test_formulae_are_plain_text(page):
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.S)
    assert "$" not in prose


EJECTED = {"gpt2": "gpt2", "llama_3_8b": "llama-3-8b", "t5_base": "t5-base"}


@pytest.mark.parametrize("name", sorted({*EJECTED, *(path.stem for path in (DOCS / "ejected").glob("*.py"))}))
def test_the_ejected_files_of_the_book_are_what_is_ejected_today(name):
    """Where this fails: anyformer eject RECIPE --out docs/ejected/NAME.py --force."""
    text = eject(load_spec(EJECTED[name]), Surroundings(name=EJECTED[name], file=f"{name}.py"))
    assert (DOCS / f"ejected/{name}.py").read_text(encoding="utf-8") == text
