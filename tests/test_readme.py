"""What the README and the book promise in code and links is so."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_python_example_of_the_readme_runs_as_it_stands():
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S).group(1)
    run = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "parameters" in run.stdout
    assert len(code.strip().splitlines()) <= 12


def test_the_recipe_of_the_readme_is_the_shipped_one():
    import tomllib

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = tomllib.loads(re.search(r"```toml\n(.*?)```", text, re.S).group(1))
    shipped = tomllib.loads((ROOT / "src/anyformer/recipes/llama-tiny.toml").read_text(encoding="utf-8"))
    assert shown == shipped


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_link_and_file_that_a_page_names_exists(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target
    rooms = "spec|planning|nn|families|weights|text|infer|report|train|laws|cli"
    for name in re.findall(rf"`((?:{rooms})/[\w/]+\.py)`", text):
        assert (ROOT / "src/anyformer" / name).exists(), name
    for name in re.findall(r"`(benchmarks/\w+\.py)`", text):
        assert (ROOT / name).exists(), name


def test_every_verb_of_the_readme_exists():
    from anyformer.cli.main import app

    verbs = {c.name or c.callback.__name__ for c in app.registered_commands}
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^anyformer (\w+)", text, re.M)) <= verbs
