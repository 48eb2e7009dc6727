"""A specification as one file: equal to the core for every recipe, only what it uses, readable, and the same twice."""

import ast
import copy
import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path
from typing import get_args

import pytest
import torch

import anyformer
from anyformer.errors import UserError
from anyformer.infer.generation import Generation
from anyformer.laws import mutant as models
from anyformer.laws.draw import Draw, fresh, outputs
from anyformer.laws.eject import check, ejected, run
from anyformer.laws.result import Findings
from anyformer.laws.space import sample
from anyformer.spec import ModelSpec, SpecError, expand, load_spec
from anyformer.spec import parts as spec_parts
from anyformer.spec.part import Activation, Part
from anyformer.text import Tokenizer
from anyformer.weights.eject import Surroundings, eject
from anyformer.weights.eject import file as file_text
from anyformer.weights.eject.format import WIDTH
from anyformer.weights.eject.known import KNOWN, WORDS
from anyformer.weights.eject.pattern import tuple_text

RECIPES = sorted(path.stem for path in Path(anyformer.__file__).parent.glob("recipes/*.toml") if path.stem != "demo")
SMALL = {"vocab_size": 53, "d_model": 24, "max_positions": 64, "d_ff": 20, "window": 5, "q_rank": 9, "kv_rank": 7}
SMALL |= {"d_nope": 6, "d_rope": 4, "n_experts": 12, "n_groups": 4, "top_groups": 2, "top_k": 3, "original": 8}


