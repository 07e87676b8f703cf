"""Work counted, where a test once measured time: a count is the same on any machine, however busy.

What the work takes in seconds is a figure for benchmarks/command_line.py.
"""
from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import flashgen

PARENT = str(Path(flashgen.__file__).parent.parent)
_AUDITED = """import json, sys
opened, started = [], []
def hook(event, arguments):
    if event == "open":
        opened.append(str(arguments[0]))
    elif event in ("subprocess.Popen", "os.fork", "os.posix_spawn", "os.system"):
        started.append(event)
sys.addaudithook(hook)
sys.argv[0] = "flashgen"
from flashgen.cli import main
code = 0
try:
    main()
except SystemExit as end:
    code = end.code or 0
print(json.dumps([code, sorted(sys.modules), opened, started]), file=sys.stderr)
"""


@dataclass(frozen=True)
class Run:
    """Of `flashgen ...` in a process of its own: what it printed, imported, opened and started."""

    stdout: str
    modules: frozenset[str]
    opened: tuple[str, ...]
    started: tuple[str, ...]

    @property
    def packages(self) -> frozenset[str]:
        return frozenset(name.partition(".")[0] for name in self.modules)


def counted_run(*arguments: str) -> Run:
    result = subprocess.run([sys.executable, "-c", _AUDITED, *arguments], env={**os.environ, "PYTHONPATH": PARENT},
                            capture_output=True, text=True)
    code, modules, opened, started = json.loads(result.stderr.splitlines()[-1])
    assert code == 0 and result.returncode == 0, result.stderr
    return Run(result.stdout, frozenset(modules), tuple(opened), tuple(started))


def python_calls(work: Callable[[], Any]) -> int:
    """How many Python functions are called by `work`."""
    calls, before = 0, sys.getprofile()

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(before)
    return calls
