"""doctor answers on any machine: whatever is missing, broken, hanging or crashing becomes a line with advice."""
from __future__ import annotations

import importlib.util
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from tiny import tiny

from flashgen.errors import BundleError
from flashgen.runtime import doctor
from flashgen.runtime.compile.cache import Cache
from flashgen.runtime.doctor import Finding, Report, examine
from flashgen.runtime.select.bundle import write_bundle


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("FLASHGEN_BUNDLE_PATH", "FLASHGEN_NO_COMPILE"):
        monkeypatch.delenv(name, raising=False)


def one(probe: str) -> Finding:
    findings = list(doctor.PROBES[probe]())
    assert len(findings) == 1, findings
    return findings[0]


def test_report_of_this_machine() -> None:
    report = examine()
    assert {f.name for f in report.findings} >= {"python", "packages", "nvrtc", "specs", "cache", "torch"}
    assert report.usable_for("build") and report.exit_code == 0
    for f in report.findings:
        assert f.status in ("ok", "warn", "fail") and f.detail
        assert f.status != "fail" or (f.next and f.needed_for in ("build", "run"))
    text = str(report)
    assert "build kernels: yes" in text and all(f.detail in text and f.next in text for f in report.findings)
    assert json.loads(json.dumps(report.to_json()))["build"] is True


@pytest.mark.parametrize(("failing", "build", "run", "code"), [
    ("", "yes", "yes", 0), ("run", "yes", "no", 0), ("build", "no", "only those", 8)])
def test_verdict(failing: str, build: str, run: str, code: int) -> None:
    report = Report((Finding("a", "ok", "fine"), Finding("b", "fail" if failing else "warn", "x", "y", failing)))
    assert report.exit_code == code
    assert f"build kernels: {build}" in str(report) and f"run kernels:   {run}" in str(report)


def test_one_probe_that_breaks_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Any:
        raise ZeroDivisionError("inside")

    monkeypatch.setitem(doctor.PROBES, "nvrtc", broken)
    monkeypatch.setattr(doctor, "_ask", lambda question: {"error": "none", "next": ""})
    found = {f.name: f for f in examine().findings}
    assert "ZeroDivisionError: inside" in found["nvrtc"].detail and found["cache"].status == "ok"


def test_missing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "jinja2" else real(name))
    found = one("packages")
    assert (found.status, found.needed_for, found.next) == ("fail", "build", "pip install jinja2")


@pytest.mark.parametrize(("body", "error"), [
    ("raise ImportError('libcudart.so.13 is missing')", "libcudart"),
    ("raise ValueError('odd')", "ValueError: odd"),
    ("import os; os.abort()", "exit status -6"),
    ("import signal; signal.pause()", "no answer within"),
    ("print('hello'); import sys; sys.exit(3)", "exit status 3"),
    ("__version__ = '9'", "AttributeError"),
])
def test_a_broken_torch_is_a_line(body: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text(body)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    if "pause" in body:
        monkeypatch.setattr(doctor, "CHILD_LIMIT_S", 0.5)  # of a child that never answers
    found = one("torch")
    assert found.status == "fail" and error in found.detail and found.needed_for == "run" and found.next


def test_chatter_of_a_library_does_not_spoil_the_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("print('welcome')\n__version__ = '9.9'\nclass version: cuda = None\n"
                                       "class cuda:\n    is_available = staticmethod(lambda: False)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert one("torch").detail == "9.9, built without CUDA"


def devices(*found: tuple[str, int]) -> dict[str, Any]:
    return {"driver": "580.65.06", "cuda": "13.0", "devices": list(found)}


@pytest.mark.parametrize(("answer", "run", "words"), [
    (devices(("NVIDIA H200", 90)), True, "runs sm_90, sm_90a"),
    (devices(("Tesla T4", 75)), False, "no target of flashgen runs on it"),
    (devices(("Tesla T4", 75), ("NVIDIA H200", 90)), True, "cuda:1 NVIDIA H200"),
    (devices(), False, "sees no device"),
    ({"error": "no libcuda", "next": ""}, False, "no libcuda"),
])
def test_devices(answer: dict[str, Any], run: bool, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_ask", lambda question: answer)
    report = Report(tuple(doctor.PROBES["driver"]()))
    assert report.usable_for("run") is run and report.usable_for("build") and words in str(report)


def test_an_old_compiler_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_ask", lambda question: {"nvrtc": "12.4", "archs": [80, 86, 89, 90]})
    found = one("nvrtc")
    assert found.status == "warn" and "sm_100a" in found.detail and "sm_90" not in found.detail


def test_no_compiler_forbids_building(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_ask", lambda question: {"error": "no NVRTC", "next": "pip install it"})
    found = one("nvrtc")
    assert (found.status, found.needed_for, found.next) == ("fail", "build", "pip install it")


def test_a_cache_that_is_not_there_yet_is_not_made(tmp_path: Path) -> None:
    assert one("cache").status == "ok" and not (tmp_path / "cache").exists()


def test_a_filled_cache(tmp_path: Path) -> None:
    Cache().get_or_build(*tiny())
    assert "1 kernels" in one("cache").detail


@pytest.mark.parametrize("kind", ["open", "file"])
def test_a_cache_that_may_not_be_used(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "cache"
    if kind == "open":
        path.mkdir()
        path.chmod(stat.S_IRWXU | stat.S_IRWXG | stat.S_IRWXO)
    else:
        path.write_text("")
    found = one("cache")
    assert found.status == "warn" and "FLASHGEN_CACHE_DIR" in found.next and str(path) in found.detail


def test_bundles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = write_bundle([Cache().get_or_build(*tiny())], tmp_path / "bundle")
    monkeypatch.setenv("FLASHGEN_BUNDLE_PATH", os.pathsep.join([str(good), str(tmp_path / "none")]))
    fine, missing = doctor.PROBES["bundles"]()
    assert fine.status == "ok" and "1 kernels for sm_80" in fine.detail
    assert missing.status == "fail" and missing.needed_for == "run" and missing.next
    with pytest.raises(BundleError):  # which is what a call would meet
        from flashgen.runtime.select.bundle import Bundle

        Bundle.load(tmp_path / "none")


def test_no_compile_is_mentioned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_NO_COMPILE", "1")
    assert [f.status for f in doctor.PROBES["bundles"]()] == ["ok", "warn"]
