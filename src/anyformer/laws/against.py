"""An ejected file that was edited, against the core: which activation is the first that differs."""

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from rich import box
from rich.table import Table
from torch import Tensor, nn

from anyformer.errors import UserError
from anyformer.laws.draw import Draw, dtype_of, longest, outputs
from anyformer.laws.eject import Ejected, Pair, cached_calls, ejected, padded_rows
from anyformer.laws.foreign import code_of, run_file, running
from anyformer.laws.result import TOLERANCES, distance, error_of_finite
from anyformer.nn.model import Model
from anyformer.nn.quantised import dequantised_state

SHOWN = 8
"""How many sites that differ a table shows."""
SCORES = "scores"


@dataclass(frozen=True)
class Site:
    """One place of both models and what they make there.

    Attributes:
        name: of the module that gives the activation, as the file calls it (from its second call on with #2, …); or
            what the model says.
        error: the largest difference, relative to max(1, |value|); infinite for another shape, and where one alone is
            no finite number.
        holds: whether rounding may make it.
        shape: of the core's activation.
        got: the shape of the file's.
        place: the index at which they differ most, empty where they have no place in common.
        compared: whether the core makes a finite number there at all; weights that are none leave nothing to compare.
    """

    name: str
    error: float
    holds: bool
    shape: tuple[int, ...]
    got: tuple[int, ...]
    place: tuple[int, ...]
    compared: bool

    def where(self) -> str:
        """At which index the file and the core differ most, or in which shape."""
        if self.shape != self.got:
            return f"shape {list(self.got)} in the file, {list(self.shape)} in the core"
        return f"at {list(self.place)}"


@dataclass(frozen=True)
class Comparison:
    """A file beside the core.

    Attributes:
        subject: the specification or checkpoint, as it was named.
        file: the file.
        seed: of the inputs, and of the weights of a specification.
        dtype: what both were computed in.
        tolerance: the largest relative difference that rounding may make.
        sites: those of both models in the core's order of execution, then the scores, and what was computed of padded
            rows and with a cache.
        core_alone: sites of the core that an unedited file has too, and this one does not.
        file_alone: sites of the file that neither the core nor an unedited file has.
        new: parameters of the file that the checkpoint has not, which are as its `Model()` made them.
    """

    subject: str
    file: str
    seed: int
    dtype: str
    tolerance: float
    sites: tuple[Site, ...]
    core_alone: tuple[str, ...]
    file_alone: tuple[str, ...]
    new: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        """Whether nothing differs."""
        return all(site.holds for site in self.sites)

    @property
    def first(self) -> Site | None:
        """The first site that differs, None where all are the same."""
        return next((site for site in self.sites if not site.holds), None)

    def to_json(self) -> str:
        """All of it; a difference that is no finite number is null."""
        first = self.first
        table = {"holds": self.holds, "first": None if first is None else first.name, **asdict(self)}
        for site in table["sites"]:
            site["error"] = None if site["error"] == inf else site["error"]
        return json.dumps(table, indent=1, ensure_ascii=False)

    def table(self) -> Table:
        """For a terminal: the last site before a difference, the first that differ, and what the models say."""
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for name, justify in (("site", "left"), ("", "left"), ("error", "right"), ("where", "left")):
            table.add_column(name, justify=justify, no_wrap=name != "where")  # type: ignore[arg-type]
        for site in self._shown():
            where = "" if site.holds else site.where()
            said = "DIFFERS" if not site.holds else "same" if site.compared else "no numbers"
            table.add_row(site.name, said, f"{site.error:.1e}", where)
        return table

    def _shown(self) -> list[Site]:
        n_modules = next(i for i, site in enumerate(self.sites) if site.name == SCORES)
        modules, said = self.sites[:n_modules], self.sites[n_modules:]
        wrong = [i for i, site in enumerate(modules) if not site.holds]
        before = [modules[i] for i in range(max(0, wrong[0] - 1), wrong[0])] if wrong else []
        return [*before, *(modules[i] for i in wrong[:SHOWN]), *said]

    def lines(self) -> list[str]:
        """What is to be said of it."""
        n, wrong, first = len(self.sites), sum(not site.holds for site in self.sites), self.first
        if first is None:
            lines = [f"{self.file} is the same as the core of {self.subject} at all {n} sites"]
        else:
            place = self.sites.index(first)
            before = f"; {self.sites[place - 1].name} before it is the same" if place else ""
            lines = [
                f"{self.file} first differs at {first.name}, by {first.error:.1e}, {first.where()}{before}",
                f"{wrong} of {n} sites differ by more than the {self.tolerance:.0e} that {self.dtype} may round",
            ]
            if max(site.error for site in self.sites) < TOLERANCES[torch.float32]:
                lines.append("no difference is larger than float32 may round")
        empty = [site.name for site in self.sites if not site.compared]
        if empty:
            said = f"at {len(empty)} of them, from {empty[0]} on, the core makes no finite number"
            lines.append(f"{said}: the weights are damaged, and nothing is compared there")
        for names, whose in ((self.core_alone, "the core"), (self.file_alone, "the file")):
            if names:
                said = ", ".join(names[:SHOWN]) + (", …" if len(names) > SHOWN else "")
                lines.append(f"of {whose} without a partner, {len(names)}: {said}")
        if self.new:
            said = ", ".join(self.new[:SHOWN]) + (", …" if len(self.new) > SHOWN else "")
            lines.append(f"not in the checkpoint, and as Model() made them, {len(self.new)}: {said}")
        return lines


