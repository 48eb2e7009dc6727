"""t5-base: an encoder of 12 layers and a decoder of 12 layers, 222,903,552 parameters.

    python t5_base.py                                            a pass with random weights
    python t5_base.py --checkpoint DIR --prompt "…" --start ID   answers a text, with the weights and tokenizer of DIR

Shapes: B batch, T queries, S keys, H query heads, D head width, C d_model, F d_ff, V vocabulary.
"""

import argparse
import json
import math
import mmap
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB_SIZE = 32128  # V
SOURCE_POSITIONS = 512
MAX_POSITIONS = 512
N_LAYERS = 12
D_MODEL = 768  # C
N_HEADS = 12  # H
D_HEAD = 64  # D
D_FF = 3072  # F
N_BUCKETS = 32
MAX_DISTANCE = 128
HEAD_SCALE = 0.03608439182435161  # 1 / √C, where head and embedding share a table (Raffel et al. 2020)
NORM_EPS = 1e-06
DROPOUT = 0.1
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
RENAMED = (("_norms.before.", "_norm."), ("encoder.embed.token.", "embed."))  # stored names, and ours


def upcast(x: Tensor) -> Tensor:
    """x in float32 at least: statistics, angles and softmax lose too much in half precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class Cache:
    """What is kept of the tokens so far, so that none is computed twice (Pope et al. 2022): a store for each layer."""

    def __init__(self) -> None:
        self.length = 0
        self.stores: list[dict[str, Tensor]] = [{} for _ in range(N_LAYERS)]


def cached(store: dict[str, Tensor], **new: Tensor) -> list[Tensor]:
    """What is stored and what is new, joined along the sequence; all of it is stored for the next call."""
    for name, x in new.items():
        store[name] = torch.cat([store[name], x], dim=1) if name in store else x
    return [store[name] for name in new]


class RMSNorm(nn.Module):
    """x / √(mean(x²) + ε) · weight, over the last dimension (Zhang & Sennrich 2019, eq. 4)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> the same."""
        wide = upcast(x)
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + NORM_EPS)
        return (normed * self.weight).to(x.dtype)


class RelativeBias(nn.Module):
    """A trained bias for each head and bucket of key − query positions (Raffel et al. 2020, section 2.1)."""

    def __init__(self, two_sided: bool) -> None:
        super().__init__()
        self.two_sided = two_sided
        self.weight = nn.Parameter(torch.empty(N_BUCKETS, N_HEADS))

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Positions [B or 1, T] and [B or 1, S] -> what is added to the scores, [B or 1, H, T, S].

        Half of a side's buckets stand for one distance each; the others grow logarithmically up to MAX_DISTANCE.
        """
        distance = keys[:, None, :] - queries[:, :, None]
        side, n = N_BUCKETS, (-distance).clamp(min=0)
        if self.two_sided:
            side, n = N_BUCKETS // 2, distance.abs()
        half = side // 2
        grown = torch.log(n.float() / half) / math.log(MAX_DISTANCE / half) * (side - half)
        far = (half + grown.clamp(min=0.0).long()).clamp(max=side - 1)
        bucket = torch.where(n < half, n, far)
        if self.two_sided:
            bucket = bucket + side * (distance > 0)  # keys after the query have the other half
        return self.weight[bucket].permute(0, 3, 1, 2)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, dropout: float, bias: Tensor | None = None) -> Tensor:
    """softmax(q·kᵀ + bias)·v over the keys that the mask shows (Vaswani et al. 2017, eq. 1).

    q [B, T, H, D], k [B, S, H, D], v [B, S, H, D], mask [B or 1, 1, T or 1, S] -> [B, T, H, D].
    """
    scores = torch.einsum("bthd,bshd->bhts", upcast(q), upcast(k))  # [B, H, T, S]
    if bias is not None:
        scores = scores + bias
    weights = scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(dim=-1)  # of −∞ alone it is NaN
    weights = weights.masked_fill(~mask, 0.0)  # a row of padding alone sees nothing
    weights = F.dropout(weights, dropout)
    return torch.einsum("bhts,bshd->bthd", weights, upcast(v)).to(v.dtype)


