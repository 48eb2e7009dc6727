"""How fast texts become sentence vectors, beside `transformers` and, where installed, sentence-transformers.

    python benchmarks/embed_minilm.py FOLDER [--texts 400 --batch 32 --threads 2 --runs 3]

FOLDER holds all-MiniLM-L6-v2 or another BERT with modules.json whose pooling is the mean. The texts are paragraphs of
Python's own documentation. Medians of alternating runs, tokenising included; each peer sorts texts by length. The
largest difference of a vector's number from ours stands beside.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor

import anyformer as af

Embed = Callable[[list[str]], Tensor]


def of_transformers(folder: Path, most: int, batch: int, normalise: bool) -> Embed:
    """The mean of the states of their model, over batches of texts of like length."""
    from transformers import AutoModel, AutoTokenizer

    model, tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)

    @torch.no_grad()
    def run(texts: list[str]) -> Tensor:
        order = sorted(range(len(texts)), key=lambda place: len(texts[place]), reverse=True)
        found: dict[int, Tensor] = {}
        for start in range(0, len(order), batch):
            places = order[start : start + batch]
            wanted = [texts[place] for place in places]
            inputs = tokenizer(wanted, padding=True, truncation=True, max_length=most, return_tensors="pt")
            real = inputs["attention_mask"][..., None]
            vectors = (model(**inputs).last_hidden_state * real).sum(1) / real.sum(1)
            found |= dict(zip(places, F.normalize(vectors, dim=-1) if normalise else vectors, strict=True))
        return torch.stack([found[place] for place in range(len(texts))])

    return run


def of_sentence_transformers(folder: Path, batch: int) -> Embed | None:
    """Theirs; None where the package is not installed."""
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError:
        return None
    model = SentenceTransformer(str(folder), device="cpu")
    return lambda texts: model.encode(texts, batch_size=batch, convert_to_tensor=True)


def main() -> None:
    """A line an implementation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    for name, value in (("texts", 400), ("batch", 32), ("threads", 2), ("runs", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", TOKENIZERS_PARALLELISM="true")
    texts = "\n\n".join(topics.values()).split("\n\n")[: options.texts]
    checkpoint = af.load(options.folder)
    how = checkpoint.embedding
    if how is None or how.pooling != ("mean",) or how.max_length is None or how.dense:
        parser.error("the folder should say in modules.json that a vector is a mean, and how long a text may be")
    tokens = sum(min(len(ids), how.max_length) for ids in checkpoint.tokenizer.encode_batch(texts))
    peers = {
        "anyformer": lambda given: checkpoint.embed(given, batch_size=options.batch),
        "transformers": of_transformers(options.folder, how.max_length, options.batch, how.normalise),
        "sentence-transformers": of_sentence_transformers(options.folder, options.batch),
    }
    runs = {name: run for name, run in peers.items() if run is not None}
    times: dict[str, list[float]] = {name: [] for name in runs}
    vectors = {}
    for index in range(options.runs + 1):
        for name, run in runs.items():
            begin = time.perf_counter()
            vectors[name] = run(texts)
            if index:  # The first run warms up.
                times[name].append(time.perf_counter() - begin)
    print(f"{len(texts)} texts, {tokens:,} tokens, batches of {options.batch}, {options.threads} threads")
    print(f"{'':24}{'seconds':>10}{'texts/s':>10}{'tokens/s':>10}{'difference':>12}")
    for name, found in times.items():
        median = statistics.median(found)
        apart = float((vectors[name] - vectors["anyformer"]).abs().max())
        print(f"{name:24}{median:10.2f}{len(texts) / median:10.1f}{tokens / median:10,.0f}{apart:12.1e}")


if __name__ == "__main__":
    main()
