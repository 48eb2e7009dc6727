"""What each parameter is for. Initialisation, optimiser groups and sharding all read the same word."""

from typing import Literal, get_args

from torch import nn

Role = Literal["embedding", "position", "head", "hidden", "residual", "router", "norm", "bias"]
"""hidden: a block's matrix that reads; residual: a block's matrix that writes to the residual stream."""


def roles(model: nn.Module) -> dict[str, Role]:
    """The role of every parameter by name; a shared parameter appears once, under its first name.

    Each module that owns parameters says their roles in `roles: dict[str, Role]` beside them.

    Raises:
        TypeError: a parameter without a role.
    """
    found: dict[str, Role] = {}
    for path, module in model.named_modules():
        own: dict[str, Role] = getattr(module, "roles", {})
        for name, _ in module.named_parameters(recurse=False):
            if name not in own:
                raise TypeError(f"{type(module).__name__} at {path!r} gives no role to its parameter {name!r}")
            assert own[name] in get_args(Role)
            found[f"{path}.{name}" if path else name] = own[name]
    unique = dict(model.named_parameters())
    return {name: role for name, role in found.items() if name in unique}
