"""The files by which a folder of sentence-transformers says how its sentence vectors are made."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path, PureWindowsPath
from typing import Any, NoReturn, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from anyformer.errors import UserError
from anyformer.files import atomic_file, storage_errors, write_text
from anyformer.infer.pooling import DENSE_ACTIVATIONS, MODES, Dense
from anyformer.text.settings import CONFIG_FILE

MODULES_FILE = "modules.json"
MODEL_FILE = "config_sentence_transformers.json"
TEXT_FILES = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
"""The first is written; the others are older names of it."""
_WEIGHTS_FILE = "model.safetensors"
_PACKAGE = "sentence_transformers."
_KNOWN = ("Transformer", "Pooling", "Dense", "Normalize", "Dropout")
# A mode's name as a flag, which every version reads, and in a list in any order, which versions from 6.0 write.
_FLAGS = {
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "mean": "pooling_mode_mean_tokens",
    "mean_sqrt_len": "pooling_mode_mean_sqrt_len_tokens",
    "weighted_mean": "pooling_mode_weightedmean_tokens",
    "last": "pooling_mode_lasttoken",
}
_LISTED = {
    "cls": "cls",
    "max": "max",
    "mean": "mean",
    "mean_sqrt_len": "mean_sqrt_len_tokens",
    "weighted_mean": "weightedmean",
    "last": "lasttoken",
}
_OLDEST = ("cls", "max", "mean", "mean_sqrt_len")
_STATES = {"method": "forward", "method_output_name": "last_hidden_state"}
_VECTOR = "sentence_embedding"
_ARGUMENTS = [f"{of}_{kind}" for of in ("model", "tokenizer", "processor", "config") for kind in ("args", "kwargs")]
_ENDLESS = 1 << 31  # The settings of a tokenizer without a limit say 1e30.

T = TypeVar("T")


def read_files(folder: Path) -> dict[str, Any] | None:
    """The attributes of an `Embedding` that the files of `folder` give; `Embedding.read` says the rest."""
    file = folder / MODULES_FILE
    if not os.path.lexists(file):
        return None
    modules = _modules(file)
    names = [name for name, _ in modules]
    if names[:2] != ["Transformer", "Pooling"] or {"Transformer", "Pooling"} & set(names[2:]):
        expected = "Transformer, Pooling, and then Dense, Dropout or Normalize"
        raise UserError("this order of modules is not supported", where=file, got=", ".join(names), expected=expected)
    if "Normalize" in names and "Dense" in names[names.index("Normalize") :]:
        what = "a dense layer after normalisation is not supported"
        raise UserError(what, where=file, got=", ".join(names), expected="Dense, then Normalize")
    dense = []
    for name, place in modules[2:]:
        if name == "Dense":
            dense.append(_read_dense(place))
        elif name == "Normalize" and os.path.lexists(place / "config.json"):
            config = _Config(place / "config.json")
            config.only(["module_input_name", "module_output_name"], _VECTOR)
            config.done()
    return {
        **_read_text(folder),
        **_read_model(folder / MODEL_FILE),
        **_read_pooling(modules[1][1] / "config.json"),
        "dense": tuple(dense),
        "normalise": "Normalize" in names,
    }


def write_files(
    folder: Path,
    *,
    pooling: Sequence[str],
    d_model: int,
    pool_prompt: bool,
    dense: Sequence[Dense],
    normalise: bool,
    max_length: int | None,
    lower: bool,
    prompts: Mapping[str, str],
    default_prompt: str | None,
    similarity: str | None,
) -> None:
    """Writes the files, each whole or not at all, `modules.json` last. Raises `UserError` where it cannot."""
    names = ["Transformer", "Pooling", *["Dense"] * len(dense), *["Normalize"] * normalise]
    paths = ["", *(f"{place}_{name}" for place, name in enumerate(names) if place)]
    modules = [
        {"idx": place, "name": str(place), "path": path, "type": f"{_PACKAGE}models.{name}"}
        for place, (name, path) in enumerate(zip(names, paths, strict=True))
    ]
    with storage_errors(folder):
        for path in paths[: 2 + len(dense)]:
            (folder / path).mkdir(parents=True, exist_ok=True)
    _write_json(folder / paths[1] / "config.json", _pooling_config(pooling, d_model, pool_prompt))
    for path, layer in zip(paths[2:], dense, strict=False):
        _write_dense(folder / path, layer)
    _write_json(folder / TEXT_FILES[0], {"max_seq_length": max_length, "do_lower_case": lower})
    model = {"prompts": dict(prompts), "default_prompt_name": default_prompt, "similarity_fn_name": similarity}
    _write_json(folder / MODEL_FILE, model)
    _write_json(folder / MODULES_FILE, modules)


class _Config:
    """A JSON object in a file, of which every key is either used or refused."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._left: dict[str, Any] = _read_json(path, dict)

    def take(self, key: str, kind: type[T]) -> T | None:
        """The value of a key, None where it is absent or null. Raises `UserError` for one of another kind."""
        value: T | None = self._left.pop(key, None)
        if value is not None and type(value) is not kind:
            self.refuse(key, value, kind.__name__)
        return value

    def needed(self, key: str, kind: type[T]) -> T:
        """The value of a key. Raises `UserError` where it is absent, null or of another kind."""
        value = self.take(key, kind)
        if value is None:
            self.refuse(key, value, kind.__name__)
        return value

    def names(self, key: str) -> list[object]:
        """The value of a key that holds one name or several; none where it is absent or null."""
        value = self._left.pop(key, None)
        return value if isinstance(value, list) else [] if value is None else [value]

    def only(self, keys: Sequence[str], *allowed: object) -> None:
        """Raises `UserError` for a key among these that has another value than null and the allowed ones."""
        for key in keys:
            value = self._left.pop(key, None)
            if value is not None and value not in allowed:
                self.refuse(key, value, " or ".join(map(repr, allowed)) or "null")

    def done(self) -> None:
        """Raises `UserError` for a key that nothing has asked for."""
        for key, value in self._left.items():
            self.refuse(key, value, "no such key")

    def refuse(self, key: str, value: object, expected: object) -> NoReturn:
        """Raises `UserError` for a value."""
        where = f"{self.path}, {key}"
        raise UserError("this setting is not supported", where=where, got=repr(value), expected=expected)


