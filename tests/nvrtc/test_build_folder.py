"""`flashgen build -o DIR` and then ninja. What is compiled is counted by the entries that the cache gains."""
from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny import TEXT, tiny, tiny_plan, tiny_source

import flashgen
from flashgen.errors import BundleError, EnvironmentError_
from flashgen.runtime.compile import build_folder
from flashgen.runtime.compile.build import Rendered
from flashgen.runtime.compile.build_folder import BuildFolder
from flashgen.runtime.compile.cache import Cache, cache_key
from flashgen.runtime.select.bundle import Bundle, write_bundle

PLAIN, CAUSAL, SCORED = "own_bf16_d32.sm_80", "own_bf16_d32_causal.sm_80", "scored_bf16_d32_x"
FIELDS = "family: fa2\npass: fwd\narch: sm_80\ndtype: bf16\nhead_dim_qk: 32\n"
CAUSAL_SLOT, SCORE_HEADER = "templates/slots/mask/causal.cuh.j2", "templates/include/flashgen/expression.cuh"
# A worker that is about to compile NAME ends ninja and itself, as the system does when memory runs out.
KILLER = """    if plan.kernel_name == os.environ.get("KILL_AT"):
        os.kill(int(os.environ["NINJA"]), 9)
        os.kill(os.getpid(), 9)
    _check_arch(source, plan)
"""


class House:
    """A copy of flashgen whose files a test may change, two spec files, and the command lines over them."""

    def __init__(self, root: Path, cache: Path) -> None:
        self.root, self.package, self.folder, self.cache = root, root / "lib" / "flashgen", root / "a b:c", cache
        shutil.copytree(Path(flashgen.__file__).parent, self.package)
        (root / "own.yaml").write_text(f"name: own\n{FIELDS}causal: [false, true]\n")
        (root / "scored.yaml").write_text(f"name: scored\n{FIELDS}score: score * 2.0 + kv_pos\n")
        self._seen = self.entries()

    def run(self, *command: str, code: int = 0, cwd: Path | None = None, **environment: str) -> str:
        """What a command says, on either stream."""
        env = {**os.environ, "PYTHONPATH": str(self.package.parent), "FLASHGEN_CACHE_DIR": str(self.cache),
               **environment}
        ended = subprocess.run(command, env=env, cwd=cwd or self.root, stdout=subprocess.PIPE, timeout=600,
                               stderr=subprocess.STDOUT, text=True)
        assert ended.returncode == code, ended.stdout
        return ended.stdout

    def build(self, *arguments: str, code: int = 0) -> str:
        return self.run(sys.executable, "-m", "flashgen", "build", *arguments, code=code)

    def ninja(self, *arguments: str) -> str:
        return self.run(sys.executable, "-m", "ninja", "-C", str(self.folder), *arguments)

    def failing_ninja(self, *arguments: str) -> str:
        """Its exit code is 1 or that of the worker, as its version has it."""
        with pytest.raises(AssertionError) as said:
            self.ninja(*arguments)
        return str(said.value)

    def entries(self) -> set[str]:
        return {path.parent.name for path in self.cache.glob("??/*/meta.json")}

    def compiled(self) -> int:
        """How many kernels were compiled since the last call."""
        before, self._seen = self._seen, self.entries()
        return len(self._seen - before)

    def append(self, name: str, text: str) -> None:
        with (self.package / name).open("a") as file:
            file.write(text)

    def images(self) -> set[str]:
        return {path.name.removesuffix(".cubin") for path in self.folder.glob("*.cubin")}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def house(tmp_path: Path, cache: Path) -> Iterator[House]:
    yield House(tmp_path.resolve(), cache)
    assert not [path for path in tmp_path.rglob(".flashgen/.*")]  # what was written beside its place, and not renamed


def edges(said: str) -> list[str]:
    """What ninja did, without the folder."""
    return re.findall(r"^\[\d+/\d+\] flashgen (.*) in ", said, re.MULTILINE)


IDLE = "no work to do"


