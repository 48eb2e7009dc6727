import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from training_runs import RECIPE, table

import anyformer
from anyformer.errors import UserError
from anyformer.nn.model import build
from anyformer.spec import load_spec
from anyformer.train import train
from anyformer.train.loss import make_batch
from anyformer.train.optim import Optimizer
from anyformer.train.parallel import join, share
from anyformer.train.run import AdamW
from anyformer.train.step import train_step

SOURCE = str(Path(anyformer.__file__).parents[1])

WORKER = """
import sys, json
import torch, torch.distributed as dist
torch.set_num_threads(1)
rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
from anyformer.nn.model import build
from anyformer.spec import load_spec
from anyformer.train.loss import make_batch
from anyformer.train.optim import Optimizer
from anyformer.train.parallel import Group
from anyformer.train.run import AdamW
from anyformer.train.step import train_step
model = build(load_spec(json.loads(sys.argv[3])), seed=3).train()
optimizer = Optimizer(model, AdamW(lr=0.01, eps=1e-3))
world = Group(torch.device("cpu"))
said = []
for step in range(3):
    data = torch.load(f"{folder}/step{step}-rank{rank}.pt", weights_only=True)
    r = train_step(model, [make_batch(*part) for part in data], optimizer, clip=0.2, world=world)
    said.append([r.loss, r.n_targets, r.grad_norm])
assert world.any(rank) == 1
assert world.same(float(rank + 5)) == 5.0
assert world.gather(torch.tensor([rank], dtype=torch.uint8)).tolist() == [[0], [1]]
torch.save([said, [p.detach() for p in model.parameters()]], f"{folder}/out{rank}.pt")
dist.destroy_process_group()
"""


def start(arguments, rank=None, world=None, port=None):
    environment = {**os.environ, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    if world is not None:
        environment |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
    return subprocess.Popen(
        [sys.executable, *arguments], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(processes):
    for process in processes:
        _, error = process.communicate(timeout=240)
        assert process.returncode == 0, error


def test_b08_b43_two_processes_with_unequal_tokens_equal_one(tmp_path):
    """Loss, norm and weights after three clipped steps, the same numbers in both processes; tied once."""
    recipe = {**RECIPE, "vocab_size": 23}
    model = build(load_spec(recipe), seed=3).train()
    optimizer = Optimizer(model, AdamW(lr=0.01, eps=1e-3))
    g = torch.Generator().manual_seed(0)
    wanted = []
    for step in range(3):
        tokens, targets = torch.randint(23, (5, 7), generator=g), torch.randint(23, (5, 7), generator=g)
        mask = torch.arange(7) < torch.tensor([7, 1, 2, 6, 3])[:, None]
        parts = {0: [slice(0, 1)], 1: [slice(1, 3), slice(3, 5)]}
        for rank, cuts in parts.items():
            torch.save([[x[c] for x in (tokens, targets, mask)] for c in cuts], tmp_path / f"step{step}-rank{rank}.pt")
        result = train_step(model, [make_batch(tokens, targets, mask)], optimizer, clip=0.2)
        assert result.grad_norm > 0.2
        wanted.append([result.loss, result.n_targets, result.grad_norm])
    import json

    finish([start(["-c", WORKER, str(rank), str(tmp_path), json.dumps(recipe)]) for rank in (0, 1)])
    outputs = [torch.load(tmp_path / f"out{rank}.pt", weights_only=True) for rank in (0, 1)]
    assert outputs[0][0] == outputs[1][0]
    for mine, other in zip(outputs[0][0], wanted, strict=True):
        assert mine == pytest.approx(other, abs=1e-6, rel=1e-5)
    for rank in (0, 1):
        for mine, other in zip(outputs[rank][1], model.parameters(), strict=True):
            torch.testing.assert_close(mine, other.detach(), rtol=0, atol=1e-6)


def test_a_run_on_two_processes_equals_one_and_resumes(tmp_path):
    """The whole loop: rows dealt out, the first process writes, evaluation is shared, the run goes on after a stop."""
    import json
    import socket

    changes = {"train": {"steps": 6, "micro_batch": 2, "batch": 5, "evaluate_every": 3}}
    code = (
        "import sys, json, torch\ntorch.set_num_threads(1)\n"
        "import torch.distributed as dist\n"
        "from anyformer.train import train\n"
        "run = json.loads(sys.argv[1])\n"
        "for steps, resume in ((4, False), (6, True)):\n"
        "    run['train']['steps'] = steps\n"
        "    result = train(run, root=sys.argv[2], report=False, resume=resume)\n"
        "dist.destroy_process_group()\n"
    )
    # A constant rate, so that the length of the first part does not show.
    run = table(tmp_path, schedule="constant", **changes)
    one = train(run, root=tmp_path / "one", report=False)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = ["-c", code, json.dumps(run), str(tmp_path / "two")]
    finish([start(arguments, rank, 2, port) for rank in (0, 1)])
    mine, other = (
        (root / "tiny" / "metrics.jsonl").read_text().splitlines() for root in (tmp_path / "two", one.folder.parent)
    )
    for kind, keys in (("train", ("step", "loss", "grad_norm", "tokens")), ("eval", ("step", "loss", "n_tokens"))):
        a, b = ([[r[k] for k in keys] for r in map(json.loads, lines) if r["kind"] == kind] for lines in (mine, other))
        a = [row for row in a if row[0] != 4 or kind == "train"]
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert x == pytest.approx(y, rel=1e-5, abs=1e-6)
    assert json.loads((tmp_path / "two" / "tiny" / "run.json").read_text())["processes"] == 2


def test_shares_cover_every_row_once():
    for rows in range(1, 20):
        for size in range(1, 8):
            taken = [list(range(rows))[share(rows, rank, size)] for rank in range(size)]
            assert [row for part in taken for row in part] == list(range(rows))
            assert max(map(len, taken)) - min(map(len, taken)) <= 1


def test_fewer_rows_than_processes_and_absent_devices_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="cannot be used here"):
        join("cuda", 8)
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(UserError, match="fewer rows than processes"):
        join("cpu", 3)


def test_one_device_named_for_several_processes_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: pytest.fail("took another device"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="each takes its own device") as caught:
        join("cuda:1", 8)
    assert "train.device" in str(caught.value)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert join("cuda:1", 8)[1] == torch.device("cuda:1")
