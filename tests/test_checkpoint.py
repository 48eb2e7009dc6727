"""Checkpoints: what goes in comes out, and whatever is not a whole checkpoint of ours is refused with a reason."""

import json
import pickle
import resource
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import anyformer as af
from anyformer.checkpoint import Checkpoint, device_of, load
from anyformer.errors import UserError
from anyformer.infer import Sampling, generate_ids
from anyformer.nn.model import build
from anyformer.spec import load_spec
from anyformer.text import Tokenizer
from anyformer.weights.own import WEIGHTS_FILE, read_weights

CUDA = torch.cuda.is_available()


@pytest.fixture(scope="module")
def made():
    """A tied model with odd widths, bias and learned positions, and its tokenizer."""
    tokenizer = Tokenizer.train("byte", [])
    recipe = {
        "vocab_size": tokenizer.vocab_size,
        "d_model": 24,
        "n_layers": 2,
        "max_positions": 40,
        "tie": True,
        "bias": True,
        "norm": "layer",
        "ffn": {"kind": "gated", "activation": "silu", "d_ff": 40},
        "embed": {"position": "learned"},
        "attention": {"n_heads": 3, "n_kv_heads": 1, "position": "none"},
    }
    spec = load_spec(recipe)
    return Checkpoint(spec, build(spec, seed=5), tokenizer)


@pytest.fixture
def folder(made, tmp_path):
    return made.save(tmp_path / "c")


def refusal(*arguments, **named):
    with pytest.raises(UserError) as caught:
        load(*arguments, **named)
    return str(caught.value)


def rewrite(folder, change):
    """The weights as `change` leaves them."""
    tensors = load_file(folder / WEIGHTS_FILE)
    change(tensors)
    save_file(tensors, folder / WEIGHTS_FILE)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_a_round_trip_changes_no_bit(made, tmp_path, dtype):
    """A tied head is one tensor on disk, and one in memory afterwards."""
    model = build(made.spec, seed=5, dtype=dtype)
    folder = Checkpoint(made.spec, model, made.tokenizer).save(tmp_path / "c")
    back = load(folder, dtype="stored")
    assert back.spec == made.spec
    before, after = model.state_dict(), back.model.state_dict()
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert after[name].dtype == value.dtype
        assert torch.equal(after[name], value), name
    with safe_open(folder / WEIGHTS_FILE, framework="pt") as stored:
        shapes = [tuple(stored.get_slice(name).get_shape()) for name in stored.keys()]
    assert shapes.count((made.spec.vocab_size, 24)) == 1
    assert sum(np.prod(shape) for shape in shapes) == sum(p.numel() for p in back.model.parameters())
    tokens = torch.tensor([[1, 2, 3, 250]])
    with torch.no_grad():
        assert torch.equal(back.model(tokens), model(tokens))
        next(p for p in back.model.parameters() if p.shape == (made.spec.vocab_size, 24)).mul_(2)
        assert torch.equal(back.model(tokens).argmax(-1), load_again_doubled(folder, tokens))
    assert back.tokenizer.encode("grüezi") == made.tokenizer.encode("grüezi")
    assert not back.model.training


def load_again_doubled(folder, tokens):
    """The choice of a model whose one embedding is doubled on disk: input and head both follow."""
    name = next(n for n, v in load_file(folder / WEIGHTS_FILE).items() if v.shape[0] > 200)
    rewrite(folder, lambda tensors: tensors[name].mul_(2))
    return load(folder, dtype="stored").model(tokens).argmax(-1)


def test_the_dtype_is_float32_unless_asked_otherwise(made, tmp_path):
    folder = Checkpoint(made.spec, build(made.spec, dtype="bfloat16")).save(tmp_path / "c")

    def dtypes(**how):
        return {p.dtype for p in af.load(folder, **how).model.parameters()}

    assert dtypes() == {torch.float32}
    assert dtypes(dtype="stored") == dtypes(dtype=None) == {torch.bfloat16}
    assert dtypes(dtype="float64") == dtypes(dtype=torch.float64) == {torch.float64}


@pytest.mark.parametrize("dtype", ["nonsense", "int64", "double", "float8_e4m3fn", torch.int64])
def test_an_unknown_dtype_is_named(folder, dtype):
    assert "unknown dtype" in refusal(folder, dtype=dtype)