@pytest.mark.slow
def test_a_build_leaves_ninja_nothing_to_do_and_what_is_lost_or_edited_there_comes_back(house: House) -> None:
    said = house.build("own.yaml", "-o", str(house.folder))
    assert f"kernels and build.ninja in {house.folder}" in said and house.images() == {PLAIN, CAUSAL}
    house.compiled()
    assert IDLE in house.ninja() and len(Bundle.load(house.folder).selectors()) == 2
    text = house.folder / f"{PLAIN}.cu"
    text.write_text(text.read_text() + "// an experiment\n")
    assert len(edges(house.ninja())) == 2 and house.compiled() == 1 and IDLE in house.ninja()
    assert Bundle.load(house.folder).get(next(iter(Bundle.load(house.folder).selectors()))) is not None
    image = house.folder / f"{CAUSAL}.cubin"
    before = image.read_bytes()
    image.unlink()
    assert any("compile" in edge for edge in edges(house.ninja())) and house.compiled() == 0
    assert image.read_bytes() == before and IDLE in house.ninja()
    assert "2 from the cache" in house.build("own.yaml", "-o", str(house.folder)) and house.compiled() == 0
    house.ninja()
    assert "experiment" not in text.read_text() and house.compiled() == 0 and IDLE in house.ninja()


@pytest.mark.slow
def test_ninja_alone_builds_and_then_what_an_edit_reaches(house: House, cache: Path) -> None:
    """The whole story: from sources only; comments of Python, of a template, of a header; a line of a spec."""
    house.cache = cache / "fresh"
    house.build("own.yaml", "scored.yaml", "-o", str(house.folder), "--jobs", "1", "--sources-only")
    assert house.compiled() == 0 and not house.images() and not (house.folder / "manifest.json").exists()
    # One worker compiles all three: its start is paid once.
    assert len(edges(house.ninja())) == 2 and house.compiled() == 3 and IDLE in house.ninja()
    scored = next(name for name in house.images() if name.startswith(SCORED))
    keys = {row.key for row in Bundle.load(house.folder)._rows.values()}
    assert keys == house.entries()  # what a call would look up

    house.append("codegen/families/fa2/lower.py", "# a comment\n")
    assert edges(house.ninja()) == ["sources of 3 kernels"] and house.compiled() == 0 and IDLE in house.ninja()

    texts = {name: (house.folder / f"{name}.cu").read_text() for name in (PLAIN, CAUSAL, scored)}
    house.append(CAUSAL_SLOT, "// a comment\n")
    house.ninja()
    assert house.compiled() == 1 and IDLE in house.ninja()
    assert [name for name in texts if (house.folder / f"{name}.cu").read_text() != texts[name]] == [CAUSAL]

    assert "expression.cuh" in texts[scored] and "expression.cuh" not in texts[PLAIN] + texts[CAUSAL]
    house.append(SCORE_HEADER, "// a comment\n")
    house.ninja()
    assert house.compiled() == 1 and IDLE in house.ninja()

    (house.root / "own.yaml").write_text(f"name: own\n{FIELDS}causal: true\nlse: [true, false]\n")
    house.ninja()  # which reads the new list of kernels before it starts
    assert house.compiled() == 1 and IDLE in house.ninja()
    assert house.images() == {CAUSAL, CAUSAL.replace(".", "_nolse."), scored}
    assert not [path for path in house.folder.rglob(f"{PLAIN}.*")]
    assert len(Bundle.load(house.folder).selectors()) == 3


@pytest.mark.slow
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_kernel_that_fails_stops_no_other_and_is_told_with_its_line(house: House, jobs: str) -> None:
    """In the same worker, or in another."""
    house.append("templates/include/flashgen/tile.cuh", f"// jobs {jobs}\n")
    house.append(CAUSAL_SLOT, "this is no CUDA;\n")
    said = house.build("own.yaml", "-o", str(house.folder), "--jobs", jobs, code=5)
    assert "ninja -C" in said and house.images() == {PLAIN} and house.compiled() == 1
    with pytest.raises(BundleError, match="manifest"):
        Bundle.load(house.folder)

    house.append("templates/include/flashgen/tile.cuh", "// and again\n")
    said = house.failing_ninja("-k", "0")
    line = 1 + (house.folder / f"{CAUSAL}.cu").read_text().splitlines().index("this is no CUDA;")
    assert f"error: {CAUSAL}.cu:{line}: NVRTC" in said and "Traceback" not in said
    assert house.compiled() == 1 and house.images() == {PLAIN}

    slot = house.package / CAUSAL_SLOT
    slot.write_text(slot.read_text().replace("this is no CUDA;\n", ""))
    house.ninja()
    assert house.compiled() == 1 and len(Bundle.load(house.folder).selectors()) == 2 and IDLE in house.ninja()


