"""What the writers of a file share: the kinds that are there, the constants, the sections so far."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from anyformer.spec.parts import ModelSpec
from anyformer.weights.eject.constants import Constants
from anyformer.weights.eject.layers import Choices
from anyformer.weights.eject.render import render
from anyformer.weights.eject.uses import Call, Kind, Use, kinds_of


@dataclass
class Parts:
    """A file in the making: its specification, its constants, and its sections in the order in which it has them."""

    spec: ModelSpec
    choices: Choices
    constants: Constants = field(default_factory=Constants)
    sections: list[str] = field(default_factory=list)

    def render(
        self,
        kinds: Sequence[Kind],
        texts: Callable[[Kind], Mapping[str, str]],
        calls: Callable[[Kind], Mapping[str, Call]] = lambda kind: {},
    ) -> None:
        """Writes kinds, whose placeholders become what `texts` and `calls` say of each."""
        for kind in kinds:
            self.sections.append(render(kind, self.constants, texts(kind), calls(kind)))


def switch(there: object) -> str:
    """True or False, as Python writes it."""
    return str(bool(there))


def plural(n: int, word: str) -> str:
    """A number of things."""
    return f"{n} {word}{'' if n == 1 else 's'}"


def alone(use: Use) -> Kind:
    """The kind of a use that the file has once."""
    (kind,) = kinds_of([use])
    return kind


def within(uses: Sequence[Use]) -> list[Use]:
    """Every use that some uses call, what is called first before them."""
    found: list[Use] = []
    for use in uses:
        for part, _ in use.parts.values():
            found += [*within([part]), part]
    return found


def call_of(use: Use, constants: Constants) -> str:
    """The call that makes a module of a use, its arguments as constants."""
    assert use.kind is not None
    return f"{use.kind.name}({', '.join(arguments(use, constants))})"


def arguments(use: Use, constants: Constants) -> list[str]:
    """What a module of a use is given of its own numbers."""
    assert use.kind is not None
    return [f"{name.lower()}={constants.name(name, use.numbers[name], use.title)}" for name in use.kind.fields]