@pytest.mark.parametrize("device", ["nonsense", "CPU", "cuda:", "cuda:x", "cudax", "meta", "", "cpu:99"])
def test_an_unknown_device_is_named(folder, device):
    said = refusal(folder, device=device)
    assert said.startswith("this device is not known")
    assert "damaged" not in said


@pytest.mark.parametrize("device", ["cuda:99", pytest.param("cuda", marks=pytest.mark.skipif(CUDA, reason="is there"))])
def test_a_device_that_is_not_there_is_refused_before_anything_is_read(device):
    assert refusal("nowhere", device=device).startswith("this device cannot be used here")
    assert device_of("auto").type == ("cuda" if CUDA else "cpu")
    assert device_of(torch.device("cpu")) == torch.device("cpu")


def test_loaded_weights_are_mapped_and_the_file_is_never_written_to(folder, made):
    """What is changed in memory stays there; saving over the folder leaves what was loaded as it was."""
    file = folder / WEIGHTS_FILE
    bytes_before = file.read_bytes()
    back = load(folder)
    first = next(back.model.parameters())
    with torch.no_grad():
        first.mul_(2)
    assert file.read_bytes() == bytes_before
    assert torch.equal(first, 2 * next(made.model.parameters()))
    again = load(folder)
    Checkpoint(made.spec, build(made.spec, seed=77)).save(folder)
    for name, value in made.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], value)


def test_a_resumed_run_has_its_own_memory(folder, made):
    back = read_weights(folder / WEIGHTS_FILE, made.spec, dtype=None, device=torch.device("cpu"))
    file = folder / WEIGHTS_FILE
    file.write_bytes(b"\xff" * file.stat().st_size)
    for name, value in made.model.state_dict().items():
        assert torch.equal(back.state_dict()[name], value)


def test_weights_cut_short_anywhere_are_refused(folder):
    file = folder / WEIGHTS_FILE
    whole = file.read_bytes()
    for length in [*range(12), 100, 1000, *range(1500, len(whole), 4999), len(whole) - 1]:
        file.write_bytes(whole[:length])
        said = refusal(folder)
        assert "cut short or damaged" in said, length
        assert str(file) in said
    file.write_bytes(whole + b"x")
    assert "cut short or damaged" in refusal(folder)
    file.unlink()
    assert "has no weights" in refusal(folder)


def test_a_specification_cut_short_anywhere_is_refused(folder):
    file = folder / "spec.json"
    whole = file.read_bytes().rstrip()
    for length in range(0, len(whole), 37):
        file.write_bytes(whole[:length])
        assert "spec.json" in refusal(folder)
    file.write_bytes(b"\xff\xfe")
    assert "spec.json" in refusal(folder)


def test_foreign_tensors_are_named(folder):
    name = max(load_file(folder / WEIGHTS_FILE))
    pristine = (folder / WEIGHTS_FILE).read_bytes()
    for change, said in (
        (lambda t: t.update(foreign=torch.ones(3)), "1 unknown, first foreign"),
        (lambda t: t.pop(name), f"1 missing, first {name}"),
        (lambda t: t.update({name: torch.ones(2, 3, 4)}), f"{name} is [2, 3, 4] and should be"),
        (lambda t: t.update({"lm_head.weight": torch.ones(256, 24)}), "1 unknown, first lm_head.weight"),
        (lambda t: t.update({name: t[name].to(torch.int64)}), "weights are floating-point numbers"),
        (lambda t: t.update({name: t[name].to(torch.float8_e4m3fn)}), "weights are floating-point numbers"),
    ):
        (folder / WEIGHTS_FILE).write_bytes(pristine)
        rewrite(folder, change)
        for dtype in ("float32", None):
            message = refusal(folder, dtype=dtype)
            assert said in message
            assert WEIGHTS_FILE in message


def test_a_newer_format_is_refused_with_advice(folder):
    table = json.loads((folder / "spec.json").read_text())
    (folder / "spec.json").write_text(json.dumps({**table, "format_version": 99}))
    assert "newer release" in refusal(folder)