def small(name):
    """A recipe with all its ideas and small numbers that hide nothing."""
    stored = load_spec(name).model_dump(mode="json")

    def walk(table):
        if isinstance(table, list):
            return [walk(each) for each in table]
        if not isinstance(table, dict):
            return table
        made = {key: SMALL[key] if key in SMALL and value is not None else walk(value) for key, value in table.items()}
        if "n_heads" in table:
            own = table.get("d_head") or table["d_nope"] + table["d_rope"]
            made["n_heads"] = 4
            if "d_head" in table:
                made["n_kv_heads"] = max(1, 4 * table["n_kv_heads"] // table["n_heads"])
                made["d_head"] = 10 if made["position"].get("fraction", 1.0) == 1.0 else 16
            made["d_value"] = made.get("d_head", 5)
            width = made.get("d_head") or made["d_nope"] + made["d_rope"]
            if table["scale"] == own**-0.5:
                made["scale"] = width**-0.5
        if "blocks" in table:
            made["blocks"] = made["blocks"][:4] if len(table["blocks"]) < 26 else made["blocks"][:7]
        return made

    table = walk(stored)
    if table["head"] is not None and table["head"].get("transform"):
        table["head"]["transform"]["width"] = SMALL["d_model"]
    return ModelSpec.model_validate(table, strict=False)


def beside(spec, dtype="float32", seed=0):
    """The core with weights that hide nothing, on its textbook backend, and the ejected file with the same weights."""
    core = fresh(spec, seed, dtype).use_backend("reference")
    file = ejected(core)
    return core, file.module, file.model


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_computes_what_the_core_computes(name):
    """Scores, those of padded rows and of calls with a cache, and the gradient of every parameter."""
    findings = Findings("recipe", 1e-10)
    check(fresh(small(name), 0, "float64"), 1, findings)
    result = findings.result("")
    assert result.holds, result


def test_where_the_operations_are_the_same_float32_is_equal_to_the_bit():
    spec = load_spec("gpt2", ["d_model=48", "n_layers=2", "attention.n_heads=3", "vocab_size=61", "max_positions=32"])
    core, _, model = beside(spec)
    tokens = torch.randint(61, (2, 13), generator=torch.Generator().manual_seed(0))
    assert torch.equal(model(tokens), core(tokens))


def test_generation_is_that_of_the_checkpoint():
    spec = small("llama-tiny")
    core, _, _ = beside(spec)
    want = anyformer.Checkpoint(spec, core).generate([5, 3, 8], max_new_tokens=12)
    file = ejected(core, eject(spec, Surroundings(ends=(want[7],))))
    module, model = file.module, file.model
    assert list(module.generate(model, torch.tensor([[5, 3, 8]]), 12)) == want[: want.index(want[7])]
    module = run(eject(spec))
    torch.manual_seed(0)
    hot = list(module.generate(model, torch.tensor([[5, 3, 8]]), 12, temperature=20.0))
    torch.manual_seed(0)
    read = [5, 3, 8]
    with torch.no_grad():
        for _ in range(12):
            read.append(int(torch.multinomial((core(torch.tensor([read]))[0, -1] / 20.0).softmax(0), 1)))
    assert hot == read[3:]
    assert len(set(hot)) > 4


def test_a_llama_is_at_most_250_lines():
    assert len(eject(load_spec("llama-3-8b")).splitlines()) <= 250


UNSAID_BY_LLAMA = """dropout softcap sink clamp bias=True LayerNorm Embedding( alibi bucket window prefix real memory
source expert router gelu scale pooled types factor owner""".split()


def test_what_a_specification_does_not_use_leaves_no_trace():
    text = eject(load_spec("llama-3-8b"))
    body = text[text.index("class RMSNorm") : text.index("def generate")]
    found = [word for word in UNSAID_BY_LLAMA if word in body.replace("nn.Embedding(VOCAB_SIZE, D_MODEL)", "")]
    assert not found
    tree = ast.parse(text)
    named = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    defined = {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    constants = {target.id for node in tree.body if isinstance(node, ast.Assign) for target in node.targets}
    assert not (defined | constants) - named


def ruff():
    found = Path(sys.executable).with_name("ruff")
    return str(found) if found.exists() else shutil.which("ruff")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Every recipe's file, and some whose names or conditions grow past the page."""
    place = tmp_path_factory.mktemp("ejected")
    for seed in (24, 158, 272, 330, 500, 631, 692, 1077, 1335, 2101, 2698, 3964):
        (place / f"sample_{seed}.py").write_text(eject(expand(sample(seed))), encoding="utf-8")
    for name in RECIPES:
        (place / f"{re.sub('[^a-z0-9]', '_', name)}.py").write_text(eject(load_spec(name)), encoding="utf-8")
    return place


def test_every_file_stands_alone_and_is_no_wider_than_the_page(folder):
    for path in folder.iterdir():
        text = path.read_text(encoding="utf-8")
        modules = {
            (node.module if isinstance(node, ast.ImportFrom) else node.names[0].name).partition(".")[0]
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Import | ast.ImportFrom)
        }
        assert modules <= {"torch", "tokenizers", *sys.stdlib_module_names}, path.name
        assert max(map(len, text.splitlines())) <= WIDTH, path.name


@pytest.mark.skipif(ruff() is None, reason="ruff is of the development extra")
def test_every_file_passes_the_linter_and_is_as_the_formatter_leaves_it(folder):
    rules = ["--select", "E,F,W,I,UP,B,C4,SIM,PIE,RET,PERF,C90,D1", "--ignore", "D105,D107,D100,D103"]
    for command in (["check", "--no-cache", *rules], ["format", "--check", "--no-cache"]):
        found = subprocess.run(
            [ruff(), *command, "--isolated", "--line-length", str(WIDTH), str(folder)], capture_output=True, text=True
        )
        assert found.returncode == 0, found.stdout


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mypy", path=Path(sys.executable).parent) is None, reason="mypy is not installed")
def test_every_file_passes_the_type_checker(folder):
    mypy = [sys.executable, "-m", "mypy", "--disallow-untyped-defs", *map(str, folder.iterdir())]
    found = subprocess.run(mypy, capture_output=True, text=True, cwd=folder)
    assert found.returncode == 0, found.stdout


def test_the_same_specification_gives_the_same_bytes_in_another_process():
    names = ["t5-base", "gemma-3-1b", "deepseek-v3"]
    code = (
        "import hashlib; from anyformer.spec import load_spec; from anyformer.weights.eject import eject\n"
        f"print([hashlib.sha256(eject(load_spec(n)).encode()).hexdigest() for n in {names}])"
    )
    runs = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": s},
        ).stdout
        for s in ("1", "2")
    }
    assert len(runs) == 1