class Attention(nn.Module):
    """Multi-head attention (Vaswani et al. 2017, section 3.2.2)."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(D_MODEL, N_HEADS * D_HEAD, bias=False)
        self.k = nn.Linear(D_MODEL, N_HEADS * D_HEAD, bias=False)
        self.v = nn.Linear(D_MODEL, N_HEADS * D_HEAD, bias=False)
        self.out = nn.Linear(N_HEADS * D_HEAD, D_MODEL, bias=False)

    def forward(self, x: Tensor, mask: Tensor, bias: Tensor, store: dict[str, Tensor]) -> Tensor:
        """[B, T, C] -> [B, T, C]."""
        q = self.q(x).unflatten(-1, (N_HEADS, D_HEAD))  # [B, T, H, D]
        k = self.k(x).unflatten(-1, (N_HEADS, D_HEAD))  # [B, T, H, D]
        v = self.v(x).unflatten(-1, (N_HEADS, D_HEAD))  # [B, T, H, D]
        k, v = cached(store, k=k, v=v)
        z = attend(q, k, v, mask, bias=bias, dropout=DROPOUT if self.training else 0.0)  # [B, T, H, D]
        return F.dropout(self.out(z.flatten(-2)), DROPOUT, self.training)


class CrossAttention(nn.Module):
    """Queries of one text over keys and values of another (Vaswani et al. 2017, section 3.2.3)."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(D_MODEL, N_HEADS * D_HEAD, bias=False)
        self.k = nn.Linear(D_MODEL, N_HEADS * D_HEAD, bias=False)
        self.v = nn.Linear(D_MODEL, N_HEADS * D_HEAD, bias=False)
        self.out = nn.Linear(N_HEADS * D_HEAD, D_MODEL, bias=False)

    def forward(self, x: Tensor, memory: Tensor, source_mask: Tensor, store: dict[str, Tensor]) -> Tensor:
        """[B, T, C] and the source [B, S, C] -> [B, T, C]."""
        q = self.q(x).unflatten(-1, (N_HEADS, D_HEAD))  # [B, T, H, D]
        if "source_k" not in store:  # the source stays as it is while the target grows
            k = self.k(memory).unflatten(-1, (N_HEADS, D_HEAD))  # [B, S, H, D]
            v = self.v(memory).unflatten(-1, (N_HEADS, D_HEAD))  # [B, S, H, D]
            store["source_k"], store["source_v"] = k, v
        k, v = store["source_k"], store["source_v"]
        z = attend(q, k, v, source_mask, dropout=DROPOUT if self.training else 0.0)  # [B, T, H, D]
        return F.dropout(self.out(z.flatten(-2)), DROPOUT, self.training)


class FeedForward(nn.Module):
    """down(relu(up(x))) (Vaswani et al. 2017, eq. 2)."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(D_MODEL, D_FF, bias=False)
        self.down = nn.Linear(D_FF, D_MODEL, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, C] -> [B, T, C]."""
        hidden = F.relu(self.up(x))
        hidden = F.dropout(hidden, DROPOUT, self.training)
        return F.dropout(self.down(hidden), DROPOUT, self.training)


class EncoderBlock(nn.Module):
    """Attention and feed-forward, each added to x, a norm before each (Xiong et al. 2020)."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(D_MODEL)
        self.attention = Attention()
        self.ffn_norm = RMSNorm(D_MODEL)
        self.ffn = FeedForward()

    def forward(self, x: Tensor, mask: Tensor, bias: Tensor, store: dict[str, Tensor]) -> Tensor:
        """[B, T, C] -> [B, T, C]."""
        x = x + self.attention(self.attention_norm(x), mask, bias, store)
        return x + self.ffn(self.ffn_norm(x))


class DecoderBlock(nn.Module):
    """Attention, cross-attention and feed-forward, each added to x, a norm before each (Xiong et al. 2020)."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(D_MODEL)
        self.attention = Attention()
        self.cross_norm = RMSNorm(D_MODEL)
        self.cross = CrossAttention()
        self.ffn_norm = RMSNorm(D_MODEL)
        self.ffn = FeedForward()

    def forward(
        self, x: Tensor, mask: Tensor, bias: Tensor, memory: Tensor, source_mask: Tensor, store: dict[str, Tensor]
    ) -> Tensor:
        """[B, T, C] -> [B, T, C]."""
        x = x + self.attention(self.attention_norm(x), mask, bias, store)
        x = x + self.cross(self.cross_norm(x), memory, source_mask, store)
        return x + self.ffn(self.ffn_norm(x))