def _read_json(path: Path, kind: type[T]) -> T:
    try:
        value: T = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        remedy = f"copy it from where {MODULES_FILE} comes from"
        raise UserError("a file of the sentence vectors is missing", where=path, remedy=remedy) from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError("this file cannot be read as JSON", where=path, got=error) from error
    if type(value) is not kind:
        what = "this file holds another kind of JSON value"
        raise UserError(what, where=path, got=type(value).__name__, expected=kind.__name__)
    return value


def _write_json(path: Path, value: object) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def _modules(file: Path) -> list[tuple[str, Path]]:
    """Kind and folder of each module, in order."""
    found = []
    for number, entry in enumerate(_read_json(file, list)):
        where = f"{file}, module {number}"
        kind, path = (entry.get("type"), entry.get("path")) if isinstance(entry, dict) else (None, None)
        if not isinstance(kind, str) or not isinstance(path, str):
            raise UserError("a module has a type and a path", where=where, got=repr(entry))
        name = kind.rpartition(".")[2]
        if not kind.startswith(_PACKAGE) or name not in _KNOWN:
            expected = ", ".join(f"{_PACKAGE}models.{known}" for known in _KNOWN)
            raise UserError("this module is not supported", where=where, got=kind, expected=expected)
        if entry.get("kwargs"):
            raise UserError("arguments of modules are not supported", where=where, got=repr(entry["kwargs"]))
        # Files may be links to elsewhere, as in a cache of downloads: the path alone is looked at.
        said = PureWindowsPath(path)
        if said.anchor or ".." in said.parts or "\0" in path:
            raise UserError("this path leaves the folder", where=where, got=repr(path))
        if name == "Transformer" and said.parts:
            remedy = f'move its files beside {MODULES_FILE} and make its path ""'
            raise UserError("the model does not lie in the folder itself", where=where, got=path, remedy=remedy)
        found.append((name, file.parent / path))
    return found


def _read_text(folder: Path) -> dict[str, Any]:
    """How a text is tokenised."""
    most, lower = None, None
    there = [folder / name for name in TEXT_FILES if os.path.lexists(folder / name)]
    if there:
        config = _Config(there[0])
        most, lower = config.take("max_seq_length", int), config.take("do_lower_case", bool)
        states = config.take("modality_config", dict)
        if states is not None and states.get("text") != _STATES:
            config.refuse("modality_config", states, {"text": _STATES})
        config.only(["transformer_task"], "feature-extraction")
        config.only(["module_output_name"], "token_embeddings")
        config.only(["unpad_inputs"], True, False)
        config.only(["query_length", "document_length", "query_expansion"])
        config.only(["processing_kwargs", *_ARGUMENTS], {})
        config.done()
    settings = _read_json(folder / CONFIG_FILE, dict) if os.path.lexists(folder / CONFIG_FILE) else {}
    limit = settings.get("model_max_length")
    if most is None and isinstance(limit, int | float) and limit < _ENDLESS:
        most = int(limit)
    return {"max_length": most, "lower": bool(lower), "truncation": settings.get("truncation_side") or "right"}