@pytest.mark.parametrize(
    "name", ['a"""b', "back\\slash\\", "line\nbreak", "é 模", "D_MODEL ENCODED VOCAB_SIZE", "{%!%} {{x}}"]
)
def test_whatever_a_folder_is_called_the_file_says_it_and_runs(name):
    module = run(eject(small("llama-tiny"), Surroundings(name=name, checkpoint=name)))
    source = eject(small("llama-tiny"), Surroundings(name=name, checkpoint=name))
    divided = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Div)]
    (default,) = [n.right.value for n in divided if ast.unparse(n.left) == "Path(__file__).parent" and n.lineno > 150]
    assert default == name
    assert module.Model().decoder is not None


def spec_classes():
    found = {each for each in vars(spec_parts).values() if isinstance(each, type) and issubclass(each, Part)}
    leaves = {each for each in found if not each.__subclasses__() and each.__name__ != "Part"}
    return leaves | {
        each for cls in leaves for field in cls.model_fields.values() for each in _parts_in(field.annotation)
    }


def _parts_in(annotation):
    if isinstance(annotation, type) and issubclass(annotation, Part):
        return {annotation, *(x for f in annotation.model_fields.values() for x in _parts_in(f.annotation))}
    return {x for each in get_args(annotation) for x in _parts_in(each)}


def test_every_field_of_every_part_is_known_to_the_pieces():
    """A field that nobody taught the pieces would be left out of the file without a word."""
    for cls in spec_classes():
        assert set(cls.model_fields) - {"kind"} == set(KNOWN[cls.__name__]), cls.__name__
    assert set(WORDS["activation"]) == set(get_args(Activation))


def test_a_part_that_no_piece_says_is_refused_by_name():
    spec = small("llama-tiny")

    class Spiral(type(spec.decoder.blocks[0].attention.position)):
        turns: int = 3

    def told(**changes):
        block = spec.decoder.blocks[1]
        blocks = (
            spec.decoder.blocks[0],
            block.model_copy(update={"attention": block.attention.model_copy(update=changes)}),
        )
        return spec.model_copy(update={"decoder": spec.decoder.model_copy(update={"blocks": blocks})})

    with pytest.raises(UserError, match=r"decoder\.blocks\.1\.attention\.position"):
        eject(told(position=Spiral()))
    act = spec.decoder.blocks[0].ffn.model_copy(update={"activation": "snake"})
    block = spec.decoder.blocks[0].model_copy(update={"ffn": act})
    with pytest.raises(UserError, match=r"decoder\.blocks\.0\.ffn\.activation(.|\n)*snake"):
        eject(spec.model_copy(update={"decoder": spec.decoder.model_copy(update={"blocks": (block,)})}))


def test_a_recipe_without_a_vocabulary_is_refused_before():
    with pytest.raises(SpecError):
        eject(load_spec("demo"))


def test_half_precision_and_the_meta_device_run():
    """Statistics, angles and softmax are in float32 there, as in the core."""
    for name in ("llama-tiny", "gemma-2-2b", "deepseek-v2-lite", "t5-small"):
        core, _, model = beside(small(name), "bfloat16")
        draw = Draw(core, 0)
        inputs = draw.inputs(2, 9)
        with torch.no_grad():
            got, want = model(**inputs), outputs(core, inputs)
        assert got.dtype == torch.bfloat16
        torch.testing.assert_close(got, want, rtol=0.1, atol=0.15)
    with torch.device("meta"):
        module = run(eject(load_spec("llama-3-8b")))
        assert module.Model()(torch.zeros(1, 5, dtype=torch.int64)).shape == (1, 5, 128256)


LAYERS = [
    ("n_layers = 5", "Block() for _ in range(N_LAYERS)"),
    (
        'n_layers = 6\npattern = [{ attention = { mask = { kind = "causal", window = 4 } } }, {}]',
        "WINDOWS = 3 * (4, None)",
    ),
    ('n_layers = 6\nshare = "all"', "OWNERS = 6 * (0,)"),
]


