"""Encoders with the weights of a published implementation give its states, scores of words, labels and answers."""

import pytest
import torch
from encoders import BERT, BERT_STATES, ENCODERS
from encoders_more import MORE_ENCODERS
from pairs import Pair, ids, padded, pair
from seq2seq_more import ENCODER_ALONE
from torch import Tensor

ALL = [*ENCODERS, *MORE_ENCODERS, *ENCODER_ALONE]
families = pytest.mark.parametrize("family", ALL, ids=lambda family: family.name)


def theirs(both: Pair, tokens: Tensor, real: Tensor | None = None, **kwargs) -> Tensor:
    """What their model ends with."""
    out = both.theirs(tokens, real, **kwargs)
    if hasattr(out, "start_logits"):
        return torch.stack([out.start_logits, out.end_logits], -1)
    return out.logits if hasattr(out, "logits") else out.last_hidden_state


def ours(both: Pair, tokens: Tensor, **kwargs) -> Tensor:
    """What our model ends with."""
    run = both.our.hidden if both.our.head is None else both.our
    return run(tokens, **kwargs).detach()


@families
def test_the_whole_pass_gives_their_output(family):
    """Past windows; a lone token."""
    both = pair(family)
    for batch, length in ((2, 23), (1, 1)):
        tokens = ids(batch, length, both.vocab_size, seed=length)
        both.close(theirs(both, tokens), ours(both, tokens))


@families
def test_rows_padded_on_the_right_give_their_output(family):
    """Theirs padded the same way."""
    both = pair(family)
    tokens, real = ids(3, 19, both.vocab_size), padded([19, 12, 1], "right")
    a, b = theirs(both, tokens, real), ours(both, tokens, padding=real)
    both.close(a if a.dim() == 2 else a[real], b if b.dim() == 2 else b[real])


@families
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_row_gives_the_output_of_the_row_alone(family, side):
    """Theirs takes the first place of a row for its first token, so that it is given each row alone."""
    both = pair(family)
    tokens, real = ids(3, 19, both.vocab_size), padded([19, 12, 1], side)
    out = ours(both, tokens, padding=real)
    for row in range(3):
        alone = theirs(both, tokens[row][real[row]][None])
        both.close(alone, out[row][None] if out.dim() == 2 else out[row][real[row]][None])


@pytest.mark.parametrize("family", [BERT, BERT_STATES], ids=lambda family: family.name)
def test_token_types_are_added_and_default_to_the_first(family):
    """Three types; left out, as zeros, and mixed."""
    both = pair(family)
    tokens = ids(2, 11, both.vocab_size)
    types = torch.randint(0, 3, tokens.shape, generator=torch.Generator().manual_seed(1))
    both.close(theirs(both, tokens, token_type_ids=types), ours(both, tokens, types=types))
    assert torch.equal(ours(both, tokens), ours(both, tokens, types=torch.zeros_like(types)))
    assert not torch.allclose(ours(both, tokens), ours(both, tokens, types=types), atol=0.1)


def test_the_pooler_reads_the_first_real_token():
    """tanh of one map of one token; padded on either side."""
    both = pair(BERT_STATES)
    tokens = ids(2, 11, both.vocab_size)
    both.close(both.theirs(tokens).pooler_output, both.our.pooled(tokens).detach())
    real = padded([11, 6], "left")
    alone = both.theirs(tokens[1:, 5:]).pooler_output
    both.close(alone, both.our.pooled(tokens, padding=real)[1:].detach())
