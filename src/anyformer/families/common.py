"""What families have in common: keys of every configuration, tables of frequent parts, names of frequent tensors."""

from typing import Any

from anyformer.families.family import Rule, Variant
from anyformer.families.fields import Labels

IGNORED = (
    "architectures",
    "model_type",
    "transformers_version",
    "torch_dtype",
    "dtype",
    "_name_or_path",
    "auto_map",
    "use_cache",
    "initializer_range",
    "return_dict",
    "output_attentions",
    "output_hidden_states",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "sep_token_id",
    "cls_token_id",
    "mask_token_id",
    "unk_token_id",
    "decoder_start_token_id",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "bad_words_ids",
    "suppress_tokens",
    "begin_suppress_tokens",
    "prefix",
    "problem_type",
    "finetuning_task",
    "task_specific_params",
    "tokenizer_class",
    "id2label",
    "label2id",
    "num_labels",
    "gradient_checkpointing",
    "max_length",
    "min_length",
    "do_sample",
    "num_beams",
    "early_stopping",
    "length_penalty",
    "no_repeat_ngram_size",
    "num_return_sequences",
    "temperature",
    "top_k",
    "top_p",
    "typical_p",
    "repetition_penalty",
    "attn_implementation",
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_flash_attn_2_enabled",
    "unsloth_version",
    "unsloth_fixed",
    "language",
    "gradient_checkpointing_kwargs",
    "base_model_tp_plan",
    "base_model_pp_plan",
)
"""Keys that say nothing of what a model computes: bookkeeping, token ids, settings of generation and training."""
FIXED: dict[str, Any] = {
    "is_decoder": False,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "cross_attention_hidden_size": None,
    "tie_encoder_decoder": False,
    "chunk_size_feed_forward": 0,
    "pruned_heads": ({},),
    "torchscript": False,
    "use_bfloat16": False,
    "tf_legacy_loss": False,
    "remove_invalid_values": False,
    "diversity_penalty": 0.0,
    "num_beam_groups": 1,
    "encoder_no_repeat_ngram_size": 0,
    "output_scores": False,
    "return_dict_in_generate": False,
    "exponential_decay_length_penalty": None,
    "pretraining_tp": 1,
}
"""Keys of any configuration with the one value that a specification can say."""
DROPPED = (
    "{any}rotary_emb.inv_freq",
    "{any}position_ids",
    "{any}.masked_bias",
)
"""Tensors that older files carry beside what was learned: tables that are computed."""

RMS = {"kind": "rms"}
LAYER = {"kind": "layer"}
LANGUAGE = {"kind": "language"}
LAST = {"kind": "sequence", "pool": "last", "bias": False}
"""A decoder's classification of a row: from its last token."""


def norms(slots: dict[str, Any], *, cross: bool = False) -> dict[str, Any]:
    """The same norms around every branch."""
    return dict.fromkeys(("attention", "ffn", *(("cross",) if cross else ())), slots)


def eps(*slots: str, final: bool = True, cross: bool = False, embed: bool = False) -> tuple[str, ...]:
    """The places of a norm's eps in those slots of each branch."""
    branches = ("attention", "ffn", *(("cross",) if cross else ()))
    paths = tuple(f"norms.{branch}.{slot}.eps" for branch in branches for slot in slots)
    return (*paths, *(("final_norm.eps",) if final else ()), *(("embed.norm.eps",) if embed else ()))


def spans(name: str, *, body: str = "model.") -> dict[str, Variant]:
    """The class that finds an answer in a text."""
    head = Variant({"head": {"kind": "span"}}, (("qa_outputs.{p}", "head.{p}"),), (), body)
    return {f"{name}ForQuestionAnswering": head}


def decoders(
    name: str, *, body: str = "model.", score: str = "score.weight", tokens: bool = True
) -> dict[str, Variant]:
    """The classes of a decoder: language model, bare body, classifiers of rows and (with `tokens`) of tokens."""
    token = Variant({"head": {"kind": "token"}}, (("score.{p}", "head.{p}"),), (Labels(),), body)
    return {
        f"{name}ForCausalLM": Variant({"head": LANGUAGE}, (("lm_head.{p}", "head.{p}"),), body=body),
        f"{name}Model": Variant({"head": None}),
        f"{name}ForSequenceClassification": Variant({"head": LAST}, ((score, "head.weight"),), (Labels(),), body),
        **({f"{name}ForTokenClassification": token} if tokens else {}),
    }


ENDS: tuple[Rule, ...] = (
    ("{body}embed_tokens.weight", "decoder.embed.token.weight"),
    ("{body}norm.{p}", "decoder.final_norm.{p}"),
)
ATTENTION: tuple[Rule, ...] = tuple(
    (f"{{body}}layers.{{i}}.self_attn.{theirs}_proj.{{p}}", f"decoder.blocks.{{i}}.attention.{ours}.{{p}}")
    for theirs, ours in (("q", "q"), ("k", "k"), ("v", "v"), ("o", "out"))
)
QK_NORMS: tuple[Rule, ...] = tuple(
    (f"{{body}}layers.{{i}}.self_attn.{x}_norm.weight", f"decoder.blocks.{{i}}.attention.{x}_norm.norm.weight")
    for x in "qk"
)
GATED: tuple[Rule, ...] = tuple(
    (f"{{body}}layers.{{i}}.mlp.{x}_proj.{{p}}", f"decoder.blocks.{{i}}.ffn.{x}.{{p}}") for x in ("gate", "up", "down")
)
PRE_NORMS: tuple[Rule, ...] = (
    ("{body}layers.{i}.input_layernorm.{p}", "decoder.blocks.{i}.attention_norms.before.{p}"),
    ("{body}layers.{i}.post_attention_layernorm.{p}", "decoder.blocks.{i}.ffn_norms.before.{p}"),
)
LLAMA_TENSORS: tuple[Rule, ...] = (*ENDS, *ATTENTION, *GATED, *PRE_NORMS)