@pytest.mark.parametrize(("said", "expected"), LAYERS)
def test_layers_that_repeat_are_said_as_one_would(said, expected):
    import tomllib

    recipe = tomllib.loads(
        f'vocab_size = 31\nd_model = 16\n{said}\nffn = "swiglu"\n[attention]\nn_heads = 2\nposition = "rope"\n'
    )
    assert expected in eject(expand(recipe))


def program(text, place, monkeypatch, *words):
    """The file as a program, in this process."""
    module = types.ModuleType("ejected")
    module.__dict__["__file__"] = str(place / "model.py")
    exec(compile(text, "<ejected>", "exec"), module.__dict__)
    monkeypatch.setattr(sys, "argv", ["model.py", *words])
    module.main()
    return module


@pytest.mark.parametrize("name", ["llama-tiny", "bert-base", "t5-small", "deepseek-v2-lite"])
def test_by_itself_the_file_shows_its_shapes_and_counts_its_parameters(name, tmp_path, monkeypatch, capsys):
    spec = small(name)
    program(eject(spec), tmp_path, monkeypatch)
    shown = capsys.readouterr().out
    assert f"{sum(p.numel() for p in fresh(spec).parameters()):,} parameters" in shown
    assert re.search(r"blocks\.0 +\[1, 16, 24\]", shown)
    with pytest.raises(SystemExit, match="0"):
        program(eject(spec), tmp_path, monkeypatch, "--help")
    said = capsys.readouterr().out
    assert not re.findall(r"\b(?!TEMPERATURE|CHECKPOINT|PROMPT|SEED|MAX_NEW_TOKENS|START|ID|DIR)[A-Z]{2,}\b", said)


@pytest.mark.slow
def test_a_model_that_is_too_large_is_shown_without_its_weights(tmp_path, monkeypatch, capsys):
    program(eject(load_spec("llama-3-8b")), tmp_path, monkeypatch)
    assert re.search(r"head +\[1, 16, 128256\](.|\n)*8,030,261,248 parameters", capsys.readouterr().out)
    program(eject(load_spec("deepseek-v3")), tmp_path, monkeypatch)
    shown = capsys.readouterr().out
    assert re.search(r"head +\[1, 16, 129280\](.|\n)*671,026,404,352 parameters", shown)


@pytest.mark.parametrize("name", ["bert-base", "t5-small", "gpt2"])
def test_a_prompt_is_read_with_the_weights_and_the_tokenizer_of_a_folder(name, tmp_path, monkeypatch, capsys):
    tokenizer = Tokenizer.train("char", ["abcdefghij klmnopq"])
    spec = small(name)
    core = fresh(spec, 1).use_backend("reference")
    generation = Generation(start=(3,)) if name == "t5-small" else None
    more = {} if generation is None else {"generation": generation}
    checkpoint = anyformer.Checkpoint(spec, core, tokenizer, **more)
    checkpoint.save(tmp_path / "it")
    around = Surroundings(checkpoint="it", start=(3,), words=tokenizer.vocab_size, suffix=len(tokenizer.suffix))
    words = ("--prompt", "bad cab") if name == "bert-base" else ("--prompt", "bad cab", "--max-new-tokens", "9")
    program(eject(spec, around), tmp_path, monkeypatch, *words)
    said = capsys.readouterr().out
    if name == "bert-base":
        assert "[1, 7, 53] logits" in said
    else:
        settings = {"max_new_tokens": 9, "ignore_eos": True}
        assert said == checkpoint.generate("bad cab", **settings) + "\n"
    with pytest.raises(SystemExit, match="2"):
        program(eject(spec, around), tmp_path / "elsewhere", monkeypatch, "--prompt", "a")
    assert "give --checkpoint DIR" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        program(eject(spec, around), tmp_path, monkeypatch, "--prompt", "")
    none = "no tokens" if spec.last.max_positions is None else "0 tokens, and this model reads 1 to 64"
    assert f"the prompt has {none}" in capsys.readouterr().err


