"""Every package that the source imports is declared, so that an installation by itself has it."""

import ast
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


SAMPLING = {("choose.py", "hypothesis"), ("space.py", "hypothesis")}
"""What samples the space of models for tests uses the test extra, inside the functions that need it."""


def imported(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name.split(".")[0] for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]


def test_what_is_imported_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    listed = [*project["dependencies"], *project["optional-dependencies"]["tensorboard"]]
    declared = {re.match(r"[\w-]+", line)[0] for line in listed} | {"anyformer"}
    undeclared = {
        f"{path.name}: {name}"
        for path in (ROOT / "src").rglob("*.py")
        for name in imported(ast.parse(path.read_text(encoding="utf-8")))
        if name not in sys.stdlib_module_names and name not in declared and (path.name, name) not in SAMPLING
    }
    assert not undeclared
