"""The emulator's process: every way out of a launch, forks, threads, and the end of the process that started it."""
from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import emulator_kit
import numpy as np
import pytest
import torch
from emulator_kit import run_case, small_case

import flashgen
from flashgen.errors import EnvironmentError_, VerifyError
from flashgen.runtime.emulator import client, kernel
from flashgen.runtime.emulator.client import Worker
from flashgen.runtime.emulator.schedule import Schedule

HANG_S = 240  # of a script that imports torch and compiles a kernel, on a busy machine; only a hang gets there
DOUBLE = small_case("double", "p.out[t] = 2 * p.x[t];")


def doubled(first: int) -> None:
    """One launch, and its answer: that of these very inputs."""
    x = np.arange(first, first + 64, dtype=np.uint32)
    results, _ = run_case(DOUBLE, {"x": x, "out": np.zeros(64, np.uint32)}, Schedule())
    assert (results["out"] == 2 * x).all()


def process() -> subprocess.Popen[bytes]:
    """Of this thread's worker."""
    found = kernel._local.worker._process
    assert found is not None
    return found


def script(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in a process of its own. It and all it started have ended: they would hold the pipes open."""
    path = os.pathsep.join(sys.path)
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=HANG_S,
                          env={**os.environ, "PYTHONPATH": path})


# ---- ways out of a launch

def _interrupt(*_: object) -> Any:
    raise KeyboardInterrupt


LINE = Worker._line
WAYS_OUT: dict[str, tuple[Callable[..., bytes], type[BaseException]]] = {
    "interrupt": (_interrupt, KeyboardInterrupt),
    "interrupt while progress is shown": (lambda *_: b'{"blocks": 1}', KeyboardInterrupt),
    "bad answer": (lambda *_: b"{", VerifyError),
}


@pytest.mark.parametrize("way", WAYS_OUT)
def test_any_way_out_but_an_answer_ends_the_process(way: str, monkeypatch: pytest.MonkeyPatch) -> None:  # B120
    """The launch may be running still. The next one has a process and a memory of its own, and its own answer."""
    line, error = WAYS_OUT[way]
    doubled(1)
    before = process()
    with monkeypatch.context() as patch:
        patch.setattr(Worker, "_line", line)
        patch.setattr(kernel, "_progress", lambda *_: nullcontext(_interrupt))
        with pytest.raises(error):
            doubled(100)
    assert before.returncode is not None, "the process still runs"
    doubled(1000)
    assert process().pid != before.pid and process().poll() is None


def test_a_process_that_was_killed_between_launches_is_replaced() -> None:  # B121
    doubled(1)
    before = process()
    before.kill()
    before.wait()
    for first in (2, 3):
        doubled(first)
    assert process().pid != before.pid


def test_a_process_that_dies_before_it_is_asked_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:  # B121
    """Between the look at it and the request: no BrokenPipeError."""
    def run(self: Worker, *arguments: Any) -> dict[str, Any]:
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        return real(self, *arguments)

    real = Worker.run
    with monkeypatch.context() as patch:
        patch.setattr(Worker, "run", run)
        with pytest.raises(VerifyError, match="SIGKILL, which comes from outside"):
            doubled(1)
    doubled(2)


def test_a_call_within_a_call_has_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a signal handler calls a kernel: it must not cut the memory of the launch that it interrupts."""
    nested: list[int] = []

    def line(self: Worker, running: subprocess.Popen[bytes]) -> bytes:
        if not nested:
            nested.append(running.pid)
            doubled(7)
        nested.append(running.pid)
        return LINE(self, running)

    doubled(1)
    monkeypatch.setattr(Worker, "_line", line)
    doubled(100)
    assert len(set(nested)) == 2 and nested[0] == nested[-1] == process().pid


def test_a_thread_takes_its_process_along() -> None:
    found: list[subprocess.Popen[bytes]] = []

    def work() -> None:
        doubled(5)
        found.append(process())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found[0].wait(HANG_S) == -signal.SIGKILL


def test_what_lies_between_the_elements_of_out_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may write the other heads while this launch runs."""
    q = torch.randn(1, 16, 1, 64, dtype=torch.bfloat16)
    whole = torch.zeros(1, 16, 2, 64, dtype=torch.bfloat16)

    def line(self: Worker, running: subprocess.Popen[bytes]) -> bytes:
        whole[:, :, 1] = 7.0
        return LINE(self, running)

    monkeypatch.setattr(Worker, "_line", line)
    flashgen.attention(q, q, q, out=whole[:, :, :1])
    assert (whole[:, :, 1] == 7.0).all() and whole[:, :, 0].any()


# ---- objects that cannot be loaded

@pytest.mark.parametrize("which", ["machine", "kernel"])
def test_an_object_that_cannot_be_loaded_is_named(which: str, tmp_path: Path,  # B122
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"\x7fELF")
    doubled(1)
    with monkeypatch.context() as patch:
        if which == "machine":
            patch.setattr(client, "runtime_library", lambda: broken)
            kernel._local.worker.stop()
        else:
            patch.setattr(emulator_kit, "compile_kernel", lambda source: broken)
        with pytest.raises(EnvironmentError_) as caught:
            doubled(2)
    assert caught.value.where == str(broken) and "flashgen cache clear" in caught.value.next
    doubled(3)


# ---- forks and the end

FORK = """
import os, threading, torch, flashgen
from flashgen.runtime.emulator import client, kernel
from flashgen.runtime.select.lookup import registry
torch.set_num_threads(2)
torch.empty(1 << 20).fill_(1.0)     # now OpenMP's threads are there, which no fork inherits
a, b = (torch.randn(1, 20, 2, 64).bfloat16() for _ in range(2))
right = [flashgen.attention(t, t, t) for t in (a, b)]
held, go = threading.Event(), threading.Event()
def hold():
    flashgen.attention(a, a, a)     # has a worker of its own
    with registry._lock:
        held.set(); go.wait()
thread = threading.Thread(target=hold); thread.start(); held.wait()
parent = kernel._local.worker._process.pid
pid = os.fork()
if pid == 0:
    assert [w._process for w in client._workers] == [None, None][:len(client._workers)]
    assert all(torch.equal(flashgen.attention(b, b, b), right[1]) for _ in range(3))
    assert kernel._local.worker._process.pid != parent
    c = b[..., :32]
    flashgen.attention(c, c, c)     # a kernel that was not looked up before: takes the registry's lock
    kernel._local.worker.stop()
    os._exit(7)
assert all(torch.equal(flashgen.attention(a, a, a), right[0]) for _ in range(3))
assert kernel._local.worker._process.pid == parent
print("child", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])); go.set(); thread.join()
"""


def test_a_fork_has_its_own_process_memory_and_locks() -> None:  # B119
    done = script(FORK)
    assert done.stdout == "child 7\n" and done.returncode == 0, done.stderr


SPIN = """
import os, signal, sys
import numpy as np
from emulator_kit import run_case, small_case
from flashgen.runtime.emulator.client import Worker
from flashgen.runtime.emulator.schedule import Schedule
def run(body):
    case = small_case("spin", body)
    run_case(case, case.inputs(np.random.default_rng(0)), Schedule())
if sys.argv[1:]:
    run("p.out[t] = t;")
Worker._line = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
run("volatile uint32_t x = 1;\\nwhile (x) {}")
"""


@pytest.mark.parametrize("begun", [[], ["begun"]])
def test_no_process_is_left_when_this_one_is_killed(begun: list[str]) -> None:
    """Not even one that runs a kernel that spins, and so never sees its input end; nor one that has yet to begin."""
    assert script(SPIN, *begun).returncode == -signal.SIGKILL
