"""Next-token loss: which tokens are targets, and the summed cross-entropy over them.

Targets are chosen by mask, never by id, so that a token that also serves as padding can be learned; the shift between
input and target happens here once.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from anyformer.nn.moe import Routing

_IGNORED = -100


@dataclass(frozen=True)
class Batch:
    """Rows to learn from.

    Attributes:
        tokens: int64 [B, T], the input.
        targets: int64 [B, T], the token after each.
        mask: bool [B, T], True where a target counts; None where all do.
        segments: int64 [B, T], the document of each input token; None where a row is one text.
        padding: bool [B, T], True = real input; None where all are.
        n_targets: the number of targets that count.
        n_sequences: the number of rows with a real token.
        n_tokens: the number of real tokens.
    """

    tokens: Tensor
    targets: Tensor
    mask: Tensor | None
    segments: Tensor | None
    padding: Tensor | None
    n_targets: int
    n_sequences: int
    n_tokens: int

    @property
    def n_rows(self) -> int:
        """B."""
        return self.tokens.shape[0]

    def rows(self, start: int, stop: int) -> "Batch":
        """Rows [start, stop) alone."""
        if start <= 0 and stop >= self.n_rows:
            return self
        cut = (None if x is None else x[start:stop] for x in (self.mask, self.segments, self.padding))
        return make_batch(self.tokens[start:stop], self.targets[start:stop], *cut)

    def micro(self, rows: int) -> "list[Batch]":
        """Parts of at most `rows` rows; the last may have fewer."""
        return [self.rows(start, start + rows) for start in range(0, self.n_rows, rows)]

    def to(self, device: torch.device) -> "Batch":
        """The same on a device."""
        if device.type == "cpu":
            return self
        names = ("tokens", "targets", "mask", "segments", "padding")
        given = {name: getattr(self, name) for name in names}
        return replace(self, **{n: x.to(device, non_blocking=True) for n, x in given.items() if x is not None})


def make_batch(
    tokens: Tensor,
    targets: Tensor,
    mask: Tensor | None = None,
    segments: Tensor | None = None,
    padding: Tensor | None = None,
) -> Batch:
    """A batch with its targets, rows and tokens counted, on the host before anything is computed."""
    n_targets = targets.numel() if mask is None else int(mask.sum())
    n_sequences = tokens.shape[0] if padding is None else int(padding.any(1).sum())
    n_tokens = tokens.numel() if padding is None else int(padding.sum())
    return Batch(tokens, targets, mask, segments, padding, n_targets, n_sequences, n_tokens)


def shifted(
    tokens: Tensor, real: Tensor | None = None, supervised: Tensor | None = None, segments: Tensor | None = None
) -> Batch:
    """Rows of T + 1 tokens as inputs and the targets after them.

    Args:
        tokens: int64 [B, T + 1].
        real: bool [B, T + 1], False = padding, on either side; a first real token has nothing before it and is no
            target.
        supervised: bool [B, T + 1], tokens to learn; all real ones where None.
        segments: int64 [B, T + 1], the document of each token; a document's first token is no target.
    """
    conditions = [
        None if real is None else real[:, 1:] & real[:, :-1],
        None if supervised is None else supervised[:, 1:],
        None if segments is None else segments[:, 1:] == segments[:, :-1],
    ]
    given = [condition for condition in conditions if condition is not None]
    mask = torch.stack(given).all(0) if given else None
    return make_batch(
        tokens[:, :-1],
        tokens[:, 1:],
        mask,
        None if segments is None else segments[:, :-1],
        None if real is None else real[:, :-1],
    )


def summed_loss(logits: Tensor, targets: Tensor, mask: Tensor | None = None) -> Tensor:
    """−Σ log softmax(logits)[target] in nats over the targets that count, in float32 at least; 0 when none does.

    Args:
        logits: [B, T, V] of any floating type.
        targets: int64 [B, T].
        mask: bool [B, T], True where a target counts; None counts all.
    """
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    if mask is not None:
        targets = torch.where(mask, targets, _IGNORED)
    return F.cross_entropy(logits.flatten(0, 1), targets.reshape(-1), ignore_index=_IGNORED, reduction="sum")


def batch_loss(model: torch.nn.Module, batch: Batch, *, routing: Routing | None = None) -> Tensor:
    """The summed loss of a model on a batch, a float32 scalar. `routing` collects what mixtures of experts chose."""
    more = {} if routing is None else {"routing": routing}
    logits = model(batch.tokens, padding=batch.padding, segments=batch.segments, **more)
    return summed_loss(logits, batch.targets, batch.mask)
