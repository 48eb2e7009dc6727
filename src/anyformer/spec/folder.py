"""Which folder a path to a checkpoint means: itself, ours or a published one, or the best of a run."""

from pathlib import Path

from anyformer.errors import UserError
from anyformer.files import recover

SPEC_FILE = "spec.json"
PUBLISHED_FILE = "config.json"
"""The configuration of a published checkpoint, in the form of Hugging Face."""
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def resolve(path: str | Path) -> Path:
    """The checkpoint folder that a path means: itself, or the best of a run folder. Raises `UserError`."""
    folder = Path(path)
    if not folder.exists():
        raise UserError("there is no such checkpoint", where=folder, remedy="give a checkpoint folder or a run folder")
    if not folder.is_dir():
        pickled = folder.suffix in PICKLES
        remedy = (
            "pickled weights can run code and are never opened; convert them to safetensors"
            if pickled
            else "give the folder that holds model.safetensors and its description"
        )
        raise UserError("a checkpoint is a folder", where=folder, remedy=remedy)
    if (folder / SPEC_FILE).exists() or is_published(folder):
        return folder
    for name in ("best", "last"):
        pointer = folder / "checkpoints" / name
        target = pointed_at(pointer)
        if target is not None:
            return target
    raise UserError(
        "the folder holds no checkpoint",
        where=folder,
        expected=f"{SPEC_FILE} or Hugging Face's {PUBLISHED_FILE}, and model.safetensors; or a run's checkpoints/",
        remedy=_pickle_advice(folder),
    )


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


def _pickle_advice(folder: Path) -> str | None:
    pickles = sorted(p.name for p in folder.iterdir() if p.suffix in PICKLES)
    return (
        f"{pickles[0]} is a pickle, which can run code: it is never opened; convert it to safetensors"
        if pickles
        else None
    )