def against(model: Model, path: Path, seed: int = 0, subject: str = "the model") -> Comparison:
    """Compares an ejected file, edited or not, with the core, both with the model's weights on the same inputs.

    The file is run. Both compute in float64, where rounding hides no difference; in float32 where the file cannot.
    Sites are modules whose names the file's `RENAMED` makes equal and at which an unedited file gives what the core
    gives: the two may cut their work differently elsewhere.

    Args:
        model: the core's, which stays as it is.
        path: of the file.
        seed: of the inputs.
        subject: what the model is called.

    Raises:
        UserError: a file that is not there, is no Python, has no `Model`, or raises; weights without a place in it.
    """
    module = run_file(path, code_of(path))
    file = _filled(module, model, path)
    try:
        return _compare(model, file, path, seed, subject, torch.float64)
    except UserError:
        return _compare(model, file, path, seed, subject, torch.float32)


def _compare(model: Model, file: Ejected, path: Path, seed: int, subject: str, dtype: torch.dtype) -> Comparison:
    core = copy.deepcopy(model).to(dtype).use_backend("reference")
    tolerance = TOLERANCES[dtype]
    draw = Draw(core, seed)
    inputs = draw.inputs(3, longest(draw.stack))
    with torch.no_grad():
        with running(path, "is run"):
            theirs, said = _trace(file.model.to(dtype), lambda: file(inputs))
        if not isinstance(said, Tensor):
            what = "the file's Model gives something else than a tensor"
            raise UserError(what, where=path, got=type(said).__name__, expected="what its scores are")
        ours, want = _trace(core, lambda: outputs(core, inputs), file.here)
        plain = ejected(core)
        unedited, _ = _trace(plain.model, lambda: plain(inputs))
        shared = {n for n, x in unedited.items() if n in ours and error_of_finite(x, ours[n]) <= tolerance}
        sites = [_site(name, theirs[name], x, tolerance) for name, x in ours.items() if name in shared & theirs.keys()]
        sites.append(_site(SCORES, said, want, tolerance))
        if sites[-1].holds:
            with running(path, "is run with padding and a cache"):
                rest = [*padded_rows(core, file, draw, inputs), *_cached(core, file, draw)]
            sites += [_site(where, got, right, tolerance) for got, right, where in rest]
    return Comparison(
        subject,
        str(path),
        seed,
        str(dtype).removeprefix("torch."),
        tolerance,
        tuple(sites),
        tuple(name for name in ours if name in shared and name not in theirs),
        tuple(name for name in theirs if name not in ours and name not in unedited),
        tuple(sorted(file.model.state_dict().keys() - {file.here(name) for name in core.state_dict()})),
    )


