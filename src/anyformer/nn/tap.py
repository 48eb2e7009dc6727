"""Named activation sites: look at them or change them while a model runs. A model without a tap pays nothing."""

from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase

import torch
from torch import Tensor

Edit = Callable[[Tensor], Tensor]


class Tap:
    """Records and edits activations at named sites, passed to a call as `tap=`.

    Sites are `embed`, `final_norm`, `logits`, and in every block `blocks.I.` and one of `resid_pre`, `q`, `k`, `v`,
    `pattern` (the weights [B, H, T, S], which selects the reference backend), `z` (heads' outputs [B, T, H, Dv]),
    `attn_out`, `resid_mid`, `mlp_out`, `resid_post`. A block with cross-attention has `cross.q`, `cross.k`, `cross.v`,
    `cross.pattern`, `cross.z`, `cross_out` and `resid_cross` too. Sites of an encoder beside a decoder begin with
    `encoder.`. Latent attention has `latent`, what a cache stores of a token, too.

    Args:
        record: names or shell patterns (`blocks.*.resid_post`) of what to keep in `values`.
        edit: for a name or pattern, a function that gives the value to go on with.
    """

    def __init__(self, record: Iterable[str] = (), edit: Mapping[str, Edit] | None = None) -> None:
        self.record = tuple(record)
        self.edit = dict(edit or {})
        self.values: dict[str, Tensor] = {}
        self._offered: set[str] = set()

    def wants(self, site: str) -> bool:
        """Whether anything is recorded or edited at `site`."""
        return any(fnmatchcase(site, pattern) for pattern in (*self.record, *self.edit))

    def __call__(self, site: str, value: Tensor) -> Tensor:
        """The value to go on with at `site`, recorded after its edits."""
        self._offered.add(site)
        for pattern, change in self.edit.items():
            if fnmatchcase(site, pattern):
                value = _edited(site, value, change(value))
        if any(fnmatchcase(site, pattern) for pattern in self.record):
            self.values[site] = value
        return value

    def check(self) -> None:
        """Raises `ValueError` for a name or pattern that met no site in the calls so far."""
        for pattern in (*self.record, *self.edit):
            if not any(fnmatchcase(site, pattern) for site in self._offered):
                near = get_close_matches(pattern, self._offered, n=1)
                known = ", ".join(sorted({site.rpartition(".")[2] for site in self._offered}))
                raise ValueError(
                    f"no activation site is called {pattern!r}; "
                    + (f"did you mean {near[0]!r}?" if near else f"sites end in {known}")
                )


def _edited(site: str, before: Tensor, after: object) -> Tensor:
    """What an edit gave, where it can take the value's place."""
    if not isinstance(after, Tensor) or after.shape != before.shape:
        got = list(after.shape) if isinstance(after, Tensor) else f"a {type(after).__name__}"
        raise ValueError(f"an edit of {site} gives a tensor {list(before.shape)} like the one it is given; got {got}")
    return after


class Finite(Tap):
    """Remembers the first site at which a value is not finite."""

    def __init__(self) -> None:
        super().__init__()
        self.first: str | None = None

    def wants(self, site: str) -> bool:  # noqa: D102
        return not site.endswith("pattern")

    def __call__(self, site: str, value: Tensor) -> Tensor:
        """The value itself."""
        if self.first is None and not bool(torch.isfinite(value).all()):
            self.first = site
        return value


class Under:
    """A tap as one module sees it: its sites carry the module's place in their names."""

    def __init__(self, tap: "AnyTap", prefix: str) -> None:
        self.tap, self.prefix = tap, prefix

    def wants(self, site: str) -> bool:
        """Whether anything is recorded or edited at `site` of this module."""
        return self.tap.wants(f"{self.prefix}{site}")

    def __call__(self, site: str, value: Tensor) -> Tensor:
        """The value to go on with at `site` of this module."""
        return self.tap(f"{self.prefix}{site}", value)


AnyTap = Tap | Under


def see(tap: AnyTap | None, site: str, value: Tensor) -> Tensor:
    """The value to go on with: itself, unless a tap changes it."""
    return value if tap is None else tap(site, value)