class Encoder(nn.Module):
    """The encoder: 12 layers and a final norm."""

    def __init__(self) -> None:
        super().__init__()
        self.relative_bias = RelativeBias(two_sided=True)
        self.blocks = nn.ModuleList(EncoderBlock() for _ in range(N_LAYERS))
        self.final_norm = RMSNorm(D_MODEL)

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        """Token vectors [B, T, C] -> [B, T, C]."""
        positions = (real.cumsum(dim=1) - 1).clamp(min=0)  # [B, T], counted over real tokens
        x = F.dropout(x, DROPOUT, self.training)
        mask = real[:, None, None, :]
        bias = self.relative_bias(positions, positions)  # one for all layers
        # A source is read once: what its layers would keep for the next call goes into {} and is forgotten.
        for block in self.blocks:
            x = block(x, mask, bias, {})
        return self.final_norm(x)


class Decoder(nn.Module):
    """The decoder: 12 layers and a final norm."""

    def __init__(self) -> None:
        super().__init__()
        self.relative_bias = RelativeBias(two_sided=False)
        self.blocks = nn.ModuleList(DecoderBlock() for _ in range(N_LAYERS))
        self.final_norm = RMSNorm(D_MODEL)

    def forward(self, x: Tensor, cache: Cache, memory: Tensor, source_real: Tensor) -> Tensor:
        """Token vectors [B, T, C] -> [B, T, C]."""
        keys = torch.arange(cache.length + x.shape[1], device=x.device)[None]  # [1, S]
        positions = keys[:, cache.length :]  # [1, T], those of the tokens that come in
        x = F.dropout(x, DROPOUT, self.training)
        mask = keys[:, None, None, :] <= positions[:, None, :, None]  # what came before, and itself
        bias = self.relative_bias(positions, keys)  # one for all layers
        source_mask = source_real[:, None, None, :]
        for block, store in zip(self.blocks, cache.stores, strict=True):
            x = block(x, mask, bias, memory, source_mask, store)
        return self.final_norm(x)


