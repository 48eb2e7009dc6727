"""How long the command line's help and the imports take, each in a fresh process.

    python benchmarks/startup.py [--runs 20]

Medians of alternating runs, so that a change of the machine's speed falls on all alike. The first run of each fills the
disk's cache and does not count.
"""

import argparse
import statistics
import subprocess
import sys
import time

MOST_HELP = 0.3
"""Seconds that help may take."""
MOST_BEYOND_TORCH = 0.3
"""Seconds that our import may take beyond torch's own."""

FRONT = [sys.executable, "-c", "from anyformer.cli.main import run; run()"]
HELP, PLAN_HELP = "anyformer --help", "anyformer plan --help"
TORCH, BARE, USED = "import torch", "import anyformer", "import anyformer as af; af.load_spec; af.build; af.attend"
COMMANDS = {
    HELP: [*FRONT, "--help"],
    PLAN_HELP: [*FRONT, "plan", "--help"],
    TORCH: [sys.executable, "-c", TORCH],
    BARE: [sys.executable, "-c", BARE],
    USED: [sys.executable, "-c", USED],
}


def seconds(command: list[str]) -> float:
    """How long a process takes from start to end."""
    begin = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - begin


def main() -> None:
    """A line a command: its median, and the goal where it has one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    runs = parser.parse_args().runs
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for index in range(runs + 1):
        for name, command in COMMANDS.items():
            took = seconds(command)
            if index:
                times[name].append(took)
    median = {name: statistics.median(found) for name, found in times.items()}
    import_goal = median[TORCH] + MOST_BEYOND_TORCH
    goals = {HELP: MOST_HELP, PLAN_HELP: MOST_HELP, BARE: import_goal, USED: import_goal}
    print(f"{'median of ' + str(runs) + ' fresh processes':62} {'seconds':>8}")
    for name, found in median.items():
        goal = goals.get(name)
        said = "" if goal is None else f"  goal {goal:.3f}: {'reached' if found <= goal else 'MISSED'}"
        print(f"{name:62} {found:8.3f}{said}")


if __name__ == "__main__":
    main()
