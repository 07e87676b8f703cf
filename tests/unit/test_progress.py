"""How far a command is: a bar on a terminal, lines elsewhere, counted here with a clock that the test turns."""
from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flashgen.cli.app import app
from flashgen.cli.progress import TELL_S, Ticks, loading_torch, progress
from flashgen.errors import EnvironmentError_

LIMIT_S = 240.0  # a test that would wait longer fails


class Turned(Ticks):
    """A clock that stands until `pass_` turns it."""

    def __init__(self) -> None:
        self.seconds, self.over = 0.0, False
        self._asked, self._answered = threading.Semaphore(0), threading.Semaphore(0)

    def now(self) -> float:
        return self.seconds

    def wait(self, seconds: float) -> bool:
        self._asked.release()
        assert self._answered.acquire(timeout=LIMIT_S)
        self.seconds += 0.0 if self.over else seconds
        return self.over

    def pass_(self) -> None:
        """Let one wait run out, and return when the next one has begun."""
        assert self._asked.acquire(timeout=LIMIT_S)
        self._answered.release()
        assert self._asked.acquire(timeout=LIMIT_S)
        self._asked.release()

    def stop(self) -> None:
        self.over = True
        self._answered.release()


def test_one_long_step_is_told_every_few_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    ticks = Turned()
    with progress("verifying", 1, ticks) as step:
        step(0, "kernel[4]")
        for _ in range(24):  # two minutes of one kernel
            ticks.pass_()
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == "" and len(lines) == 24 and ticks.seconds == 24 * TELL_S
    assert lines[0] == f"verifying: 0 of 1 done, {TELL_S:.0f} s; kernel[4]"
    assert lines[-1] == f"verifying: 0 of 1 done, {24 * TELL_S:.0f} s; kernel[4]"


def test_a_line_tells_the_last_news_only(capsys: pytest.CaptureFixture[str]) -> None:
    ticks = Turned()
    with progress("building", 300, ticks) as step:
        ticks.pass_()
        for done in range(300):
            step(done, f"k{done}")
        ticks.pass_()
    assert capsys.readouterr().err.splitlines() == ["building: 0 of 300 done, 5 s",
                                                    "building: 299 of 300 done, 10 s; k299"]


def test_quick_work_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("building", 10, Turned()) as step:
        step(1, "a")
    assert capsys.readouterr() == ("", "")


def test_nothing_is_told_after_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ZeroDivisionError), progress("building", 10):
        raise ZeroDivisionError
    assert "flashgen progress" not in {thread.name for thread in threading.enumerate()}
    assert capsys.readouterr() == ("", "")


def test_a_reader_of_the_lines_that_left_ends_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone:
        def write(self, text: str) -> None:
            raise BrokenPipeError

        def flush(self) -> None: ...
        def isatty(self) -> bool:
            return False

    monkeypatch.setattr(sys, "stderr", Gone())
    ticks = Turned()
    with progress("building", 10, ticks) as step:
        assert ticks._asked.acquire(timeout=LIMIT_S)
        ticks._answered.release()
        step(9, "the work goes on")


def test_a_bar_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with progress("building", 10) as step:
        step(4, "kernel[4]")
    out, err = capsys.readouterr()
    assert out == "" and "4/10" in err and "kernel[4]" in err


def test_torch_that_cannot_be_imported() -> None:
    words = r"(?s)torch cannot be imported: no libcudart.*next: flashgen doctor"
    with pytest.raises(EnvironmentError_, match=words), loading_torch():
        raise ImportError("no libcudart")


SMALL = ["fa2_fwd", "--variant", "fa2_fwd_bf16_d32", "--arch", "sm_80"]


@pytest.mark.parametrize(("arguments", "title", "where"), [
    (["build", *SMALL], "building", "flashgen.runtime.compile.build.build_specs"),
    (["bundle", *SMALL, "-o", "b"], "building", "flashgen.runtime.compile.build.build_specs"),
    (["verify", *SMALL, "--emulate"], "verifying, seed 0", "flashgen.runtime.verify.verify.verify_spec"),
    (["bench", "fa2_fwd", "--problem-grid", "{batch: 2, num_heads_q: 4, head_dim_qk: 64, seqlen_q: 64}"], "timing",
     "flashgen.runtime.measure.bench.bench"),
    (["tune", *SMALL], "building", "flashgen.runtime.measure.tune.build_specs"),
    (["trace", *SMALL], "tracing", "flashgen.runtime.emulator.trace.timeline"),
    (["doctor"], "checking", "flashgen.runtime.doctor.examine"),
])
def test_every_long_command_tells(arguments: list[str], title: str, where: str, monkeypatch: pytest.MonkeyPatch,
                                  tmp_path: Path) -> None:
    """While the long part of each command runs, one line is told for each tick, on standard error alone."""
    from flashgen.cli import progress as module
    from flashgen.runtime.launch import driver
    from flashgen.runtime.measure import device as bench_device

    class Fake:
        def __init__(self, *_: Any) -> None:
            self.data = "normal"

        def archs(self) -> tuple[str, ...]:
            return ("sm_80",)

    def work(*_: Any, **__: Any) -> Any:
        clocks[-1].pass_()
        clocks[-1].pass_()
        raise EnvironmentError_("enough")

    clocks: list[Turned] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "Ticks", lambda: clocks.append(Turned()) or clocks[-1])
    monkeypatch.setattr(driver, "need_device", lambda purpose, nearest: None)
    monkeypatch.setattr(bench_device, "CudaDevice", Fake)
    monkeypatch.setattr(where, work)
    result = CliRunner().invoke(app, [*arguments, "--json"])
    told = [line for line in result.stderr.splitlines() if line.startswith(f"{title}: ")]
    assert len(told) == 2 and result.exit_code == 8, result.output
    assert not any(line in result.stdout for line in told) and '"enough"' in result.stdout
