"""The run description: everything that decides a training run, as frozen tables read from TOML. Imports no torch."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError

from anyformer.errors import UserError
from anyformer.spec.attention import Prefix
from anyformer.spec.expand import expand
from anyformer.spec.overrides import apply_overrides
from anyformer.spec.parts import Count, Length, ModelSpec, Part, Positive, Rate, Vocabulary
from anyformer.spec.problems import Problem, SpecError, from_pydantic
from anyformer.spec.recipe import known_keys
from anyformer.spec.source import find_toml, load_recipe, read_toml
from anyformer.train.schedule import Cosine, Schedule

NonNegative = Annotated[float, Field(ge=0)]
Rows = Annotated[int, Field(ge=1, le=1 << 20)]


def _listed(value: object) -> object:
    """A text alone is a list of one."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list | tuple):
        raise ValueError("should be a list of texts, or one text")
    return value


def _named(name: str) -> str:
    if len(name) > LONGEST_NAME:
        raise ValueError(f"is too long: {len(name)} characters, and a folder is named by it; {LONGEST_NAME} may be had")
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", name):
        raise ValueError(
            "may hold the letters a to z and A to Z, digits, '_', '-' and '.', and begins with a letter, a digit or '_'"
        )
    return name


LONGEST_NAME = 100
Words = Annotated[tuple[str, ...], Field(strict=False), BeforeValidator(_listed)]


class ByteTokenizer(Part):
    """Each byte a token."""

    kind: Literal["byte"] = "byte"


class CharTokenizer(Part):
    """Each character of the training text a token."""

    kind: Literal["char"] = "char"


class BpeTokenizer(Part):
    """Byte-level BPE trained on the training text."""

    kind: Literal["bpe"] = "bpe"
    vocab_size: Vocabulary = 4096


class FileTokenizer(Part):
    """A finished tokenizer: a folder with tokenizer.json, or that file."""

    kind: Literal["file"] = "file"
    path: str


TokenizerChoice = Annotated[ByteTokenizer | CharTokenizer | BpeTokenizer | FileTokenizer, Field(discriminator="kind")]


class Data(Part):
    """Where the text comes from and how it fills rows.

    `sources` are files, folders, "python:stdlib", "python:docs"; `corpus` is a folder that `anyformer prepare` made.
    `packing` "stream" reads all tokens as one text; with "documents" a token sees its own document alone, and no
    document's first token is a target.
    """

    sources: Words = ()
    corpus: str | None = None
    tokenizer: TokenizerChoice | None = None
    val_fraction: Rate | None = None
    context: Length = 256
    packing: Literal["stream", "documents"] = "stream"


class Training(Part):
    """How long, how many rows at a time, and when to look.

    Exactly one of `steps`, `tokens` and `minutes` says how long; `minutes` becomes a number of steps by a measurement
    before the first, and stays that number when the run is resumed. `batch` is rows per update, `micro_batch` rows per
    forward pass (it need not divide `batch`). Cadences left out are a tenth of the run. `clip` 0 clips nothing.
    """

    steps: Count | None = None
    tokens: Count | None = None
    minutes: Positive | None = None
    batch: Rows = 16
    micro_batch: Rows | None = None
    evaluate_every: Count | None = None
    sample_every: Count | None = None
    checkpoint_every: Count | None = None
    keep: Count = 2
    clip: NonNegative = 1.0
    precision: Literal["float32", "bfloat16"] = "float32"
    compile: bool = False
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"


Beta = Annotated[float, Field(ge=0, lt=1)]
Betas = Annotated[tuple[Beta, Beta], Field(strict=False)]


class RoleRates(Part):
    """A factor on the learning rate for each role of a parameter."""

    embedding: NonNegative = 1.0
    position: NonNegative = 1.0
    head: NonNegative = 1.0
    hidden: NonNegative = 1.0
    residual: NonNegative = 1.0
    router: NonNegative = 1.0
    norm: NonNegative = 1.0
    bias: NonNegative = 1.0