@pytest.mark.slow
def test_a_killed_ninja_goes_on_with_the_rest(house: House) -> None:
    module = house.package / "runtime" / "compile" / "nvrtc.py"
    module.write_text(module.read_text().replace("    _check_arch(source, plan)\n", KILLER, 1))
    house.append("templates/include/flashgen/tile.cuh", "// killed\n")
    house.build("own.yaml", "-o", str(house.folder), "--jobs", "1", "--sources-only")
    # The shell becomes ninja, whose number it hands on. `kill -9` of oneself is exit status -9 to the parent.
    script = f"NINJA=$$ exec {sys.executable} -c 'import ninja, os; os.execv(os.path.join(ninja.BIN_DIR, \"ninja\"), " \
             "[\"ninja\", \"-C\", os.environ[\"AT\"]])'"
    house.run("sh", "-c", script, code=-signal.SIGKILL, AT=str(house.folder), KILL_AT=CAUSAL)
    assert house.compiled() == 1 and house.images() == {PLAIN}
    house.ninja()
    assert house.compiled() == 1 and len(Bundle.load(house.folder).selectors()) == 2 and IDLE in house.ninja()


@pytest.mark.slow
def test_other_ninja_files_include_it(house: House) -> None:
    """Twice in one project, by relative and by absolute path; one of them into the project's own scope."""
    other, outer = house.root / "outer" / "kernels", house.root / "outer"
    house.build("own.yaml", "--variant", "own_bf16_d32", "-o", str(house.folder))
    house.build("own.yaml", "--variant", PLAIN.replace("d32", "d32_caus*"), "-o", str(other))
    image = f"{house.folder}/{PLAIN}.cubin".replace(" ", "$ ").replace(":", "$:")
    (outer / "build.ninja").write_text(
        "subninja kernels/build.ninja\n" f"include {house.folder}/kernels.ninja\n".replace(" b:", "$ b$:") +
        f"rule compile\n  command = cp $in $out\nbuild ours.bin: compile {image}\n")
    house.compiled()

    def ninja() -> str:
        return house.run(sys.executable, "-m", "ninja", cwd=outer)

    ninja()
    assert (outer / "ours.bin").read_bytes() == (house.folder / f"{PLAIN}.cubin").read_bytes()
    assert house.compiled() == 0 and IDLE in ninja()
    house.append("templates/slots/mask/full.cuh.j2", "// a comment\n")
    ninja()
    assert house.compiled() == 1 and IDLE in ninja()
    house.ninja()  # its own log does not know of the other project's run
    assert house.compiled() == 0 and IDLE in house.ninja() and not (outer / ".flashgen").exists()


@pytest.mark.slow
def test_what_is_wrong_with_a_spec_is_told_through_ninja(house: House) -> None:
    assert "--sources-only: there is no folder" in house.build("own.yaml", "--sources-only", code=2)
    house.build("own.yaml", "-o", str(house.folder), "--sources-only")
    (house.root / "own.yaml").write_text(f"name: own\n{FIELDS}causal: maybe\n")
    said = house.failing_ninja()
    assert re.search(r"error: .*own\.yaml:7:9: causal", said) and "Traceback" not in said and house.compiled() == 0


# -- without a process


def some(count: int = 2) -> list[Rendered]:
    plans = [tiny_plan(f"tiny_{number}", fields={"head_dim_v": number}) for number in range(count)]
    sources = map(tiny_source, plans)
    return [Rendered(plan, source.text, cache_key(source, plan)) for plan, source in zip(plans, sources, strict=True)]


