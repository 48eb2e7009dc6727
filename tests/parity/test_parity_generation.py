"""Greedy replies of encoder–decoders as theirs, and generation_config.json as they read it."""

import json
from dataclasses import replace

import pytest
import torch
from maps import copy
from pairs import ids, padded, pair, wide
from seq2seq import BART, MARIAN, T5, T5_V1_1

from anyformer.infer import Generation, Sampling, generate_ids

LENGTHS = [11, 4, 7]
STARTS = {
    "t5": {"decoder_start_token_id": 0, "pad_token_id": 0},
    "t5 v1.1": {"decoder_start_token_id": 0, "pad_token_id": 0},
    "bart": {"decoder_start_token_id": 2, "pad_token_id": 1, "forced_bos_token_id": 0},
    "marian": {"decoder_start_token_id": 36, "pad_token_id": 36, "bad_words_ids": [[36]]},
}
families = pytest.mark.parametrize("family", [T5, T5_V1_1, BART, MARIAN], ids=lambda family: family.name)


def theirs(both, sources, keys, n):
    """What `generate` adds to each row after its start tokens, cut before an end token."""
    from transformers import GenerationConfig

    width = max(map(len, sources))
    tokens = torch.tensor([source + [5] * (width - len(source)) for source in sources])
    real = padded([len(source) for source in sources], "right")
    forced = keys.get("forced_bos_token_id") is not None
    config = GenerationConfig(**keys, num_beams=1, do_sample=False, max_new_tokens=n + forced)
    with wide():
        rows = both.hf.generate(tokens, attention_mask=real.long(), generation_config=config).tolist()
    replies, eos = [], keys.get("eos_token_id") or []
    for row in rows:
        reply = row[1 + forced :]
        stops = [place for place, token in enumerate(reply) if token in eos]
        replies.append(reply[: stops[0]] if stops else reply)
    return replies


def ours(both, sources, folder, keys, n, **options):
    (folder / "generation_config.json").write_text(json.dumps(keys))
    replies = [[] for _ in sources]
    sampling = Sampling(max_new_tokens=n, **options)
    for step in generate_ids(both.our, sources, sampling, generation=Generation.read(folder)):
        if step.token is not None:
            replies[step.row].append(step.token)
    return replies


def lively(family):
    """The family's pair with layers of twice their weights: replies then depend on the source."""
    both = pair(replace(family, name=f"{family.name}, lively"))
    if both not in MADE:
        with torch.no_grad():
            for name, value in both.hf.named_parameters():
                if "layer" in name and "relative" not in name and value.dim() > 1:
                    value.mul_(2)
        copy(both.hf, both.our, family.rules)
        MADE.append(both)
    return both


MADE = []


@families
def test_greedy_replies_are_theirs(family, tmp_path):
    """B05, B37. Sources of three lengths in one batch; then a penalty, forbidden ids, several ends, a minimum."""
    both, keys = lively(family), STARTS[family.name]
    tokens = ids(3, max(LENGTHS), both.vocab_size, seed=3)
    sources = [row[:length].tolist() for row, length in zip(tokens, LENGTHS, strict=True)]
    assert ours(both, sources, tmp_path, keys, 18) == theirs(both, sources, keys, 18)

    keys = {**keys, "repetition_penalty": 5.0}
    free = theirs(both, sources, keys, 18)
    assert len({tuple(reply) for reply in free}) == 3
    assert min(len(set(reply)) for reply in free) > 7
    assert ours(both, sources, tmp_path, keys, 18, repetition_penalty=5.0) == free

    keys["bad_words_ids"] = [*keys.get("bad_words_ids", []), [free[0][0]], [free[1][0]]]
    barred = theirs(both, sources, keys, 18)
    assert barred != free
    assert ours(both, sources, tmp_path, keys, 18, repetition_penalty=5.0) == barred

    keys["eos_token_id"] = [barred[0][3], barred[1][5]]
    ended = theirs(both, sources, keys, 18)
    assert (len(ended[0]), len(ended[1])) <= (3, 5)
    assert ours(both, sources, tmp_path, keys, 18, repetition_penalty=5.0) == ended

    keys["min_new_tokens"] = 8 + ("forced_bos_token_id" in keys)  # theirs counts the forced token
    later = theirs(both, sources, keys, 18)
    assert all(len(reply) >= 8 for reply in later)
    assert ours(both, sources, tmp_path, keys, 18, repetition_penalty=5.0, min_new_tokens=8) == later


@families
def test_one_reply_alone_is_theirs(family, tmp_path):
    """B05."""
    both, keys = lively(family), {**STARTS[family.name], "repetition_penalty": 5.0}
    for length in (1, 6):
        sources = ids(1, length, both.vocab_size, seed=length).tolist()
        assert ours(both, sources, tmp_path, keys, 18, repetition_penalty=5.0) == theirs(both, sources, keys, 18)


def same(folder, again, **how):
    """Both folders' configurations as they read them: `again` holds what ours made of the first."""
    from transformers import GenerationConfig

    (again / "generation_config.json").write_text(Generation.read(folder).text())
    return GenerationConfig.from_pretrained(folder, **how), GenerationConfig.from_pretrained(again)


@pytest.fixture
def again(tmp_path_factory):
    return tmp_path_factory.mktemp("again")


@families
def test_a_published_folder_reads_the_same_after_reading_and_writing(family, tmp_path, again):
    """With generation_config.json, and with config.json alone."""
    from transformers import GenerationConfig

    keys = {**STARTS[family.name], "eos_token_id": [1, 9], "num_beams": 4, "length_penalty": 0.8, "max_length": 142}
    GenerationConfig(**keys).save_pretrained(tmp_path)
    one, two = same(tmp_path, again)
    assert one == two
    assert two.decoder_start_token_id == keys["decoder_start_token_id"]

    (tmp_path / "generation_config.json").unlink()
    model = {**pair(family).hf.config.to_dict(), **keys, "eos_token_id": 9, "task_specific_params": {"a": {}}}
    (tmp_path / "config.json").write_text(json.dumps(model))
    one, two = same(tmp_path, again, config_file_name="config.json", _from_model_config=True)
    assert one == two
    assert (two.num_beams, two.eos_token_id) == (4, 9)


def test_every_option_of_theirs_is_taken_from_config_json(tmp_path, again):
    """As each stands in a file, whatever its name."""
    from transformers import GenerationConfig

    absent = {"eos_token_id", "bad_words_ids", "suppress_tokens", "forced_bos_token_id", "decoder_start_token_id"}
    absent |= {"transformers_version", "continuous_batching_config"}
    options = [key for key in GenerationConfig().to_dict() if key not in absent and not key.startswith("_")]
    (tmp_path / "config.json").write_text(json.dumps(dict.fromkeys([*options, "d_model"], 1)))
    assert Generation.read(tmp_path).rest == dict.fromkeys(options, 1)