def _cached(core: Model, file: Ejected, draw: Draw) -> Iterator[Pair]:
    """Calls with a cache, of a file that has kept its."""
    return cached_calls(core, file, draw) if hasattr(file.module, "Cache") else iter(())


def _trace(
    model: nn.Module, run: Callable[[], Any], here: Callable[[str], str] = lambda name: name
) -> tuple[dict[str, Tensor], Any]:
    """What the modules of a model give in a run, by name in order of execution, and what it gives as a whole."""
    seen: dict[str, Tensor] = {}

    def see(name: str, out: object) -> None:
        if isinstance(out, Tensor):
            calls = 1
            while (site := f"{name} #{calls}" if calls > 1 else name) in seen:
                calls += 1
            seen[site] = out.detach().clone()  # A file may go on to change it in place.

    with _hooks(model, lambda name, out: see(here(f"{name}.").removesuffix("."), out)):
        said = run()
    return seen, said


@contextmanager
def _hooks(model: nn.Module, see: Callable[[str, object], None]) -> Iterator[None]:
    """Shows `see` the name and the output of every module at each call; what passes its input on is none."""
    handles = [
        module.register_forward_hook(lambda module, given, out, name=name: see(name, out))
        for name, module in model.named_modules()
        if name and not isinstance(module, nn.Identity)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _site(name: str, got: Tensor, want: Tensor, tolerance: float) -> Site:
    error = error_of_finite(got, want)
    place: tuple[int, ...] = ()
    if got.shape == want.shape and want.numel():
        worst = distance(got, want).argmax()
        place = tuple(int(i) for i in torch.unravel_index(worst, want.shape))
    compared = not want.numel() or bool(want.isfinite().any())
    return Site(name, error, error <= tolerance, tuple(want.shape), tuple(got.shape), place, compared)


def _filled(module: ModuleType, model: Model, path: Path) -> Ejected:
    """The file's `Model` with a copy of the core's weights. Raises `UserError` for what does not fit."""
    made = getattr(module, "Model", None)
    if not (isinstance(made, type) and issubclass(made, nn.Module)):
        got = "nothing of that name" if made is None else "something else of that name"
        raise UserError("the file has no model", where=path, got=got, expected="a class Model, an nn.Module")
    _require_pairs(module, path)
    with running(path, "builds its Model"), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        file = Ejected(module, module.Model())
    weights = {file.here(name): x for name, x in dequantised_state(model).items()}
    places = file.model.state_dict()
    unplaced, unfilled = weights.keys() - places.keys(), places.keys() - weights.keys()
    wrong = [name for name in weights if name in places and weights[name].shape != places[name].shape]
    # Parameters that an edit adds keep what they are; one that is missing beside them may be one that was renamed.
    lost = unplaced | set(wrong)
    said = [f"{what}: {_some(names)}" for what, names in _misfits(unplaced, unfilled) if names and lost]
    said += [f"{n} is {list(places[n].shape)}, and {list(weights[n].shape)} in the checkpoint" for n in wrong[:3]]
    if said:
        remedy = "its parameters keep their names and shapes, or RENAMED says what they are called in the checkpoint"
        raise UserError("the weights do not fit the file's Model", where=path, got="; ".join(said), remedy=remedy)
    file.model.to(torch.promote_types(dtype_of(model), torch.float32)).load_state_dict(weights, strict=False)
    file.model.eval()
    return file


def _misfits(unplaced: set[str], unfilled: set[str]) -> list[tuple[str, set[str]]]:
    return [("without a place in the file", unplaced), ("not in the checkpoint", unfilled)]


def _some(names: set[str]) -> str:
    return ", ".join(sorted(names)[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _require_pairs(module: ModuleType, path: Path) -> None:
    pairs = getattr(module, "RENAMED", ())
    good = isinstance(pairs, tuple | list) and all(
        isinstance(pair, tuple | list) and len(pair) == 2 and all(isinstance(word, str) for word in pair)
        for pair in pairs
    )
    if not good:
        expected = "pairs of texts, each a part of a checkpoint's name and what it is here"
        raise UserError("the file's RENAMED is not what it should be", where=path, expected=expected)