LONGROPE = {
    "vocab_size": 61,
    "d_model": 24,
    "n_layers": 2,
    "ffn": {"kind": "swiglu", "d_ff": 20},
    "attention": {
        "n_heads": 3,
        "d_head": 10,
        "position": {
            "kind": "rope",
            "scaling": {"kind": "longrope", "original": 9, "short": [1, 1.2, 1.3, 1.4, 1.5], "long": [2, 3, 4, 5, 6]},
        },
    },
}
TWO_LENGTHS = copy.deepcopy(LONGROPE)
TWO_LENGTHS["attention"]["position"]["scaling"]["original"] = 14
LEARNED = {"embed": {"position": "learned"}, "max_positions": 16, "attention": {"n_heads": 3, "position": "none"}}


@pytest.mark.parametrize(
    ("recipe", "prompts"),
    [
        (LONGROPE, ([5, 3, 8], [1] * 9, [2] * 12)),
        (LONGROPE | {"pattern": [{}, {"attention": TWO_LENGTHS["attention"]}]}, ([5, 3, 8],)),
        (LONGROPE | {"attention": LONGROPE["attention"] | {"mask": "prefix"}}, ([5, 3, 8, 9],)),
        (LONGROPE | {"attention": {"n_heads": 3, "position": "rope", "mask": "prefix"}}, ([5, 3, 8, 9],)),
        (LONGROPE | LEARNED, ([5, 3, 8], [7] * 14, [7] * 15, [7] * 16)),
        (
            LONGROPE | {"attention": {"n_heads": 3, "position": "rope"}, "max_positions": 16},
            ([5, 3, 8], [7] * 15, [7] * 16),
        ),
        (models.BOTH, ([5, 3, 8],)),
    ],
    ids=["longrope", "two lengths", "longrope, prefix", "prefix", "learned", "context", "both"],
)
def test_a_text_is_the_checkpoints_to_its_end(recipe, prompts):
    """Past the length at which all tokens turn otherwise, over a prefix, and at the end of the context."""
    spec = expand(recipe)
    core = fresh(spec, 1).use_backend("reference")
    file, start = ejected(core), (2, 3)
    both = spec.encoder is not None
    for prompt in prompts:
        want = anyformer.Checkpoint(spec, core, generation=Generation(start=start)).generate(prompt, max_new_tokens=20)
        given = ([*start],) if both else ()
        assert list(file.module.generate(file.model, torch.tensor([prompt]), *given, 20)) == want


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """A checkpoint with a tokenizer that has control tokens, and its file's text."""
    tokenizer = Tokenizer.train("bpe", ["a cab had a bad fab"] * 9, vocab_size=268, control_tokens=["<|stop|>"])
    spec = load_spec("llama-tiny", [f"vocab_size={tokenizer.vocab_size}", "max_positions=20", "d_model=24"])
    place = tmp_path_factory.mktemp("told")
    checkpoint = anyformer.Checkpoint(spec, fresh(spec, 1).use_backend("reference"), tokenizer)
    checkpoint.save(place / "it")
    return place, checkpoint, eject(spec, Surroundings(checkpoint="it"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--temperature", "-1"], "--temperature 0 or from"),
        (["--temperature", "nan"], "--temperature 0 or from"),
        (["--temperature", "inf"], "--temperature 0 or from"),
        (["--temperature", "1e-300"], "--temperature 0 or from"),
        (["--max-new-tokens", "-1"], "--max-new-tokens is 0 or more"),
        (["--prompt", "bad cab fad " * 9], r"the prompt has \d+ tokens, and this model reads 1 to 20"),
        (["--checkpoint", "nowhere"], "nowhere is no checkpoint of this model: .*; give --checkpoint DIR"),
    ],
)
def test_the_program_refuses_in_words(told, words, said, monkeypatch, capsys):
    place, _, text = told
    with pytest.raises(SystemExit, match="2"):
        program(text, place, monkeypatch, "--prompt", "a cab", *words)
    assert re.search(said, capsys.readouterr().err)


def test_ids_that_no_text_has_may_be_suppressed(told):
    """They lie past what the tokenizer has, where nothing is generated anyway."""
    _, checkpoint, _ = told
    text = eject(checkpoint.spec, Surroundings(words=200, suppressed=(7, 200, 250)))
    assert "SUPPRESSED_IDS = (7,)" in text
    file = ejected(checkpoint.model, text)
    assert all(token < 200 for token in file.module.generate(file.model, torch.tensor([[3, 1]]), 9))


