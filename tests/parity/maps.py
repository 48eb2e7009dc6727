"""Weights of a published implementation carried over to the names of this package, every tensor once."""

import re
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

Rule = tuple[str, str | list[str]] | tuple[str, list[str], Callable[[Tensor], Iterable[Tensor]]]
"""Their name, ours (or several of ours), and how theirs is taken apart. `{i}` is a number and `{p}` the last word."""

_FIELDS = {"i": r"(?P<i>\d+)", "p": r"(?P<p>weight|bias)"}


def theirs(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and saved buffer by its first name; a tied one once."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in seen:
            seen.add(id(value))
            found[name] = value
    return found


def ours(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer to be set."""
    return {name: value.detach() for name, value in [*model.named_parameters(), *model.named_buffers()]}


def copy(source: nn.Module, target: nn.Module, rules: list[Rule]) -> None:
    """Sets every value of `target` from `source`. Every tensor of either is touched exactly once, or this fails."""
    patterns = [(_pattern(rule[0]), rule[1], rule[2] if len(rule) == 3 else None) for rule in rules]
    room = ours(target)
    unread: list[str] = []
    for name, value in theirs(source).items():
        match, names, take = next(
            ((found, names, take) for pattern, names, take in patterns if (found := pattern.fullmatch(name))),
            (None, [], None),
        )
        if match is None:
            unread.append(name)
            continue
        values = [value] if take is None else list(take(value))
        for our_name, part in zip([names] if isinstance(names, str) else names, values, strict=True):
            place = room.pop(our_name.format(**match.groupdict()))
            assert place.shape == part.shape, f"{name} -> {our_name}: {list(part.shape)} for {list(place.shape)}"
            place.copy_(part.detach())
    assert not unread, f"never read: {unread}"
    assert not room, f"never set: {list(room)}"


def _pattern(name: str) -> re.Pattern[str]:
    parts = re.split(r"\{(\w+)\}", name)
    return re.compile("".join(_FIELDS[part] if n % 2 else re.escape(part) for n, part in enumerate(parts)))


def turned(value: Tensor) -> list[Tensor]:
    """One matrix kept as [in, out]."""
    return [value.mT if value.dim() > 1 else value]


def rows(*sizes: int) -> Callable[[Tensor], Iterable[Tensor]]:
    """Blocks of rows (or of the elements of a bias), one after another."""
    return lambda value: value.split(list(sizes))


def columns(*sizes: int) -> Callable[[Tensor], Iterable[Tensor]]:
    """Blocks of a matrix kept as [in, out]."""
    return lambda value: [part.T if part.dim() > 1 else part for part in value.split(list(sizes), -1)]


def by_head(n_groups: int, *sizes: int) -> Callable[[Tensor], Iterable[Tensor]]:
    """Each group of heads holds its own blocks of rows one after another."""

    def take(value: Tensor) -> Iterable[Tensor]:
        parts = value.unflatten(0, (n_groups, sum(sizes))).split(list(sizes), 1)
        return [part.flatten(0, 1) for part in parts]

    return take


def chunks(n: int, dim: int = 0) -> Callable[[Tensor], Iterable[Tensor]]:
    """Equal blocks."""
    return lambda value: value.chunk(n, dim)


def from_halves(n_heads: int) -> Callable[[Tensor], Iterable[Tensor]]:
    """Channels i and i + d/2 of every head side by side."""
    return lambda value: [value.unflatten(0, (n_heads, 2, -1)).transpose(1, 2).flatten(0, 2)]


def scattered(model: nn.Module, seed: int = 0) -> nn.Module:
    """Random values of a size that shows: norms around what they start at, biases far from zero, matrices by fan-in."""
    generator = torch.Generator().manual_seed(seed)
    norms = {id(p) for module in model.modules() if "Norm" in type(module).__name__ for p in module.parameters()}
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    with torch.no_grad():
        for value in theirs(model).values():
            if isinstance(value, nn.Parameter) and not value.requires_grad:
                continue  # A fixed table of sines.
            noise = torch.randn(value.shape, generator=generator, dtype=torch.float64)
            if id(value) in norms:
                value.add_(0.4 * noise)
            elif value.dim() < 2:
                value.copy_(0.4 * noise)
            elif id(value) in tables:
                value.copy_(noise)
            else:
                value.copy_(noise * value.shape[-1] ** -0.5)
    return model
