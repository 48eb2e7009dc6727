"""The one model: embedding, blocks, final norm, head, as its specification says."""

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from anyformer.nn.attend import BACKENDS, Backend, choose
from anyformer.nn.attend.call import checked
from anyformer.nn.attend.masks import Causal
from anyformer.nn.block import Block
from anyformer.nn.cache import StaticCache
from anyformer.nn.embed import EmbedLayer, HeadLayer
from anyformer.nn.frame import Frame
from anyformer.nn.init import Init, initialise
from anyformer.nn.layers import norm_layer
from anyformer.nn.tap import Finite, Tap, Under, see
from anyformer.spec.parts import BlockSpec, ModelSpec, StackSpec


class Choice(NamedTuple):
    """A layer's attention backend and the reason for it."""

    layer: str
    backend: str
    why: str


class Stack(nn.Module):
    """Embedding, blocks and final norm."""

    def __init__(self, spec: StackSpec, vocab_size: int) -> None:
        super().__init__()
        self.embed = EmbedLayer(spec, vocab_size)
        self.blocks = nn.ModuleList(Block(block, spec.d_model) for block in spec.blocks)
        self.final_norm = norm_layer(spec.final_norm, spec.d_model)

    def forward(self, x: Tensor, frame: Frame, tap: Tap | None) -> Tensor:
        """Token vectors [B, T, C] -> hidden states [B, T, C]."""
        x = see(tap, "embed", self.embed(x, frame.positions))
        for index, block in enumerate(self.blocks):
            x = block(x, frame, index, None if tap is None else Under(tap, f"blocks.{index}."))
        return see(tap, "final_norm", self.final_norm(x))


class Model(nn.Module):
    """A decoder-only Transformer. Call it with tokens int64 [B, T] for logits [B, T, V]."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self.decoder = Stack(spec.decoder, spec.vocab_size)
        tied = "head" in spec.ties
        self.head = (
            None if spec.head is None else HeadLayer(spec.head, spec.decoder.d_model, spec.vocab_size, tied=tied)
        )

    def forward(
        self,
        tokens: Tensor | None = None,
        *,
        embeddings: Tensor | None = None,
        padding: Tensor | None = None,
        segments: Tensor | None = None,
        positions: Tensor | None = None,
        cache: StaticCache | None = None,
        last_only: bool = False,
        tap: Tap | None = None,
    ) -> Tensor:
        """Logits [B, T, V].

        Args:
            tokens: int64 [B, T].
            embeddings: [B, T, C] instead of tokens.
            padding: bool [B, T], True = real, padded on either side.
            segments: int64 [B, T], documents packed into rows: a token sees its own document, and positions start
                again in each.
            positions: int64 [T] or [B, T] for the position encodings; what a token sees follows the order of the row.
            cache: attends over what it stores and the new tokens, then stores these and advances. A row that is all
                padding stays as it was. What it stores is detached: gradients reach the tokens of this call alone.
            last_only: the head at each row's last real position alone, [B, 1, V].
            tap: looks at or edits named activations; a name that meets no site is refused.

        Raises:
            ValueError: the model has no head; arguments that do not go together; ids outside the vocabulary; positions
                past a learned table; a full cache.
        """
        if self.head is None:
            raise ValueError("this model has no head; model.hidden(…) gives its hidden states")
        hidden, frame = self._run(tokens, embeddings, padding, segments, positions, cache, tap)
        if last_only:
            hidden = _last(hidden, padding)
        logits = see(tap, "logits", self.head(hidden, self.decoder.embed.token.weight))
        _finish(frame, tap)
        return logits

    def hidden(
        self,
        tokens: Tensor | None = None,
        *,
        embeddings: Tensor | None = None,
        padding: Tensor | None = None,
        segments: Tensor | None = None,
        positions: Tensor | None = None,
        cache: StaticCache | None = None,
        tap: Tap | None = None,
    ) -> Tensor:
        """Hidden states [B, T, C] after the final norm. Arguments as in a call."""
        hidden, frame = self._run(tokens, embeddings, padding, segments, positions, cache, tap)
        _finish(frame, tap)
        return hidden

    def _run(
        self,
        tokens: Tensor | None,
        embeddings: Tensor | None,
        padding: Tensor | None,
        segments: Tensor | None,
        positions: Tensor | None,
        cache: StaticCache | None,
        tap: Tap | None,
    ) -> tuple[Tensor, Frame]:
        x = self._embedded(tokens, embeddings)
        frame = Frame.of(x, padding=padding, segments=segments, positions=positions, cache=cache)
        return self.decoder(x, frame, tap), frame

    def _embedded(self, tokens: Tensor | None, embeddings: Tensor | None) -> Tensor:
        if (tokens is None) == (embeddings is None):
            raise ValueError("give tokens or embeddings, one of them")
        if tokens is not None:
            if tokens.dim() != 2 or tokens.dtype not in (torch.int64, torch.int32) or not tokens.numel():
                got = f"{tokens.dtype} {list(tokens.shape)}"
                raise ValueError(f"tokens are int64 [B, T] with B and T at least 1; got {got}")
            return self.decoder.embed.lookup(tokens)
        assert embeddings is not None
        c = self.spec.decoder.d_model
        fits = embeddings.dim() == 3 and embeddings.shape[-1] == c and embeddings.numel()
        if not fits or not embeddings.is_floating_point():
            got = f"{embeddings.dtype} {list(embeddings.shape)}"
            raise ValueError(f"embeddings are floating-point numbers [B, T, {c}]; got {got}")
        return embeddings

    def new_cache(self, batch: int, capacity: int, kind: str = "static") -> StaticCache:
        """An empty cache for `batch` rows of up to `capacity` tokens, in the model's dtype and on its device.

        Raises:
            ValueError: an unknown kind.
        """
        if kind != "static":
            raise ValueError(f"unknown kind of cache {kind!r}; known: static")
        weight = self.decoder.embed.token.weight
        layout = [block.attention.stores() for block in self.layers()]
        return StaticCache(layout, batch, capacity, dtype=weight.dtype, device=weight.device)

    def layers(self) -> list[Block]:
        """The blocks, first to last."""
        return [cast(Block, block) for block in self.decoder.blocks]

    def use_backend(self, backend: Backend) -> "Model":
        """Makes every layer compute attention by the named backend ("auto" chooses). Returns the model."""
        if backend != "auto" and backend not in BACKENDS:
            raise ValueError(f"unknown backend {backend!r}; known: auto, {', '.join(BACKENDS)}")
        for block in self.layers():
            block.attention.backend = backend
        return self

    @torch.no_grad()
    def trace_nonfinite(self, tokens: Tensor | None = None, **arguments: Any) -> str | None:
        """The first activation site that is not finite in a call with these arguments, or None.

        Parameters are looked at first: a broken one is named as `parameter NAME`.
        """
        for name, parameter in self.named_parameters():
            if not bool(torch.isfinite(parameter).all()):
                return f"parameter {name}"
        tap = Finite()
        run = self.hidden if self.head is None else self
        run(tokens, **arguments, tap=tap)
        return tap.first

    def explain(
        self, *, batch: int = 1, context: int | None = None, cached: int = 0, training: bool = False
    ) -> list[Choice]:
        """Which attention backend each layer takes for such a call, and why. Nothing is computed.

        Args:
            batch: rows.
            context: new tokens a row; the model's context, or 1,024, where None.
            cached: tokens that a cache holds already.
            training: whether gradients are wanted.
        """
        t = context or self.spec.decoder.max_positions or 1024
        found: list[Choice] = []
        for index, block in enumerate(self.layers()):
            spec = block.attention.spec
            shapes = (
                (batch, t, spec.n_heads, spec.d_head),
                (batch, cached + t, spec.n_kv_heads, spec.d_head),
                (batch, cached + t, spec.n_kv_heads, spec.d_value),
            )
            q, k, v = (torch.empty(shape, device="meta", requires_grad=training) for shape in shapes)
            call = checked(q, k, v, Causal(), None, None, None, None, spec.dropout if training else 0.0)
            asked = block.attention.backend
            name, why = choose(call) if asked == "auto" else (asked, "asked for")
            found.append(Choice(f"blocks.{index}", name, why))
        return found


def _finish(frame: Frame, tap: Tap | None) -> None:
    """The last acts of a call: the cache counts what it stored, a tap's names are held to the sites there were."""
    if frame.cache is not None and frame.step is not None:
        frame.cache.advance(frame.step)
    if tap is not None:
        tap.check()


