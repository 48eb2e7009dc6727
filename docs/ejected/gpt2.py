"""gpt2: a decoder of 12 layers, 124,439,808 parameters.

    python gpt2.py                                 a pass with random weights
    python gpt2.py --checkpoint DIR --prompt "…"   continues a text, with the weights and tokenizer of DIR

Shapes: B batch, T queries, S keys, H query heads, D head width, C d_model, F d_ff, V vocabulary.
"""

import argparse
import json
import mmap
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB_SIZE = 50257  # V
MAX_POSITIONS = 1024
N_LAYERS = 12
D_MODEL = 768  # C
N_HEADS = 12  # H
D_HEAD = 64  # D
D_FF = 3072  # F
NORM_EPS = 1e-05  # ε of LayerNorm (Ba et al. 2016, eq. 4)
DROPOUT = 0.1
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
RENAMED = (("_norms.before.", "_norm."),)  # stored names, and ours


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


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, dropout: float) -> Tensor:
    """softmax(q·kᵀ / √D)·v over the keys that the mask shows (Vaswani et al. 2017, eq. 1).

    q [B, T, H, D], k [B, S, H, D], v [B, S, H, D], mask [B or 1, 1, T or 1, S] -> [B, T, H, D].
    """
    scores = torch.einsum("bthd,bshd->bhts", upcast(q), upcast(k)) * q.shape[-1] ** -0.5  # [B, H, T, S]
    weights = scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(dim=-1)  # of −∞ alone it is NaN
    weights = F.dropout(weights, dropout)
    return torch.einsum("bhts,bshd->bthd", weights, upcast(v)).to(v.dtype)


class Attention(nn.Module):
    """Multi-head attention (Vaswani et al. 2017, section 3.2.2)."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(D_MODEL, N_HEADS * D_HEAD, bias=True)
        self.k = nn.Linear(D_MODEL, N_HEADS * D_HEAD, bias=True)
        self.v = nn.Linear(D_MODEL, N_HEADS * D_HEAD, bias=True)
        self.out = nn.Linear(N_HEADS * D_HEAD, D_MODEL, bias=True)

    def forward(self, x: Tensor, mask: Tensor, store: dict[str, Tensor]) -> Tensor:
        """[B, T, C] -> [B, T, C]."""
        q = self.q(x).unflatten(-1, (N_HEADS, D_HEAD))  # [B, T, H, D]
        k = self.k(x).unflatten(-1, (N_HEADS, D_HEAD))  # [B, T, H, D]
        v = self.v(x).unflatten(-1, (N_HEADS, D_HEAD))  # [B, T, H, D]
        k, v = cached(store, k=k, v=v)
        z = attend(q, k, v, mask, dropout=DROPOUT if self.training else 0.0)  # [B, T, H, D]
        return F.dropout(self.out(z.flatten(-2)), DROPOUT, self.training)


class FeedForward(nn.Module):
    """down(act(up(x))) (Vaswani et al. 2017, eq. 2); act is GELU by its tanh form."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(D_MODEL, D_FF, bias=True)
        self.down = nn.Linear(D_FF, D_MODEL, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, C] -> [B, T, C]."""
        return F.dropout(self.down(F.gelu(self.up(x), approximate="tanh")), DROPOUT, self.training)


class Block(nn.Module):
    """Attention and feed-forward, each added to x, a norm before each (Xiong et al. 2020)."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(D_MODEL, eps=NORM_EPS)
        self.attention = Attention()
        self.ffn_norm = nn.LayerNorm(D_MODEL, eps=NORM_EPS)
        self.ffn = FeedForward()

    def forward(self, x: Tensor, mask: Tensor, store: dict[str, Tensor]) -> Tensor:
        """[B, T, C] -> [B, T, C]."""
        x = x + self.attention(self.attention_norm(x), mask, store)
        return x + self.ffn(self.ffn_norm(x))


class Embedding(nn.Module):
    """Token vectors + positions."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCAB_SIZE, D_MODEL)
        self.position = nn.Embedding(MAX_POSITIONS, D_MODEL)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """int64 [B, T] -> [B, T, C]."""
        x = self.token(tokens)
        x = x + self.position(positions)
        return F.dropout(x, DROPOUT, self.training)


class Decoder(nn.Module):
    """The decoder: the embedding, 12 layers and a final norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = Embedding()
        self.blocks = nn.ModuleList(Block() for _ in range(N_LAYERS))
        self.final_norm = nn.LayerNorm(D_MODEL, eps=NORM_EPS)

    def forward(self, tokens: Tensor, cache: Cache) -> Tensor:
        """int64 [B, T] -> [B, T, C]."""
        keys = torch.arange(cache.length + tokens.shape[1], device=tokens.device)[None]  # [1, S]
        positions = keys[:, cache.length :]  # [1, T], those of the tokens that come in
        x = self.embed(tokens, positions)
        mask = keys[:, None, None, :] <= positions[:, None, :, None]  # what came before, and itself
        for block, store in zip(self.blocks, cache.stores, strict=True):
            x = block(x, mask, store)
        return self.final_norm(x)


class Model(nn.Module):
    """A decoder, and a head that gives logits of the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = Decoder()
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)  # Radford et al. 2019
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        """int64 [B, T] after those in the cache, if any -> logits of the vocabulary, [B, T, V]."""
        cache = Cache() if cache is None else cache
        hidden = self.decoder(tokens, cache)
        cache.length += tokens.shape[1]
        # The head's matrix is the embedding's table (Press & Wolf 2017).
        return F.linear(hidden, self.decoder.embed.token.weight)


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
    """A pass over random tokens with random weights: the shape that leaves each part, and the number of parameters."""
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
