"""Which folder a path to a checkpoint means: itself, ours or a published one, or the best of a run."""

import re
from importlib.resources import files
from pathlib import Path

from anyformer.errors import UserError
from anyformer.files import recover

SPEC_FILE = "spec.json"
PUBLISHED_FILE = "config.json"
"""The configuration of a published checkpoint, in the form of Hugging Face."""
CODE_FILE = "modeling_anyformer.py"
"""The modelling code of a folder of Hugging Face for a model that no published family is."""
GGUF = ".gguf"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def resolve(path: str | Path) -> Path:
    """The checkpoint folder or GGUF file that a path means: itself, or the best of a run folder. Raises `UserError`."""
    folder = Path(path)
    if not folder.exists():
        raise UserError("there is no such checkpoint", where=path, remedy=_advice_on_absence(str(path)))
    if is_gguf(folder):
        return folder
    if not folder.is_dir():
        remedy = "give the folder that holds model.safetensors and its description, or a GGUF file"
        if folder.suffix in PICKLES:
            remedy = "pickled weights can run code and are never opened; convert them to safetensors"
        raise UserError("a checkpoint is a folder or a GGUF file", where=folder, remedy=remedy)
    if (folder / SPEC_FILE).exists() or is_published(folder):
        return folder
    for name in ("best", "last"):
        pointer = folder / "checkpoints" / name
        target = pointed_at(pointer)
        if target is not None:
            return target
    file = _only_gguf(folder)
    if file is not None:
        return file
    raise UserError(
        "the folder holds no checkpoint",
        where=folder,
        expected=f"{SPEC_FILE} or Hugging Face's {PUBLISHED_FILE}, and model.safetensors; a GGUF file; or a run",
        remedy=_advice_on(folder),
    )


def is_gguf(path: Path) -> bool:
    """Whether a path is that of a GGUF file: by its name, or by its first bytes."""
    if not path.is_file():
        return False
    if path.suffix.lower() == GGUF:
        return True
    try:
        with path.open("rb") as file:
            return file.read(4) == _MAGIC
    except OSError:
        return False


def _only_gguf(folder: Path) -> Path | None:
    """The GGUF file of a folder, the first of a model that is split; None without one. Raises `UserError` for two."""
    files = sorted(path for path in folder.iterdir() if path.suffix.lower() == GGUF and path.is_file())
    first = [path for path in files if _LATER_PART.search(path.name) is None]
    if len(first) > 1:
        got = ", ".join(path.name for path in first[:5])
        raise UserError("the folder holds several GGUF files", where=folder, got=got, remedy="give one of them")
    return first[0] if first else None


_MAGIC = b"GGUF"
_LATER_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$")
_PARTS = re.compile(
    r"spec\.json|labels\.json|certificate\.json|train|config\.json|modeling_anyformer\.py|generation_config\.json"
    r"|model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json"
    r"|tokenizer\.json|tokenizer_config\.json|special_tokens_map\.json|added_tokens\.json|chat_template\.jinja"
    r"|additional_chat_templates|modules\.json|sentence_bert_config\.json|config_sentence_transformers\.json"
    r"|\d+_(Pooling|Dense|Normalize|Dropout)"
)
"""Names of what a checkpoint's folder is made of, ours or a published one."""


def strangers(folder: Path) -> list[str]:
    """What a folder holds that is no part of a checkpoint, and that replacing it would lose; all of it without one."""
    names = sorted(path.name for path in folder.iterdir())
    if SPEC_FILE not in names and not (PUBLISHED_FILE in names and _speaks_of_a_model(folder / PUBLISHED_FILE)):
        return names
    return [name for name in names if _PARTS.fullmatch(name) is None]


def _speaks_of_a_model(path: Path) -> bool:
    """Whether a config.json is that of a published model; many other things have files of this name."""
    try:
        return b'"model_type"' in path.read_bytes()
    except OSError:
        return False


def is_published(folder: Path) -> bool:
    """Whether a folder holds a checkpoint of Hugging Face and none of ours."""
    return (folder / PUBLISHED_FILE).exists() and not (folder / SPEC_FILE).exists()


def pointed_at(pointer: Path) -> Path | None:
    """The checkpoint that a run's `best` or `last` names, or None where there is none."""
    if pointer.is_symlink():
        recover(pointer.parent / pointer.readlink())
    if pointer.is_dir():
        return pointer if (pointer / SPEC_FILE).exists() else None
    if not pointer.is_file():
        return None
    name = pointer.read_text(encoding="utf-8").strip()
    target = pointer.parent / name
    if name and Path(name).name == name:
        recover(target)
    if not name or Path(name).name != name or not (target / SPEC_FILE).exists():
        raise UserError("the run's pointer names no checkpoint", where=pointer, got=name)
    return target


def _advice_on_absence(path: str) -> str:
    """What to do about a path that leads nowhere: it may be a hub's name for a model, or a recipe's."""
    if (Path(str(files("anyformer"))) / "recipes" / f"{path}.toml").is_file():
        return f"`{path}` is a shipped recipe, which has no weights: train it, or `anyformer plan {path}`"
    if "://" in path or (path.count("/") == 1 and not path.startswith((".", "/", "~"))):
        return "nothing is downloaded here: fetch the model's folder first, as with `hf download NAME --local-dir DIR`"
    return "give a checkpoint folder, a run folder, a folder of Hugging Face, or a GGUF file"


def _advice_on(folder: Path) -> str | None:
    """What to do about a folder that holds no checkpoint."""
    pickles = sorted(p.name for p in folder.iterdir() if p.suffix in PICKLES)
    return (
        f"{pickles[0]} is a pickle, which can run code: it is never opened; convert it to safetensors"
        if pickles
        else None
    )
