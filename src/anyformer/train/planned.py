"""What a run will cost and how long it will be, from its description and the text alone. Imports no torch."""

import math
from dataclasses import replace

from anyformer.planning import Plan, plan
from anyformer.spec.parts import ModelSpec
from anyformer.text.corpus import Corpus
from anyformer.text.sources import list_documents
from anyformer.text.split import split_documents
from anyformer.text.tokenizer import Tokenizer
from anyformer.text.trained import END_OF_TEXT
from anyformer.train.run import BpeTokenizer, ByteTokenizer, CharTokenizer, FileTokenizer, Run


def planned(run: Run, spec: ModelSpec) -> Plan:
    """The plan of a run's forward passes. Weights, gradients and moments are float32 under autocast, too."""
    made = plan(spec, batch=run.rows_per_forward(), context=run.data.context, optimizer=run.optimizer.kind)
    if run.train.precision == "float32":
        return made
    words = f"{run.train.precision} autocast; activations are counted as float32, an upper bound"
    return replace(made, facts={**made.facts, "precision": words})


def steps_of(run: Run) -> int | None:
    """The updates that a run asks for; None when it gives minutes, which must be measured."""
    if run.train.steps is not None:
        return run.train.steps
    if run.train.tokens is not None:
        return math.ceil(run.train.tokens / (run.train.batch * run.data.context))
    return None


def val_fraction(run: Run) -> float:
    """The share of the text that is for validation: a tenth where not given."""
    return 0.1 if run.data.val_fraction is None else run.data.val_fraction


def expected_spec(run: Run) -> ModelSpec:
    """The model of a run before its corpus is made; a bpe vocabulary is taken to be as large as allowed.

    Raises `UserError` for text, a corpus or a tokenizer that is not there.
    """
    if run.data.corpus is not None:
        return run.spec(Corpus.open(run.data.corpus).tokenizer.vocab_size)
    documents = list_documents(run.data.sources).documents
    match run.data.tokenizer or BpeTokenizer():
        case BpeTokenizer(vocab_size=size):
            return run.spec(size)
        case FileTokenizer(path=path):
            return run.spec(Tokenizer.load(path).vocab_size)
        case CharTokenizer():
            train, _ = split_documents(documents, val_fraction(run))
            control = (END_OF_TEXT,) if len({document.digest for document in documents}) > 1 else ()
            texts = (part.text() for part in train)
            return run.spec(Tokenizer.train("char", texts, control_tokens=control).vocab_size)
        case ByteTokenizer():
            return run.spec(Tokenizer.train("byte", []).vocab_size)
