"""Decoders with the weights of a published implementation give its logits: whole, padded, continued from a cache."""

import pytest
import torch
from dense import DENSE, DYNAMIC, GEMMA2, LONGROPE, PHI3
from dense_other import GPT2_ROWS, OTHERS
from kin import KIN
from mixtures import LATENTS, MIXTURES
from pairs import ids, padded, pair, wide

FAMILIES = [*DENSE, *KIN, *OTHERS, *MIXTURES, *LATENTS]
families = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
by_length = [DYNAMIC, LONGROPE, PHI3]


@families
def test_the_whole_pass_gives_their_logits(family):
    """Past windows and trained lengths; a lone token; every tensor of either model carried over once."""
    both = pair(family)
    for batch, length in ((2, 23), (1, 1)):
        tokens = ids(batch, length, both.vocab_size, seed=length)
        both.close(both.theirs(tokens).logits, both.our(tokens).detach())


@families
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_give_their_logits(family, side):
    """Theirs padded the same way; row by row where their rotation follows the longest row of a batch."""
    both, lengths = pair(family), [19, 12, 1]
    tokens, real = ids(3, 19, both.vocab_size), padded(lengths, side)
    ours = both.our(tokens, padding=real).detach()
    if family in by_length:
        for row in range(3):
            both.close(both.theirs(tokens[row][real[row]][None]).logits, ours[row][real[row]][None])
    else:
        both.close(both.theirs(tokens, real).logits[real], ours[real])


@families
def test_greedy_continuation_of_padded_prompts_gives_their_tokens(family):
    """A prompt padded on the left, a chunk, single tokens; past every window, and with caches that keep no more."""
    both = pair(family)
    tokens, real = ids(2, 7, both.vocab_size), padded([7, 4], "left")
    caches = [both.our.new_cache(2, 16, kind) for kind in ("static", "ring")]
    stored, state, chosen = None, None, []
    for step in range(6):
        out = both.theirs(tokens, real, stored, cache=state, use_cache=True)
        for cache in caches:
            padding = real if stored is None else None
            ours = both.our(tokens, padding=padding, cache=cache, last_only=True).detach()
            both.close(out.logits[:, -1:], ours)
        state = out.cache
        stored = real if stored is None else torch.cat([stored, real], 1)
        best = out.logits[:, -1].argmax(-1)
        assert torch.equal(best, ours[:, -1].argmax(-1))
        chosen.append(best)
        tokens = ids(2, 3, both.vocab_size, seed=5) if step == 1 else best[:, None]
        real = torch.ones_like(tokens, dtype=torch.bool)
    assert len(chosen) == 6


@pytest.mark.parametrize("family", [LONGROPE, PHI3], ids=lambda family: family.name)
def test_continuation_past_the_original_context(family):
    """Once a prompt is long, every key turns by the long divisors."""
    both = pair(family)
    tokens = ids(2, 18, both.vocab_size)
    cache, state = both.our.new_cache(2, 32), None
    for _ in range(4):
        out = both.theirs(tokens, cache=state, use_cache=True)
        both.close(out.logits, both.our(tokens, cache=cache).detach())
        state, tokens = out.cache, out.logits[:, -1:].argmax(-1)


@pytest.mark.parametrize("family", [DYNAMIC, LONGROPE, PHI3], ids=lambda family: family.name)
@pytest.mark.parametrize("length", [15, 16, 17])
def test_lengths_around_the_original_context(family, length):
    """The last length that is short, and the first that is long."""
    both = pair(family)
    tokens = ids(2, length, both.vocab_size)
    both.close(both.theirs(tokens).logits, both.our(tokens).detach())


def test_dynamic_scaling_forgets_a_long_row():
    """Lengths below and past the trained one, up and down."""
    both = pair(DYNAMIC)
    for length in (24, 9, 15, 31, 9):
        tokens = ids(1, length, both.vocab_size, seed=length)
        both.close(both.theirs(tokens).logits, both.our(tokens).detach())


@pytest.mark.parametrize("side", ["left", "right"])
def test_labels_are_read_off_the_last_real_token(side):
    """Theirs finds it by the token that pads."""
    both = pair(GPT2_ROWS)
    real = padded([11, 6, 1], side)
    tokens = ids(3, 11, both.vocab_size).masked_fill(~real, 0)
    both.close(both.theirs(tokens, real).logits, both.our(tokens, padding=real).detach())


def test_scores_and_logits_of_gemma_reach_their_caps():
    """The caps would not show in numbers far below them."""
    both = pair(GEMMA2)
    seen = {}

    def keep(name):
        def hook(module, inputs, output):
            seen[name] = output.abs().max()

        return hook

    attention = both.hf.model.layers[0].self_attn
    handles = [attention.q_proj.register_forward_hook(keep("q")), both.hf.lm_head.register_forward_hook(keep("logits"))]
    with wide():
        both.hf(ids(2, 9, both.vocab_size))
    for handle in handles:
        handle.remove()
    assert seen["logits"] > 30.0
    assert seen["q"] > 2.0
