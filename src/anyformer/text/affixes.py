"""What a tokenizer puts before and after a text, read from its post-processor and written into one."""

import json
from typing import Any

from tokenizers import Tokenizer as Library
from tokenizers import models

from anyformer.errors import UserError

Ids = tuple[int, ...]
# These put tokens around a text; the others only keep account of where tokens came from.
_TEMPLATES = frozenset({"TemplateProcessing", "BertProcessing", "RobertaProcessing"})


def read_affixes(library: Library) -> tuple[Ids, Ids]:
    """The ids that the post-processor of `library` puts before and after any one text.

    Raises:
        UserError: it leaves the text itself out, or repeats it.
    """
    # The word comes from elsewhere: this model may be unable to write any given text.
    word = Library(models.WordLevel({"a": 0}, unk_token="a")).encode("a")
    shape = library.post_process(word, None, True)
    if shape.special_tokens_mask.count(0) != 1:
        raise UserError("the post-processor of this tokenizer does not keep a text as it is", where="post_processor")
    body = shape.special_tokens_mask.index(0)
    return tuple(shape.ids[:body]), tuple(shape.ids[body + 1 :])


def with_affixes(library: Library, prefix: Ids, suffix: Ids) -> Library:
    """A tokenizer like `library` whose post-processor puts `prefix` and `suffix` around a text."""
    if read_affixes(library) == (prefix, suffix):
        return library
    state = json.loads(library.to_str())
    steps = [step for step in _flat(state.get("post_processor")) if step["type"] not in _TEMPLATES]
    steps.append(_template(library, prefix, suffix))
    state["post_processor"] = steps[0] if len(steps) == 1 else {"type": "Sequence", "processors": steps}
    return Library.from_str(json.dumps(state))


def _flat(step: dict[str, Any] | None) -> list[dict[str, Any]]:
    if step is None:
        return []
    if step["type"] != "Sequence":
        return [step]
    return [inner for each in step["processors"] for inner in _flat(each)]


def _template(library: Library, prefix: Ids, suffix: Ids) -> dict[str, Any]:
    tokens = {index: library.id_to_token(index) for index in (*prefix, *suffix)}

    def around(sequence: str, kind: int) -> list[dict[str, Any]]:
        before, after = (
            [{"SpecialToken": {"id": tokens[index], "type_id": kind}} for index in ids] for ids in (prefix, suffix)
        )
        return [*before, {"Sequence": {"id": sequence, "type_id": kind}}, *after]

    return {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": [*around("A", 0), *around("B", 1)],
        "special_tokens": {token: {"id": token, "ids": [index], "tokens": [token]} for index, token in tokens.items()},
    }
