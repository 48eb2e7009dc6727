"""GGUF files of tiny models of `transformers`, written by the `gguf` package, and what is made of them."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import isclose
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from anyformer.spec.parts import ModelSpec
from anyformer.weights.config import differences, evaluated, read_config
from anyformer.weights.gguf.format import Entry, Gguf
from anyformer.weights.gguf.load import load_gguf
from anyformer.weights.gguf.reading import Place, write_place
from anyformer.weights.gguf.save import require_kind, save_gguf
from anyformer.weights.gguf.types import KIND

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")
modeling_gguf_pytorch_utils = pytest.importorskip("transformers.modeling_gguf_pytorch_utils")
transformers.logging.set_verbosity_error()

Change = Callable[[str, Tensor], Mapping[str, Tensor]]
"""What a file has instead of a tensor of theirs: names that the `gguf` package knows, with tensors."""
CPU = torch.device("cpu")


def tiny(name: str, **settings: Any) -> nn.Module:
    """A model of `transformers` in float32, every number of it random: norms are not ones, biases not zeros.

    Args:
        name: of the classes, as "Qwen2" in Qwen2ForCausalLM and Qwen2Config.
        settings: of the configuration.
    """
    kind = {"Gemma3": "Gemma3Text"}.get(name, name)
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**settings)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            spread = 0.3 if parameter.dim() > 1 or parameter_name.endswith("bias") else 0.2
            around = 1.0 if parameter_name.endswith("norm.weight") and "Gemma" not in name else 0.0
            parameter.copy_(around + spread * torch.randn(parameter.shape))
    return model.eval()


def put(
    path: Path,
    architecture: str,
    model: nn.Module,
    metadata: Mapping[str, Any],
    change: Change | None = None,
    tables: Mapping[str, Tensor] | None = None,
) -> Path:
    """The model in a file as the `gguf` package writes it: its names, its order of dimensions, float32.

    Args:
        path: the file.
        architecture: its word in GGUF.
        model: of `transformers`.
        metadata: without the architecture's prefix.
        change: what becomes of each tensor first.
        tables: further tensors, by their names in the file.
    """
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        _add(writer, f"{architecture}.{key}", value)
    number = next(n for n, word in gguf.MODEL_ARCH_NAMES.items() if word == architecture)
    names = gguf.get_tensor_name_map(number, metadata["block_count"])
    state = model.state_dict()
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    for name, tensor in (tables or {}).items():
        writer.add_tensor(name, tensor.numpy())
    for name, tensor in _apart(state):
        for theirs, value in (change or _same)(name, tensor).items():
            known = names.get_name(theirs, try_suffixes=(".weight", ".bias")) or theirs
            writer.add_tensor(known, value.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: Any, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)


def _same(name: str, tensor: Tensor) -> Mapping[str, Tensor]:
    return {name: tensor}


def _apart(state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Tensors with the experts' gates and upward matrices, joined in memory, apart."""
    for name, tensor in state.items():
        if name.endswith("experts.gate_up_proj"):
            stem = name.removesuffix("gate_up_proj")
            gate, up = tensor.chunk(2, dim=1)
            yield f"{stem}gate_proj.weight", gate
            yield f"{stem}up_proj.weight", up
        elif name.endswith("experts.down_proj"):
            yield f"{name}.weight", tensor
        else:
            yield name, tensor