def _last(hidden: Tensor, padding: Tensor | None) -> Tensor:
    """The hidden state of each row's last real token, [B, 1, C]."""
    if padding is None:
        return hidden[:, -1:]
    places = torch.arange(padding.shape[1], device=padding.device)
    last = torch.where(padding, places, -1).max(1).values.clamp(min=0)
    return hidden[torch.arange(hidden.shape[0], device=hidden.device), last][:, None]


def _dtype(name: str | torch.dtype) -> torch.dtype:
    dtype = name if isinstance(name, torch.dtype) else getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"unknown dtype {name!r}; known: float32, bfloat16, float16, float64")
    return dtype


def build(
    spec: ModelSpec,
    *,
    seed: int = 0,
    init: str | Init = "scaled",
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype = "float32",
) -> Model:
    """A model with fresh weights, in evaluation mode.

    The structure is made without memory, then filled: every parameter is initialised or this raises.

    Args:
        spec: what to build.
        seed: of the weights; the global generator is not touched.
        init: "scaled" (std 1/√fan_in), "gpt2" (std 0.02), or an `Init`.
        device: where the weights live; "meta" gives the structure alone.
        dtype: of the weights.
    """
    if not isinstance(spec, ModelSpec):
        raise ValueError(f"build takes a specification, and got {spec!r}; af.load_spec(name or file) gives one")
    with torch.device("meta"):
        model = Model(spec).to(_dtype(dtype))
    if torch.device(device).type != "meta":
        model.to_empty(device=device)
        initialise(model, spec.decoder.n_layers, seed=seed, init=init)
    return model.eval()


def build_block(
    spec: BlockSpec,
    d_model: int,
    *,
    seed: int = 0,
    init: str | Init = "scaled",
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype = "float32",
) -> Block:
    """One block with fresh weights, [B, T, C] -> [B, T, C], in evaluation mode, for use in any module.

    `spec` is a block of a model's specification, `spec.decoder.blocks[0]` say, and `d_model` its width C.
    """
    if not isinstance(spec, BlockSpec):
        raise ValueError(f"build_block takes a block, such as spec.decoder.blocks[0]; got a {type(spec).__name__}")
    with torch.device("meta"):
        block = Block(spec, d_model).to(_dtype(dtype))
    if torch.device(device).type != "meta":
        block.to_empty(device=device)
        initialise(block, 1, seed=seed, init=init)
    return block.eval()