class AdamWFields(Part):
    """AdamW (Loshchilov & Hutter 2019, algorithm 2). Decay falls on block matrices and an untied head alone."""

    lr: Positive = 1e-3
    betas: Betas = (0.9, 0.95)
    eps: Positive = 1e-8
    weight_decay: NonNegative = 0.1
    lr_scale: RoleRates = RoleRates()


class AdamW(AdamWFields):
    """AdamW for every parameter."""

    kind: Literal["adamw"] = "adamw"


Triple = Annotated[tuple[float, float, float], Field(strict=False)]


class MuonFields(Part):
    """Muon's own numbers; `lr` and `weight_decay` are the optimiser's where not given.

    `scale` multiplies an update of `rows` × `cols`: "rms" 0.2·√max(rows, cols), AdamW's usual size (Liu et al. 2025,
    eq. 4); "jordan" √max(1, rows/cols) (Jordan 2024); "spectral" √(rows/cols) (Bernstein & Newhouse 2024); "none" 1.
    `coefficients` are "jordan", "polar" (Amsel et al. 2025), or triples a, b, c, the last of which repeats. `precision`
    "auto" iterates in bfloat16 on CUDA and in float32 elsewhere.
    """

    lr: Positive | None = None
    momentum: Beta = 0.95
    nesterov: bool = True
    weight_decay: NonNegative | None = None
    ns_steps: Annotated[int, Field(ge=1, le=20)] = 5
    coefficients: Literal["jordan", "polar"] | Annotated[tuple[Triple, ...], Field(strict=False, min_length=1)] = (
        "jordan"
    )
    scale: Literal["rms", "jordan", "spectral", "none"] = "rms"
    precision: Literal["auto", "float32", "bfloat16"] = "auto"


class Muon(AdamWFields):
    """Muon for the blocks' matrices, each expert's by itself; AdamW for the rest, routers included."""

    kind: Literal["muon"] = "muon"
    muon: MuonFields = MuonFields()


class Initial(Part):
    """Standard deviations of the fresh weights by role; None is 1/√fan_in. See `nn/init.py`."""

    kind: Literal["table"] = "table"
    embedding: NonNegative | None = None
    position: NonNegative | None = 0.02
    head: NonNegative | None = None
    router: NonNegative | None = None
    hidden: NonNegative | None = None
    residual: NonNegative | None = None
    depth: Literal["sqrt", "none", "zero"] = "sqrt"
    look_back: NonNegative = 0.0


class ScaledInit(Part):
    """Std 1/√fan_in, residual matrices divided by √(2·n_layers)."""

    kind: Literal["scaled"] = "scaled"


class Gpt2Init(Part):
    """Std 0.02, residual matrices divided by √(2·n_layers) (Radford et al. 2019)."""

    kind: Literal["gpt2"] = "gpt2"


class Sample(Part):
    """Texts to continue now and then, so that people see the model learn."""

    prompts: Words = ()
    max_new_tokens: Count = 100
    temperature: NonNegative = 0.8


class Track(Part):
    """Where metrics go beside metrics.jsonl."""

    tensorboard: bool = False


