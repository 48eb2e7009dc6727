"""A specification as one file: the uses of its parts, grouped into kinds, each rendered once after what it calls."""

from math import isclose

from anyformer.spec.parts import LanguageHead, ModelSpec
from anyformer.weights.eject.constants import Constants
from anyformer.weights.eject.known import require_known
from anyformer.weights.eject.layers import Choices, head, stack
from anyformer.weights.eject.parts import Parts
from anyformer.weights.eject.text_blocks import write_attentions, write_blocks, write_networks
from anyformer.weights.eject.text_leaves import write_leaves, write_pool
from anyformer.weights.eject.text_model import write_model
from anyformer.weights.eject.text_stacks import write_embeddings, write_stack
from anyformer.weights.eject.uses import Use


def compose(spec: ModelSpec, choices: Choices) -> tuple[str, Constants]:
    """The classes and functions of a model, and their constants. `choices` learns what is renamed.

    Raises `UserError` naming a part that no piece says.
    """
    require_known(spec)
    _share_attention(spec, choices)
    stacks = [stack(name, spec, choices) for name in spec.stacks]
    parts = Parts(spec, choices)
    model = Use("nn/model.py.jinja", "Model", {}, {"D_MODEL": spec.last.d_model})
    facts = head(spec, model)
    blocks = [block for each in stacks for block in each.blocks]
    write_leaves(parts, stacks, facts)
    for place in ("ATTENTION", "CROSS"):
        write_attentions(parts, [block.slots[place] for block in blocks if place in block.slots])
    write_networks(parts, [block.slots["FFN"] for block in blocks])
    write_blocks(parts, blocks)
    write_embeddings(parts, stacks)
    for each in stacks:
        write_stack(parts, each)
    if facts.pool or spec.pooler is not None:
        write_pool(parts, facts.pool or "pooler")
    write_model(parts, model, facts, stacks)
    text = "\n\n".join(parts.sections)
    _note(parts, text)
    return text, parts.constants


def _note(parts: Parts, text: str) -> None:
    """What stands beside constants whose value means something."""
    notes, spec = parts.constants.notes, parts.spec
    if "nn.LayerNorm(" in text and "class RMSNorm" not in text and "class LayerNorm" not in text:
        notes["NORM_EPS"] = "ε of LayerNorm (Ba et al. 2016, eq. 4)"
    if isinstance(spec.head, LanguageHead) and isclose(spec.head.scale, spec.last.d_model**-0.5):
        notes["HEAD_SCALE"] = "1 / √C, where head and embedding share a table (Raffel et al. 2020)"
    if all(isclose(stack.embed.scale, stack.d_embed**0.5) for stack in spec.stacks.values()):
        notes["EMBED_SCALE"] = "√C (Vaswani et al. 2017, section 3.4)"


def _share_attention(spec: ModelSpec, choices: Choices) -> None:
    """An encoder's attention is the decoder's class where they are alike; the class then has a store."""
    if spec.encoder is None or spec.decoder is None:
        return
    encoder, decoder = (
        {b.slots["ATTENTION"].key() for b in stack(name, spec, Choices(True, stores=False)).blocks}
        for name in ("encoder", "decoder")
    )
    choices.encoder_stores = bool(encoder & decoder)
