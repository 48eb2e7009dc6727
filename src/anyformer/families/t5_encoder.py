"""The encoder of T5 (Raffel et al. 2020) by itself, for embeddings and conditions (Ni et al. 2021)."""

from anyformer.families.choice import Choice
from anyformer.families.family import Family, Variant
from anyformer.families.fields import Same
from anyformer.families.seq2seq import feed_forwards
from anyformer.families.t5 import ALIASES, ENCODER, EPS, POSITION, RATES, TENSORS

FAMILY = Family(
    name="T5's encoder",
    model_type="t5",
    stack="encoder",
    spec={"encoder": ENCODER},
    config=(
        Same("vocab_size", "vocab_size"),
        Same("d_model", "d_model"),
        Same("num_layers", "n_layers"),
        Same("n_positions", "max_positions", default=None),
        Same("num_heads", ("attention.n_heads", "attention.n_kv_heads")),
        Same("d_kv", ("attention.d_head", "attention.d_value"), default=64),
        Same("relative_attention_num_buckets", f"{POSITION}.n_buckets", default=32),
        Same("relative_attention_max_distance", f"{POSITION}.max_distance", default=128),
        Choice("feed_forward_proj", feed_forwards("ffn"), default="relu"),
        Same("d_ff", "ffn.d_ff"),
        Same("layer_norm_epsilon", tuple(path for path in EPS if "cross" not in path), default=1e-6),
        Same("dropout_rate", (*RATES, "attention.dropout", "attention.out_dropout"), default=0.1),
    ),
    models={"T5EncoderModel": Variant({"head": None})},
    tensors=TENSORS,
    when={"architectures": (["T5EncoderModel"],)},
    aliases=ALIASES,
    fixed={"is_encoder_decoder": (False, True), "tie_word_embeddings": (True, False)},
    ignored=("num_decoder_layers", "scale_decoder_outputs", "initializer_factor", "classifier_dropout", "output_past"),
)
