"""What one run of the tests samples of what a soak run tries in full; docs/testing.md says when each runs.

A sample turns with the commit: a few commits cover everything. A run can be repeated: TEST_ROTATION is the
number that it turns by, and is printed where a test fails.
"""
from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def _commit() -> int:
    """A number of the commit that is checked out; 0 outside of a git checkout."""
    try:
        found = subprocess.run(["git", "rev-parse", "--short=8", "HEAD"], cwd=Path(__file__).parent,
                               capture_output=True, text=True)
    except OSError:
        return 0
    return int(found.stdout, 16) if found.returncode == 0 else 0


ROTATION = int(os.environ.get("TEST_ROTATION") or _commit())
SOAK_RUNS = int(os.environ.get("EMULATOR_SOAK_RUNS", "0"))  # of correct kernels; more than 0: nothing is sampled


def in_turn(things: Sequence[T], number: int) -> list[T]:
    """One of `things`, another for the next number and for the next commit; in a soak run all of them."""
    return list(things) if SOAK_RUNS else [things[(ROTATION + number) % len(things)]]


def one_in(count: int, things: Iterable[T]) -> list[T]:
    """Every count-th, beginning elsewhere for the next commit; in a soak run all of them."""
    return [thing for number, thing in enumerate(things) if SOAK_RUNS or (ROTATION + number) % count == 0]
