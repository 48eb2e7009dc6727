"""What every part of a specification is: a frozen table that knows all of its keys, and the numbers it may hold."""

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field


class Part(BaseModel):
    """A frozen table that knows all of its keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, defer_build=True)

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """Itself: nothing in it can change. Copying a model copied its specification table by table."""
        return self


Count = Annotated[int, Field(ge=1)]
MAX_LAYERS = 100_000
MAX_WIDTH = 1 << 20
MAX_HEADS = 1 << 16
MAX_EXPERTS = 1 << 16
MAX_VOCABULARY = 1 << 24
MAX_POSITIONS = 1 << 31
"""Far beyond any model; a slip of the keyboard does not fill the memory."""
Width = Annotated[int, Field(ge=1, le=MAX_WIDTH)]
InnerWidth = Annotated[int, Field(ge=1, le=4 * MAX_WIDTH)]
Heads = Annotated[int, Field(ge=1, le=MAX_HEADS)]
Experts = Annotated[int, Field(ge=1, le=MAX_EXPERTS)]
Vocabulary = Annotated[int, Field(ge=1, le=MAX_VOCABULARY)]
Length = Annotated[int, Field(ge=1, le=MAX_POSITIONS)]
LARGEST = 1e30
"""Numbers and their inverses stay within what float32 and bfloat16 hold."""


def _not_tiny(value: float) -> float:
    if value < 1 / LARGEST:
        raise ValueError(f"should be at least {1 / LARGEST:g}: smaller numbers are lost in float32")
    return value


Number = Annotated[float, Field(ge=-LARGEST, le=LARGEST)]
Positive = Annotated[float, Field(gt=0, le=LARGEST), AfterValidator(_not_tiny)]
NotNegative = Annotated[float, Field(ge=0, le=LARGEST)]
Rate = Annotated[float, Field(ge=0, lt=1)]
Activation = Literal["relu", "gelu", "gelu_tanh", "silu", "relu2", "quick_gelu", "sigmoid", "tanh", "identity"]


def plain(part: Part) -> dict[str, Any]:
    """A part as plain tables, without what equals its default, except the tags of unions."""
    values: dict[str, Any] = {}
    given = {name: getattr(part, name) for name in type(part).model_fields}
    for name, field in type(part).model_fields.items():
        value = given[name]
        if name != "kind" and not field.is_required():
            default = field.get_default(call_default_factory=True, validated_data=given)
            if value == default:
                continue
        values[name] = plain(value) if isinstance(value, Part) else value
    return values
