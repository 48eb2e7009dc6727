"""Marian (Junczys-Dowmunt et al. 2018), as OPUS-MT's translators (Tiedemann & Thottingal 2020): BART with sinusoids."""

from dataclasses import replace

from anyformer.families.bart import ALIASES, DECODER, ENCODER, FIELDS, FIXED, IGNORED, LANGUAGE, SHARED, TENSORS
from anyformer.families.family import Family, Rule, Variant
from anyformer.families.fields import Always, Tied
from anyformer.families.seq2seq import TABLES, SameVocabulary
from anyformer.families.sizes import PadWithin

EMBED = {"embed": {"position": {"kind": "sinusoidal", "layout": "halves"}}}
SHARE = "share_encoder_decoder_embeddings"
MORE = (*FIELDS, SameVocabulary(), PadWithin(58100))
OWN: tuple[Rule, ...] = (
    ("{body}encoder.embed_tokens.weight", "encoder.embed.token.weight"),
    ("{body}decoder.embed_tokens.weight", "decoder.embed.token.weight"),
)

FAMILY = Family(
    name="Marian",
    model_type="marian",
    stack="decoder",
    spec={"encoder": {**ENCODER, **EMBED}, "decoder": {**DECODER, **EMBED}},
    config=(*MORE, Always(SHARE, True, default=True), Tied(True, TABLES, otherwise=TABLES[:2])),
    models={"MarianMTModel": LANGUAGE, "MarianModel": Variant({"head": None})},
    tensors=(*SHARED, *TENSORS),
    when={SHARE: (None, True)},
    aliases=ALIASES,
    fixed={**FIXED, "normalize_embedding": False, "static_position_embeddings": True},
    ignored=IGNORED,
    computed={f"{{any}}{stack}.embed_positions.weight": stack for stack in ("encoder", "decoder")},
)
APART = replace(
    FAMILY,
    name="Marian with a table for each language",
    config=(*MORE, Always(SHARE, False), Tied(True, TABLES[1:])),
    tensors=(*OWN, *TENSORS),
    when={SHARE: False},
)