class Canary:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_pickle_is_never_opened(folder, tmp_path):
    """Refused with advice, alone, in a folder of its own, and beside safetensors; its code never runs."""
    canary = tmp_path / "canary"
    poison = pickle.dumps(Canary(canary))
    pickle.loads(poison)
    assert canary.exists(), "the canary would not have sung"
    canary.unlink()
    for name in ("pytorch_model.bin", "model.pt", "optimizer.pth", "last.ckpt", "data.pkl"):
        alone = tmp_path / f"of-{name}"
        alone.mkdir()
        (alone / name).write_bytes(poison)
        for path in (alone, alone / name):
            assert "never opened" in refusal(path)
        (folder / name).write_bytes(poison)
    load(folder)
    (folder / WEIGHTS_FILE).write_bytes(poison)
    assert "cut short or damaged" in refusal(folder)
    (folder / WEIGHTS_FILE).unlink()
    assert "has no weights" in refusal(folder)
    assert not canary.exists()


def test_a_run_folder_means_its_best(made, tmp_path):
    places = tmp_path / "run" / "checkpoints"
    for seed, name in enumerate(("step-000001", "step-000002"), 1):
        Checkpoint(made.spec, build(made.spec, seed=seed), None).save(places / name)

    def first(folder):
        return next(load(folder).model.parameters()).flatten()[0].item()

    one, two = (first(places / f"step-00000{n}") for n in (1, 2))
    assert one != two
    assert "holds no checkpoint" in refusal(tmp_path / "run")
    (places / "last").symlink_to("step-000002", target_is_directory=True)
    assert first(tmp_path / "run") == two
    (places / "best").symlink_to("step-000001", target_is_directory=True)
    assert first(tmp_path / "run") == one
    (places / "best").unlink()
    (places / "best").write_text("step-000001\n")
    assert first(tmp_path / "run") == one
    for name in ("../../elsewhere", str(places / "step-000001"), "step-000009", "", ".."):
        (places / "best").write_text(name)
        assert "names no checkpoint" in refusal(tmp_path / "run")


def test_saving_replaces_a_checkpoint_and_nothing_else(made, folder, tmp_path):
    (folder / "notes.txt").write_text("precious")
    other = build(made.spec, seed=77)
    with pytest.raises(UserError, match="notes"):
        Checkpoint(made.spec, other, None).save(folder)
    (folder / "notes.txt").unlink()
    Checkpoint(made.spec, other, None).save(folder)
    assert sorted(p.name for p in folder.iterdir()) == [WEIGHTS_FILE, "spec.json"]
    assert torch.equal(next(load(folder).model.parameters()), next(other.parameters()))
    file = tmp_path / "file"
    file.write_text("precious")
    photos = tmp_path / "photos"
    photos.mkdir()
    (photos / "one.jpg").write_text("precious")
    for path in (file, photos, file / "below", "/proc/nowhere", tmp_path):
        with pytest.raises(UserError):
            made.save(path)
    assert file.read_text() == (photos / "one.jpg").read_text() == "precious"
    (tmp_path / "empty").mkdir()
    made.save(tmp_path / "empty")
    with pytest.raises(UserError, match="unknown checkpoint format"):
        made.save(tmp_path / "new", format="gguf2")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c", "empty", "file", "photos"]


