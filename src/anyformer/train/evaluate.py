"""Loss, perplexity and bits per byte: of a validation split while training, and of any text afterwards.

A text is scored in windows of `context` tokens that begin every `stride` tokens; each window scores what the one before
it did not, so that every token is scored once and, after the first window, sees at least context − stride tokens
before it. A document's first token is scored where the tokenizer has a BOS or EOS token to stand before it, and is left
out with its bytes where not.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import takewhile
from typing import Any

import numpy as np
import torch
from torch import nn

from anyformer.errors import UserError
from anyformer.nn.model import Model
from anyformer.text.corpus import Split, bits_per_byte
from anyformer.text.tokenizer import Tokenizer
from anyformer.train.data import Windows, whole_split
from anyformer.train.loss import Batch, batch_loss, make_batch
from anyformer.train.parallel import Alone, World
from anyformer.train.step import precision_context


@dataclass(frozen=True)
class Score:
    """What a model makes of a text.

    Attributes:
        loss: the mean over scored tokens, in nats.
        perplexity: e to the loss.
        bits_per_byte: the summed loss in bits over the bytes of UTF-8 that the scored tokens stand for.
        n_tokens: scored tokens.
        n_bytes: those bytes.
    """

    loss: float
    perplexity: float
    bits_per_byte: float
    n_tokens: int
    n_bytes: int

    @staticmethod
    def of(nats: float, n_tokens: int, n_bytes: int) -> "Score":
        """From the summed loss. Raises `UserError` when nothing was scored."""
        if not n_tokens:
            raise UserError(
                "there is nothing to score",
                where="text",
                expected="a token, and one before it to predict it from",
                remedy="give a longer text",
            )
        loss = nats / n_tokens
        # e^709 is the largest that a float holds.
        perplexity = math.exp(loss) if loss < 709 else math.inf
        return Score(loss, perplexity, bits_per_byte(nats, n_bytes), n_tokens, n_bytes)

    def to_dict(self) -> dict[str, Any]:
        """As numbers that JSON knows: a perplexity too large for a float is None."""
        return {**asdict(self), "perplexity": self.perplexity if math.isfinite(self.perplexity) else None}

    @staticmethod
    def from_dict(table: dict[str, Any]) -> "Score":
        """What `to_dict` gave."""
        perplexity = table["perplexity"]
        return Score(**{**table, "perplexity": math.inf if perplexity is None else perplexity})


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; the mode and every random generator are afterwards as they were."""
    modes = [(module, module.training) for module in model.modules()]
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    model.eval()
    try:
        with torch.random.fork_rng(list(devices)), torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def total_loss(
    model: nn.Module, batches: Iterable[Batch], *, precision: str = "float32", world: World | None = None
) -> tuple[float, int]:
    """The summed loss in nats and the number of targets, over all batches and processes. In evaluation mode."""
    world = world or Alone()
    device = next(model.parameters()).device
    nats = torch.zeros((), dtype=torch.float64, device=device)
    n_targets = 0
    with evaluating(model):
        for index, batch in enumerate(batches):
            if index % world.size != world.rank:
                continue
            with precision_context(precision, device):
                nats += batch_loss(model, batch.to(device)).double()
            n_targets += batch.n_targets
    return float(world.sum_(nats)), world.total(n_targets)


def evaluate_split(
    model: nn.Module,
    split: Split,
    *,
    context: int,
    documents: bool = False,
    rows: int = 16,
    precision: str = "float32",
    world: World | None = None,
    abandon: Callable[[], bool] = lambda: False,
) -> Score | None:
    """The score of a whole split, in disjoint windows of `context` tokens, the last partial one included.

    Args:
        model: either mode; it comes back in the one it was in.
        split: with two tokens or more.
        context: tokens a row.
        documents: keep documents apart, as packing "documents" does.
        rows: of a forward pass.
        precision: "float32", or "bfloat16" for autocast.
        world: the processes that share the work; all get the whole score.
        abandon: asked before each forward pass; True ends the work, and the score is None.
    """
    windows = Windows(split.tokens, split.documents if documents else None, context)
    batches = takewhile(lambda _: not abandon(), whole_split(windows, rows))
    nats, n_targets = total_loss(model, batches, precision=precision, world=world)
    if abandon():
        return None
    n_bytes = _predicted_bytes(split) if documents else split.predicted_bytes
    return Score.of(nats, n_targets, n_bytes)


def _predicted_bytes(split: Split) -> int:
    """The bytes of a split without those of each document's first token."""
    starts = np.unique(split.documents[split.documents < split.n_tokens])
    return split.n_bytes - sum(split.bytes_of(int(start), int(start) + 1) for start in starts)


