"""What importing costs: the specification and the plan need no torch, and the package itself needs nothing."""

import subprocess
import sys

import pytest


def modules_after(code):
    script = f"import sys\n{code}\nprint('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "code",
    [
        "import anyformer.spec, anyformer.spec.overrides, anyformer.spec.stored",
        "import anyformer.planning as p, anyformer.spec as s\np.plan(s.load_spec('llama-tiny')).table()",
    ],
)
def test_spec_and_plan_import_no_torch(code):
    assert not {"torch", "numpy", "matplotlib"} & modules_after(code)


def test_the_package_itself_imports_nothing_heavy():
    modules = modules_after("import anyformer; assert 'attend' in dir(anyformer)")
    assert not {"torch", "pydantic", "numpy", "rich", "typer"} & modules
    with pytest.raises(AttributeError, match="no attribute 'colour'"):
        import_and_read("colour")


def import_and_read(name):
    import anyformer

    return getattr(anyformer, name)
