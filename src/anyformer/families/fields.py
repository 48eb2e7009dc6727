"""What a configuration's keys say of a specification, each in a form that is read and written.

A field reads its keys into tables, and writes them from a specification. What is written need only be right where the
family can say the specification: it is read again and compared.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from anyformer.families.config import REQUIRED, Config
from anyformer.families.tables import PerLayer, Tables, View
from anyformer.spec.part import MAX_LAYERS
from anyformer.spec.problems import MISSING


class Field(Protocol):
    """Keys of a configuration and places of a specification that say the same."""

    def read(self, config: Config, tables: Tables) -> None:
        """Puts what the configuration says into the tables. Raises `UserError`."""

    def write(self, view: View, config: dict[str, Any]) -> None:
        """Puts what the specification says into the configuration."""


@dataclass(frozen=True)
class Of:
    """A default: the value of another key, which has a default of its own."""

    key: str
    default: Any = REQUIRED


@dataclass(frozen=True)
class Quotient:
    """A default: one key's whole number divided by another's."""

    key: str
    by: str


@dataclass(frozen=True)
class Times:
    """A default: some times another key's whole number."""

    key: str
    factor: int


def default_of(config: Config, default: Any) -> Any:
    """A default as a value."""
    match default:
        case Of(key=key, default=other):
            return config.get(key, other)
        case Quotient(key=key, by=by):
            return config.whole(key) // config.whole(by)
        case Times(key=key, factor=factor):
            return config.whole(key) * factor
    return default


def put(config: dict[str, Any], key: str, value: Any) -> None:
    """Writes a key, `parent.key` into the table of its parent."""
    *parents, last = key.split(".")
    for parent in parents:
        config = config.setdefault(parent, {})
    config[last] = value


@dataclass(frozen=True)
class Same:
    """A key whose value stands unchanged at one place, or at several. `nullable`: null is a value, None."""

    key: str
    paths: str | tuple[str, ...]
    default: Any = REQUIRED
    nullable: bool = False

    def read(self, config: Config, tables: Tables) -> None:
        default = REQUIRED if self.default is REQUIRED else MISSING
        value = config.get(self.key, default, nullable=self.nullable)
        if value is MISSING:
            value = default_of(config, self.default)
        for path in (self.paths,) if isinstance(self.paths, str) else self.paths:
            tables.set(path, value, self.key)

    def write(self, view: View, config: dict[str, Any]) -> None:
        paths = (self.paths,) if isinstance(self.paths, str) else self.paths
        value = next((value for path in paths if (value := view.first(path)) is not MISSING), MISSING)
        if value is not MISSING and (value is not None or self.nullable):
            put(config, self.key, value)


ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
    "quick_gelu": "quick_gelu",
    "sigmoid": "sigmoid",
    "tanh": "tanh",
    "linear": "identity",
}
"""Published names of activations, the name to be written first of each kind first."""


@dataclass(frozen=True)
class Named:
    """A key whose words stand for ours. Written as the default's word where that fits, else as the first that does."""

    key: str
    paths: str | tuple[str, ...]
    default: Any = REQUIRED
    names: Mapping[str, Any] = None  # type: ignore[assignment]

    def _names(self) -> Mapping[str, Any]:
        return ACTIVATIONS if self.names is None else self.names

    def read(self, config: Config, tables: Tables) -> None:
        names = self._names()
        word = config.word(self.key, names, self.default)
        for path in (self.paths,) if isinstance(self.paths, str) else self.paths:
            tables.set(path, names[word], self.key)

    def write(self, view: View, config: dict[str, Any]) -> None:
        paths = (self.paths,) if isinstance(self.paths, str) else self.paths
        value = next((value for path in paths if (value := view.first(path)) is not MISSING), MISSING)
        names = self._names()
        words = [word for word, ours in names.items() if ours == value]
        if words:
            put(config, self.key, self.default if self.default in words else words[0])


@dataclass(frozen=True)
class Flag:
    """A key that is true or false, and what either means; null is false."""

    key: str
    path: str
    default: bool
    on: Any = True
    off: Any = False

    def read(self, config: Config, tables: Tables) -> None:
        value = config.get(self.key, self.default, nullable=True)
        if value is not None and not isinstance(value, bool):
            config.refuse(self.key, value, "true or false")
        tables.set(self.path, self.on if value else self.off, self.key)

    def write(self, view: View, config: dict[str, Any]) -> None:
        value = view.first(self.path)
        if value is not MISSING:
            put(config, self.key, value == self.on)


