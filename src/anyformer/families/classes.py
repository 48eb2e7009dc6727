"""Classes of decoders that name their heads as GPT-2's: lm_head, score, classifier, qa_outputs."""

from collections.abc import Mapping
from typing import Any

from anyformer.families.common import LANGUAGE, LAST
from anyformer.families.family import Variant
from anyformer.families.fields import Field, Labels


def classes(
    name: str,
    body: str,
    *,
    language: str = "ForCausalLM",
    head: Mapping[str, Any] = LANGUAGE,
    scores: tuple[str, ...] = ("lm_head.{p}",),
    token: tuple[Field, ...] | None = (),
) -> dict[str, Variant]:
    """The bare body, and the body with each kind of head.

    Args:
        name: what the names of the classes begin with.
        body: what stands before the names of the body's tensors in a model with a head.
        language: what the name of the language model ends with.
        head: the language head.
        scores: names of its tensors, the one to be written first.
        token: fields of the classifier of tokens, None where the family has none.
    """
    found = {
        f"{name}{language}": Variant({"head": head}, tuple((each, "head.{p}") for each in scores), body=body),
        f"{name}Model": Variant({"head": None}),
        f"{name}ForSequenceClassification": Variant(
            {"head": LAST}, (("score.weight", "head.weight"),), (Labels(),), body
        ),
        f"{name}ForQuestionAnswering": Variant({"head": {"kind": "span"}}, (("qa_outputs.{p}", "head.{p}"),), (), body),
    }
    if token is not None:
        found[f"{name}ForTokenClassification"] = Variant(
            {"head": {"kind": "token"}}, (("classifier.{p}", "head.{p}"),), (Labels(), *token), body
        )
    return found
