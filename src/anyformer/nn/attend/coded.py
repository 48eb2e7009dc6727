"""Descriptions as a line of text and a list of tensors, the form in which an operator of torch can take them."""

from typing import Any

from torch import Tensor

from anyformer.nn.attend import bias as biases
from anyformer.nn.attend import masks
from anyformer.nn.attend.bias import Bias
from anyformer.nn.attend.masks import All, Term

KINDS: dict[str, type[Term] | type[Bias]] = {
    kind.__name__: kind
    for kind in (
        masks.Everything,
        masks.Causal,
        masks.Window,
        masks.Prefix,
        masks.PrefixKeys,
        masks.Segments,
        masks.Padding,
        masks.Dense,
        biases.DenseBias,
        biases.AlibiBias,
        biases.BucketBias,
    )
}

TENSOR, TRAINED, NONE = "tensor", "trained", "none"


def code(visible: All, bias: Bias | None) -> tuple[str, list[Tensor], Tensor | None]:
    """A mask and a bias as text, the tensors it speaks of in order, and the one to which the bias sends gradients."""
    tensors: list[Tensor] = []
    words = [_value(visible.queries, tensors), _value(visible.keys, tensors)]
    words += [_part(term, tensors, None) for term in visible.terms]
    trained = None if bias is None else bias.tensor
    if bias is not None:
        words.append(_part(bias, tensors, trained))
    return " ".join(words), tensors, trained


def _part(part: Term | Bias, tensors: list[Tensor], trained: Tensor | None) -> str:
    words = [type(part).__name__]
    for name, value in vars(part).items():
        words.append(f"{name}={TRAINED if value is not None and value is trained else _value(value, tensors)}")
    return ",".join(words)


def _value(value: object, tensors: list[Tensor]) -> str:
    if value is None:
        return NONE
    if isinstance(value, Tensor):
        tensors.append(value)
        return TENSOR
    return str(int(value))  # type: ignore[call-overload]


def decode(text: str, tensors: list[Tensor], trained: Tensor | None) -> tuple[All, Bias | None]:
    """What `code` was given."""
    left = iter(tensors)

    def value(word: str) -> Tensor | int | None:
        if word == TENSOR:
            return next(left)
        return {NONE: None, TRAINED: trained}[word] if word in (NONE, TRAINED) else int(word)

    queries, keys, *parts = text.split(" ")
    places = value(queries), value(keys)
    terms: list[Term] = []
    bias: Bias | None = None
    for part in parts:
        name, *pairs = part.split(",")
        fields: dict[str, Any] = {key: value(word) for key, word in (pair.split("=") for pair in pairs)}
        made = KINDS[name](**fields)
        if isinstance(made, Bias):
            bias = made
        else:
            terms.append(made)
    return All(tuple(terms), *places), bias  # type: ignore[arg-type]