def test_a_full_disk_is_one_message_and_leaves_the_old_checkpoint(made, folder, tmp_path):
    before = (folder / WEIGHTS_FILE).read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    try:
        with pytest.raises(UserError, match="cannot write"):
            made.save(folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (folder / WEIGHTS_FILE).read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_text_gives_text_and_ids_give_ids(made, folder):
    back = load(folder)
    how = {"max_new_tokens": 7, "temperature": 1.0, "seed": 3, "top_k": 50}
    text, ids = back.generate("def", **how), back.generate(list(b"def"), **how)
    assert isinstance(text, str)
    assert isinstance(ids, list)
    assert text == back.tokenizer.decode(ids)
    assert back.generate(np.frombuffer(b"def", np.uint8), **how) == ids
    assert back.complete("def", Sampling(**how)).ids == tuple(ids)


def test_a_model_without_a_tokenizer_continues_ids(made, tmp_path):
    folder = Checkpoint(made.spec, made.model).save(tmp_path / "bare")
    back = load(folder)
    assert back.tokenizer is None
    prompt = [3, 1, 4, 1, 5]
    steps = generate_ids(made.model, [prompt], Sampling(max_new_tokens=6))
    assert back.generate(prompt, max_new_tokens=6) == [step.token for step in steps]
    completion = back.complete(prompt, Sampling(max_new_tokens=6))
    assert (completion.text, completion.n_prompt_tokens, completion.finish_reason) == ("", 5, "length")
    with pytest.raises(UserError, match="text needs a tokenizer"):
        back.generate("def")


def test_quantised_loading_is_refused(folder):
    assert "quantised" in refusal(folder, quantize="q4_0")


def test_weights_alone_can_be_read(made, folder):
    model = read_weights(folder / WEIGHTS_FILE, made.spec, dtype=None, device=torch.device("cpu"))
    assert all(p.requires_grad for p in model.parameters())


def test_a_folder_of_other_things_is_never_replaced(made, tmp_path):
    """Though it has a config.json, or a whole checkpoint, beside them."""
    project = tmp_path / "project"
    (project / "src").mkdir(parents=True)
    (project / "config.json").write_text('{"port": 8080}')
    published = made_llama().save(tmp_path / "published", format="hf")
    (published / "README.md").write_text("precious")
    nested = made.save(tmp_path / "own")
    made.save(nested / "inner")
    for folder, name in ((project, "config.json"), (published, "README"), (nested, "inner")):
        before = sorted(path.name for path in folder.rglob("*"))
        for format in ("anyformer", "hf"):
            with pytest.raises(UserError, match=name):
                made_llama().save(folder, format=format)
        assert sorted(path.name for path in folder.rglob("*")) == before
    (published / "README.md").unlink()
    made_llama().save(published)
    assert not (published / "config.json").exists()


def made_llama(**over):
    """A small LLaMA, which Hugging Face has a form for."""
    attention = {"n_heads": 3, "n_kv_heads": 1, "position": "rope"}
    sizes = {"vocab_size": 31, "d_model": 24, "n_layers": 1, "max_positions": 40}
    spec = load_spec({**sizes, "ffn": "swiglu", "attention": attention, **over})
    return Checkpoint(spec, build(spec, seed=1))


@pytest.mark.parametrize("format", ["anyformer", "hf"])
def test_labels_keep_their_names(tmp_path, format):
    made = made_llama(head={"kind": "sequence", "n_labels": 3, "pool": "last", "bias": False})
    unnamed = () if format == "anyformer" else ("LABEL_0", "LABEL_1", "LABEL_2")
    assert load(made.save(tmp_path / "plain", format=format)).labels == unnamed
    made.labels = ("neg", "neutral", "pos")
    assert load(made.save(tmp_path / "named", format=format)).labels == ("neg", "neutral", "pos")


def test_a_tokenizer_that_is_not_read_is_spoken_of(tmp_path):
    folder = made_llama().save(tmp_path / "c", format="hf")
    (folder / "spiece.model").write_bytes(b"x")
    with pytest.warns(UserWarning, match="no tokenizer is read from spiece.model"):
        assert load(folder).tokenizer is None


def test_what_is_meant_by_a_path_that_leads_nowhere(tmp_path):
    for path, said in (
        ("meta-llama/Llama-3.2-1B", "nothing is downloaded"),
        ("https://huggingface.co/gpt2", "nothing is downloaded"),
        ("gpt2", "a shipped recipe, which has no weights"),
        (tmp_path / "gone", "give a checkpoint folder"),
    ):
        assert said in refusal(path)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert "too short to be GGUF" in refusal(tmp_path / "model.gguf")
    assert "too short to be GGUF" in refusal(tmp_path)
    (tmp_path / "other.gguf").write_bytes(b"GGUF")
    assert "several GGUF files" in refusal(tmp_path)


def test_arguments_of_other_libraries_are_named(made):
    for wrong, near in (("max_length", "max_new_tokens"), ("do_sample", "temperature"), ("topk", "top_k")):
        with pytest.raises(UserError, match=f"did you mean `{near}`"):
            made.generate("a", **{wrong: 3})
    for several in (["a", "b"], [[1], [2]]):
        with pytest.raises(UserError, match="one prompt"):
            made.generate(several)
