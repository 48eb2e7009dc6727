"""llama-3-8b: a decoder of 32 layers, 8,030,261,248 parameters.

    python llama_3_8b.py                                 the shapes of a pass, without weights
    python llama_3_8b.py --checkpoint DIR --prompt "…"   continues a text, with the weights and tokenizer of DIR

Shapes: B batch, T queries, S keys, H query heads, G key/value heads, D head width, C d_model, F d_ff, V vocabulary.
"""

import argparse
import json
import mmap
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB_SIZE = 128256  # V
MAX_POSITIONS = 8192
N_LAYERS = 32
D_MODEL = 4096  # C
N_HEADS = 32  # H
N_KV_HEADS = 8  # G
D_HEAD = 128  # D
D_FF = 14336  # F
ROPE_THETA = 500000.0
NORM_EPS = 1e-05
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
RENAMED = (("_norms.before.", "_norm."), ("decoder.embed.token.", "decoder.embed."))  # stored names, and ours


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


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Turns channels i and i + D/2 of each head by position · θ^(−2i/D) (Su et al. 2021, eq. 34).

    x [B, T, H, D], positions [B or 1, T] -> x rotated.
    """
    wide = upcast(x)
    powers = torch.arange(0, D_HEAD, 2, device=x.device, dtype=wide.dtype) / D_HEAD  # 2i / D
    frequencies = 1.0 / ROPE_THETA**powers
    angles = positions[:, :, None, None].to(wide.dtype) * frequencies  # [B or 1, T, 1, D / 2]
    cos, sin = angles.cos(), angles.sin()
    a, b = wide.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """softmax(q·kᵀ / √D)·v over the keys that the mask shows (Vaswani et al. 2017, eq. 1).

    q [B, T, H, D], k [B, S, G, D], v [B, S, G, D], mask [B or 1, 1, T or 1, S] -> [B, T, H, D].
    """
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))  # each serves H / G heads of q
    scores = torch.einsum("bthd,bshd->bhts", upcast(q), upcast(k)) * q.shape[-1] ** -0.5  # [B, H, T, S]
    weights = scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(dim=-1)  # of −∞ alone it is NaN
    return torch.einsum("bhts,bshd->bthd", weights, upcast(v)).to(v.dtype)


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al. 2023): H query heads share G heads of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(D_MODEL, N_HEADS * D_HEAD, bias=False)
        self.k = nn.Linear(D_MODEL, N_KV_HEADS * D_HEAD, bias=False)
        self.v = nn.Linear(D_MODEL, N_KV_HEADS * D_HEAD, bias=False)
        self.out = nn.Linear(N_HEADS * D_HEAD, D_MODEL, bias=False)

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor, store: dict[str, Tensor]) -> Tensor:
        """[B, T, C] -> [B, T, C]."""
        q = self.q(x).unflatten(-1, (N_HEADS, D_HEAD))  # [B, T, H, D]
        k = self.k(x).unflatten(-1, (N_KV_HEADS, D_HEAD))  # [B, T, G, D]
        v = self.v(x).unflatten(-1, (N_KV_HEADS, D_HEAD))  # [B, T, G, D]
        q, k = rotate(q, positions), rotate(k, positions)
        k, v = cached(store, k=k, v=v)
        return self.out(attend(q, k, v, mask).flatten(-2))  # [B, T, H · D] -> [B, T, C]


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) · up(x)) (Shazeer 2020, eq. 6)."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(D_MODEL, D_FF, bias=False)
        self.up = nn.Linear(D_MODEL, D_FF, bias=False)
        self.down = nn.Linear(D_FF, D_MODEL, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, C] -> [B, T, C]."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention and feed-forward, each added to x, a norm before each (Xiong et al. 2020)."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(D_MODEL)
        self.attention = Attention()
        self.ffn_norm = RMSNorm(D_MODEL)
        self.ffn = FeedForward()

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor, store: dict[str, Tensor]) -> Tensor:
        """[B, T, C] -> [B, T, C]."""
        x = x + self.attention(self.attention_norm(x), positions, mask, store)
        return x + self.ffn(self.ffn_norm(x))


class Decoder(nn.Module):
    """The decoder: the embedding, 32 layers and a final norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB_SIZE, D_MODEL)
        self.blocks = nn.ModuleList(Block() for _ in range(N_LAYERS))
        self.final_norm = RMSNorm(D_MODEL)

    def forward(self, tokens: Tensor, cache: Cache) -> Tensor:
        """int64 [B, T] -> [B, T, C]."""
        keys = torch.arange(cache.length + tokens.shape[1], device=tokens.device)[None]  # [1, S]
        positions = keys[:, cache.length :]  # [1, T], those of the tokens that come in
        x = self.embed(tokens)
        mask = keys[:, None, None, :] <= positions[:, None, :, None]  # what came before, and itself
        for block, store in zip(self.blocks, cache.stores, strict=True):
            x = block(x, positions, mask, store)
        return self.final_norm(x)


