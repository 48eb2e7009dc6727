"""Published folders that are not whole, disagree or are hostile: one clear error, nothing half loaded."""

import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import anyformer as af
from anyformer.checkpoint import Checkpoint
from anyformer.errors import UserError
from anyformer.spec.folder import CODE_FILE
from anyformer.weights import hf
from anyformer.weights.config import write_config
from anyformer.weights.shards import INDEX_FILE

SPEC = {
    "vocab_size": 37,
    "d_model": 20,
    "n_layers": 3,
    "max_positions": 32,
    "norm": "rms",
    "ffn": {"kind": "swiglu", "d_ff": 13},
    "attention": {"n_heads": 5, "n_kv_heads": 1, "position": "rope"},
}
WEIGHTS = "model.safetensors"
RUN = "from anyformer.cli.main import run; run()"


@pytest.fixture
def single(tmp_path):
    """A LLaMA in one file."""
    spec = af.load_spec(SPEC)
    return Checkpoint(spec, af.build(spec, seed=1)).save(tmp_path / "single", format="hf")


@pytest.fixture
def sharded(tmp_path, monkeypatch):
    """The same in several files."""
    monkeypatch.setattr(hf, "MAX_SHARD", 3000)
    spec = af.load_spec(SPEC)
    return Checkpoint(spec, af.build(spec, seed=1)).save(tmp_path / "sharded", format="hf")


def refusal(folder, **how):
    with pytest.raises(UserError) as caught:
        af.load(folder, **how)
    return str(caught.value)


def configured(folder, **changes):
    """The configuration with changes; a value of None takes the key away."""
    table = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in table.items() if v is not None}))


def indexed(folder, change):
    """The index as `change` leaves it."""
    table = json.loads((folder / INDEX_FILE).read_text())
    change(table["weight_map"])
    (folder / INDEX_FILE).write_text(json.dumps(table))


def reweighted(file, change):
    """A file of weights as `change` leaves it."""
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def test_shards_hold_what_one_file_holds(single, sharded):
    files = sorted(path.name for path in sharded.glob("*.safetensors"))
    assert len(files) > 3
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    whole, parts = af.load(single).model.state_dict(), af.load(sharded).model.state_dict()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert len(whole) == len(parts)


def test_a_missing_shard_is_named(sharded):
    gone = sorted(sharded.glob("*.safetensors"))[1]
    gone.unlink()
    said = refusal(sharded)
    assert gone.name in said
    assert "missing" in said


