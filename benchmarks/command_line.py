"""How long the command line takes to answer: processor seconds of `flashgen list` and of a build that hits the cache.

    python benchmarks/command_line.py

Prints the least of five runs beside its target. The tests count the work instead (tests/unit/test_cli.py): modules,
files, processes and calls are the same on any machine.
"""
from __future__ import annotations

import os
import subprocess
import sys
import tempfile

RUNS = 5
HIT = ("build", "fa2_fwd", "--variant", "fa2_fwd_bf16_d32", "--arch", "sm_80")
TARGETS_S = {("list",): 0.3, HIT: 0.4}


def seconds(arguments: tuple[str, ...]) -> float:
    """Processor time of one `flashgen` process and its children, in seconds."""
    before = os.times()
    subprocess.run([sys.executable, "-m", "flashgen", *arguments], check=True, stdout=subprocess.DEVNULL)
    after = os.times()
    return after.children_user - before.children_user + after.children_system - before.children_system


def main() -> None:
    with tempfile.TemporaryDirectory() as cache:
        os.environ["FLASHGEN_CACHE_DIR"] = cache
        seconds(HIT)  # compiles it
        for arguments, target in TARGETS_S.items():
            best = min(seconds(arguments) for _ in range(RUNS))
            print(f"{best:.2f} s (target {target}) flashgen {' '.join(arguments)}")


if __name__ == "__main__":
    main()