class Run(Part):
    """A whole run. `model` is a recipe; its `vocab_size` and `max_positions` may be left out for the data's."""

    name: Annotated[str, AfterValidator(_named)]
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    model: dict[str, Any]
    init: Annotated[ScaledInit | Gpt2Init | Initial, Field(discriminator="kind")] = ScaledInit()
    data: Data
    train: Training
    optimizer: Annotated[AdamW | Muon, Field(discriminator="kind")] = AdamW()
    schedule: Schedule = Cosine()
    sample: Sample = Sample()
    track: Track = Track()

    def spec(self, vocab_size: int) -> ModelSpec:
        """The model for a tokenizer of `vocab_size` ids.

        Raises:
            UserError: a model with fewer rows, or one that training is not for.
        """
        recipe = {"vocab_size": vocab_size, "max_positions": self.data.context, **self.model}
        spec = expand(recipe, where="model")
        _require_trainable(spec)
        if spec.vocab_size < vocab_size:
            raise UserError(
                "the model's vocabulary is smaller than the tokenizer's",
                where="model.vocab_size",
                got=spec.vocab_size,
                expected=f"at least {vocab_size}",
                remedy="leave it out: it then comes from the tokenizer",
            )
        return spec

    def rows_per_forward(self) -> int:
        """Rows of a micro-batch."""
        return min(self.train.micro_batch or self.train.batch, self.train.batch)

    def to_dict(self) -> dict[str, Any]:
        """Every value, defaults included, as JSON knows it."""
        return self.model_dump(mode="json")


def _require_trainable(spec: ModelSpec) -> None:
    """Raises `UserError` for a model that does not predict each next token of its own input."""
    if spec.generates and spec.encoder is None:
        if any(isinstance(block.attention.mask, Prefix) for block in spec.last.blocks):
            raise UserError(
                "a prefix model cannot be trained here",
                where="model.attention.mask",
                got="prefix",
                expected="causal: a running text has no prefix that its tokens could all see",
                remedy='mask = "causal"; the weights fit a model with prefix masks',
            )
        return
    head = "no head" if spec.head is None else f"a {spec.head.kind} head"
    raise UserError(
        "this kind of model cannot be trained here",
        where="model",
        got=f"{' and '.join(f'an {name}' if name == 'encoder' else f'a {name}' for name in spec.stacks)} with {head}",
        expected="a decoder alone with a language head, which learns to predict each next token",
        remedy="choose a recipe of such a model",
    )


_WORDS = (("optimizer",), ("schedule",), ("init",), ("data", "tokenizer"))
_DEFAULT_KINDS = {("optimizer",): "adamw", ("schedule",): "cosine", ("init",): "table"}


