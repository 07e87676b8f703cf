"""The house rules that can be checked: budgets, who may import whom, and what the repository does not say."""
from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from flashgen.codegen.families.registry import FAMILIES, passes

ROOT = Path(__file__).resolve().parents[2]
MAX_FILE_LINES, MAX_FUNCTION_LINES = 400, 60
# Raising a budget is a change to review: file -> why it is longer.
LONGER = {"tests/nvrtc/test_cache.py": "each way a directory or an entry can go wrong is a case"}
LONGER_FUNCTIONS = {f"tests/kit/drawer_{name}.py": "a list of cases" for name in ("copies", "kernels", "registers")}
SOURCES = [path for folder in ("codegen", "runtime", "flashgen/cli", "flashgen/compat", "tests", "benchmarks")
           for path in sorted((ROOT / folder).rglob("*.py"))] + sorted((ROOT / "flashgen").glob("*.py"))
# What mypy is told to overlook in the package. The number may only fall: lower it with each comment that goes.
MAX_TYPE_IGNORES = 14


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
    "import flashgen.codegen.families.registry, flashgen.codegen.render",
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


# ---- who may import whom, and who may name whom

PACKAGE = [path for path in SOURCES if relative(path).split("/")[0] in ("codegen", "runtime", "flashgen")]


def module_of(path: Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts if parts[0] == "flashgen" else ["flashgen", *parts]).removesuffix(".__init__")


MODULES = {module_of(path): ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE}


def imports_of(node: ast.AST) -> Iterator[str]:
    """Modules of the package that are imported anywhere, within functions as well, but for type checkers alone."""
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name in MODULES)
    if isinstance(node, ast.ImportFrom):
        for alias in node.names:
            full = f"{node.module}.{alias.name}"
            yield from {full if full in MODULES else str(node.module)} & MODULES.keys()
    for child in ast.iter_child_nodes(node):
        yield from imports_of(child)


IMPORTS = {name: {found for found in imports_of(tree) if found != "flashgen"} for name, tree in MODULES.items()}


def test_no_module_imports_itself_by_way_of_others():
    left = dict(IMPORTS)  # less those that import none of what is left, again and again
    while done := [name for name, found in left.items() if not found & left.keys() - {name}]:
        for name in done:
            del left[name]
    assert not left, f"these import each other, or modules that do: {sorted(left)}"


# What each part may not import: codegen is pure, and only the command line knows all.
ABOVE = {"flashgen.codegen": ("flashgen.runtime", "flashgen.cli", "flashgen.compat"),
         "flashgen.runtime": ("flashgen.cli", "flashgen.compat")}


@pytest.mark.parametrize("part", ABOVE)
def test_layers(part):
    above = {name: sorted(found for found in IMPORTS[name] if found.startswith(ABOVE[part]))
             for name in IMPORTS if name.startswith(part)}
    assert not {name: found for name, found in above.items() if found}


# Modules that still name a family, and how often. The numbers may only fall: lower them as names go.
NAMED = {
    "codegen/explain/counts.py": (1, "the word standard: what three kernels move, beside the kernel's own traffic"),
    "codegen/explain/text.py": (2, "likewise"),
    "codegen/expr/tiles.py": (3, "the printer of the language"),
    "codegen/target.py": (3, "the feature that targets of the language have"),
    "codegen/slots.py": (4, "the family whose skeletons have a slot"),
    "runtime/compile/build.py": (2, "the word standard: output and error"),
    "runtime/launch/engines.py": (1, "the engine of the language"),
    "runtime/launch/triton.py": (3, "the package, and a folder of its files"),
    "runtime/measure/device.py": (2, "a package whose version is noted"),
    "runtime/ops/attention/bench.py": (3, "names of peers"),
    "runtime/ops/attention/flex.py": (1, "the name of a shipped spec"),
    "runtime/ops/attention/overhead.py": (4, "names of rows on record"),
    "runtime/ops/attention/timed.py": (19, "names of peers"),
    "runtime/ops/attention/variants.py": (5, "the grid's specs, and its name"),
    "runtime/ops/attention_backward/bench.py": (1, "the name of a peer"),
    "runtime/ops/attention_backward/timed.py": (1, "the name of a peer"),
    "runtime/ops/mla_decode/bench.py": (2, "names of peers"),
    "runtime/ops/mla_decode/op.py": (1, "the blocks of its only family's launch"),
    "runtime/ops/mla_decode/overhead.py": (4, "names of rows on record"),
    "runtime/ops/mla_decode/timed.py": (6, "names of peers"),
    "flashgen/cli/bench.py": (3, "names of peers"),
    "flashgen/cli/check.py": (1, "the name of a shipped spec"),
}