def test_batches_are_few_and_leave_no_processor_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    for kernels, jobs, batches in ((1, None, 1), (3, 2, 2), (3, None, 3), (20, None, 16), (128, None, 16),
                                   (500, None, 63), (9, 1, 2)):
        names = [f"kernel_{number}" for number in range(kernels)]
        found = build_folder._batches(names, jobs)
        assert len(found) == batches and max(map(len, found)) <= build_folder.BATCH
        assert sorted(name for batch in found for name in batch) == sorted(names)


def test_workers_are_as_many_as_memory_allows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_folder, "jobs_default", lambda: 7)
    for jobs, depth in ((None, 7), (3, 3)):
        BuildFolder(tmp_path).write_sources(some(1), [], [], jobs)
        text = (tmp_path / "kernels.ninja").read_text()
        assert f"depth = {depth}" in text and text.count("pool = ") == 3


def test_sources_are_as_old_as_what_they_were_made_of(tmp_path: Path) -> None:
    """An edit while they are made is newer than they are; and what stays as it was keeps its time."""
    folder = BuildFolder(tmp_path)
    folder.write_sources(some(), [], [], since_ns=10**18)
    folder.write_sources(some(), [], [], since_ns=2 * 10**18)
    assert {path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()} == {10**18}


def test_a_folder_is_a_bundle_only_while_it_is_whole(tmp_path: Path) -> None:
    plan, source = tiny("tiny_0")
    folder, entry = BuildFolder(tmp_path / "d"), Cache(tmp_path / "c").build(plan, source)
    folder.write_sources(some(1), [], [])
    with pytest.raises(BundleError, match=r"tiny_0.sm_80.row.json: No such file"):
        folder.write_manifest()
    folder.put(entry)
    assert len(Bundle.load(folder.write_manifest()).selectors()) == 1
    (tmp_path / "d" / ".flashgen" / "tiny_0.sm_80.row.json").write_text('{"variant": 1}')
    with pytest.raises(BundleError, match=r"row.json lacks `arch`"):
        folder.write_manifest()
    changed, _ = tiny("tiny_0", text=TEXT + "// changed\n")
    folder.write_sources([Rendered(changed, TEXT, "0" * 64)], [], [])
    with pytest.raises(BundleError, match=r"manifest.json cannot be read"):
        Bundle.load(tmp_path / "d")


def test_folders_that_are_somebody_elses_are_left_alone(tmp_path: Path) -> None:
    entry = Cache(tmp_path / "c").build(*tiny())
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").touch()
    for path in (tmp_path / "mine", tmp_path / "mine" / "thesis.txt", write_bundle([entry], tmp_path / "bundle")):
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(BundleError, match="is no build folder"):
            BuildFolder(path)
        assert sorted(tmp_path.rglob("*")) == before
    BuildFolder(tmp_path / "new").write_sources(some(), [], [])
    with pytest.raises(BundleError, match=r"not the bundle's|is not a bundle"):
        write_bundle([entry], tmp_path / "new")


@pytest.mark.parametrize("letter", "$|\n\r")
def test_names_that_ninja_has_no_spelling_for_are_refused(letter: str, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="cannot spell"):
        BuildFolder(tmp_path / f"a{letter}b")
    with pytest.raises(BundleError, match="cannot spell"):
        BuildFolder(tmp_path / "d").write_sources(some(), [tmp_path / f"a{letter}b.yaml"], [])
    assert not (tmp_path / "d").exists()


def test_without_the_package_the_error_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ninja.ninja_syntax", None)
    with pytest.raises(EnvironmentError_, match=r"(?s)ninja cannot be imported.*pip install"):
        BuildFolder(tmp_path).write_sources(some(), [], [])


def test_a_worker_whose_sources_are_gone_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                 capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    handler = signal.getsignal(signal.SIGINT)
    try:
        assert build_folder.main(["gone.sm_80"]) == 5
    finally:
        signal.signal(signal.SIGINT, handler)
    assert "error: gone.sm_80: its sources are gone" in capsys.readouterr().err