def _read_model(path: Path) -> dict[str, Any]:
    """Prompts, and what the vectors are compared by."""
    if not os.path.lexists(path):
        return {}
    config = _Config(path)
    config.only(["model_type"], "SentenceTransformer")
    config.only(["truncate_dim"])
    prompts = config.take("prompts", dict) or {}
    if any(not isinstance(text, str) for text in prompts.values()):
        config.refuse("prompts", prompts, "texts by name")
    # Other keys describe the model and do not change its vectors.
    default, similarity = config.take("default_prompt_name", str), config.take("similarity_fn_name", str)
    return {"prompts": prompts, "default_prompt": default, "similarity": similarity}


def _read_pooling(path: Path) -> dict[str, Any]:
    config = _Config(path)
    old = config.take("word_embedding_dimension", int)
    width = config.take("embedding_dimension", int) or old or config.needed("word_embedding_dimension", int)
    flagged = [mode for mode in MODES if config.take(_FLAGS[mode], bool)]
    pools = config.take("include_prompt", bool)
    modes = []
    for listed in config.names("pooling_mode"):
        known = [mode for mode in MODES if _LISTED[mode] == listed]
        if not known:
            config.refuse("pooling_mode", listed, ", ".join(_LISTED.values()))
        modes += known
    config.done()
    return {"pooling": tuple(modes or flagged or ["mean"]), "d_model": width, "pool_prompt": pools is not False}


def _pooling_config(pooling: Sequence[str], d_model: int, pool_prompt: bool) -> dict[str, Any]:
    """Flags where they can say it, so that every version reads it."""
    prompt = {} if pool_prompt else {"include_prompt": False}
    if list(pooling) == [mode for mode in MODES if mode in pooling]:
        flags = {_FLAGS[mode]: mode in pooling for mode in MODES if mode in pooling or mode in _OLDEST}
        return {"word_embedding_dimension": d_model, **flags, **prompt}
    return {"embedding_dimension": d_model, "pooling_mode": [_LISTED[mode] for mode in pooling], **prompt}


def _read_dense(folder: Path) -> Dense:
    config = _Config(folder / "config.json")
    width, out = config.needed("in_features", int), config.needed("out_features", int)
    biased = config.take("bias", bool) is not False
    named = config.take("activation_function", str) or DENSE_ACTIVATIONS["tanh"]
    word = named.rpartition(".")[2] if named.startswith("torch.nn.") else None
    activation = next((name for name, theirs in DENSE_ACTIVATIONS.items() if theirs.rpartition(".")[2] == word), None)
    if activation is None:
        config.refuse("activation_function", named, ", ".join(DENSE_ACTIVATIONS.values()))
    config.only(["module_input_name", "module_output_name"], _VECTOR)
    config.only(["use_residual"], False)
    config.done()
    wanted = {"linear.weight": [out, width], **({"linear.bias": [out]} if biased else {})}
    tensors = _read_weights(folder / _WEIGHTS_FILE, wanted)
    return Dense(tensors["linear.weight"], tensors.get("linear.bias"), activation)


def _read_weights(file: Path, wanted: dict[str, list[int]]) -> dict[str, Tensor]:
    """Tensors of these shapes and no others, in float32."""
    if not os.path.lexists(file):
        there = (file.parent / "pytorch_model.bin").exists()
        remedy = "open and save the model with sentence-transformers, which writes safetensors" if there else None
        got = "pytorch_model.bin, a pickle, which can run code when it is opened" if there else "no such file"
        raise UserError("a dense layer has no weights that can be read", where=file, got=got, remedy=remedy)
    try:
        tensors = load_file(file)
    except (SafetensorError, OSError) as error:
        raise UserError(f"cannot read the weights: {error}", where=file) from None
    found = {name: list(value.shape) for name, value in tensors.items()}
    if found != wanted or not all(value.is_floating_point() for value in tensors.values()):
        held = {name: f"{found[name]} {value.dtype}" for name, value in tensors.items()}
        raise UserError("the weights do not fit the dense layer", where=file, got=held, expected=wanted)
    return {name: value.to(torch.float32, copy=True) for name, value in tensors.items()}


def _write_dense(folder: Path, layer: Dense) -> None:
    width, out = layer.widths
    config = {"in_features": width, "out_features": out, "bias": layer.bias is not None}
    _write_json(folder / "config.json", {**config, "activation_function": DENSE_ACTIVATIONS[layer.activation]})
    named = {"linear.weight": layer.weight, "linear.bias": layer.bias}
    tensors = {name: value.detach().cpu().contiguous() for name, value in named.items() if value is not None}
    with atomic_file(folder / _WEIGHTS_FILE) as partial:
        try:
            save_file(tensors, partial, metadata={"format": "pt"})
        except SafetensorError as error:
            raise UserError(f"cannot write the weights: {error}", where=folder / _WEIGHTS_FILE) from error