def test_a_control_token_that_a_prompt_spells_is_text(told, monkeypatch, capsys):
    place, checkpoint, text = told
    program(text, place, monkeypatch, "--prompt", "a<|stop|>", "--max-new-tokens", "4")
    assert capsys.readouterr().out == checkpoint.generate("a<|stop|>", max_new_tokens=4, ignore_eos=True) + "\n"


def test_weights_are_read_wherever_they_begin_and_never_in_part(told, monkeypatch, capsys):
    """A header of any length is legal; a file that was cut short, or of another model, is refused in words."""
    place, checkpoint, text = told
    whole = (place / "it" / "model.safetensors").read_bytes()
    n = int.from_bytes(whole[:8], "little")
    folder = place / "odd"
    shutil.copytree(place / "it", folder)
    for spaces in (1, 2, 3):
        head = whole[8 : 8 + n].rstrip() + b" " * spaces
        (folder / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + whole[8 + n :])
        module = run(text)
        loaded = module.load(folder / "model.safetensors")
        tokens = torch.tensor([[3, 1, 2]])
        torch.testing.assert_close(loaded(tokens), checkpoint.model(tokens))
    bad = [whole[:-4], whole[: len(whole) // 2], whole[: 8 + n // 2], whole[:7], b"", b"\xff" * 40]
    bad.append(whole.replace(b"attention.q.", b"attention.z."))
    for data in bad:
        (folder / "model.safetensors").write_bytes(data)
        with pytest.raises(SystemExit, match="2"):
            program(text, place, monkeypatch, "--prompt", "a", "--checkpoint", str(folder))
        assert "is no checkpoint of this model" in capsys.readouterr().err


def test_an_encoder_decoder_is_told_how_an_answer_begins(tmp_path, monkeypatch, capsys):
    """Nothing is invented where the checkpoint names no start token."""
    tokenizer = Tokenizer.train("char", ["abcdefghij klmnopq"])
    spec = small("t5-small")
    core = fresh(spec, 1).use_backend("reference")
    anyformer.Checkpoint(spec, core, tokenizer).save(tmp_path / "it")
    text = eject(spec, Surroundings(checkpoint="it", words=tokenizer.vocab_size))
    needed, long = "--start is needed, ids from 0 to 52", "--start has 65 ids, and an answer at most 64"
    for words, said in (((), needed), (["53"], needed), (["-1"], needed), (["1"] * 65, long)):
        with pytest.raises(SystemExit, match="2"):
            program(text, tmp_path, monkeypatch, "--prompt", "bad cab", *(("--start", *words) if words else ()))
        assert said in capsys.readouterr().err
    program(text, tmp_path, monkeypatch, "--prompt", "bad cab", "--max-new-tokens", "9", "--start", "3", "4")
    told = anyformer.Checkpoint(spec, core, tokenizer, generation=Generation(start=(3, 4)))
    assert capsys.readouterr().out == told.generate("bad cab", max_new_tokens=9, ignore_eos=True) + "\n"


@pytest.mark.parametrize("name", ["mixtral-8x7b", "deepseek-v2-lite", "t5-small"])
def test_a_pass_without_numbers_shows_the_shapes_of_any_model(name, tmp_path, monkeypatch, capsys):
    """As for models whose weights would not fit: nobody knows which experts a token goes to."""
    spec = small(name)
    shown = []
    for large in (2 * 10**9, 0):
        monkeypatch.setattr(file_text, "_LARGE", large)
        program(eject(spec), tmp_path, monkeypatch)
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]


@pytest.mark.parametrize("name", ["gpt2", "t5-small", "modernbert-base", "mixtral-8x7b", "gemma-2-2b"])
def test_a_fresh_model_begins_near_even_odds_and_every_module_takes_part(name):
    """Unused modules, or a table of the size of one that is a head as well, would be a bad place to fork from."""
    module = run(eject(small(name)))
    torch.manual_seed(0)
    model = module.Model()
    called = set()
    for path, each in model.named_modules():
        each.register_forward_hook(lambda module, args, out, path=path: called.add(path))
    tokens = torch.randint(53, (2, 16))
    logits = model(tokens, source=tokens) if name == "t5-small" else model(tokens)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
    assert abs(loss - torch.tensor(53.0).log()) < 0.5
    loss.backward()
    silent = [path for path, each in model.named_modules() if path not in called and not list(each.children()) and path]
    assert not [path for path in silent if "pooler" not in path and "router" not in path]
    assert all(p.grad is not None for n, p in model.named_parameters() if "pooler" not in n)


def test_numbers_of_one_name_in_two_parts_of_a_layer_stay_apart():
    """Heads of attention and of cross-attention that vary each in its own way, and lists that alternate."""
    table = load_spec("t5-small").model_dump(mode="json") | {"vocab_size": 31}
    for stack in ("encoder", "decoder"):
        table[stack] |= {"d_model": 24, "blocks": table[stack]["blocks"][:4]}
    for layer, heads in enumerate((2, 4, 2, 4)):
        block = table["decoder"]["blocks"][layer] = dict(table["decoder"]["blocks"][layer])
        block["attention"] = block["attention"] | {"n_heads": heads, "n_kv_heads": heads, "position": {"kind": "none"}}
        block["cross"] = block["cross"] | {"n_heads": 6 - heads, "n_kv_heads": 6 - heads}
    spec = ModelSpec.model_validate(table, strict=False)
    core, _, model = beside(spec, "float64")
    inputs = Draw(core, 0).inputs(2, 9)
    with torch.no_grad():
        torch.testing.assert_close(model(**inputs), outputs(core, inputs), rtol=1e-10, atol=1e-10)


def test_lists_of_numbers_that_alternate_from_layer_to_layer_are_written_as_they_are():
    assert eval(tuple_text([(1.0, 2.0), (3.0, 4.0)] * 3)) == ((1.0, 2.0), (3.0, 4.0)) * 3
    assert eval(tuple_text([None, 4, None, 4, None])) == (None, 4, None, 4, None)
    assert eval(tuple_text([(1.0,)] * 3 + [(2.0,)] * 4)) == ((1.0,),) * 3 + ((2.0,),) * 4
    assert eval(tuple_text([((1.0, 2.0),)[0]] * 2 + [(5.0, 6.0)])) == ((1.0, 2.0), (1.0, 2.0), (5.0, 6.0))


@pytest.mark.parametrize("seed", [0, 4, 6, 15, 24, 43])
def test_half_precision_runs_through_norms_without_weights(seed):
    spec = expand(sample(seed))
    model = run(eject(spec)).Model().bfloat16().eval()
    inputs = Draw(fresh(spec), seed).inputs(2, 5)
    with torch.no_grad():
        assert model(**inputs).dtype == torch.bfloat16


@pytest.mark.parametrize("groups", [None, {"n_groups": 4, "top_groups": 2, "score": "top2"}])
def test_equal_scores_of_experts_go_to_the_lower_number_as_in_the_core(groups):
    table = small("deepseek-v3").model_dump(mode="json")
    for block in table["decoder"]["blocks"]:
        if block["ffn"]["kind"] == "moe":
            block["ffn"]["groups"] = groups
    spec = ModelSpec.model_validate(table, strict=False)
    core, _, model = beside(spec, "float64")
    with torch.no_grad():
        for each in (core, model):
            for name, value in (*each.named_parameters(), *each.named_buffers()):
                if "router" in name or "choice_bias" in name:
                    value.zero_()
        tokens = torch.randint(53, (2, 9))
        torch.testing.assert_close(model(tokens), core(tokens), rtol=1e-10, atol=1e-10)


def test_the_offset_of_a_norm_is_added_in_float32():
    module = run(eject(small("gemma-2-2b")))
    norm = module.RMSNorm(24)
    torch.nn.init.normal_(norm.weight, std=0.1)
    norm.bfloat16()
    x = torch.randn(3, 24).bfloat16()
    wide = x.float()
    want = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * (1 + norm.weight.float())
    assert torch.equal(norm(x), want.bfloat16())