def _normalise(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The same tables with shorthand words written out and left-out kinds filled in."""
    table: dict[str, Any] = {key: dict(value) if isinstance(value, dict) else value for key, value in raw.items()}
    for path in _WORDS:
        parent: Any = table
        for key in path[:-1]:
            parent = parent.get(key, {}) if isinstance(parent, dict) else {}
        if not isinstance(parent, dict):
            continue
        value = parent.get(path[-1])
        if isinstance(value, str):
            parent[path[-1]] = {"kind": value}
        elif isinstance(value, dict) and path in _DEFAULT_KINDS:
            parent[path[-1]] = {"kind": _DEFAULT_KINDS[path], **value}
    return table


def _model_of(model: Any, data: Any) -> tuple[ModelSpec | None, list[Problem]]:
    """The model of a recipe, its left-out numbers stood in for, and what is wrong with it."""
    if not isinstance(model, dict):
        return None, []
    context = data.get("context") if isinstance(data, dict) else None
    context = context if isinstance(context, int) and context > 0 else 256
    try:
        return expand({"vocab_size": 1 << 16, "max_positions": context, **model}), []
    except SpecError as error:
        return None, [Problem(f"model.{p.path}", p.why, p.got, p.remedy) for p in error.problems]


def _between(raw: dict[str, Any]) -> list[Problem]:
    """Rules that join several keys, read from what was written so that other faults do not hide them."""
    problems: list[Problem] = []
    train, data, model = (
        raw.get(key) if isinstance(raw.get(key), dict) else None for key in ("train", "data", "model")
    )
    if train is not None:
        given = [key for key in ("steps", "tokens", "minutes") if train.get(key) is not None]
        if len(given) != 1:
            got = "all of " + ", ".join(given) if given else "none"
            problems.append(Problem("train", f"takes one of steps, tokens and minutes, got {got}"))
        batch, micro = train.get("batch", 16), train.get("micro_batch")
        if isinstance(batch, int) and isinstance(micro, int) and micro > batch:
            why = f"is more than train.batch={batch}, the rows of a whole update"
            problems.append(Problem("train.micro_batch", why, micro, f"{batch} or fewer would do"))
    if data is not None:
        problems += _data_problems(data)
        length, context = (model or {}).get("max_positions"), data.get("context", 256)
        if isinstance(length, int) and isinstance(context, int) and 0 < length < context:
            why = f"is longer than model.max_positions={length}"
            problems.append(Problem("data.context", why, context, f"{length} or fewer would do"))
    return problems


def _data_problems(data: dict[str, Any]) -> list[Problem]:
    problems: list[Problem] = []
    sources, corpus = data.get("sources"), data.get("corpus")
    if bool(sources) == bool(corpus):
        got = "both" if corpus else "neither"
        problems.append(Problem("data", f"takes sources or a prepared corpus, got {got}"))
    elif corpus:
        for key in ("tokenizer", "val_fraction"):
            if data.get(key) is not None:
                why = "is settled in the prepared corpus"
                problems.append(Problem(f"data.{key}", why, remedy="leave it out, or prepare the corpus again"))
    return problems


def make_run(raw: Mapping[str, Any], *, where: object = None) -> Run:
    """A run from nested tables.

    Raises:
        SpecError: with every problem found, those of the model included.
        UserError: a model that training is not for, said here and not after the text is prepared.
    """
    table = _normalise(raw)
    problems: list[Problem] = []
    made: Run | None = None
    try:
        made = Run.model_validate(table)
    except ValidationError as error:
        problems = from_pydantic(error, table, known_keys(Run, table))
    problems += _between(table)
    model, wrong = _model_of(table.get("model"), table.get("data"))
    problems += wrong
    if problems or made is None:
        raise SpecError(problems, where=where)
    if model is not None:
        _require_trainable(model)
    return made


_RECIPE_KEYS = {"vocab_size", "d_model", "n_layers", "attention", "ffn"}


def _refuse_recipe(raw: Mapping[str, Any], source: object) -> None:
    """Raises `SpecError` for a model's recipe in the place of a run."""
    if raw.keys() & {"model", "data", "train"} or not raw.keys() & _RECIPE_KEYS:
        return
    name = "the recipe" if isinstance(source, Mapping) else repr(str(source))
    remedy = f"write a run description with model = {name}, [data] and [train]"
    where = None if isinstance(source, Mapping) else source
    raise SpecError([Problem("(the whole)", "a model recipe, not a run", remedy=remedy)], where=where)


def load_run(source: str | Path | Mapping[str, Any] | Run, overrides: Iterable[str] = ()) -> Run:
    """The run that `source` describes: a TOML file, a shipped run's name, tables, or a run.

    Args:
        source: paths inside it are read from the working folder, a recipe's path also from the file's own folder.
        overrides: `"train.steps=100"`, `"model.d_model=64"` and the like.

    Raises:
        SpecError: with every problem found; one problem where it is a model's recipe.
        UserError: a file that cannot be read, files that name each other in a ring, an override that is none, or a
            model that training is not for.
    """
    if isinstance(source, Run):
        source = {key: value for key, value in source.to_dict().items() if value is not None}
    path = None if isinstance(source, Mapping) else find_toml(source)
    raw = dict(source) if isinstance(source, Mapping) else read_toml(path or Path())
    _refuse_recipe(raw, source)
    overrides = list(overrides)
    chosen = [text for text in overrides if re.match(r"model\s*=", text)]
    raw = apply_overrides(raw, chosen)
    if isinstance(raw.get("model"), str):
        raw["model"] = load_recipe(raw["model"], named_by=path)
    raw = apply_overrides(raw, [text for text in overrides if text not in chosen])
    if path is not None:
        raw.setdefault("name", re.sub(r"[^A-Za-z0-9._-]", "-", path.stem))
    return make_run(raw, where=path)
