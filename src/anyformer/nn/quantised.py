"""Weights that stay in quantised codes: a module in the place of a parameter, and how it gets there."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anyformer.errors import UserError
from anyformer.nn.packed import GROUP, Codes, Packed, can_keep, codes_of, compiled, multiplied, multiplied_back
from anyformer.nn.packing import Blocks

__all__ = ["GROUP", "Codes", "Quantised", "can_keep", "codes_of", "dequantised_state", "keep", "load_rest", "product"]
__all__ += ["quantised", "why_not_kept"]

_REMEDY = "load it with quantize=None for floats"
_NO_PLACE = "no weight that a model uses through a product alone has this name"


class _Through(torch.autograd.Function):
    """The product with a gradient for its input; the matrix is made again for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Packed) -> Tensor:
        ctx.packed = packed
        return multiplied(x, packed.rows, packed.scales, packed.zeros, packed.bits)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        packed: Packed = ctx.packed
        return multiplied_back(grad, packed.rows, packed.scales, packed.zeros, packed.bits), None


class Quantised(nn.Module):
    """A weight kept in codes, in the place and under the name of the parameter that it stands for.

    It is frozen: gradients pass through the product to its input, and stop there. A state dict holds it as `weight`
    (uint8 codes as they are in `Codes`), `weight.scales` and `weight.zeros`.

    Args:
        codes: the weight, or what makes its codes when a state dict asks for them: it is then looked up alone.
        shape: of the weight.
        rows: for a token table, int64 [n] -> float32 [n, C], its rows from elsewhere, such as a mapped file.
        dtype: of what is looked up.

    Attributes:
        dtype: that of the activations that a lookup gives; `to` changes it.
        device: the CPU.
    """

    def __init__(
        self,
        codes: Codes | Blocks | Packed | Callable[[], Codes],
        shape: tuple[int, ...],
        rows: Callable[[Tensor], Tensor] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.shape, self._look_up = torch.Size(shape), rows
        packed = Packed(codes) if isinstance(codes, Codes | Blocks) else codes
        self._packed = packed if isinstance(packed, Packed) else None
        self._make = None if isinstance(packed, Packed) else packed
        self._like = torch.empty(0, dtype=dtype, device="cpu")
        self._parts: list[Quantised] | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Of what is looked up."""
        return self._like.dtype

    @property
    def device(self) -> torch.device:
        """Where the codes are."""
        return self._like.device

    @property
    def is_meta(self) -> bool:
        """Never: it has values."""
        return False

    @property
    def nbytes(self) -> int:
        """Bytes in memory; 0 for a table that is read from elsewhere."""
        return 0 if self._packed is None else self._packed.nbytes

    @property
    def bits(self) -> int | None:
        """Of a code; None where no codes are in memory."""
        return None if self._packed is None else self._packed.bits

    def codes(self) -> Codes:
        """The weight as it was given."""
        if self._packed is not None:
            return self._packed.codes()
        assert self._make is not None
        return self._make()

    def dequantised(self) -> Tensor:
        """The weight in float32."""
        return self.codes().dequantised()

    def forward(self, x: Tensor) -> Tensor:
        """x Wᵀ, […, K] -> […, N] in float32, for x of any floating type."""
        packed = self._require_packed()
        flat = x.reshape(-1, packed.k).to(torch.float32)
        if flat.shape[0] == 0:
            return flat.new_empty(*x.shape[:-1], packed.n)
        if torch.compiler.is_compiling():
            out = compiled(flat, packed.rows, packed.scales, packed.zeros, packed.bits)
        elif flat.requires_grad and torch.is_grad_enabled():
            out = _Through.apply(flat, packed)  # type: ignore[no-untyped-call]
        else:
            out = multiplied(flat, packed.rows, packed.scales, packed.zeros, packed.bits)
        narrow: Tensor = out if out.shape[1] == packed.n else out[:, : packed.n]
        return narrow.reshape(*x.shape[:-1], packed.n)

    def lookup(self, ids: Tensor) -> Tensor:
        """int64 […] -> […, K] in `dtype`. Raises `IndexError` for an id outside the table."""
        if torch.compiler.is_compiling():
            # Decorated so above, it would import the compiler with the package, which takes as long as torch itself.
            outside: Tensor = torch.compiler.disable(self._found)(ids)  # type: ignore[no-untyped-call]
            return outside
        return self._found(ids)

    def _found(self, ids: Tensor) -> Tensor:
        flat = ids.reshape(-1).to(torch.int64)
        if flat.numel() and not 0 <= int(flat.min()) <= int(flat.max()) < self.shape[0]:
            raise IndexError("id outside the table")
        found = self._require_packed().looked_up(flat) if self._look_up is None else self._look_up(flat)
        return found.to(self.dtype).view(*ids.shape, self.shape[-1])

    def unbind(self) -> list["Quantised"]:
        """Each matrix of a stack, in the same memory."""
        if self._parts is None:
            packed = self._require_packed()
            self._parts = [Quantised(packed.of(index), self.shape[1:]) for index in range(self.shape[0])]
        return self._parts

    def _require_packed(self) -> Packed:
        if self._packed is None:
            raise ValueError("this table is read row by row from its file, and is not multiplied with")
        return self._packed

    def _apply(self, fn: Any, recurse: bool = True) -> "Quantised":
        like = fn(self._like)
        if like.device.type != "cpu":
            raise ValueError(f"weights kept in codes stay on the CPU, not {like.device}: {_REMEDY}")
        self._like = like
        return self

    def _save_to_state_dict(self, destination: dict[str, Tensor], prefix: str, keep_vars: bool) -> None:
        codes = self.codes()
        destination[prefix[:-1]] = codes.codes
        destination[f"{prefix}scales"], destination[f"{prefix}zeros"] = codes.scales, codes.zeros

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Tensor],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        names = {
            prefix + part: prefix[:-1] if part == "codes" else prefix + part for part in ("codes", "scales", "zeros")
        }
        if strict:
            unexpected_keys += [name for name in state_dict if name.startswith(prefix) and name not in names]
        missing = [said for name, said in names.items() if name not in state_dict]
        if missing:
            missing_keys += missing
            return
        values, scales, zeros = (state_dict[name] for name in names)
        try:
            codes = codes_of(values, scales, zeros, prefix[:-1])
            if values.shape != self.shape:
                raise UserError("the weight has another shape", got=list(values.shape), expected=list(self.shape))
        except UserError as error:
            error_msgs.append(f"{prefix[:-1]}: {error}")
            return
        self._packed, self._make, self._look_up, self._parts = Packed(codes), None, None, None

    def extra_repr(self) -> str:
        """Shape and bits."""
        return f"{list(self.shape)}, " + ("looked up elsewhere" if self._packed is None else f"{self.bits} bits")


def product(x: Tensor, weight: Tensor | Quantised, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b in x's type, […, K] -> […, N], for floats or codes; with codes it is computed in float32."""
    if isinstance(weight, Tensor):
        return F.linear(x, weight, bias)
    out: Tensor = weight(x)
    return (out if bias is None else out + bias).to(x.dtype)


def _rename(module: nn.Module, state_dict: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """Before loading: a child `weight` finds its codes under its own prefix, where torch lets it look."""
    if f"{prefix}weight" in state_dict:
        state_dict[f"{prefix}weight.codes"] = state_dict.pop(f"{prefix}weight")


def _place(model: nn.Module, name: str) -> tuple[nn.Module, Tensor] | tuple[None, None]:
    """The module whose parameter `name` may be kept in codes, and the parameter."""
    path, _, last = name.rpartition(".")
    try:
        module = model.get_submodule(path)
    except AttributeError:
        return None, None
    parameter = module._parameters.get(last)
    takes = last == "weight" and getattr(module, "keepable", False)
    return (module, parameter) if takes and parameter is not None else (None, None)


def why_not_kept(model: nn.Module, name: str, codes: Codes | Blocks, device: str | torch.device = "cpu") -> str | None:
    """Why codes cannot stand for the parameter `name` on a device; None where they can."""
    module, parameter = _place(model, name)
    if module is None or parameter is None:
        return _NO_PLACE
    if tuple(codes.shape) != tuple(parameter.shape):
        return f"the weight has another shape, {list(parameter.shape)}"
    return can_keep(tuple(codes.shape), device, codes.group)


def keep(
    model: nn.Module,
    name: str,
    codes: Codes | Blocks | Callable[[], Codes],
    rows: Callable[[Tensor], Tensor] | None = None,
) -> None:
    """Puts a weight in codes in place of the parameter `name` of a model, on the meta device or with values.

    Other parameters load by `load_rest` before or after. What is looked up of a token table has the type of the
    parameter that is replaced.

    Args:
        model: whose parameter it is.
        name: such as "decoder.blocks.0.attention.q.weight"; the weight of a `Linear` that says it may be kept, of a
            token table, of experts, or of a language head.
        codes: of the parameter's shape, a stack of matrices maybe as one [E · N, K], or packed already; or a function
            that gives them, called at once unless `rows` are given and nothing multiplies with the table.
        rows: for a token table, int64 [n] -> float32 [n, C].

    Raises:
        UserError: codes that are not a whole, or not of the parameter's shape; a place that takes no codes.
    """
    module, parameter = _place(model, name)
    if module is None or parameter is None:
        raise UserError(_NO_PLACE, where=name, remedy=_REMEDY)
    if not isinstance(codes, Codes | Blocks) and (rows is None or "head" in cast("Any", model).spec.ties):
        codes = codes()
    if isinstance(codes, Codes):
        codes.check(name)
        codes = codes.shaped(parameter.shape)
    if isinstance(codes, Codes | Blocks):
        why = why_not_kept(model, name, codes)
        if why is not None:
            raise UserError(why, where=name, got=list(codes.shape), remedy=_REMEDY)
    kept = Quantised(codes, tuple(parameter.shape), rows, parameter.dtype).train(module.training)
    del module.weight
    module.weight = kept
    module.register_load_state_dict_pre_hook(_rename)  # type: ignore[no-untyped-call]


def load_rest(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Loads, by assignment, every parameter and buffer that is not kept in codes.

    Raises `RuntimeError`, as `load_state_dict` does, for missing and unknown names and for other shapes.
    """
    result = model.load_state_dict(tensors, assign=True, strict=False)
    kept = tuple(quantised(model))
    missing = [name for name in result.missing_keys if not name.startswith(kept)]
    if missing or result.unexpected_keys:
        raise RuntimeError(f"missing: {missing}, unknown: {result.unexpected_keys}")


def quantised(model: nn.Module) -> dict[str, Quantised]:
    """The weights of a model that are kept in codes, by the names of the parameters that they stand for."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Quantised)}


class _Floats(Mapping[str, Tensor]):
    """A state dict that makes floats of a weight in codes each time it is asked for."""

    def __init__(self, values: dict[str, Tensor | Quantised]) -> None:
        self._values = values

    def __getitem__(self, name: str) -> Tensor:
        value = self._values[name]
        return value if isinstance(value, Tensor) else value.dequantised()

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def dequantised_state(model: nn.Module) -> Mapping[str, Tensor]:
    """The state dict of the same model without codes: weights kept in codes become float32, others are as they are.

    The floats of a weight in codes are made each time it is looked up, so that one of them is in memory at a time.
    """
    state: dict[str, Tensor | Quantised] = {}
    for path, module in model.named_modules():
        if isinstance(module, Quantised):
            state[path] = module
        else:
            module._save_to_state_dict(state, f"{path}." if path else "", keep_vars=False)
    return _Floats(state)