def permuted(heads: int, kv_heads: int) -> Change:
    """LLaMA's rows as its files have them: of each head 0, D/2, 1, D/2 + 1, …"""

    def change(name: str, tensor: Tensor) -> Mapping[str, Tensor]:
        found = re.search(r"\.(q|k)_proj\.", name)
        if found is None:
            return {name: tensor}
        n = heads if found[1] == "q" else kv_heads
        width = len(tensor) // n
        order = [
            head * width + half * (width // 2) + i for head in range(n) for i in range(width // 2) for half in (0, 1)
        ]
        return {name: tensor[order]}

    return change


def plus_one(name: str, tensor: Tensor) -> Mapping[str, Tensor]:
    """Gemma's norms as its files have them."""
    return {name: tensor + 1 if name.endswith("norm.weight") else tensor}


def flat_gate(name: str, tensor: Tensor) -> Mapping[str, Tensor]:
    """Qwen2-MoE's shared gate as a vector."""
    return {name: tensor[0] if name.endswith("shared_expert_gate.weight") else tensor}


def tokens(model: nn.Module, length: int = 19) -> Tensor:
    """Two rows of random tokens, [2, T]."""
    return torch.randint(model.config.vocab_size, (2, length), generator=torch.Generator().manual_seed(1))


def apart(model: nn.Module, path: Path, length: int = 19) -> float:
    """The greatest difference of logits between theirs and the file read by us, over the greatest of theirs."""
    ids = tokens(model, length)
    loaded = load_gguf(path, torch.float32, CPU)
    with torch.no_grad():
        theirs, ours = model(ids).logits, loaded.model(ids)
    return float((theirs - ours).abs().max() / theirs.abs().max())


def written(path: Path, source: Path, kind: str = "F32") -> tuple[Path, Place]:
    """A file read and written again, and how it was understood."""
    model = load_gguf(source, torch.float32, CPU).model
    place = write_place(model.spec)
    save_gguf(path, place, dict(model.named_parameters()), require_kind(kind), {}, "tiny")
    return path, place


def unlike(ours: ModelSpec, theirs: ModelSpec) -> list[str]:
    """Where two specifications differ in what they compute."""
    return [str(difference) for difference in differences(evaluated(ours), evaluated(theirs))]


def reopened(path: Path, model: nn.Module) -> nn.Module:
    """What `transformers` reads from a file: every tensor of a class like `model`'s.

    It knows some metadata of each architecture; these must be what `model` has, and the rest is taken from there.
    """
    said = modeling_gguf_pytorch_utils.load_gguf_checkpoint(path)["config"]
    config = model.config
    known = {**config.rope_parameters, **config.to_dict(), "architectures": None, "_model_name_or_path": None}
    wrong = {key: value for key, value in said.items() if known.get(key) is not None and not _near(known[key], value)}
    assert not wrong, wrong
    made = type(model)(config).eval()
    tensors = modeling_gguf_pytorch_utils.load_gguf_checkpoint(path, True, made)["tensors"]
    lacking = made.load_state_dict(tensors, strict=False)
    assert set(lacking.missing_keys) <= ({"lm_head.weight"} if config.tie_word_embeddings else set())
    return made


def _near(ours: Any, theirs: Any) -> bool:
    return ours == theirs or (
        isinstance(ours, float) and isinstance(theirs, float) and isclose(ours, theirs, rel_tol=1e-6)
    )


def raw(path: Path) -> dict[str, np.ndarray]:
    """Every tensor of a file by its name, as the `gguf` package reads it."""
    return {tensor.name: np.array(tensor.data) for tensor in gguf.GGUFReader(path).tensors}


@dataclass(frozen=True)
class _Said(Gguf):
    numbers: Mapping[str, list[float]] = field(default_factory=dict)

    def floats(self, name: str) -> list[float]:
        return self.numbers[name]


def said(
    architecture: str,
    shapes: Mapping[str, tuple[int, ...]],
    numbers: Mapping[str, list[float]] | None = None,
    **metadata: Any,
) -> Gguf:
    """A file that holds metadata, given without the architecture's prefix, shapes of tensors, and small tables."""
    path = Path("tiny.gguf")
    full = {f"{architecture}.{key}": value for key, value in metadata.items()}
    entries = {name: Entry(path, KIND["F32"], shape, 0) for name, shape in shapes.items()}
    return _Said(path, {"general.architecture": architecture, **full}, entries, numbers or {})


def spec_of(table: Mapping[str, Any]) -> ModelSpec:
    """The specification that a published configuration means."""
    return read_config(dict(table), "config.json").spec
