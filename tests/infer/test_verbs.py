"""`anyformer generate` and `anyformer chat`, from a saved checkpoint and from a scripted model."""

import json
from types import SimpleNamespace

import pytest
import typer
from typer.testing import CliRunner

from anyformer.checkpoint import Checkpoint, load
from anyformer.cli.chat import Conversation, chat
from anyformer.cli.eval import evaluate
from anyformer.cli.generate import generate
from anyformer.errors import UserError
from anyformer.infer import Generation, Sampling
from anyformer.infer import generate as generate_text
from anyformer.nn.model import build
from anyformer.spec import load_spec
from anyformer.text import Tokenizer

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ROLES = ["<|system|>", "<|user|>", "<|assistant|>"]


def verb(function):
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(function)
    return app


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    tokenizer = Tokenizer.train("byte", [])
    spec = load_spec("llama-tiny", [f"vocab_size={tokenizer.vocab_size}", "max_positions=64", "n_layers=1"])
    return Checkpoint(spec, build(spec, seed=3), tokenizer).save(tmp_path_factory.mktemp("checkpoint") / "c")


def run_generate(checkpoint, *options, **inputs):
    return CliRunner().invoke(verb(generate), [str(checkpoint), *options], **inputs)


def test_text_goes_to_stdout_alone(checkpoint):
    loaded = load(checkpoint)
    sampling = Sampling(max_new_tokens=12, temperature=1.0, seed=4)
    (expected,) = generate_text(loaded.model, loaded.tokenizer, "def f", sampling)
    options = ["--prompt", "def f", "--max-new-tokens", "12", "--temperature", "1", "--seed", "4"]
    for how in ([], ["--no-stream"]):
        result = run_generate(checkpoint, *options, *how)
        assert result.exit_code == 0, result.output
        assert result.stdout_bytes == (expected.text + "\n").encode()
        assert result.stderr == "12 tokens, finish: length\n"


def test_json_is_one_document(checkpoint):
    loaded = load(checkpoint)
    sampling = Sampling(
        max_new_tokens=30, top_k=5, temperature=0.5, stop=("a", "\n"), min_p=0.1, repetition_penalty=1.1
    )
    (expected,) = generate_text(loaded.model, loaded.tokenizer, "é", sampling)
    options = "--max-new-tokens 30 --top-k 5 --temperature 0.5 --min-p 0.1 --repetition-penalty 1.1 --json".split()
    result = run_generate(checkpoint, "--prompt", "é", *options, "--stop", "a", "--stop", "\n")
    document = json.loads(result.stdout)
    assert document["prompt"] == "é"
    assert document["text"] == expected.text
    assert document["ids"] == list(expected.ids)
    assert document["n_prompt_tokens"] == 2
    assert document["finish_reason"] == expected.finish_reason
    assert document["sampling"]["top_k"] == 5
    assert document["sampling"]["stop"] == ["a", "\n"]
    assert result.stderr == ""


def test_the_prompt_may_come_from_standard_input(checkpoint):
    result = run_generate(checkpoint, "--prompt", "-", "--json", "--max-new-tokens", "1", input=b"x = 1\n")
    assert json.loads(result.stdout)["prompt"] == "x = 1\n"


@pytest.mark.parametrize(
    ("options", "inputs", "message"),
    [
        (["--prompt", "-"], {"input": b"ab\xff"}, "byte 0xff at offset 2"),
        (["--prompt", "a\udcff"], {}, "not valid Unicode"),
        (["--prompt", ""], {}, "prompt is empty"),
        (["--prompt", "x" * 65], {}, "65 tokens, context 64"),
        (["--prompt", "x", "--temperature", "-1"], {}, "temperature"),
        (["--prompt", "x", "--top-p", "nan"], {}, "top_p"),
        (["--prompt", "x", "--stop", ""], {}, "stop"),
        (["--prompt", "x", "--max-new-tokens", "-1"], {}, "max_new_tokens"),
    ],
)
def test_mistakes_have_one_message_and_no_output(checkpoint, options, inputs, message):
    """On the command line."""
    result = run_generate(checkpoint, *options, **inputs)
    assert isinstance(result.exception, UserError)
    assert message in str(result.exception)
    assert result.stdout == ""


@pytest.mark.parametrize("name", ["generate", "chat", "eval"])
def test_a_model_that_does_not_generate_is_refused(name, tmp_path):
    tokenizer = Tokenizer.train("byte", [])
    recipe = {"architecture": "encoder", "d_model": 8, "n_layers": 1, "max_positions": 64}
    rest = {"vocab_size": tokenizer.vocab_size, "attention": {"n_heads": 2, "position": "rope"}, "ffn": "swiglu"}
    spec = load_spec({**recipe, **rest})
    place = Checkpoint(spec, build(spec), tokenizer).save(tmp_path / "c")
    text = tmp_path / "text.txt"
    text.write_text("some words", encoding="utf-8")
    verbs = {"generate": (generate, "--prompt", "x"), "chat": (chat,), "eval": (evaluate, "--text", str(text))}
    function, *options = verbs[name]
    result = CliRunner().invoke(verb(function), [str(place), *options], input="hello\n")
    assert isinstance(result.exception, UserError)
    assert "predicts no next token" in str(result.exception)
    assert not result.stdout