class Model(nn.Module):
    """A decoder, and a head that gives logits of the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = Decoder()
        self.head = nn.Linear(D_MODEL, VOCAB_SIZE, bias=False)
        for matrix in (p for p in self.parameters() if p.dim() > 1):
            nn.init.normal_(matrix, std=0.02)  # Radford et al. 2019

    def forward(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        """int64 [B, T] after those in the cache, if any -> logits of the vocabulary, [B, T, V]."""
        cache = Cache() if cache is None else cache
        hidden = self.decoder(tokens, cache)
        cache.length += tokens.shape[1]
        return self.head(hidden)


@torch.inference_mode()
def generate(model: Model, tokens: Tensor, n_tokens: int, temperature: float = 0.0) -> Iterator[int]:
    """What follows the tokens, int64 [1, T], one by one, up to `n_tokens`; at temperature 0 always the likeliest."""
    cache = Cache()
    for _ in range(min(n_tokens, max(MAX_POSITIONS - tokens.shape[1], 1))):
        logits = model(tokens, cache=cache)[0, -1]
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
    """A pass on the meta device, as weights would fill 32 GB: the shape that leaves each part, and parameters."""
    with torch.device("meta"):
        model, tokens = Model().eval(), torch.randint(VOCAB_SIZE, (1, 16))
    for name, module in model.named_modules():
        if name and (".blocks." not in name or ".blocks.0" in name):
            module.register_forward_hook(lambda module, args, out, name=name: print(f"{name:<36} {list(out.shape)}"))
    print(f"{list(tokens.shape)} tokens -> {list(model(tokens).shape)} logits")
    print(f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters")


def main() -> None:
    """The command line: shows the model, or reads a prompt."""
    parser = argparse.ArgumentParser(description=str(__doc__), formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", help="a text to continue; without one the model is shown")
    parser.add_argument("--checkpoint", type=Path, default=Path(__file__).parent, help="a folder of anyformer")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="how many to add at most")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn above temperature 0")
    args = parser.parse_args()
    if args.prompt is None:
        show()
        return
    if args.max_new_tokens < 0 or not (args.temperature == 0 or 1e-6 <= args.temperature < float("inf")):
        parser.error("--max-new-tokens is 0 or more, --temperature 0 or from 0.000001 up")
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(args.checkpoint / "tokenizer.json"))
        tokenizer.encode_special_tokens = True  # control tokens that a prompt spells are text
        ids = torch.tensor([tokenizer.encode(args.prompt).ids], dtype=torch.int64)
        model = load(args.checkpoint / "model.safetensors")
    except Exception as error:  # tokenizers raises nothing narrower
        parser.error(f"{args.checkpoint} is no checkpoint of this model: {error}; give --checkpoint DIR")
    if not 0 < ids.shape[1] <= MAX_POSITIONS:
        parser.error(f"the prompt has {ids.shape[1]} tokens, and this model reads 1 to {MAX_POSITIONS}")
    torch.manual_seed(args.seed)
    print(tokenizer.decode(list(generate(model, ids, args.max_new_tokens, args.temperature))))


if __name__ == "__main__":
    main()
