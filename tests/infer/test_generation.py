"""generation_config.json and config.json as `Generation`, and back."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyformer.errors import UserError
from anyformer.infer import Generation

OWN, MODEL = "generation_config.json", "config.json"


@pytest.fixture
def read(tmp_path):
    """Reads a folder of these files; None leaves one out."""

    def make(own=None, model=None):
        for name, content in ((OWN, own), (MODEL, model)):
            (tmp_path / name).unlink(missing_ok=True)
            if content is not None:
                (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
        return Generation.read(tmp_path)

    return make


def test_absent_files_say_nothing(read):
    assert read() == Generation() == Generation((), (), (), {})
    assert read(own={}, model={}) == read(model={"d_model": 8, "num_beams": None}) == Generation()


def test_t5_begins_with_its_padding(read):
    own = {"decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0, "transformers_version": "4.27.0"}
    found = read(own, {"is_encoder_decoder": True, "d_model": 512})
    assert found == Generation((0,), (1,), (), {"pad_token_id": 0, "transformers_version": "4.27.0"})


def test_bart_begins_with_two_tokens(read):
    """The second is what its decoder is made to write first."""
    config = {"decoder_start_token_id": 2, "forced_bos_token_id": 0, "bos_token_id": 0, "eos_token_id": 2, "d_model": 4}
    assert read(model=config) == Generation((2, 0), (2,), (), {"bos_token_id": 0})
    old = {**config, "forced_bos_token_id": None, "force_bos_token_to_be_generated": True}
    assert read(model=old) == read(model=config)


def test_marian_never_writes_padding(read):
    own = {"decoder_start_token_id": 58100, "eos_token_id": 0, "bad_words_ids": [[58100]], "num_beams": 4}
    found = read(own)
    assert (found.start, found.eos_ids, found.suppressed) == ((58100,), (0,), (58100,))
    assert found.rest == {"bad_words_ids": [[58100]], "num_beams": 4}


@pytest.mark.parametrize(
    ("own", "model", "eos_ids"),
    [
        ({"eos_token_id": [5, 9]}, {"eos_token_id": 5}, (5, 9)),
        ({"eos_token_id": 9}, {"eos_token_id": 5}, (9, 5)),
        ({"eos_token_id": None}, {"eos_token_id": [5]}, (5,)),
        ({}, {"eos_token_id": [5, 5]}, (5,)),
        (None, {"eos_token_id": 5}, (5,)),
        ({"eos_token_id": [9, 8]}, None, (9, 8)),
    ],
)
def test_the_ends_of_both_files_count(read, own, model, eos_ids):
    """B37."""
    assert read(own, model).eos_ids == eos_ids


def test_generation_config_decides_where_it_is_there(read):
    """config.json has a start token to add, and no option."""
    model = {"decoder_start_token_id": 3, "forced_bos_token_id": 7, "bad_words_ids": [[4]], "num_beams": 2}
    assert read({"top_k": 4}, model) == Generation((3,), rest={"top_k": 4})
    assert read({"decoder_start_token_id": 1}, model).start == (1,)
    assert read(None, model) == Generation((3, 7), (), (4,), {"bad_words_ids": [[4]], "num_beams": 2})


def test_an_encoder_decoder_without_start_token_begins_with_bos(read):
    assert read({"bos_token_id": 6}, {"is_encoder_decoder": True}).start == (6,)
    assert read({}, {"is_encoder_decoder": True, "bos_token_id": 6}).start == (6,)
    assert read({"bos_token_id": 6, "forced_bos_token_id": 4}, {"is_encoder_decoder": True}).start == (6, 4)
    assert read({"bos_token_id": 6}, {"is_encoder_decoder": False}).start == ()
    assert read({"bos_token_id": -1, "decoder_start_token_id": 0}, {"is_encoder_decoder": True}).start == (0,)
    with pytest.raises(UserError, match="bos_token_id"):
        read({"bos_token_id": -1}, {"is_encoder_decoder": True})
    lone = read({"forced_bos_token_id": 4})
    assert (lone.start, lone.rest) == ((), {"forced_bos_token_id": 4})


def test_single_ids_are_suppressed_and_sequences_are_not(read):
    """Of the words, an end token is left alone; `suppress_tokens` means what it says."""
    own = {"bad_words_ids": [[7], [1, 2], [5], [3]], "eos_token_id": 5, "suppress_tokens": [9, 3]}
    assert read(own).suppressed == (3, 7, 9)
    assert read({**own, "suppress_tokens": [5]}).suppressed == (3, 5, 7)
    assert read({"bad_words_ids": None, "suppress_tokens": None}).suppressed == ()


def test_ids_suppressed_by_hand_are_written(read):
    made = Generation(suppressed=[8, 2, 8], rest={"bad_words_ids": [[2]]})
    assert made.suppressed == (2, 8)
    assert read(made.text()) == made == Generation(suppressed=(8,), rest={"bad_words_ids": [[2]]})
    assert json.loads(made.text()) == {"bad_words_ids": [[2]], "suppress_tokens": [8]}


_ids = st.lists(st.integers(0, 9), max_size=3)
_keys = st.fixed_dictionaries(
    {},
    optional={
        "decoder_start_token_id": st.integers(0, 9) | st.none(),
        "forced_bos_token_id": st.integers(0, 9) | st.none(),
        "bos_token_id": st.integers(0, 9) | st.none(),
        "eos_token_id": st.integers(0, 9) | _ids | st.none(),
        "bad_words_ids": st.lists(_ids.filter(bool), max_size=3) | st.none(),
        "suppress_tokens": _ids | st.none(),
        "is_encoder_decoder": st.booleans(),
        "temperature": st.floats(0, 2),
        "note": st.text(),
    },
)


@given(own=_keys | st.none(), model=_keys | st.none())
def test_what_is_written_reads_the_same(tmp_path_factory, own, model):
    folder = tmp_path_factory.mktemp("checkpoint")
    for name, keys in ((OWN, own), (MODEL, model)):
        if keys is not None:
            (folder / name).write_text(json.dumps(keys))
    found = Generation.read(folder)
    again = tmp_path_factory.mktemp("again")
    (again / OWN).write_bytes(found.text().encode("utf-8"))
    assert Generation.read(again) == found


def test_one_end_is_written_as_a_number_and_several_as_a_list():
    assert json.loads(Generation((2, 0), (5,)).text()) == {
        "decoder_start_token_id": 2,
        "forced_bos_token_id": 0,
        "eos_token_id": 5,
    }
    assert json.loads(Generation(eos_ids=(5, 9)).text()) == {"eos_token_id": [5, 9]}
    with pytest.raises(UserError, match="start tokens"):
        Generation((1, 2, 3)).text()


@pytest.mark.parametrize("file", [OWN, MODEL])
@pytest.mark.parametrize(
    ("content", "key"),
    [
        ("{", ""),
        ("[1]", ""),
        ("[" * 100_000, ""),
        ({"decoder_start_token_id": -1}, "decoder_start_token_id"),
        ({"decoder_start_token_id": "<pad>"}, "decoder_start_token_id"),
        ({"decoder_start_token_id": [0, 0]}, "decoder_start_token_id"),
        ({"decoder_start_token_id": 1, "forced_bos_token_id": 0.0}, "forced_bos_token_id"),
        ({"eos_token_id": True}, "eos_token_id"),
        ({"eos_token_id": [5, -9]}, "eos_token_id"),
        ({"eos_token_id": {"id": 5}}, "eos_token_id"),
        ({"bad_words_ids": [5]}, "bad_words_ids"),
        ({"bad_words_ids": 5}, "bad_words_ids"),
        ({"bad_words_ids": [[]]}, "bad_words_ids"),
        ({"bad_words_ids": [[-5]]}, "bad_words_ids"),
        ({"suppress_tokens": 5}, "suppress_tokens"),
        ({"suppress_tokens": ["x" * 500]}, "suppress_tokens"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_place(read, tmp_path, file, content, key):
    with pytest.raises(UserError) as caught:
        read(**{"own" if file == OWN else "model": content})
    assert str(caught.value.where) == f"{tmp_path / file}{', ' * bool(key)}{key}"
    assert len(str(caught.value)) < 400


def test_a_folder_in_place_of_the_file_and_a_dangling_link_are_refused(tmp_path):
    (tmp_path / OWN).mkdir()
    with pytest.raises(UserError):
        Generation.read(tmp_path)
    (tmp_path / OWN).rmdir()
    (tmp_path / OWN).write_bytes(b'{"a": "\xff"}')
    with pytest.raises(UserError):
        Generation.read(tmp_path)
    (tmp_path / OWN).unlink()
    (tmp_path / OWN).symlink_to(tmp_path / "gone")
    with pytest.raises(UserError):
        Generation.read(tmp_path)


@pytest.mark.parametrize("field", ["start", "eos_ids", "suppressed"])
@pytest.mark.parametrize("value", [5, "5", (-1,), (True,), (1.0,), None])
def test_ids_given_by_hand_are_checked(field, value):
    with pytest.raises(UserError):
        Generation(**{field: value})
