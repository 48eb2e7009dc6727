"""Further encoder–decoders: without heads, other feed-forwards, a table for each language, an encoder alone."""

from dataclasses import replace
from typing import Any

from pairs import Family
from seq2seq import BART, MARIAN, T5, T5_V1_1


def _recipe(family: Family, **over: Any) -> dict[str, Any]:
    return {key: value for key, value in {**family.recipe, **over}.items() if value is not None}


_EMBEDS = ["encoder.embed", "decoder.embed"]
T5_EXACT = replace(
    T5_V1_1,
    name="t5, gated, exact gelu",
    settings={**T5_V1_1.settings, "feed_forward_proj": "gated-gelu_python"},
    recipe=_recipe(T5_V1_1, ffn={"kind": "gated", "activation": "gelu", "d_ff": 31}),
)
T5_STATES = replace(
    T5,
    name="t5, states",
    model="T5Model",
    settings={**T5.settings, "feed_forward_proj": "silu"},
    recipe=_recipe(T5, tie=_EMBEDS, head="none", ffn={"kind": "dense", "activation": "silu", "d_ff": 31}),
)
T5_ENCODER = Family(
    "t5, encoder",
    "t5",
    "T5EncoderModel",
    "T5Config",
    {**T5.settings, "feed_forward_proj": "gated-silu"},
    {
        **_recipe(T5, tie=None, decoder=None, encoder=None),
        "architecture": "encoder",
        "n_layers": 3,
        "head": "none",
        "ffn": {"kind": "gated", "activation": "silu", "d_ff": 31},
    },
    T5.rules,
)
BART_STATES = replace(
    BART,
    name="bart, states",
    model="BartModel",
    settings={**BART.settings, "scale_embedding": False, "activation_function": "relu"},
    recipe=_recipe(
        BART,
        tie=_EMBEDS,
        head="none",
        embed={"position": {"kind": "learned", "offset": 2}, "norm": "layer"},
        ffn={"kind": "dense", "activation": "relu", "d_ff": 31},
    ),
    rules=[(rule[0].removeprefix("model."), *rule[1:]) for rule in BART.rules],
)
MARIAN_STATES = replace(
    MARIAN,
    name="marian, states",
    model="MarianModel",
    recipe=_recipe(MARIAN, tie=_EMBEDS, head="none"),
    rules=[(rule[0].removeprefix("model."), *rule[1:]) for rule in MARIAN.rules],
)
MARIAN_APART = replace(
    MARIAN,
    name="marian, a table for each language",
    settings={**MARIAN.settings, "share_encoder_decoder_embeddings": False},
    recipe=_recipe(MARIAN, tie=["decoder.embed", "head"]),
    rules=[
        *(rule for rule in MARIAN.rules if rule[0] != "model.shared.weight"),
        ("model.encoder.embed_tokens.weight", "encoder.embed.token.weight"),
        ("model.decoder.embed_tokens.weight", "decoder.embed.token.weight"),
    ],
)

MORE_PAIRS = [T5_EXACT, MARIAN_APART]
"""With a language head."""
STATES = [T5_STATES, BART_STATES, MARIAN_STATES]
ENCODER_ALONE = [T5_ENCODER]
