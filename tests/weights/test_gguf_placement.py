"""Where tensors of a GGUF file go: the rule that needs no torch agrees with what the modules can do."""

import pytest

from anyformer.nn.model import build
from anyformer.spec import load_spec
from anyformer.weights.gguf.placement import _MATRICES

SMALL = ["vocab_size=96"]


@pytest.mark.parametrize(
    "recipe", ["llama-tiny", "gpt2", "mixtral-8x7b", "deepseek-v2-lite", "deepseek-v3", "gemma-3-1b"]
)
def test_what_may_be_kept_by_name_is_what_the_modules_can_keep(recipe):
    model = build(load_spec(recipe, SMALL), device="meta")
    able = {
        f"{name}.weight"
        for name, module in model.named_modules()
        if getattr(module, "keepable", False) and getattr(module, "weight", None) is not None
    }
    assert able == {name for name, _ in model.named_parameters() if _MATRICES.fullmatch(name)}