@dataclass(frozen=True)
class Always:
    """A key that has one value in all models of a family, and is written."""

    key: str
    value: Any
    default: Any = REQUIRED

    def read(self, config: Config, tables: Tables) -> None:
        value = config.get(self.key, self.default, nullable=self.value is None)
        if value != self.value or isinstance(value, bool) != isinstance(self.value, bool):
            config.refuse(self.key, value, repr(self.value))

    def write(self, view: View, config: dict[str, Any]) -> None:
        put(config, self.key, self.value)


@dataclass(frozen=True)
class Tied:
    """Whether token tables and the head are one parameter; of no meaning in a model without a language head."""

    default: bool
    tables: tuple[str, ...] = ("decoder.embed", "head")
    otherwise: tuple[str, ...] = ()
    key: str = "tie_word_embeddings"

    def read(self, config: Config, tables: Tables) -> None:
        tied = config.flag(self.key, self.default)
        head = tables.get("head.kind") == "language"
        names = self.tables if tied else self.otherwise
        kept = [name for name in names if head or name != "head"]
        tables.set("ties", kept if len(kept) > 1 else [], self.key)

    def write(self, view: View, config: dict[str, Any]) -> None:
        language = view.get("head.kind") == "language"
        put(config, self.key, self.default if not language else set(self.tables) <= view.spec.ties)


@dataclass(frozen=True)
class Labels:
    """The number of a classifier's labels: `num_labels`, or the length of `id2label`; 2 where neither is given."""

    path: str = "head.n_labels"

    def read(self, config: Config, tables: Tables) -> None:
        names = config.get("id2label", None)
        config.get("label2id", None)
        if names is not None and not isinstance(names, dict):
            config.refuse("id2label", names, "a table of names")
        n = config.whole("num_labels", 2 if names is None else len(names))
        tables.set(self.path, n if names is None else len(names), "id2label" if names else "num_labels")

    def write(self, view: View, config: dict[str, Any]) -> None:
        n = view.get(self.path)
        if isinstance(n, int):
            config["id2label"] = {str(i): f"LABEL_{i}" for i in range(n)}
            config["label2id"] = {f"LABEL_{i}": i for i in range(n)}


def layers_of(tables: Tables) -> range:
    """The layers of the stack; none where their number is no number of layers, which is refused later."""
    n_layers = tables.get("n_layers")
    whole = isinstance(n_layers, int) and not isinstance(n_layers, bool)
    return range(n_layers if whole and n_layers <= MAX_LAYERS else 0)