def test_a_file_cut_short_anywhere_is_refused(single, sharded):
    for folder in (single, sharded):
        file = sorted(folder.glob("*.safetensors"))[-1]
        whole = file.read_bytes()
        for length in (0, 7, 8, 9, 100, len(whole) // 2, len(whole) - 1):
            file.write_bytes(whole[:length])
            said = refusal(folder)
            assert "cut short or damaged" in said
            assert file.name in said


@pytest.mark.parametrize("header", [b"\xff" * 8, (1 << 60).to_bytes(8, "little"), (2).to_bytes(8, "little") + b"[]"])
def test_a_hostile_header_is_refused(single, header):
    (single / WEIGHTS).write_bytes(header + b"{" * 64)
    assert "cut short or damaged" in refusal(single)


def test_an_index_is_checked_both_ways(sharded):
    pristine = (sharded / INDEX_FILE).read_bytes()
    first = "model.layers.0.mlp.down_proj.weight"
    files = json.loads(pristine)["weight_map"]
    file, lone = files[first], files["model.embed_tokens.weight"]
    assert list(files.values()).count(file) > 1
    assert list(files.values()).count(lone) == 1
    second = next(name for name in files.values() if name != file)
    for change, said in (
        (lambda m: m.update(ghost=file), "names a tensor that its file does not hold"),
        (lambda m: m.pop(first), "a tensor that the index does not name"),
        (lambda m: m.pop("model.embed_tokens.weight"), f"does not name this shard\n  where: {sharded / INDEX_FILE}"),
        (lambda m: m.update({first: second}), "names another file than the tensor's"),
        (lambda m: m.update(ghost="../elsewhere.safetensors"), "names a file outside the folder"),
        (lambda m: m.update(ghost="/etc/passwd"), "names a file outside the folder"),
        (lambda m: m.update(ghost="sub/model.safetensors"), "names a file outside the folder"),
        (lambda m: m.update(ghost=".."), "names a file outside the folder"),
        (lambda m: m.update(ghost="pytorch_model.bin"), "not safetensors"),
        (lambda m: m.update(ghost="gone.safetensors"), "is missing"),
        (lambda m: m.update(ghost=3), "no weight_map"),
        (lambda m: m.clear(), "no weight_map"),
    ):
        (sharded / INDEX_FILE).write_bytes(pristine)
        indexed(sharded, change)
        assert said in refusal(sharded)
    for content in (b"", b"[]", b"{", b"\xff", b"[" * 100_000, b'{"weight_map": 3}'):
        (sharded / INDEX_FILE).write_bytes(content)
        assert "index.json" in refusal(sharded)


def test_two_shards_with_one_tensor_are_refused(sharded):
    one, two = sorted(sharded.glob("*.safetensors"))[:2]
    name = next(iter(load_file(one)))
    reweighted(two, lambda tensors: tensors.update({name: torch.zeros(1)}))
    assert f"two shards hold the tensor {name}" in refusal(sharded)


def test_a_shard_that_leads_out_of_the_folder_by_a_link_is_read_as_any_file(sharded, tmp_path):
    """Caches of downloads are made of links to files elsewhere; a link is the folder's own word."""
    file = sorted(sharded.glob("*.safetensors"))[0]
    shutil.move(file, tmp_path / "blob")
    file.symlink_to(tmp_path / "blob")
    af.load(sharded)


def test_missing_extra_and_misshapen_tensors_are_named(single):
    file = single / WEIGHTS
    pristine = file.read_bytes()
    down = "model.layers.1.mlp.down_proj.weight"
    for change, said in (
        (lambda t: t.pop(down), f"no {down}"),
        (lambda t: t.update(foreign=torch.ones(3)), "foreign"),
        (lambda t: t.update({"model.layers.3.mlp.down_proj.weight": torch.ones(20, 13)}), "model.layers.3.mlp"),
        (lambda t: t.update({"model.layers.1.self_attn.q_proj.bias": torch.ones(20)}), "self_attn.q_proj.bias"),
        (lambda t: t.update({down: torch.ones(13, 20)}), "got: [13, 20]\n  expected: [20, 13]"),
        (lambda t: t.update({down: t[down].flatten()}), "got: [260]"),
        (lambda t: t.update({down: t[down].to(torch.float8_e4m3fn)}), "weights are floating-point numbers"),
        (lambda t: t.update({down: t[down].to(torch.int8)}), "weights are floating-point numbers"),
        (dict.clear, "lack 30 of 30 tensors"),
    ):
        file.write_bytes(pristine)
        reweighted(file, change)
        for dtype in ("float32", None):
            message = refusal(single, dtype=dtype)
            assert said in message
            assert str(single) in message


def test_a_configuration_of_other_sizes_is_told_by_the_first_tensor_that_does_not_fit(single):
    for changes, said in (
        ({"vocab_size": 38}, "embed_tokens.weight"),
        ({"num_hidden_layers": 2}, "no place in the model"),
        ({"num_hidden_layers": 4}, "lack 9 of"),
        ({"intermediate_size": 14}, "mlp."),
        ({"num_key_value_heads": 5}, "self_attn.k_proj"),
        ({"tie_word_embeddings": True}, "two tensors hold"),
    ):
        kept = (single / "config.json").read_bytes()
        configured(single, **changes)
        assert said in refusal(single)
        (single / "config.json").write_bytes(kept)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "lama"}, "did you mean `llama`?"),
        ({"model_type": "mamba"}, "docs/families.md"),
        ({"model_type": None}, "names no model type"),
        ({"model_type": 7}, "model_type = 7"),
        ({"architectures": ["LlamaForCausalLMs"]}, "did you mean `LlamaForCausalLM`?"),
        ({"architectures": "LlamaForCausalLM"}, "one class of models"),
        ({"architectures": ["A", "B"]}, "one class of models"),
        ({"hidden_act": "snake"}, "hidden_act = 'snake'"),
        ({"hidden_size": None}, "lacks `hidden_size`"),
        ({"hidden_size": "20"}, "hidden_size"),
        ({"hidden_size": -20}, "hidden_size"),
        ({"hidden_size": 10**12}, "hidden_size"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"num_attention_heads": 0, "head_dim": 4}, "num_attention_heads"),
        ({"num_key_value_heads": 3}, "n_kv_heads"),
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rope_scaling": {"rope_type": "spiral", "factor": 2.0}}, "rope_type = 'spiral'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "lacks `factor`"),
        ({"rope_scaling": [1]}, "rope_"),
        ({"residual_multiplier": 0.5}, "residual_multiplier = 0.5"),
        ({"is_decoder": True}, "is_decoder = True"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"attention_bias": 1}, "attention_bias"),
        ({"mlp_only_layers": [3]}, "mlp_only_layers = [3]"),
    ],
)
def test_a_configuration_that_no_specification_can_say_names_key_and_value(single, changes, said):
    configured(single, **changes)
    message = refusal(single)
    assert said in message
    assert "config.json" in message


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff\xfe", b"[" * 100_000, b"null"])
def test_a_configuration_that_is_no_json_object_is_refused(single, content):
    (single / "config.json").write_bytes(content)
    assert "config.json" in refusal(single)


def test_a_folder_without_weights_is_refused(single):
    (single / WEIGHTS).unlink()
    assert "holds no weights" in refusal(single)
    (single / "config.json").unlink()
    assert "holds no checkpoint" in refusal(single)


def test_a_pickle_is_never_opened(single, tmp_path):
    """B62. Alone it is refused with a remedy; beside safetensors it is left alone; its code never runs."""
    canary = tmp_path / "canary"

    class Canary:
        def __reduce__(self):
            return Path.touch, (canary,)

    poison = pickle.dumps(Canary())
    for name in ("pytorch_model.bin", "model.pt", "training_args.bin"):
        (single / name).write_bytes(poison)
    af.load(single)
    (single / WEIGHTS).unlink()
    assert "never opened" in refusal(single)
    (single / WEIGHTS).write_bytes(poison)
    assert "cut short or damaged" in refusal(single)
    assert not canary.exists()


def test_the_command_line_says_it_in_one_message(single, tmp_path):
    configured(single, hidden_act="snake")
    command = [sys.executable, "-c", RUN, "convert", single, tmp_path / "out", "--to", "anyformer"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "hidden_act = 'snake'" in done.stderr
    assert not (tmp_path / "out").exists()
    assert not [path for path in tmp_path.iterdir() if path.name != "single"]


def test_what_no_family_can_say_names_the_nearest_and_the_first_part(tmp_path):
    """In the message of the families, and in the code that the folder then carries."""
    for changes, words in (
        ({"norm": {"kind": "rms", "bias": True}}, ("LLaMA", "norms.attention.before.bias = True")),
        ({"attention.position": "alibi"}, ("attention.position",)),
        ({"alpha": 1.5}, ("alpha = 1.5",)),
        ({"attention.sink_logit": True}, ("sink_logit = True",)),
    ):
        recipe = json.loads(json.dumps(SPEC))
        for path, value in changes.items():
            *parents, last = path.split(".")
            table = recipe
            for parent in parents:
                table = table[parent]
            table[last] = value
        spec = af.load_spec(recipe)
        with pytest.raises(UserError) as caught:
            write_config(spec)
        folder = Checkpoint(spec, af.build(spec)).save(tmp_path / "out", format="hf")
        said = " ".join((folder / CODE_FILE).read_text().split('"""')[1].split())
        for word in ("no published family is this model", "the nearest is", *words):
            assert word in str(caught.value)
            assert word in said


def test_dropout_and_an_open_context_are_no_obstacle(tmp_path):
    """They do not change what the model computes."""
    spec = af.load_spec({**SPEC, "dropout": 0.1, "max_positions": 32})
    back = af.load(Checkpoint(spec, af.build(spec)).save(tmp_path / "a", format="hf"))
    assert back.spec.decoder.blocks[0].attention.dropout == 0.1
    table = {name: value for name, value in SPEC.items() if name != "max_positions"}
    spec = af.load_spec(table)
    assert af.load(Checkpoint(spec, af.build(spec)).save(tmp_path / "b", format="hf")).spec.decoder.max_positions