@pytest.fixture
def talk(monkeypatch, scripted):
    """Runs `chat` on lines of input with a model that always writes one script; gives the result and the prompts."""

    def start(lines, script, tokenizer, context=None, options=()):
        model = scripted(script, tokenizer, context)
        prompts = []
        original = model.forward
        model.forward = lambda tokens, **rest: (
            prompts.append(tokens[0].tolist()) if tokens.shape[1] > 1 else None,
            original(tokens, **rest),
        )[1]
        loaded = SimpleNamespace(model=model, tokenizer=tokenizer, spec=model.spec, generation=Generation())
        monkeypatch.setattr("anyformer.opened.opened", lambda path, pack: path)
        monkeypatch.setattr("anyformer.checkpoint.load", lambda path, **_: loaded)
        settings = ["--max-new-tokens", str(len(script)), *options]
        result = CliRunner().invoke(verb(chat), ["folder", *settings], input=lines)
        return result, prompts

    return start


@pytest.fixture(scope="module")
def with_template():
    control = ["<|endoftext|>", *ROLES]
    return Tokenizer.train("byte", [], control_tokens=control, chat_template=TEMPLATE)


def messages(tokenizer, *parts):
    """[role token, bytes, role token, bytes, …] as the template writes them."""
    ids = []
    for part in parts:
        ids += [tokenizer.token_id(part)] if part in ROLES else list(part.encode())
    return ids


def test_a_chat_through_a_pipe(talk, with_template):
    script = [*b"yes", with_template.eos_id]
    result, prompts = talk("hi\n\nand?\n/reset\nnew\n/quit\nnever\n", script, with_template)
    assert result.exit_code == 0, result.output
    assert result.stdout == "yes\nyes\nyes\n"
    user, assistant = "<|user|>", "<|assistant|>"
    assert prompts == [
        messages(with_template, user, "hi", assistant),
        messages(with_template, user, "hi", assistant, "yes", user, "and?", assistant),
        messages(with_template, user, "new", assistant),
    ]
    assert "anew" in result.stderr
    assert "no chat template" not in result.stderr


def test_a_system_message_opens_every_prompt(talk, with_template):
    result, prompts = talk("hi\n", [*b"y", with_template.eos_id], with_template, options=["--system", "be brief"])
    assert prompts == [messages(with_template, "<|system|>", "be brief", "<|user|>", "hi", "<|assistant|>")]
    result, _ = talk("hi\n", [97], Tokenizer.train("byte", []), options=["--system", "be brief"])
    assert "chat template" in str(result.exception)


def test_without_a_template_text_is_continued_as_written(talk):
    byte = Tokenizer.train("byte", [])
    result, prompts = talk("def f\n  x\n", b"(a):", byte)
    assert result.stdout == "(a):\n(a):\n"
    assert prompts == [list(b"def f"), list(b"def f(a):\n  x")]
    assert "no chat template: your text is continued as written" in result.stderr
    assert "limit" in result.stderr


def test_a_long_history_loses_its_oldest_turns_visibly(talk):
    """The third prompt has 21 tokens and the reply 2: context 24 holds both, 22 does not, so the first turn goes."""
    byte = Tokenizer.train("byte", [])
    result, prompts = talk("one11\ntwo22\nxyz33\n", b"ab", byte, context=24, options=["--max-new-tokens", "2"])
    assert result.exit_code == 0, result.output
    assert prompts == [list(b"one11"), list(b"one11ab\ntwo22"), list(b"one11ab\ntwo22ab\nxyz33")]
    result, prompts = talk("one11\ntwo22\nxyz33\n", b"ab", byte, context=22, options=["--max-new-tokens", "2"])
    assert prompts[-1] == list(b"two22ab\nxyz33")
    assert "oldest turn no longer" in result.stderr.replace("\n", " ")


def test_a_message_past_the_context_is_refused_and_the_chat_goes_on(talk):
    """Both numbers, nothing cut; the turns before it stay."""
    byte = Tokenizer.train("byte", [])
    result, prompts = talk("abc\n" + "x" * 17 + "\nd\n", b"!", byte, context=16)
    assert result.exit_code == 0, result.output
    assert "17 tokens" in result.stderr
    assert "at most 16 tokens" in result.stderr
    assert prompts == [list(b"abc"), list(b"abc!\nd")]


def test_an_interrupt_stops_the_reply_and_not_the_chat(talk, monkeypatch):
    """Ctrl-C: what was shown of the reply stays in the history."""
    byte = Tokenizer.train("byte", [])
    from anyformer import infer

    original, calls = infer.stream, []

    def interrupted(*arguments):
        calls.append(1)
        for n, delta in enumerate(original(*arguments)):
            if len(calls) == 1 and n == 2:
                raise KeyboardInterrupt
            yield delta

    monkeypatch.setattr(infer, "stream", interrupted)
    result, prompts = talk("go\non\n", b"abcdef", byte)
    assert result.exit_code == 0, result.output
    assert result.stdout == "ab\nabcdef\n"
    assert "(stopped)" in result.stderr
    assert prompts[1] == list(b"goab\non")


def test_invalid_text_from_a_pipe_is_named(talk):
    result, _ = talk(b"ab\xff\n", b"a", Tokenizer.train("byte", []))
    assert isinstance(result.exception, UserError)
    assert "not text" in str(result.exception)


def test_the_room_for_the_reply_is_a_quarter_at_most():
    byte = Tokenizer.train("byte", [])
    conversation = Conversation(byte, context=16, reserve=512)
    conversation.add("a" * 5, "b" * 5)
    assert conversation.prompt("c") == (list(b"aaaaabbbbb\nc"), 0)  # 12 of 16
    assert conversation.prompt("cc") == (list(b"cc"), 1)
    assert conversation.prompt("c" * 16) == (list(b"c" * 16), 0)
