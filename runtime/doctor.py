"""`flashgen doctor`: what this machine can do, and what to do about the rest. Starts where nothing else does.

Only the standard library is imported here. What could take the process down with it (NVRTC, the driver, torch) is asked
in a child process with a time limit. `python -m flashgen.runtime.doctor` is the same report without the command line.
"""
from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import flashgen.errors
from flashgen.errors import EnvironmentError_, FlashgenError

CHILD_LIMIT_S = 60.0  # a cold torch import from a slow disk takes half of it
PYTHON_MIN = (3, 10)
PACKAGES = {  # distribution -> module, of what building needs beside NVRTC
    "filelock": "filelock", "jinja2": "jinja2", "ninja": "ninja", "platformdirs": "platformdirs",
    "pydantic": "pydantic", "pyelftools": "elftools", "pyyaml": "yaml", "rich": "rich", "typer": "typer"}
_MARKS = {"ok": "ok  ", "warn": "WARN", "fail": "FAIL"}


@dataclass(frozen=True)
class Finding:
    """One line of the report. A `fail` takes away what `needed_for` names: "build", "run", or nothing ("")."""

    name: str
    status: str  # "ok", "warn" or "fail"
    detail: str
    next: str = ""
    needed_for: str = ""


@dataclass(frozen=True)
class Report:
    findings: tuple[Finding, ...]

    def usable_for(self, what: str) -> bool:
        """"build", or "run": driver, device and torch, with kernels from a build, a bundle or the cache."""
        return not any(f.status == "fail" and f.needed_for == what for f in self.findings)

    @property
    def exit_code(self) -> int:
        return 0 if self.usable_for("build") else EnvironmentError_.exit_code

    def to_json(self) -> dict[str, Any]:
        return {"build": self.usable_for("build"), "run": self.usable_for("run"),
                "findings": [asdict(finding) for finding in self.findings]}

    def __str__(self) -> str:
        lines = []
        for f in self.findings:
            lines.append(f"{_MARKS[f.status]}  {f.name:<9} {f.detail}")
            if f.next:
                lines.append(f"      {'':<9} next: {f.next}")
        build, run = self.usable_for("build"), self.usable_for("run")
        run_text = "no" if not run else "yes" if build else "only those in a bundle or in the cache"
        return "\n".join([*lines, "", f"build kernels: {'yes' if build else 'no'}", f"run kernels:   {run_text}"])


def examine(progress: Callable[[int, str], None] = lambda done, what: None) -> Report:
    """Every probe, none of which can stop the others. Those that ask a child process wait for it side by side.

    `progress(probes done, the one that is waited for)` is called before each answer.
    """
    with ThreadPoolExecutor(len(ASKING)) as pool:
        asked = {name: pool.submit(_findings, name) for name in ASKING}
        here = {name: _findings(name) for name in PROBES if name not in ASKING}
        findings: list[Finding] = []
        for done, name in enumerate(PROBES):
            progress(done, name)
            findings += asked[name].result() if name in asked else here[name]
    return Report(tuple(findings))


def _findings(name: str) -> list[Finding]:
    try:
        return list(PROBES[name]())
    except Exception as err:
        return [Finding(name, "fail", f"the check itself failed: {type(err).__name__}: {err}",
                        "report it with this line")]