def strided(ids: Sequence[int], context: int, stride: int, rows: int, first: int = 1) -> Iterator[Batch]:
    """Windows over `ids` that score each token from number `first` on exactly once, `rows` of them at a time.

    Args:
        ids: at least two tokens.
        context: the most tokens of an input.
        stride: how far windows are apart, 1 … context.
        rows: of a batch.
        first: the first token to score, at least 1.
    """
    tokens = np.asarray(ids, dtype=np.int64)
    n = len(tokens)
    width = min(context, n - 1)
    starts = np.arange(0, 1 + max(0, -(-(n - 1 - width) // stride)) * stride, stride)
    for chunk in np.split(starts, range(rows, len(starts), rows)):
        places = chunk[:, None] + np.arange(width + 1)
        rest = tokens[np.minimum(places, n - 1)]
        targets = places[:, 1:]
        new = (chunk[:, None] == 0) | (targets > chunk[:, None] + width - stride)
        mask = new & (targets < n) & (targets >= first)
        yield make_batch(*(torch.from_numpy(x) for x in (rest[:, :-1], rest[:, 1:], mask)))


def _telling(batches: Iterator[Batch], progress: Callable[[int], None]) -> Iterator[Batch]:
    """The same batches; once each is done, `progress` hears how many targets are."""
    done = 0
    for batch in batches:
        yield batch
        done += batch.n_targets
        progress(done)


def score_ids(
    model: nn.Module,
    ids: Sequence[int],
    *,
    context: int,
    stride: int | None = None,
    rows: int = 8,
    first: int = 1,
    progress: Callable[[int], None] | None = None,
) -> tuple[float, int]:
    """The summed loss in nats of tokens `first` … of `ids`, each scored once, and their number. See `strided`.

    `progress` is called after each forward pass with the number of tokens scored so far.
    """
    stride = stride or max(1, context // 2)
    if not 1 <= stride <= context:
        raise UserError("the stride is from 1 to the context", where="stride", got=stride, expected=f"1 to {context}")
    if len(ids) < 2:
        return 0.0, 0
    batches = strided(ids, context, stride, rows, first)
    return total_loss(model, batches if progress is None else _telling(batches, progress))


def _tell_bytes(progress: Callable[[int], None], before: int, size: int, n_ids: int, n_scored: int) -> None:
    """Tells how many bytes are done when `n_scored` of a document's `n_ids` tokens are."""
    progress(before + size * n_scored // n_ids)


def score_texts(
    model: nn.Module,
    tokenizer: Tokenizer,
    texts: Iterable[str],
    *,
    context: int,
    stride: int | None = None,
    rows: int = 8,
    progress: Callable[[int], None] | None = None,
) -> Score:
    """The score of documents, each by itself from its beginning.

    Args:
        model: either mode.
        tokenizer: the model's.
        texts: one or more documents.
        context: the most tokens that the model is given at once.
        stride: how far windows are apart, 1 … context; half the context where None. Smaller is slower and, for most
            models, gives a lower loss.
        rows: windows at a time.
        progress: called after each forward pass with the bytes of UTF-8 that are done, in the end all of them.

    Raises:
        UserError: nothing to score, a stride out of range, or a loss that is not a finite number.
    """
    before = tokenizer.bos_id if tokenizer.bos_id is not None else tokenizer.eos_id
    nats, n_tokens, n_bytes, n_read = 0.0, 0, 0, 0
    for text in texts:
        ids = tokenizer.encode(text, bare=True)
        size = len(text.encode("utf-8"))
        n_bytes, n_read = n_bytes + size, n_read + size
        if not ids:
            continue
        if before is not None:
            ids = [before, *ids]
        else:
            n_bytes -= len(tokenizer.token_bytes(ids[0], first=True))
        tell = None if progress is None else partial(_tell_bytes, progress, n_read - size, size, len(ids))
        more, count = score_ids(model, ids, context=context, stride=stride, rows=rows, progress=tell)
        if not math.isfinite(more):
            raise _not_finite(model, ids[:context], more)
        nats, n_tokens = nats + more, n_tokens + count
        if progress is not None:
            progress(n_read)
    return Score.of(nats, n_tokens, n_bytes)


def _not_finite(model: nn.Module, ids: Sequence[int], nats: float) -> UserError:
    """Names the first parameter that is not finite, or else the first such site in a pass over `ids`."""
    site = None
    if isinstance(model, Model):
        with evaluating(model):
            site = model.trace_nonfinite(torch.tensor([ids], device=next(model.parameters()).device))
    return UserError(
        "the loss of this text is not a finite number",
        where=site,
        got=nats,
        remedy="take an earlier checkpoint: these weights cannot be used",
    )
