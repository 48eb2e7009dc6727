"""Encoder–decoders with the weights of a published implementation give its logits, whole, padded and step by step."""

import pytest
import torch
from pairs import ids, padded, pair
from seq2seq import PAIRS
from seq2seq_more import MORE_PAIRS

from anyformer.nn.attend.bias import BucketBias

families = pytest.mark.parametrize("family", [*PAIRS, *MORE_PAIRS], ids=lambda family: family.name)


@families
def test_the_whole_pass_gives_their_logits(family):
    """A source longer than the target and one shorter, past the distance that buckets tell apart."""
    both = pair(family)
    for source_length, length in ((27, 17), (3, 29), (1, 1)):
        source = ids(2, source_length, both.vocab_size)
        target = ids(2, length, both.vocab_size, seed=1)
        out = both.theirs(source, decoder_input_ids=target)
        both.close(out.logits, both.our(target, source=source).detach())
        both.close(out.encoder_last_hidden_state, both.our.encode(source).detach())


@families
def test_padded_sources_and_targets_give_their_logits(family):
    """Padded on the right, as theirs has it."""
    both = pair(family)
    source, seen = ids(3, 19, both.vocab_size), padded([19, 12, 1], "right")
    target, real = ids(3, 14, both.vocab_size, seed=1), padded([5, 14, 2], "right")
    out = both.theirs(source, seen, decoder_input_ids=target, decoder_attention_mask=real.long())
    ours = both.our(target, padding=real, source=source, source_padding=seen).detach()
    both.close(out.logits[real], ours[real])


@families
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_row_gives_the_logits_of_the_row_alone(family, side):
    """Padding on either side of source and target."""
    both = pair(family)
    source, seen = ids(3, 19, both.vocab_size), padded([19, 12, 1], side)
    target, real = ids(3, 14, both.vocab_size, seed=1), padded([5, 14, 2], side)
    ours = both.our(target, padding=real, source=source, source_padding=seen).detach()
    for row in range(3):
        out = both.theirs(source[row][seen[row]][None], decoder_input_ids=target[row][real[row]][None])
        both.close(out.logits, ours[row][real[row]][None])


@families
def test_greedy_decoding_with_a_cache_gives_their_tokens(family):
    """A start, a chunk, single tokens; the source is read once."""
    both = pair(family)
    source, seen = ids(2, 15, both.vocab_size), padded([15, 8], "right")
    tokens, cache, state = ids(2, 1, both.vocab_size, seed=1), both.our.new_cache(2, 32), None
    memory = both.our.encode(source, padding=seen).detach()
    for step in range(16):
        out = both.theirs(source, seen, decoder_input_ids=tokens, cache=state, use_cache=True)
        given = {"memory": memory, "source_padding": seen} if step == 0 else {}
        ours = both.our(tokens, cache=cache, **given).detach()
        both.close(out.logits, ours)
        assert torch.equal(out.logits[:, -1].argmax(-1), ours[:, -1].argmax(-1))
        state = out.cache
        tokens = ids(2, 4, both.vocab_size, seed=5) if step == 1 else out.logits[:, -1:].argmax(-1)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("n_buckets", "max_distance"), [(32, 128), (32, 100), (20, 50), (8, 12), (64, 4096)])
def test_distances_fall_into_their_buckets(n_buckets, max_distance, bidirectional):
    """Every distance that can matter, in float32 as theirs has it."""
    from transformers.models.t5.modeling_t5 import T5Attention

    reach = 2 * max_distance
    queries, keys = torch.tensor([[reach]]), torch.arange(2 * reach + 1)[None]
    theirs = T5Attention._relative_position_bucket(keys - queries, bidirectional, n_buckets, max_distance)
    table = torch.arange(n_buckets, dtype=torch.float32)[:, None]
    bias = BucketBias(table, max_distance, bidirectional).at(queries=queries, keys=keys)
    assert torch.equal(bias.added(1, 2 * reach + 1)[0, 0, 0].long(), theirs[0])
