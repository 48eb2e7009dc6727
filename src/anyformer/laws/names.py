"""The names of the laws, apart from the laws: one that there is not is refused before torch is loaded."""

from collections.abc import Sequence

from anyformer.errors import UserError
from anyformer.spec.problems import did_you_mean

NAMES = (
    "causality",
    "cache",
    "padding",
    "packing",
    "batch",
    "backends",
    "shift",
    "cross",
    "round trip",
    "plan",
    "accumulation",
    "compile",
    "precision",
)
"""Every law, in the order of the book."""

SLOW = ("compile",)
"""Laws that take many seconds and are checked only where they are named."""

SPACE, BUILD = "space", "build"
"""What stands for a law where a drawn recipe is refused, and where no model can be built of it."""


def chosen(laws: Sequence[str] | None) -> list[str]:
    """The names of laws in the book's order. Raises `UserError` for one that there is not."""
    if laws is None:
        return [name for name in NAMES if name not in SLOW]
    if not laws:
        raise UserError("no law is named, so that nothing would be checked", expected=", ".join(NAMES))
    for name in laws:
        if name not in NAMES:
            near = did_you_mean(name, NAMES)
            remedy = near and f"did you mean `{near}`?"
            raise UserError("there is no such law", got=name, expected=", ".join(NAMES), remedy=remedy)
    return [name for name in NAMES if name in laws]
