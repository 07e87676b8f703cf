"""Markers `quick` and `gpu`, what they are held to, and `--on-cpu`: GPU tests with the reference for the kernels.

`--on-cpu` tests the tests: inputs, masks, slices and expectations must agree with the fp64 reference itself. Tests
that take the fixture `cuda` need a real device and are skipped there.
"""
from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Iterator
from contextlib import nullcontext
from types import FrameType
from typing import Any, TextIO

import pytest
import torch
from backward_kit import backward_by_reference
from kit import attention_by_reference
from mla_kit import mla_by_reference
from sampling import ROTATION

import flashgen
from flashgen.runtime.compile import nvrtc
from flashgen.runtime.emulator import toolchain

TIME_LIMIT_S = 120        # of a GPU test: a kernel that hangs must not hold the run
QUICK_KERNELS, TINY_LINES = 2, 60  # what a quick test may compile by NVRTC, beside texts of so many lines
HANG_GRACE_S = 30         # a wait inside the driver hears no signal; after this the process ends
_on_cpu, _stderr = pytest.StashKey[bool](), pytest.StashKey[TextIO]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--on-cpu", action="store_true", help="run the GPU tests on the CPU, against the reference itself")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device")
    config.addinivalue_line("markers", "time_limit(seconds): of a GPU test, in place of the default")
    torch.set_num_threads(1)  # workers share the cores already, and on a busy machine threads wait for each other
    config.stash[_on_cpu] = config.getoption("--on-cpu")
    capture = config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled() if capture else nullcontext():  # a hang's traceback must be seen
        config.stash[_stderr] = os.fdopen(os.dup(2), "w")


@pytest.hookimpl(tryfirst=True)  # before `-m quick` picks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.name.startswith("test_emulator_"):
            item.add_marker("slow")
        if item.get_closest_marker("slow") is None and item.get_closest_marker("gpu") is None:
            item.add_marker("quick")
    if hasattr(config, "workerinput"):  # the last tests that a worker has should be short ones
        items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu") is None:
            continue
        if "cuda" in getattr(item, "fixturenames", ()) or not config.stash[_on_cpu]:
            item.add_marker(pytest.mark.skip(reason="torch sees no CUDA device"))


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int) -> None:
    if exitstatus:
        terminalreporter.write_line(f"Samples of this run are repeated with TEST_ROTATION={ROTATION}.")


@pytest.fixture(autouse=True)
def _quick_is_cheap(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under `-m quick`, a test ends as skipped where it would compile for the emulator, or more than a few by NVRTC."""
    if "quick" not in request.config.option.markexpr:
        return
    compiled: list[str] = []

    def refuse(*arguments: object, **keywords: object) -> None:
        pytest.skip("compiles for the emulator: not quick")

    def count(source: Any, plan: object, check: Any = nvrtc._check_arch) -> None:
        if source.text.count("\n") > TINY_LINES:
            compiled.append(source.file_name)
        if len(compiled) > QUICK_KERNELS:
            pytest.skip(f"compiles more than {QUICK_KERNELS} kernels: not quick")
        check(source, plan)

    monkeypatch.setattr(toolchain, "kept", refuse)
    monkeypatch.setattr(nvrtc, "_check_arch", count)


@pytest.fixture(autouse=True)
def _time_limit(request: pytest.FixtureRequest) -> Iterator[None]:
    """TimeoutError in a GPU test past its limit; the end of the process where the wait cannot be interrupted."""
    if request.node.get_closest_marker("gpu") is None or not hasattr(signal, "SIGALRM"):
        yield
        return
    marker = request.node.get_closest_marker("time_limit")
    limit = int(marker.args[0]) if marker else TIME_LIMIT_S

    def expired(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"{request.node.nodeid} ran past {limit} s")

    previous = signal.signal(signal.SIGALRM, expired)
    signal.alarm(limit)
    faulthandler.dump_traceback_later(limit + HANG_GRACE_S, exit=True, file=request.config.stash[_stderr])
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


@pytest.fixture
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where GPU tests put their tensors: the CUDA device, or the CPU under --on-cpu."""
    if not request.config.stash[_on_cpu]:
        return "cuda"
    from flashgen.runtime.verify import verify  # here, so that tests of the build side run without it

    monkeypatch.setattr(flashgen, "attention", attention_by_reference, raising=False)
    monkeypatch.setattr(flashgen, "attention_backward", backward_by_reference, raising=False)
    monkeypatch.setattr(flashgen, "mla_decode", mla_by_reference, raising=False)
    monkeypatch.setattr(flashgen, "mla_schedule", lambda *sizes: None, raising=False)
    monkeypatch.setattr(verify, "current_device", lambda: ("cpu", 90))
    return "cpu"


@pytest.fixture
def cuda(device: str) -> str:
    """For what the reference cannot play: streams, graphs, refusals, torch.compile."""
    return device
