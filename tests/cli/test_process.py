"""The process around a verb: closed streams, memory that is not there, what is said on the way out."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest

from anyformer.cli.main import _say

RUN = "from anyformer.cli.main import program; program()"


def shell(command):
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)


def test_closed_streams_are_no_fault_of_ours(tmp_path):
    verb = f'{sys.executable} -c "{RUN}" generate {tmp_path}/none --prompt a'
    assert shell(f"{verb} >&-").returncode == 2
    assert shell(f"{verb} 2>&-").returncode == 2
    assert shell(f'{sys.executable} -c "{RUN}" plan llama-tiny >&-').returncode == 0


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried …")]
)
def test_memory_that_is_not_there_is_the_users_to_mend(error, capsys):
    assert _say(error) == 2
    assert "not enough memory" in capsys.readouterr().err
    assert _say(RuntimeError("something else")) == 1


def test_the_program_ends_at_once_and_nothing_is_lost():
    """Threads are waited for, what asked to be called at the end is, and what was written arrives."""
    code = f"""
import atexit, sys, threading, time
atexit.register(print, "called")
sys.argv = ["anyformer", sys.argv[1]]
threading.Thread(target=lambda: (time.sleep(0.2), sys.stdout.write("waited for\\n"))).start()
class Slow:
    def __del__(self):
        print("taken apart")
kept = Slow()
{RUN}
"""
    for word, exit_code in (("--version", 0), ("--nonsense", 2)):
        done = subprocess.run([sys.executable, "-c", code, word], capture_output=True, text=True, timeout=60)
        assert done.returncode == exit_code
        assert done.stdout.endswith("waited for\ncalled\n")
        assert "taken apart" not in done.stdout


def test_an_interrupt_says_so(tmp_path):
    (tmp_path / "spec.json").write_text("{}")  # A checkpoint by its looks, which is read after the prompt.
    # A shell starts what it puts in the background with interrupts ignored, and a child inherits that.
    ready = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); print('ready', flush=True)"
    child = subprocess.Popen(
        [sys.executable, "-c", f"{ready}; {RUN}", "generate", str(tmp_path), "--prompt", "-"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert child.stdout.readline() == "ready\n"
    for _ in range(10):
        # The verb then waits for its prompt on standard input. On a slow machine it may still be importing, where a
        # callback of the interpreter can swallow an interrupt, so that there is another.
        time.sleep(2.0)
        child.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            child.wait(timeout=5)
            break
    out, err = child.communicate(timeout=30)
    assert child.returncode == 130
    assert "interrupted" in err
    assert out == ""


def test_deep_nesting_is_refused(tmp_path):
    deep = tmp_path / "deep.toml"
    deep.write_text("a=" + "[" * 5000)
    for words in (["plan", str(deep)], ["plan", "llama-tiny", "--set", "a=" + "[" * 3000]):
        run = subprocess.run([sys.executable, "-c", RUN, *words], capture_output=True, text=True)
        assert run.returncode == 2, run.stderr
        assert "nested too deeply" in run.stderr
