"""Two models with the interface of the real one: logits that are a fixed function of the prefix, and a script."""

import zlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch


class PrefixCache:
    """Remembers each row's real tokens and refuses more than its capacity."""

    def __init__(self, batch, capacity):
        self.tokens = [[] for _ in range(batch)]
        self.capacity = capacity

    def select(self, rows):
        self.tokens = [list(self.tokens[row]) for row in rows.tolist()]

    @property
    def lengths(self):
        return torch.tensor([len(row) for row in self.tokens])


class PrefixModel(torch.nn.Module):
    """logits after a prefix = numbers seeded by the prefix itself; `fault` may change them."""

    def __init__(self, vocab_size=11, context=None, fault=None):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.dropout = torch.nn.Dropout(0.5)
        self.spec = SimpleNamespace(
            vocab_size=vocab_size,
            head="language",
            generates=True,
            encoder=None,
            decoder=SimpleNamespace(max_positions=context, blocks=(), turning_lengths=()),
        )
        self.fault = fault
        self.caches = []
        self.calls = []

    def of_prefix(self, prefix):
        seed = zlib.crc32(np.asarray(prefix, dtype=np.int64).tobytes())
        return np.random.default_rng(seed).normal(size=self.spec.vocab_size).astype(np.float32)

    def new_cache(self, batch, capacity, kind="static"):
        self.caches.append(PrefixCache(batch, capacity))
        return self.caches[-1]

    def forward(self, tokens, padding=None, cache=None, last_only=False):
        assert last_only
        assert not torch.is_grad_enabled() or torch.is_inference_mode_enabled()
        self.calls.append(tuple(tokens.shape))
        real = torch.ones_like(tokens, dtype=torch.bool) if padding is None else padding
        out = torch.zeros(len(tokens), 1, self.spec.vocab_size)
        for row, (ids, keep) in enumerate(zip(tokens, real, strict=True)):
            new = ids[keep].tolist()
            cache.tokens[row] += new
            if len(cache.tokens[row]) > cache.capacity:
                raise ValueError("the cache is full")
            if new:
                out[row, 0] = torch.from_numpy(self.of_prefix(cache.tokens[row]))
        if self.fault is not None:
            self.fault(self, out)
        return self.dropout(out * self.weight)


class ScriptedModel(torch.nn.Module):
    """Writes `script` after any prompt, whatever the batch: the n-th new token of a row is script[n]."""

    def __init__(self, script, vocab_size, context=None):
        super().__init__()
        self.script = list(script)
        self.spec = SimpleNamespace(
            vocab_size=vocab_size,
            head="language",
            generates=True,
            encoder=None,
            decoder=SimpleNamespace(max_positions=context, blocks=(), turning_lengths=()),
        )

    def new_cache(self, batch, capacity, kind):
        self.n = 0
        return SimpleNamespace(select=lambda rows: None)

    def forward(self, tokens, padding, cache, last_only):
        logits = torch.zeros(len(tokens), 1, self.spec.vocab_size)
        logits[..., self.script[self.n]] = 9.0
        self.n += 1
        return logits


@pytest.fixture(scope="session")
def scripted():
    def make(script, tokenizer, context=None, vocab_size=None):
        return ScriptedModel(script, vocab_size or tokenizer.vocab_size, context)

    return make


@pytest.fixture(scope="session")
def prefix_model():
    def make(**options):
        return PrefixModel(**options).eval()

    return make