def _python() -> Iterator[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    fine = sys.version_info >= PYTHON_MIN
    yield Finding("python", "ok" if fine else "fail", f"{version}, {sys.executable}",
                  "" if fine else f"python {'.'.join(map(str, PYTHON_MIN))} or later", "build")


def _packages() -> Iterator[Finding]:
    missing = [dist for dist, module in PACKAGES.items() if importlib.util.find_spec(module) is None]
    if missing:
        yield Finding("packages", "fail", f"missing: {', '.join(missing)}", f"pip install {' '.join(missing)}", "build")
    else:
        yield Finding("packages", "ok", ", ".join(f"{dist} {_version(dist)}" for dist in PACKAGES))


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "?"


def _compiler() -> Iterator[Finding]:
    from flashgen.codegen.target import TARGETS

    found = _ask("nvrtc")
    if "error" in found:
        yield Finding("nvrtc", "fail", found["error"], found["next"], "build")
        return
    ours = {name: target for name, target in TARGETS.items() if target.is_nvidia}
    absent = [name for name, target in ours.items() if target.cc not in found["archs"]]
    detail = f"{found['nvrtc']}, cuda-bindings {_version('cuda-bindings')}"
    if absent:
        yield Finding("nvrtc", "warn", f"{detail}; does not compile for {', '.join(absent)}",
                      "pip install a newer nvidia-cuda-nvrtc, or leave those targets out with --arch")
    else:
        yield Finding("nvrtc", "ok", f"{detail}; compiles for all of {', '.join(ours)}")


def _specs() -> Iterator[Finding]:
    try:
        from flashgen.codegen.spec.spec import load_specs, shipped_spec_paths

        paths = shipped_spec_paths()
        variants = sum(len(load_specs(path).specs) for path in paths)
    except (ImportError, FlashgenError) as err:
        yield Finding("specs", "fail", f"the shipped specs cannot be read: {err}", "reinstall flashgen", "build")
        return
    status = "ok" if paths else "fail"
    yield Finding("specs", status, f"{variants} variants in {len(paths)} shipped files",
                  "" if paths else "reinstall flashgen: its folder specs/ is empty", "build")


def _cache() -> Iterator[Finding]:
    from flashgen.runtime.compile.cache import Cache, default_directory, directory_trouble

    advice = "set FLASHGEN_CACHE_DIR to a directory that you alone can write; until then kernels live in memory"
    path = default_directory()
    if path is not None and path.is_absolute() and not os.path.exists(path):
        parent = next(p for p in path.parents if os.path.exists(p))
        fine = os.access(parent, os.W_OK)
        yield Finding("cache", "ok" if fine else "warn", f"{path}, " + (
            "made by the first build" if fine else f"cannot be made: {parent} is not writable"), "" if fine else advice)
        return
    trouble = directory_trouble(path)
    if trouble is not None or path is None:
        yield Finding("cache", "warn", trouble or "", advice)
        return
    items = Cache(path).ls()
    detail = (f"{path}, {len(items)} kernels, {sum(item.bytes for item in items) / 1e6:.1f} MB; "
              f"{shutil.disk_usage(path).free / 1e9:.1f} GB free")
    if not os.access(path, os.W_OK):
        yield Finding("cache", "warn", f"{detail}; read-only: what it lacks is compiled anew in every process", advice)
    else:
        yield Finding("cache", "ok", detail)


def _bundles() -> Iterator[Finding]:
    from flashgen.runtime.select.bundle import Bundle

    paths = [path for path in os.environ.get("FLASHGEN_BUNDLE_PATH", "").split(os.pathsep) if path]
    if not paths:
        yield Finding("bundles", "ok", "none on FLASHGEN_BUNDLE_PATH")
    for path in paths:
        try:
            selectors = Bundle.load(path).selectors()
        except FlashgenError as err:
            yield Finding("bundles", "fail", f"{path}: {err.what}", err.next, "run")
        else:
            archs = ", ".join(sorted({selector.arch for selector in selectors}))
            yield Finding("bundles", "ok", f"{path}: {len(selectors)} kernels for {archs}")
    if os.environ.get("FLASHGEN_NO_COMPILE", "") not in ("", "0"):
        yield Finding("compiling", "warn", "FLASHGEN_NO_COMPILE is set: a call whose kernel is neither in a bundle nor "
                      "in the cache raises")


def _driver() -> Iterator[Finding]:
    from flashgen.codegen.target import TARGETS

    found = _ask("driver")
    if "error" in found:
        yield Finding("driver", "fail", found["error"], "install an NVIDIA driver, and give a container access to the "
                      "GPU (--gpus all); building needs neither", "run")
        return
    yield Finding("driver", "ok", f"{found['driver'] or 'version unknown'}, for CUDA up to {found['cuda']}")
    if not found["devices"]:
        yield Finding("device", "fail", "the driver sees no device", "CUDA_VISIBLE_DEVICES must not hide it", "run")
    served = 0
    for index, (name, cc) in enumerate(found["devices"]):
        targets = [target for target, row in TARGETS.items() if row.runs_on(cc)]
        served += bool(targets)
        yield Finding("device", "ok" if targets else "warn", f"cuda:{index} {name}, compute capability {cc / 10:.1f}; "
                      + (f"runs {', '.join(targets)}" if targets else "no target of flashgen runs on it"))
    if found["devices"] and not served:
        yield Finding("device", "fail", "no device here runs any target", f"targets: {', '.join(TARGETS)}", "run")


def _torch() -> Iterator[Finding]:
    installed = importlib.util.find_spec("torch") is not None
    found = _ask("torch") if installed else {"error": "not installed", "next": ""}
    if "error" in found:
        yield Finding("torch", "fail", found["error"], "pip install torch; building needs none", "run")
    elif found["cuda"] is None:
        yield Finding("torch", "fail", f"{found['torch']}, built without CUDA",
                      "pip install a torch with CUDA, see pytorch.org; building needs none", "run")
    elif not found["available"]:
        yield Finding("torch", "fail", f"{found['torch']} for CUDA {found['cuda']} sees no device",
                      "the driver's CUDA must be at least torch's; see the lines on driver and device", "run")
    else:
        yield Finding("torch", "ok", f"{found['torch']} for CUDA {found['cuda']}, {found['devices']} devices")


PROBES: dict[str, Callable[[], Iterator[Finding]]] = {
    "python": _python, "packages": _packages, "nvrtc": _compiler, "specs": _specs, "cache": _cache,
    "bundles": _bundles, "driver": _driver, "torch": _torch}
ASKING = ("nvrtc", "driver", "torch")  # torch takes most of the time: 5 to 9 s of a cold import


# -- what is asked in a child process


def _ask_nvrtc() -> dict[str, Any]:
    from flashgen.runtime.compile.nvrtc import supported_archs, version_text

    return {"nvrtc": version_text(), "archs": supported_archs()}


def _ask_driver() -> dict[str, Any]:
    from flashgen.runtime.launch.driver import api, check, device_facts

    version = check(api().cuDriverGetVersion())
    devices = [device_facts(index) for index in range(check(api().cuDeviceGetCount()))]
    return {"driver": driver_version(), "cuda": f"{version // 1000}.{version % 1000 // 10}",
            "devices": [(device.name, device.cc) for device in devices]}


def _ask_torch() -> dict[str, Any]:
    import torch

    available = torch.cuda.is_available()
    return {"torch": torch.__version__, "cuda": torch.version.cuda, "available": available,
            "devices": torch.cuda.device_count() if available else 0}


QUESTIONS = {"nvrtc": _ask_nvrtc, "driver": _ask_driver, "torch": _ask_torch}


def driver_version() -> str | None:
    """Of the kernel driver, such as 580.65.06, as nvidia-smi gives it; None where that does not answer."""
    try:
        answer = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
                                capture_output=True, text=True, timeout=CHILD_LIMIT_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.split("\n")[0].strip() or None


def _ask(question: str) -> dict[str, Any]:
    """The answer of a child process, or {"error", "next"} where it fails, crashes or hangs."""
    package_parent = str(Path(flashgen.errors.__file__).parent.parent)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [package_parent, os.environ.get("PYTHONPATH")]))}
    command = [sys.executable, "-m", "flashgen.runtime.doctor", "--ask", question]
    try:
        child = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=CHILD_LIMIT_S,
                               env=env, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {CHILD_LIMIT_S:.0f} s", "next": ""}
    try:
        answer: dict[str, Any] = json.loads(child.stdout.splitlines()[-1])
        return answer
    except (IndexError, ValueError):
        last = (child.stderr.strip().splitlines() or ["no output"])[-1]
        return {"error": f"the check ended with exit status {child.returncode}: {last}", "next": ""}


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--ask"]:
        try:
            answer = QUESTIONS[arguments[1]]()
        except FlashgenError as err:
            answer = {"error": err.what, "next": err.next}
        except Exception as err:  # a broken package can raise anything
            answer = {"error": f"{type(err).__name__}: {err}", "next": ""}
        print(json.dumps(answer))
        return 0
    report = examine()
    print(json.dumps(report.to_json(), indent=1) if "--json" in arguments else report)
    return report.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