class Model(nn.Module):
    """An encoder and decoder, and a head that gives logits of the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB_SIZE, D_MODEL)  # one table for both texts
        self.encoder = Encoder()
        self.decoder = Decoder()
        for matrix in (p for p in self.parameters() if p.dim() > 1):
            nn.init.normal_(matrix, std=0.02)  # Radford et al. 2019

    def encode(self, source: Tensor, source_real: Tensor | None = None) -> Tensor:
        """int64 [B, S], and bool [B, S], True = no padding -> what the decoder reads of the source, [B, S, C]."""
        source_real = torch.ones_like(source, dtype=torch.bool) if source_real is None else source_real
        return self.encoder(self.embed(source), source_real)

    def decode(
        self, tokens: Tensor, memory: Tensor, source_real: Tensor | None = None, cache: Cache | None = None
    ) -> Tensor:
        """int64 [B, T] after those in the cache, and the encoded source -> logits of the vocabulary, [B, T, V]."""
        if source_real is None:
            source_real = torch.ones(memory.shape[:2], dtype=torch.bool, device=memory.device)
        cache = Cache() if cache is None else cache
        hidden = self.decoder(self.embed(tokens), cache, memory, source_real)
        cache.length += tokens.shape[1]
        # The head's matrix is the embedding's table (Press & Wolf 2017).
        return F.linear(hidden, self.embed.weight) * HEAD_SCALE

    def forward(self, tokens: Tensor, source: Tensor, source_real: Tensor | None = None) -> Tensor:
        """Target int64 [B, T] and source int64 [B, S] -> logits of the vocabulary, [B, T, V]."""
        return self.decode(tokens, self.encode(source, source_real), source_real=source_real)


@torch.inference_mode()
def generate(model: Model, source: Tensor, start: list[int], n_tokens: int, temperature: float = 0.0) -> Iterator[int]:
    """What answers the source, int64 [1, S], after the ids `start`, up to `n_tokens`; at temperature 0 greedily."""
    cache, memory, tokens = Cache(), model.encode(source), source.new_tensor([start])
    for _ in range(min(n_tokens, max(MAX_POSITIONS - tokens.shape[1], 1))):
        logits = model.decode(tokens, memory, cache=cache)[0, -1]
        token = torch.multinomial((logits / temperature).softmax(-1), 1) if temperature > 0 else logits.argmax()
        yield int(token)
        tokens = token.view(1, 1)


def load(file: Path) -> Model:
    """The model with the weights of a safetensors file: eight bytes of length, a header in JSON, then all numbers."""
    with torch.device("meta"):
        model = Model()
    with file.open("rb") as opened:
        data = memoryview(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY))  # mapped, not read
    start = 8 + int.from_bytes(data[:8], "little")
    header = {name: entry for name, entry in json.loads(bytes(data[8:start])).items() if name != "__metadata__"}
    weights = {}
    for name, entry in header.items():
        for stored, here in RENAMED:
            name = name.replace(stored, here)
        first, last = (start + offset for offset in entry["data_offsets"])
        weights[name] = torch.frombuffer(data[first:last], dtype=DTYPES[entry["dtype"]]).view(entry["shape"]).float()
    model.load_state_dict(weights, assign=True)
    return model.eval()


def show() -> None:
    """A pass over random tokens with random weights: the shape that leaves each part, and the number of parameters."""
    model, tokens = Model().eval(), torch.randint(VOCAB_SIZE, (1, 16))
    for name, module in model.named_modules():
        if name and (".blocks." not in name or ".blocks.0" in name):
            module.register_forward_hook(lambda module, args, out, name=name: print(f"{name:<36} {list(out.shape)}"))
    print(f"{list(tokens.shape)} tokens -> {list(model(tokens, source=tokens).shape)} logits")
    print(f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters")


def main() -> None:
    """The command line: shows the model, or reads a prompt."""
    parser = argparse.ArgumentParser(description=str(__doc__), formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", help="a text to answer; without one the model is shown")
    parser.add_argument("--checkpoint", type=Path, default=Path(__file__).parent, help="a folder of anyformer")
    parser.add_argument("--start", type=int, nargs="+", default=[], help="ids that an answer begins with")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="how many to add at most")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn above temperature 0")
    args = parser.parse_args()
    if args.prompt is None:
        show()
        return
    if args.max_new_tokens < 0 or not (args.temperature == 0 or 1e-6 <= args.temperature < float("inf")):
        parser.error("--max-new-tokens is 0 or more, --temperature 0 or from 0.000001 up")
    if not args.start or not all(0 <= index < VOCAB_SIZE for index in args.start):
        parser.error(f"--start is needed, ids from 0 to {VOCAB_SIZE - 1}: nothing else says how an answer begins")
    if len(args.start) > MAX_POSITIONS:
        parser.error(f"--start has {len(args.start)} ids, and an answer at most {MAX_POSITIONS}")
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(args.checkpoint / "tokenizer.json"))
        tokenizer.encode_special_tokens = True  # control tokens that a prompt spells are text
        ids = torch.tensor([tokenizer.encode(args.prompt).ids], dtype=torch.int64)
        model = load(args.checkpoint / "model.safetensors")
    except Exception as error:  # tokenizers raises nothing narrower
        parser.error(f"{args.checkpoint} is no checkpoint of this model: {error}; give --checkpoint DIR")
    if not 0 < ids.shape[1] <= SOURCE_POSITIONS:
        parser.error(f"the prompt has {ids.shape[1]} tokens, and this model reads 1 to {SOURCE_POSITIONS}")
    torch.manual_seed(args.seed)
    print(tokenizer.decode(list(generate(model, ids, args.start, args.max_new_tokens, args.temperature))))


if __name__ == "__main__":
    main()