# Families whose names are words, or a language's: texts count that are no more than the name, and paths.
ENGLISH = {"standard", "triton"}


def as_a_name(family: str) -> str:
    """A pattern of the family's name, also as a part of another name."""
    if family in ENGLISH:
        return rf"\A{family}\Z|families[./]{family}\b"
    return rf"(?<![A-Za-z0-9])({family}|{family.upper()})(?![A-Za-z0-9])"


def words_of(tree: ast.AST) -> Iterator[str]:
    """Every identifier and every text of a module."""
    for node in ast.walk(tree):
        for name in ("id", "attr", "arg", "name", "asname", "module"):
            if isinstance(value := getattr(node, name, None), str):
                yield value
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_families_are_named_in_their_folders_alone():
    """And in registry.py, which has a row for each."""
    found: Counter[str] = Counter()
    for path in PACKAGE:
        place = relative(path).removeprefix("codegen/families/").split("/")
        if relative(path) == "codegen/families/registry.py" or relative(path).startswith("flashgen/compat/"):
            continue
        pattern = re.compile("|".join(as_a_name(name) for name in FAMILIES if name != place[0]))
        found[relative(path)] += sum(len(pattern.findall(text)) for text in words_of(MODULES[module_of(path)]))
    assert not {name: count for name, count in found.items() if count > NAMED.get(name, (0, ""))[0]}


@pytest.mark.parametrize("folder", ["codegen/", "runtime/select/", "runtime/compile/", "flashgen/cli/"])
def test_passes_are_named_in_the_folders_of_families_alone(folder):
    """As values: `if spec.pass_ == "fwd"`. The words themselves are English."""
    for path in PACKAGE:
        if relative(path).startswith(folder) and not relative(path).startswith("codegen/families/"):
            texts = {node.value for node in ast.walk(MODULES[module_of(path)]) if isinstance(node, ast.Constant)}
            assert not texts & passes().keys(), relative(path)


def test_families_import_no_other_family():
    folders = {name: {found.split(".")[3] for found in IMPORTS[name] if found.startswith("flashgen.codegen.families.")}
               for name in IMPORTS if name.startswith("flashgen.codegen.families.")}
    for name, found in folders.items():
        if name != "flashgen.codegen.families.registry":
            assert not found & FAMILIES.keys() - {name.split(".")[3]}, name


def test_the_registry_is_light():
    """A bundle is served without pydantic, Jinja, specs and what lowers them."""
    code = "import flashgen.codegen.families.registry, sys; print('\\n'.join(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    loaded = set(out.splitlines())
    assert not loaded & {"pydantic", "jinja2", "yaml", "flashgen.codegen.spec.fields"}
    assert not [name for name in loaded if name.endswith(".lower") or name.startswith("flashgen.codegen.expr.")]


# Lines of codegen and runtime, less the emulator, which has two of many things. It rises with a new operation alone.
MAX_LINES = 22668


def test_lines():
    lines = {relative(path): path.read_text(encoding="utf-8").count("\n") for path in PACKAGE
             if relative(path).startswith(("codegen/", "runtime/")) and "runtime/emulator" not in relative(path)}
    assert sum(lines.values()) <= MAX_LINES
