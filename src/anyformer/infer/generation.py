"""What a checkpoint says about generating: with which ids a reply begins, which end it, which never occur in it.

The file is generation_config.json in the keys of Hugging Face; config.json is read as well.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from anyformer.errors import UserError

GENERATION_FILE = "generation_config.json"
MODEL_FILE = "config.json"
_START, _FIRST, _EOS, _BOS = "decoder_start_token_id", "forced_bos_token_id", "eos_token_id", "bos_token_id"
_WORDS, _TOKENS = "bad_words_ids", "suppress_tokens"
_EVERY_BOS = "force_bos_token_to_be_generated"  # in older files of BART: bos_token_id is the forced one

# Keys of config.json that count as generation_config.json's where that is absent.
_OPTIONS = """
max_length max_new_tokens min_length min_new_tokens early_stopping max_time stop_strings do_sample num_beams use_mtp
use_cache cache_implementation cache_config max_cache_len temperature top_k top_p min_p top_h typical_p epsilon_cutoff
eta_cutoff repetition_penalty encoder_repetition_penalty length_penalty no_repeat_ngram_size bad_words_ids
renormalize_logits forced_bos_token_id forced_eos_token_id remove_invalid_values exponential_decay_length_penalty
suppress_tokens begin_suppress_tokens sequence_bias token_healing guidance_scale watermarking_config
num_return_sequences output_attentions output_hidden_states output_scores output_logits return_dict_in_generate
pad_token_id bos_token_id eos_token_id encoder_no_repeat_ngram_size decoder_start_token_id is_assistant
num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold prompt_lookup_num_tokens
max_matching_ngram_size assistant_early_exit assistant_lookbehind target_lookbehind assistant_ensemble_weight
speculation_type compile_config disable_compile low_memory penalty_alpha dola_layers diversity_penalty num_beam_groups
constraints force_words_ids prefill_chunk_size
"""


@dataclass(frozen=True)
class Generation:
    """How a checkpoint's replies begin and end. Checked in construction; what cannot be an id raises `UserError`.

    Attributes:
        start: ids that the target of an encoder–decoder begins with: `decoder_start_token_id`, then
            `forced_bos_token_id` where there is one. They are no part of the reply. A decoder alone does not use them.
        eos_ids: ids that end a reply, each of them; those of the tokenizer come in addition.
        suppressed: ids that are never generated, in ascending order: the one-token `bad_words_ids` that are no end,
            `suppress_tokens`, and any given here, which then stand among the `suppress_tokens` of `rest`.
        rest: every other key as read, to be written back. Nothing else in it changes what is generated.
    """

    start: tuple[int, ...] = ()
    eos_ids: tuple[int, ...] = ()
    suppressed: tuple[int, ...] = ()
    rest: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("start", "eos_ids"):
            object.__setattr__(self, name, _ids(getattr(self, name), name))
        rest = dict(self.rest)
        said = _suppressed(rest, self.eos_ids)
        more = sorted(set(_ids(self.suppressed, "suppressed")) - said)
        if more:
            rest[_TOKENS] = [*(rest.get(_TOKENS) or []), *more]
        object.__setattr__(self, "suppressed", tuple(sorted(said.union(more))))
        object.__setattr__(self, "rest", rest)

    @classmethod
    def read(cls, folder: str | Path) -> "Generation":
        """What the files in `folder` say; one that is absent says nothing.

        generation_config.json alone decides where it is there, as in `transformers`, except that every `eos_token_id`
        of config.json ends a reply too and its `decoder_start_token_id` counts where the other file has none. Without
        generation_config.json, config.json stands for it. The target of an encoder–decoder that names no start token
        begins with `bos_token_id`.

        Raises:
            UserError: a file that cannot be read or is no JSON object; an id that is no whole number of at least 0.
        """
        model = _Said.of(Path(folder) / MODEL_FILE) or _Said(Path(folder) / MODEL_FILE, {})
        own = _Said.of(Path(folder) / GENERATION_FILE) or _options(model)
        places = [(own, _START), (model, _START)]
        if model.values.get("is_encoder_decoder") is True:
            places += [(own, _BOS), (model, _BOS)]
        first = own.one(_FIRST)
        found = (said.one(key) for said, key in places)
        known = list(islice((index for index in found if index is not None), 1))
        known += [first] if known and first is not None else []
        eos_ids = dict.fromkeys((*own.ids(_EOS), *model.ids(_EOS)))
        _suppressed(own.values, eos_ids, own)
        kept = own.values.keys() - {_START, _EOS, *([_FIRST] if known else [])}
        return cls(tuple(known), tuple(eos_ids), (), {key: own.values[key] for key in own.values if key in kept})

    def text(self) -> str:
        """The content of generation_config.json: `read` gives the same again.

        Raises `UserError` for more than two start tokens, which the file cannot say.
        """
        if len(self.start) > 2:
            expected = f"at most two: {_START} and {_FIRST}"
            raise UserError(f"{GENERATION_FILE} cannot hold so many start tokens", got=self.start, expected=expected)
        config = dict(self.rest) | dict(zip((_START, _FIRST), self.start, strict=False))
        if self.eos_ids:
            config[_EOS] = self.eos_ids[0] if len(self.eos_ids) == 1 else list(self.eos_ids)
        return json.dumps(config, indent=2, sort_keys=True) + "\n"


@dataclass(frozen=True)
class _Said:
    """The keys of one file."""

    file: Path
    values: dict[str, Any]

    @classmethod
    def of(cls, file: Path) -> "_Said | None":
        """What the file holds, None where there is none."""
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            if file.is_symlink():
                raise UserError("this link leads nowhere", where=file, expected="a file, or nothing") from None
            return None
        except (OSError, ValueError, RecursionError) as error:
            raise UserError("this file cannot be read as JSON", where=file, got=error) from error
        if not isinstance(values, dict):
            raise UserError("this file does not hold a JSON object", where=file, got=type(values).__name__)
        return cls(file, values)

    def where(self, key: str) -> str:
        return f"{self.file}, {key}"

    def one(self, key: str) -> int | None:
        """The one id at `key`."""
        value = self.values.get(key)
        return None if value is None else _id(value, self.where(key))

    def ids(self, key: str) -> tuple[int, ...]:
        """The ids at `key`: one, several or none."""
        value = self.values.get(key)
        return () if value is None else _ids(value if isinstance(value, list) else [value], self.where(key))


def _options(model: _Said) -> _Said:
    """What config.json says in place of generation_config.json."""
    known = _OPTIONS.split()
    values = {key: value for key, value in model.values.items() if key in known and value is not None}
    if model.values.get(_EVERY_BOS) and _BOS in values:
        values[_FIRST] = values[_BOS]
    return _Said(model.file, values)


def _suppressed(rest: Mapping[str, Any], eos_ids: Iterable[int], file: _Said | None = None) -> set[int]:
    """The single ids that `bad_words_ids` and `suppress_tokens` rule out. Raises `UserError` for what holds no ids."""
    wheres = {key: key if file is None else file.where(key) for key in (_WORDS, _TOKENS)}
    words = rest.get(_WORDS)
    if words is not None and not isinstance(words, list):
        raise UserError(f"{_WORDS} are lists of ids", where=wheres[_WORDS], got=_shown(words))
    sequences = [_ids(word, wheres[_WORDS]) for word in words or []]
    if () in sequences:
        raise UserError("a sequence of no ids rules nothing out", where=wheres[_WORDS], expected="at least one id each")
    tokens = rest.get(_TOKENS)
    single = {word[0] for word in sequences if len(word) == 1}
    return (single - set(eos_ids)).union(() if tokens is None else _ids(tokens, wheres[_TOKENS]))


def _ids(value: Any, where: str) -> tuple[int, ...]:
    if not isinstance(value, list | tuple):
        raise UserError("these should be token ids", where=where, got=_shown(value), expected="a list of whole numbers")
    return tuple(_id(index, where) for index in value)


def _id(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        expected = "a whole number of at least 0"
        raise UserError("this should be a token id", where=where, got=_shown(value), expected=expected)
    return value


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."


UNSAID = Generation()
"""What a checkpoint says that says nothing."""
