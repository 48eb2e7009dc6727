"""Matrices packed in a second process: the same bytes as packed by the first, or none and no harm."""

import json
import subprocess
import sys

import pytest

from anyformer.checkpoint import Checkpoint, load
from anyformer.nn.model import build
from anyformer.spec import load_spec
from anyformer.text import Tokenizer

SMALL = ["vocab_size=257", "d_model=64", "n_layers=2", "attention.n_heads=2", "attention.n_kv_heads=1", "ffn.d_ff=96"]
CODE = """
import json, os, sys
from pathlib import Path
import numpy as np
from anyformer.opened import open_gguf
from anyformer.weights.gguf import ahead, packing
from anyformer.weights.gguf.placement import placements

file = Path(sys.argv[1])
os.sched_getaffinity = lambda pid: {0, 1}
model = open_gguf(file).model
placed = placements(model, quantize="keep", dtype="float32")
here = packing.packed_matrices(model, placed, 1)

def same(there):
    assert there.keys() == here.keys()
    for name, blocks in there.items():
        for which in ("rows", "scales", "zeros"):
            a, b = getattr(blocks, which), getattr(here[name], which)
            assert (a is None) == (b is None), (name, which)
            assert a is None or (a.dtype == b.dtype and np.array_equal(a, b)), (name, which)
        assert (blocks.shape, blocks.bits, blocks.group) == (here[name].shape, here[name].bits, here[name].group)
        assert blocks.offset == here[name].offset
    return True

first = open_gguf(file, pack=True).ahead
said = {"same": same(first.blocks(placed)), "once": first.blocks(placed), "alone": open_gguf(file).ahead}
said["other"] = ahead.begin(model).blocks([each for each in placed if not each.packed])

def broken(model, placed, threads):
    yield next(whole(model, placed, threads))
    raise ValueError

whole, ahead.each_packed = packing.each_packed, broken
said["broken"] = ahead.begin(model).blocks(placed)
ahead.each_packed = whole
killed = ahead.begin(model)
os.kill(killed._child, 9)
taken = killed.blocks(placed)
said["killed"] = taken is None or same(taken)  # it may have been done by then
os.sched_getaffinity = lambda pid: {0}
said["one processor"] = ahead.begin(model)
os.sched_getaffinity = lambda pid: {0, 1}
sys.modules["torch"] = None
said["with torch"] = ahead.begin(model)
try:
    os.waitpid(-1, os.WNOHANG)
    said["children"] = True
except ChildProcessError:
    said["children"] = None
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    place = tmp_path_factory.mktemp("ahead")
    spec = load_spec("llama-tiny", SMALL)
    checkpoint = Checkpoint(spec, build(spec, seed=3, init="scaled"), Tokenizer.train("byte", []))
    return checkpoint.save(place / "small.gguf", format="gguf", quantize="q4_1")


@pytest.mark.skipif(sys.platform != "linux", reason="no second process is made there")
def test_what_a_second_process_packs_is_what_the_first_would(file):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", CODE, str(file)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said.pop("same") is True
    assert said.pop("killed") is True
    assert said == dict.fromkeys(said)


def test_the_command_line_writes_what_a_checkpoint_does(file):
    run = "import sys; from anyformer.cli.main import program; program()"
    given = ["generate", str(file), "--prompt", "abc", "--max-new-tokens", "12"]
    done = subprocess.run([sys.executable, "-c", run, *given], capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    want = load(file, quantize="keep").generate("abc", max_new_tokens=12)
    assert done.stdout.decode("utf-8", "replace") == want + "\n"