@dataclass(frozen=True)
class Windows:
    """A window of some layers: `sliding_window`, and `layer_types`, or a rule where a configuration has none.

    Args:
        rule: which layers have the window without `layer_types`: "all", every one but each n-th ("pattern",
            n = the key `pattern` or its default), those from the key `after` on, or of those before it every other one
            from the first on ("before").
        switch: a key that turns windows off, and its default.
        default: the window where the key is absent; null is no window.
        pattern: the key of n, None where no key says it, and its default.
        types: whether `layer_types` is written.
        needed: whether a width is always given, as `transformers` wants one even where no layer has a window.
    """

    rule: str = "all"
    switch: tuple[str, bool] | None = None
    default: int | None = None
    key: str = "sliding_window"
    pattern: tuple[str | None, int] = ("sliding_window_pattern", 2)
    after: tuple[str, int] = ("max_window_layers", 28)
    types: bool = True
    needed: bool = False
    path: str = "attention.mask.window"

    def read(self, config: Config, tables: Tables) -> None:
        layers = layers_of(tables)
        window = config.get(self.key, self.default, nullable=True)
        on = self.switch is None or config.flag(*self.switch)
        window = window if on else None
        types = config.get("layer_types", None) if self.types else None
        local = self._by_rule(config, layers) if types is None else self._listed(config, types, layers)
        if window is None and any(local) and (self.needed or types is not None):
            if self.switch is not None and not on:
                config.refuse(self.switch[0], on, "true: in layer_types some layers have a window")
            config.refuse(self.key, window, "a width: some layers have a window")
        if not any(local):
            window = None
        values = PerLayer(window if here else None for here in local)
        tables.set(self.path, window if all(local) else values, self.key)

    def _listed(self, config: Config, types: Any, layers: range) -> list[bool]:
        known = {"sliding_attention": True, "full_attention": False}
        if not isinstance(types, list) or len(types) != len(layers) or not all(isinstance(x, str) for x in types):
            config.refuse("layer_types", types, f"a word for each of {len(layers)} layers")
        for word in types:
            if word not in known:
                config.refuse("layer_types", word, " or ".join(known))
        for key in (self.pattern[0], f"_{self.pattern[0]}", self.after[0]):
            config.get(key or "", None)
        return [known[word] for word in types]

    def _by_rule(self, config: Config, layers: range) -> list[bool]:
        match self.rule:
            case "pattern":
                n = self.pattern[1] if self.pattern[0] is None else config.whole(self.pattern[0], self.pattern[1])
                return [bool((i + 1) % n) for i in layers]
            case "after" | "before":
                edge = config.get(*self.after)
                if not isinstance(edge, int) or isinstance(edge, bool) or edge < 0:
                    config.refuse(self.after[0], edge, "a whole number of layers")
                return [i >= edge if self.rule == "after" else i < edge and i % 2 == 0 for i in layers]
        return [self.rule == "all" for _ in layers]

    def write(self, view: View, config: dict[str, Any]) -> None:
        windows = view.layers(self.path)
        if not isinstance(windows, PerLayer):
            return
        window = next((x for x in windows if x is not MISSING and x is not None), None)
        put(config, self.key, self.default if window is None and self.needed else window)
        if self.switch is not None:
            put(config, self.switch[0], window is not None)
        if self.types:
            local = ["sliding_attention" if x is not MISSING and x is not None else "full_attention" for x in windows]
            put(config, "layer_types", local)
            if self.rule == "after":
                first = next((i for i, x in enumerate(windows) if x is not None), len(windows))
                put(config, self.after[0], first)
            if self.rule == "pattern" and self.pattern[0] is not None:
                n = next((i for i, x in enumerate(windows) if x is None), len(windows)) + 1
                if all((x is None) == ((i + 1) % n == 0) for i, x in enumerate(windows)):
                    put(config, self.pattern[0], n)


@dataclass(frozen=True)
class SparseLayers:
    """Which layers are mixtures of experts: from a number of dense ones on, or each n-th; `listed` layers are dense.

    Args:
        dense_first: the key of the number of dense layers before the first mixture, and its default.
        every: the key of n and its default: layer i is a mixture where (i + 1) is a multiple of n.
        listed: the key of a list of layers that are dense all the same.
    """

    dense_first: tuple[str, int] | None = None
    every: tuple[str, int] | None = None
    listed: str | None = None
    path: str = "ffn"

    def read(self, config: Config, tables: Tables) -> None:
        layers = layers_of(tables)
        first = config.get(*self.dense_first) if self.dense_first else 0
        step = config.whole(*self.every) if self.every else 1
        dense = config.get(self.listed, []) if self.listed else []
        if not isinstance(first, int) or isinstance(first, bool) or first < 0:
            config.refuse(self.dense_first[0] if self.dense_first else "", first, "a whole number, 0 or more")
        if not isinstance(dense, list) or any(type(i) is not int or i < 0 for i in dense):
            config.refuse(self.listed or "", dense, "a list of layers, whole numbers from 0 on")
        sparse = [i >= first and (i + 1) % step == 0 and i not in dense for i in layers]
        origin = (self.dense_first or self.every or ("", 0))[0]
        tables.set(self.path, PerLayer("sparse" if x else "dense" for x in sparse), origin)

    def write(self, view: View, config: dict[str, Any]) -> None:
        choices = view.choices(self.path)
        sparse = [i for i, choice in enumerate(choices) if choice == "sparse"]
        dense = [i for i, choice in enumerate(choices) if choice == "dense"]
        if self.dense_first is not None:
            put(config, self.dense_first[0], sparse[0] if sparse else len(choices))
        if self.every is not None:
            step = sparse[0] + 1 if sparse else len(choices) + 1
            regular = [i for i in range(len(choices)) if (i + 1) % step == 0] == sparse
            put(config, self.every[0], step if regular or self.listed is None else 1)
            if self.listed is not None:
                put(config, self.listed, [] if regular else dense)
        elif self.listed is not None:
            put(config, self.listed, [i for i in dense if sparse and i > sparse[0]])
