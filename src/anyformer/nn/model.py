"""The one model: stacks, head and pooler, as its specification says."""

from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor, nn

from anyformer.nn.attend import BACKENDS, Backend
from anyformer.nn.attend.shapes import said
from anyformer.nn.block import Block
from anyformer.nn.cache import Cache
from anyformer.nn.explain import Choice, choices
from anyformer.nn.frame import Frame, Memory, check_like
from anyformer.nn.heads import LabelHeadLayer, LanguageHeadLayer, PoolerLayer, pooled
from anyformer.nn.init import Init, initialise
from anyformer.nn.inputs import Inputs, check_names
from anyformer.nn.moe import Routing
from anyformer.nn.quantised import Quantised, quantised
from anyformer.nn.stack import Stack
from anyformer.nn.tap import Finite, Tap, see
from anyformer.spec.attention import Prefix
from anyformer.spec.parts import BlockSpec, LanguageHead, ModelSpec, SequenceHead


class _Run(NamedTuple):
    """What the last stack gave, and the frame it gave it in."""

    hidden: Tensor
    frame: Frame
    tap: Tap | None


class Model(nn.Module):
    """A Transformer: a decoder, an encoder, or both. Call it with tokens int64 [B, T]."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        both = spec.encoder is not None and spec.decoder is not None
        if spec.encoder is not None:
            self.encoder = Stack(spec.encoder, spec.vocab_size, prefix="encoder." if both else "")
        if spec.decoder is not None:
            tied = {"encoder.embed", "decoder.embed"} <= spec.ties
            width = None if spec.encoder is None else spec.encoder.d_model
            self.decoder = Stack(spec.decoder, spec.vocab_size, tied=tied, d_source=width)
        c, head = spec.last.d_model, spec.head
        self.pooler = None if spec.pooler is None else PoolerLayer(spec.pooler, c)
        self.head: LanguageHeadLayer | LabelHeadLayer | None = None
        if isinstance(head, LanguageHead):
            self.head = LanguageHeadLayer(head, c, spec.vocab_size, tied="head" in spec.ties)
        elif head is not None:
            self.head = LabelHeadLayer(head, c)

    def forward(self, tokens: Tensor | None = None, *, last_only: bool = False, **inputs: Unpack[Inputs]) -> Tensor:
        """Logits [B, T, V] of a language head; [B, n_labels], [B, T, n_labels] or [B, T, 2] of the others.

        Args:
            tokens: int64 [B, T]; those of the decoder where there are two stacks.
            last_only: a language head at each row's last real position alone, [B, 1, V].
            inputs:
                embeddings: [B, T, C] instead of tokens (of the embedding's own width where it is factorised).
                padding: bool [B, T], True = real, padded on either side.
                segments: int64 [B, T], documents packed into rows: a token sees its own document, and positions start
                    again in each.
                positions: int64 [T] or [B, T] for the position encodings; what a token sees follows the order of the
                    row.
                types: int64 [B, T], token types; zeros where left out.
                prefix: for prefix masks, int64 [B], the first so many real tokens of each row are seen by all of it;
                    or bool [B, T], True = prefix. Nothing where left out.
                cache: attends over what it stores and the new tokens, then stores these and advances. A row that is
                    all padding stays as it was. What it stores is detached: gradients reach the tokens of this call
                    alone.
                source: int64 [B, S], the encoder's tokens; with a cache the first call alone takes it.
                source_padding: bool [B, S], True = real.
                source_segments: int64 [B, S], the document of each source token, where `segments` packs the target.
                memory: [B, S, C of the encoder], what `encode` gave, instead of source.
                routing: collects the loads and losses of mixtures of experts.
                tap: looks at or edits named activations; a name that meets no site is refused.

        Raises:
            ValueError: the model has no head; arguments that do not go together; ids outside the vocabulary; positions
                past a learned table; a full cache.
        """
        check_names("model(…)", inputs)
        if self.head is None:
            raise ValueError("this model has no head; model.hidden(…) gives its hidden states")
        if last_only and not isinstance(self.head, LanguageHeadLayer):
            raise ValueError("last_only is for a language head; this model's head scores labels")
        hidden, frame, tap = self._run(tokens, **inputs)
        if isinstance(self.head, LanguageHeadLayer):
            if last_only:
                hidden = pooled(hidden, frame.real, "last")[:, None]
            logits = self.head(hidden, self._head_table())
        else:
            if isinstance(self.spec.head, SequenceHead):
                hidden = self._vector(hidden, frame.real, self.spec.head.pool)
            logits = self.head(hidden)
        logits = see(tap, "logits", logits)
        _finish(frame, tap)
        return logits

    def hidden(self, tokens: Tensor | None = None, **inputs: Unpack[Inputs]) -> Tensor:
        """Hidden states [B, T, C] after the final norm, before any head transform. Arguments as in a call."""
        check_names("model.hidden(…)", inputs)
        hidden, frame, tap = self._run(tokens, **inputs)
        _finish(frame, tap)
        return hidden

    def pooled(self, tokens: Tensor | None = None, **inputs: Unpack[Inputs]) -> Tensor:
        """The pooler's vector of each row, [B, C]. Arguments as in a call. Raises `ValueError` without a pooler."""
        if self.pooler is None:
            raise ValueError("this model has no pooler; pooler = true in a recipe gives it one")
        check_names("model.pooled(…)", inputs)
        hidden, frame, tap = self._run(tokens, **inputs)
        _finish(frame, tap)
        return self._vector(hidden, frame.real, "pooler")

    def encode(
        self,
        tokens: Tensor | None = None,
        *,
        embeddings: Tensor | None = None,
        padding: Tensor | None = None,
        segments: Tensor | None = None,
        positions: Tensor | None = None,
        types: Tensor | None = None,
        routing: Routing | None = None,
        tap: Tap | None = None,
    ) -> Tensor:
        """The encoder's output [B, S, C] for tokens int64 [B, S]. Raises `ValueError` for a model without encoder."""
        stack = self.spec.encoder
        if stack is None:
            raise ValueError("this model has no encoder; model.hidden(…) gives the decoder's hidden states")
        x = self._embedded("encoder", tokens, embeddings)
        check_like(types, "types", torch.int64, x)
        frame = Frame.of(
            x,
            padding=padding,
            segments=segments,
            positions=positions,
            routing=routing,
            shared_table=self.encoder.shared_table,
        )
        states: Tensor = self.encoder(x, frame, types, tap)
        if tap is not None and self.spec.decoder is None:
            tap.check()
        return states

    def _run(
        self,
        tokens: Tensor | None,
        *,
        embeddings: Tensor | None = None,
        padding: Tensor | None = None,
        segments: Tensor | None = None,
        positions: Tensor | None = None,
        types: Tensor | None = None,
        prefix: Tensor | None = None,
        cache: Cache | None = None,
        source: Tensor | None = None,
        source_padding: Tensor | None = None,
        source_segments: Tensor | None = None,
        memory: Tensor | None = None,
        routing: Routing | None = None,
        tap: Tap | None = None,
    ) -> _Run:
        """Hidden states of the last stack."""
        name, stack = list(self.spec.stacks.items())[-1]
        x = self._embedded(name, tokens, embeddings)
        check_like(types, "types", torch.int64, x)
        if cache is not None:
            self._check_cache(cache)
        if prefix is not None and not any(isinstance(b.attention.mask, Prefix) for b in stack.blocks):
            raise ValueError('prefix is for layers with mask = "prefix", and this model has none')
        given = (source, source_padding, source_segments, memory)
        remembered = self._memory(*given, x, segments, cache, routing, tap)
        module = self.encoder if name == "encoder" else self.decoder
        frame = Frame.of(
            x,
            padding=padding,
            segments=segments,
            positions=positions,
            prefix=prefix,
            cache=cache,
            memory=remembered,
            routing=routing,
            shared_table=module.shared_table,
        )
        hidden = module(x, frame, types, tap)
        return _Run(hidden, frame, tap)

    def _memory(
        self,
        source: Tensor | None,
        padding: Tensor | None,
        segments: Tensor | None,
        memory: Tensor | None,
        x: Tensor,
        target_segments: Tensor | None,
        cache: Cache | None,
        routing: Routing | None,
        tap: Tap | None,
    ) -> Memory | None:
        """The source as the decoder reads it: encoded now, given, or kept by the cache."""
        given = any(value is not None for value in (source, padding, segments, memory))
        if self.spec.encoder is None or self.spec.decoder is None:
            if given:
                values = {"source": source, "memory": memory, "source_padding": padding, "source_segments": segments}
                raise ValueError(_no_source(next(key for key, x in values.items() if x is not None), self.spec))
            return None
        if cache is not None and cache.has_source:
            if given:
                raise ValueError("the cache keeps the source of its first call; cache.reset() makes room for another")
            return Memory(None, cache.source_real)
        if (source is None) == (memory is None):
            raise ValueError("give source (tokens) or memory (what model.encode gave), one of them")
        if (segments is None) != (target_segments is None):
            raise ValueError("packed documents need both segments and source_segments")
        self._check_source(x, source, padding, segments, memory)
        if source is not None:
            memory = self.encode(source, padding=padding, segments=segments, routing=routing, tap=tap)
        if cache is not None:
            cache.source_real = padding
        return Memory(memory, padding, segments)

    def _check_source(
        self, x: Tensor, source: Tensor | None, padding: Tensor | None, segments: Tensor | None, memory: Tensor | None
    ) -> None:
        """Raises `ValueError` for a source, or an encoder's output in its place, that is not one for the target x."""
        assert self.spec.encoder is not None
        b, c = x.shape[0], self.spec.encoder.d_model
        given, rest = (source, ()) if memory is None else (memory, (c,))
        if not isinstance(given, Tensor) or given.shape[:1] != (b,) or given.shape[2:] != rest or not given.numel():
            raise ValueError(f"the source is [{b}, S] or memory [{b}, S, {c}] with S at least 1; got {said(given)}")
        if memory is not None:
            _check_floats("memory", memory, self.token_table("encoder"))
        check_like(padding, "source_padding", torch.bool, given, "the source")
        check_like(segments, "source_segments", torch.int64, given, "the source")

    def _check_cache(self, cache: Cache) -> None:
        if not isinstance(cache, Cache):
            raise ValueError(f"cache is what model.new_cache(…) gives; got {said(cache)}")
        if self.spec.decoder is None:
            raise ValueError("an encoder sees whole sequences and keeps no cache")
        if not torch.compiler.is_compiling():
            table = self.token_table("decoder")
            cache.check(self.decoder.keeps, table.dtype, table.device)

    def train(self, mode: bool = True) -> "Model":
        """As of any module. Raises `ValueError` for training with weights in codes, which are frozen."""
        kept = quantised(self) if mode else {}
        if kept:
            which = f"{len(kept)} weights, {next(iter(kept))} first, are kept in quantised codes"
            raise ValueError(f"{which} and cannot be trained; load the model with quantize=None")
        return super().train(mode)

    def token_table(self, stack: str) -> Tensor | Quantised:
        """The token table [V, E] that a stack reads, its own or the one that it is tied to."""
        own = (self.encoder if stack == "encoder" else self.decoder).embed.token
        if own is None:
            own = self.encoder.embed.token
        assert own is not None
        return own.weight

    def _head_table(self) -> Tensor | Quantised | None:
        """The table that a tied head reads."""
        ties = self.spec.ties
        if "head" not in ties:
            return None
        return self.token_table("encoder" if "encoder.embed" in ties else "decoder")

    def _vector(self, hidden: Tensor, padding: Tensor | None, how: str) -> Tensor:
        if how != "pooler":
            return pooled(hidden, padding, how)
        assert self.pooler is not None
        vector: Tensor = self.pooler(pooled(hidden, padding, "first"))
        return vector

    def _embedded(self, name: str, tokens: Tensor | None, embeddings: Tensor | None) -> Tensor:
        if (tokens is None) == (embeddings is None):
            raise ValueError("give tokens or embeddings, one of them")
        stack = self.encoder if name == "encoder" else self.decoder
        if tokens is not None:
            fits = isinstance(tokens, Tensor) and tokens.dim() == 2 and tokens.numel()
            if not fits or tokens.dtype not in (torch.int64, torch.int32):
                raise ValueError(f"tokens are int64 [B, T] with B and T at least 1; got {said(tokens)}")
            return stack.embed.lookup(tokens, self.token_table(name))
        assert embeddings is not None
        c = stack.spec.d_embed
        fits = isinstance(embeddings, Tensor) and embeddings.dim() == 3 and embeddings.shape[-1] == c
        if not fits or not embeddings.numel() or not embeddings.is_floating_point():
            raise ValueError(f"embeddings are floating-point numbers [B, T, {c}]; got {said(embeddings)}")
        _check_floats("embeddings", embeddings, self.token_table(name))
        return embeddings

    def new_cache(self, batch: int, capacity: int, kind: str = "static") -> Cache:
        """An empty cache for `batch` rows of up to `capacity` tokens, in the model's dtype and on its device.

        Args:
            batch: rows.
            capacity: tokens a row.
            kind: "static", or "ring": a layer with a window keeps only that (and its sinks). Latent attention keeps its
                latents, and a model with an encoder the source's keys and values, in either kind.

        Raises:
            ValueError: an unknown kind; a model without a decoder.
        """
        if kind not in ("static", "ring"):
            raise ValueError(f"unknown kind of cache {kind!r}; known: static, ring")
        if self.spec.decoder is None:
            raise ValueError("an encoder sees whole sequences and keeps no cache")
        weight = self.token_table("decoder")
        return Cache(
            self.decoder.layouts(kind),
            batch,
            capacity,
            dtype=weight.dtype,
            device=weight.device,
            positions=self.decoder.needs_positions,
            reads_source=self.spec.encoder is not None,
            made_for=self.decoder.keeps,
        )

    def layers(self) -> list[Block]:
        """The block of every layer, the encoder's first; a shared one appears for each layer that uses it."""
        stacks = [self.encoder if name == "encoder" else self.decoder for name in self.spec.stacks]
        return [block for stack in stacks for block in stack.layers()]

    def use_backend(self, backend: Backend) -> "Model":
        """Makes every layer compute attention by the named backend ("auto" chooses). Returns the model."""
        if backend not in ("auto", *BACKENDS):
            raise ValueError(f"unknown backend {backend!r}; known: auto, {', '.join(BACKENDS)}")
        for block in self.layers():
            for attention in (block.attention, block.cross):
                if attention is not None:
                    attention.backend = backend
        return self

    @torch.no_grad()
    def trace_nonfinite(self, tokens: Tensor | None = None, **arguments: Any) -> str | None:
        """The first activation site that is not finite in a call with these arguments, or None.

        Parameters and buffers are looked at first: a broken one is named as `parameter NAME`.
        """
        for name, value in [*self.named_parameters(), *self.named_buffers()]:
            if not bool(torch.isfinite(value).all()):
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
            context: new tokens a row (of the source too); the model's context, or 1,024, where None.
            cached: tokens that a cache holds already.
            training: whether gradients are wanted.
        """
        found: list[Choice] = []
        for name, stack in self.spec.stacks.items():
            module = self.encoder if name == "encoder" else self.decoder
            t = context or stack.max_positions or 1024
            stored = 0 if name == "encoder" else cached
            source = 0 if self.spec.encoder is None else context or self.spec.encoder.max_positions or 1024
            found += choices(name, module.layers(), batch, t, stored, source, training=training)
        return found


def _check_floats(name: str, value: Tensor, like: Tensor | Quantised) -> None:
    """Raises `ValueError` for another dtype than the weights', which autocast alone can mix."""
    mixes = not like.is_meta and torch.is_autocast_enabled(like.device.type) and value.is_floating_point()
    if value.dtype != like.dtype and not mixes:
        got = f"got {value.dtype}: {name}.to({like.dtype}) would do"
        raise ValueError(f"{name} should be {like.dtype} like the model; {got}")


def _no_source(argument: str, spec: ModelSpec) -> str:
    """Why a model of one stack takes no such argument, and what it takes."""
    stack = "an encoder alone" if spec.decoder is None else "a decoder alone"
    remedy = (
        "give the text that it reads as tokens: model(tokens, padding=…, segments=…)"
        if spec.decoder is None
        else "give the whole text as tokens: model(tokens, …); what went before may be in a cache"
    )
    return f"{argument} is for a model with an encoder and a decoder, and this one is {stack}; {remedy}"


def _finish(frame: Frame, tap: Tap | None) -> None:
    """The last acts of a call: a tap's names are held to the sites there were, the cache counts what it stored."""
    if tap is not None:
        tap.check()
    if frame.cache is not None and frame.step is not None:
        frame.cache.advance(frame.step)


def _dtype(name: str | torch.dtype) -> torch.dtype:
    known = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    dtype = getattr(torch, name, None) if isinstance(name, str) else name
    if dtype not in known:
        raise ValueError(f"unknown dtype {name!r}; known: float32, bfloat16, float16, float64")
    return dtype


def _device(name: str | torch.device) -> torch.device:
    try:
        return torch.device(name)
    except (RuntimeError, TypeError):
        raise ValueError(f"unknown device {name!r}; cpu, cuda and meta are some, as torch names them") from None


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
    if _device(device).type != "meta":
        model.to_empty(device=device)
        depths = {f"{name}.": stack.n_layers for name, stack in spec.stacks.items()}
        initialise(model, depths, seed=seed, init=init)
    return model.eval()


def build_block(
    spec: BlockSpec,
    d_model: int,
    *,
    d_source: int | None = None,
    seed: int = 0,
    init: str | Init = "scaled",
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype = "float32",
) -> Block:
    """One block with fresh weights, [B, T, C] -> [B, T, C], in evaluation mode, for use in any module.

    `spec` is a block of a model's specification, `spec.decoder.blocks[0]` say, `d_model` its width C, and `d_source`
    the width of what its cross-attention reads (C where not given).
    """
    if not isinstance(spec, BlockSpec):
        raise ValueError(f"build_block takes a block, such as spec.decoder.blocks[0]; got a {type(spec).__name__}")
    for name, width in (("d_model", d_model), ("d_source", d_source)):
        if width is not None and (isinstance(width, bool) or not isinstance(width, int) or width < 1):
            raise ValueError(f"{name} is a number of channels, at least 1; got {width!r}")
    with torch.device("meta"):
        block = Block(spec, d_model, d_source).to(_dtype(dtype))
    if _device(device).type != "meta":
        block.to_empty(device=device)
        initialise(block, {"": 1}, seed=seed, init=init)
    return block.eval()


__all__ = ["Choice", "Inputs", "Model", "build", "build_block"]
