"""The house rules that can be checked: budgets, who may import whom, and what the repository does not say."""
from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAX_FILE_LINES, MAX_FUNCTION_LINES = 400, 60
# Raising a budget is a change to review: file -> why it is longer.
LONGER = {"tests/nvrtc/test_cache.py": "each way a directory or an entry can go wrong is a case"}
LONGER_FUNCTIONS = {f"tests/kit/drawer_{name}.py": "a list of cases" for name in ("copies", "kernels", "registers")}
SOURCES = [path for folder in ("codegen", "runtime", "flashgen/cli", "flashgen/compat", "tests", "benchmarks")
           for path in sorted((ROOT / folder).rglob("*.py"))] + sorted((ROOT / "flashgen").glob("*.py"))
# What mypy is told to overlook in the package. The number may only fall: lower it with each comment that goes.
MAX_TYPE_IGNORES = 25


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_budgets(path):
    text = path.read_text(encoding="utf-8")
    if relative(path) not in LONGER:
        assert text.count("\n") <= MAX_FILE_LINES
    if relative(path) in LONGER_FUNCTIONS:
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = (node.end_lineno or 0) - node.lineno + 1
            assert lines <= MAX_FUNCTION_LINES, f"{node.name} has {lines} lines"


def test_type_ignores():
    """Of the package alone: mypy does not read tests and benchmarks."""
    found = {relative(path): len(re.findall(r"#\s*type:\s*ignore", path.read_text(encoding="utf-8")))
             for path in SOURCES if relative(path).split("/")[0] not in ("tests", "benchmarks")}
    assert sum(found.values()) <= MAX_TYPE_IGNORES, {name: count for name, count in found.items() if count}


# What reads a clock or waits for one fails on a busy machine: tests count (tests/kit/counted.py). file: (name, why).
CLOCKS = {"sleep", "time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "process_time",
          "process_time_ns", "thread_time", "times", "timeit", "now", "utcnow", "getrusage"}
CLOCKS_ALLOWED = {"tests/nvrtc/test_cache.py": ("time", "entries are made older than they are")}
CLOCK_MODULES = {"time", "os", "timeit", "datetime", "resource"}


def clocks_in(tree: ast.AST) -> set[str]:
    """Names of functions of the clock that a module refers to, be it as `time.sleep`, be it imported by name."""
    found = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr in CLOCKS
             and isinstance(node.value, ast.Name) and node.value.id in CLOCK_MODULES}
    return found | {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
                    and node.module in CLOCK_MODULES for alias in node.names if alias.name in CLOCKS}


@pytest.mark.parametrize("path", sorted((ROOT / "tests").rglob("*.py")), ids=relative)
def test_tests_read_no_clock(path):
    allowed = CLOCKS_ALLOWED.get(relative(path), ("", ""))[0]
    assert clocks_in(ast.parse(path.read_text(encoding="utf-8"))) <= {allowed}


@pytest.mark.parametrize("text", ["import time\ntime.sleep(1)", "from time import perf_counter", "os.times()",
                                  "datetime.now()", "from timeit import timeit"])
def test_a_clock_is_found(text):
    assert clocks_in(ast.parse(text))


HEAVY = ("torch", "cuda", "numpy", "matplotlib")


@pytest.mark.parametrize("statement", [
    "import flashgen",
    "import flashgen.codegen.families.registry, flashgen.codegen.render, flashgen.codegen.lint",
    "import flashgen.codegen.explain.explain",
    "import flashgen.cli",
])
def test_light_imports(statement):
    """No torch, no CUDA; and codegen imports nothing of runtime."""
    code = f"{statement}\nimport sys; print('\\n'.join(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    modules = out.splitlines()
    assert not [m for m in modules if m.split(".")[0] in HEAVY]
    if "cli" not in statement:
        assert not [m for m in modules if m.startswith("flashgen.runtime")]


def test_no_machine_paths_or_hosts():
    """Nothing of the machine it was written on. The words are put together here, or this file would hold them."""
    forbidden = re.compile("|".join(("/wo" + "rk/", "/ro" + "ot/", "py" + "pi.org", "python" + "hosted")))
    tracked = subprocess.run(["git", "ls-files"], capture_output=True, text=True, cwd=ROOT)
    if tracked.returncode:
        pytest.skip("not a git checkout")
    found = []
    for name in tracked.stdout.splitlines():
        path = ROOT / name
        if path.is_file() and path.suffix != ".png":
            found += [name for line in path.read_text(encoding="utf-8").splitlines() if forbidden.search(line)]
    assert not found
