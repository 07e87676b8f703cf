"""The cache: what is in a key, damage, races, killed builders, and directories that cannot or must not be used."""
from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from tiny import HEADER, TEXT, tiny, tiny_plan, tiny_source

from flashgen.codegen.plan import Constant, Plan
from flashgen.codegen.source import Source
from flashgen.errors import CompileError, UnsupportedError
from flashgen.runtime import doctor
from flashgen.runtime.compile import cache as module
from flashgen.runtime.compile.cache import Cache, cache_key
from flashgen.runtime.compile.entry import FILES, META, Entry
from flashgen.runtime.emulator import objects


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The entry names that were really compiled in this process."""
    calls: list[str] = []
    real = module.compile_source

    def counted(source: Source, *, plan: Plan) -> object:
        calls.append(source.entry)
        return real(source, plan=plan)

    monkeypatch.setattr(module, "compile_source", counted)
    return calls


@contextmanager
def one_warning(match: str) -> Iterator[None]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    assert len(caught) == 1, [str(row.message) for row in caught]
    assert match in str(caught[0].message)


@contextmanager
def no_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def entries(directory: Path) -> list[Path]:
    return sorted(directory.glob("??/" + "?" * 64))


def leftovers(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.name.startswith(module.STAGING_PREFIX)]


# -- keys


def test_the_key_changes_with_everything_that_can_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, source = tiny()
    key = cache_key(source, plan)
    sources = [replace(source, text=source.text + " "), replace(source, entry="other"),
               replace(source, file_name="other.cu"), replace(source, arch="sm_86"),
               replace(source, headers=((HEADER[0], HEADER[1] + " "),)),
               replace(source, headers=(("flashgen/other.cuh", HEADER[1]),)), replace(source, headers=()),
               replace(source, options=("-lineinfo",))]
    plans = [replace(plan, constants=(Constant("N", 1, "why"),)), replace(plan, target="sm_86"),
             replace(plan, launch=replace(plan.launch, grid="other")), replace(plan, allowed_spill_bytes=8),
             tiny_plan(fields={"lse": False})]
    keys = [cache_key(changed, plan) for changed in sources] + [cache_key(source, changed) for changed in plans]
    for name, value in (("compile_options", lambda source: ("--other",)), ("nvrtc_version", lambda: (12, 9)),
                        ("SCHEMA", module.SCHEMA + 1)):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, value)
            keys.append(cache_key(source, plan))
    assert len({key, *keys}) == len(keys) + 1
    plan, source = tiny()
    assert cache_key(source, plan) == key


def test_pieces_cannot_be_shifted_between_text_and_headers() -> None:
    plan, source = tiny()
    moved = replace(source, headers=((HEADER[0] + HEADER[1][:1], HEADER[1][1:]),))
    assert cache_key(moved, plan) != cache_key(source, plan)


# -- hits


def test_a_second_cache_loads_the_same_entry_without_compiling(tmp_path: Path, compiles: list[str]) -> None:
    plan, source = tiny()
    built = Cache(tmp_path / "c").get_or_build(plan, source)
    again = Cache(tmp_path / "c").get_or_build(plan, source)
    assert compiles == ["tiny_add"] and (built.hit, again.hit) == (False, True)
    assert replace(again, hit=False) == built and again.path == entries(tmp_path / "c")[0]
    assert sorted(path.name for path in again.path.iterdir()) == sorted([*FILES, META])
    assert (again.path / "kernel.cu").read_text() == source.text
    assert Plan.from_json((again.path / "plan.json").read_text()) == plan


def test_memory_serves_without_the_disk(tmp_path: Path, compiles: list[str]) -> None:
    plan, source = tiny()
    cache = Cache(tmp_path / "c")
    cache.get_or_build(plan, source)
    shutil.rmtree(tmp_path / "c")
    assert cache.get_or_build(plan, source).hit and len(compiles) == 1


def test_a_moved_directory_with_other_times_is_still_a_hit(tmp_path: Path, compiles: list[str]) -> None:
    plan, source = tiny()
    Cache(tmp_path / "a").get_or_build(plan, source)
    (tmp_path / "elsewhere").mkdir()
    shutil.move(tmp_path / "a", tmp_path / "elsewhere" / "b")
    for path in (tmp_path / "elsewhere").rglob("*"):
        os.utime(path, (1, 1))
    assert Cache(tmp_path / "elsewhere" / "b").get_or_build(plan, source).hit and len(compiles) == 1


def test_a_hit_in_a_new_process_needs_no_elftools_jinja_or_filelock(tmp_path: Path) -> None:
    Cache(tmp_path).get_or_build(*tiny())
    code = ("import sys\n"
            "for name in ('elftools', 'jinja2', 'filelock', 'torch', 'pydantic'): sys.modules[name] = None\n"
            "from flashgen.runtime.compile.cache import Cache\nfrom tiny import tiny\n"
            "print(Cache(sys.argv[1]).get_or_build(*tiny()).hit)")
    assert python(code, tmp_path).communicate()[0].strip() == "True"


def test_new_directories_are_private(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        path = Cache(tmp_path / "c").get_or_build(*tiny()).path
    finally:
        os.umask(old)
    assert path is not None
    assert {(p.stat().st_mode & 0o777) for p in (tmp_path / "c", path.parent, path)} == {0o700}


# -- damage


def _truncate(length: int) -> Callable[[Path], object]:
    return lambda path: os.truncate(path, min(length, path.stat().st_size - 1))


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE: dict[str, Callable[[Path], object]] = {
    "truncated": _truncate(100), "empty": _truncate(0), "flipped": _flip, "missing": lambda path: path.unlink(),
    "random": lambda path: path.write_bytes(random.Random(0).randbytes(path.stat().st_size)),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b" "),
    "folder": _folder}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in DAMAGE for name in (*FILES, META)
                                            if (kind, name) != ("longer", META)])  # white space after JSON is no damage
def test_a_damaged_entry_is_dropped_and_rebuilt_once_with_one_warning(
        kind: str, name: str, tmp_path: Path, compiles: list[str]) -> None:
    plan, source = tiny()
    good = Cache(tmp_path).get_or_build(plan, source)
    assert good.path is not None
    DAMAGE[kind](good.path / name)
    assert Cache(tmp_path).get(plan, source) is None  # never served
    with one_warning("is damaged"):
        rebuilt = Cache(tmp_path).get_or_build(plan, source)
    assert rebuilt == good and len(compiles) == 2
    with no_warning():
        assert Cache(tmp_path).get_or_build(plan, source).hit
    assert len(compiles) == 2 and not leftovers(tmp_path)


@pytest.mark.parametrize("text", ["null", "[]", "{}", '{"digest": 1}', '"x"', "\xff", '{"digest": "", "files": 3}'])
def test_any_json_in_place_of_meta_is_damage(text: str, tmp_path: Path) -> None:
    plan, source = tiny()
    path = Cache(tmp_path).get_or_build(plan, source).path
    assert path is not None
    (path / META).write_bytes(text.encode("latin-1"))
    with one_warning("is damaged"):
        assert not Cache(tmp_path).get_or_build(plan, source).hit


def test_edited_resources_and_entries_under_another_key_are_damage(tmp_path: Path) -> None:
    plan, source = tiny()
    path = Cache(tmp_path).get_or_build(plan, source).path
    assert path is not None
    meta = json.loads((path / META).read_text())
    meta["resources"]["registers"] += 1
    (path / META).write_text(json.dumps(meta))
    with one_warning("is damaged"):
        good = Cache(tmp_path).get_or_build(plan, source)
    other = tiny("tiny_other")
    key = cache_key(other[1], other[0])
    shutil.copytree(path, tmp_path / key[:2] / key)
    with one_warning("is damaged"):
        assert Cache(tmp_path).get_or_build(*other).cubin.image != good.cubin.image


def test_a_file_or_an_empty_folder_in_place_of_the_entry_is_replaced(tmp_path: Path) -> None:
    plan, source = tiny()
    path = Cache(tmp_path).get_or_build(plan, source).path
    assert path is not None
    for make in (path.touch, path.mkdir):
        shutil.rmtree(path)
        make()
        with one_warning("is damaged"):
            assert Cache(tmp_path).get_or_build(plan, source).path == path
        assert Cache(tmp_path).get_or_build(plan, source).hit


def test_a_damaged_entry_that_cannot_be_replaced_still_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, source = tiny()
    path = Cache(tmp_path).get_or_build(plan, source).path
    assert path is not None
    os.truncate(path / "kernel.cubin", 100)
    monkeypatch.setattr(module.os, "rename", _raising(errno.EROFS))
    with one_warning("in memory"):
        entry = Cache(tmp_path).get_or_build(plan, source)
    assert entry.path is None and len(entry.cubin.image) > 100


# -- processes


def python(code: str, *arguments: object) -> subprocess.Popen[str]:
    paths = [*sys.path, os.environ.get("PYTHONPATH", "")]
    return subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], text=True, stdout=subprocess.PIPE,
                            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)})


def test_eight_processes_on_a_cold_cache_publish_one_entry_per_key(tmp_path: Path) -> None:
    code = ("import sys, warnings, zlib; warnings.simplefilter('error')\n"
            "from flashgen.runtime.compile.cache import Cache\nfrom tiny import tiny\n"
            "cache = Cache(sys.argv[1])\n"
            "built = [cache.get_or_build(*tiny(f'tiny_{i}')) for i in range(5)]\n"
            "print(*(not entry.hit for entry in built), *(zlib.crc32(entry.cubin.image) for entry in built))")
    runs = [python(code, tmp_path / "c") for _ in range(8)]
    rows = [run.communicate(timeout=120)[0].split() for run in runs]
    assert [run.returncode for run in runs] == [0] * 8
    assert len({tuple(row[5:]) for row in rows}) == 1  # all got the same kernels
    assert [sum(row[i] == "True" for row in rows) for i in range(5)] == [1] * 5  # each compiled once
    assert len(entries(tmp_path / "c")) == 5 and not leftovers(tmp_path / "c")
    for i in range(5):
        assert Cache(tmp_path / "c").get(*tiny(f"tiny_{i}")) is not None


def test_without_locks_a_race_still_publishes_one_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOCK_TIMEOUT_S", 0.0)
    plan, source = tiny()
    with ThreadPoolExecutor(4) as pool, no_warning():
        built = list(pool.map(lambda _: Cache(tmp_path).get_or_build(plan, source), range(4)))
    assert len({entry.cubin.image for entry in built}) == 1 and {entry.path for entry in built} == {*entries(tmp_path)}
    assert len(entries(tmp_path)) == 1 and not leftovers(tmp_path)


def test_a_builder_killed_with_the_lock_does_not_hold_up_the_next(tmp_path: Path) -> None:
    code = ("import signal, sys\nfrom flashgen.runtime.compile import cache\nfrom tiny import tiny\n"
            "def stuck(*args, **keywords):\n    print('holding', flush=True); signal.pause()\n"
            "cache.compile_source = stuck\ncache.Cache(sys.argv[1]).get_or_build(*tiny())")
    holder = python(code, tmp_path)
    assert holder.stdout is not None and holder.stdout.readline().strip() == "holding"
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    with no_warning():  # which a wait for the lock ends in
        assert Cache(tmp_path).get_or_build(*tiny()).path is not None


def test_a_builder_that_hangs_with_the_lock_is_not_waited_for_for_ever(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import filelock

    plan, source = tiny()
    monkeypatch.setattr(module, "LOCK_TIMEOUT_S", 0.2)
    (tmp_path / "locks").mkdir()
    holder = filelock.FileLock(tmp_path / "locks" / f"{cache_key(source, plan)}.lock")
    with ThreadPoolExecutor(1) as pool, no_warning():
        pool.submit(holder.acquire).result()  # in another thread: in this one filelock would call it a deadlock
        assert Cache(tmp_path).get_or_build(plan, source).path is not None
        pool.submit(holder.release).result()


# -- directories that cannot or must not be used


def _raising(number: int) -> Callable[..., object]:
    def fail(*arguments: object, **keywords: object) -> object:
        raise OSError(number, os.strerror(number))
    return fail


def served_from_memory(cache: Cache, match: str) -> Entry:
    """The entry for tiny(), after exactly one warning, also when a second kernel is asked for."""
    with one_warning(match):
        entry = cache.get_or_build(*tiny())
        cache.get_or_build(*tiny("tiny_second"))
    assert entry.path is None and entry.cubin.image and cache.get_or_build(*tiny()).hit
    return entry


@pytest.mark.parametrize("function", ["mkdir", "rename", "fsync"])
@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOSPC, errno.EDQUOT])
def test_a_failing_call_leaves_the_kernel_in_memory(function: str, number: int, tmp_path: Path,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, function, _raising(number))
    served_from_memory(Cache(tmp_path / "c"), os.strerror(number))
    assert not entries(tmp_path) and not leftovers(tmp_path)


@pytest.mark.parametrize("full_at", range(5))
def test_a_full_disk_at_any_file_leaves_no_trace(full_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writes = 0

    class Full:
        def __init__(self, file: object) -> None:
            self.file = file

        def write(self, data: bytes) -> int:
            nonlocal writes
            writes += 1
            if writes > full_at:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return self.file.write(data)  # type: ignore[attr-defined]

        def __getattr__(self, name: str) -> object:
            return getattr(self.file, name)

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *error: object) -> None:
            self.file.close()  # type: ignore[attr-defined]

    monkeypatch.setattr(module, "open", lambda *arguments: Full(open(*arguments)), raising=False)  # noqa: SIM115
    served_from_memory(Cache(tmp_path), "No space left")
    assert writes > full_at and not entries(tmp_path) and not leftovers(tmp_path)


def test_hits_are_served_from_a_directory_that_cannot_be_written(tmp_path: Path,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    Cache(tmp_path).get_or_build(*tiny())
    for function in ("mkdir", "rename", "utime"):
        monkeypatch.setattr(os, function, _raising(errno.EROFS))
    with no_warning():
        assert Cache(tmp_path).get_or_build(*tiny()).hit


def test_a_path_under_a_file_is_served_from_memory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    served_from_memory(Cache(tmp_path / "file" / "c"), "cannot be used")
    served_from_memory(Cache(tmp_path / "file"), "cannot be used")


@pytest.mark.parametrize("home", [None, "", "/"])
def test_without_a_home_kernels_stay_in_memory_and_the_variable_wins(
        home: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_CACHE_HOME", "FLASHGEN_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    if home is not None:
        monkeypatch.setenv("HOME", home)
    served_from_memory(Cache(), "no home directory")
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "c"))
    with no_warning():
        assert Cache().get_or_build(*tiny()).path == entries(tmp_path / "c")[0]


@pytest.mark.parametrize(("name", "trouble"), [
    ("~nosuchuser/x", "no such user"), ("~nosuchuser", "no such user"), ("x" * 300, "too long")])
def test_a_name_that_leads_nowhere_costs_one_warning(name: str, trouble: str, tmp_path: Path,  # B135
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", name)
    served_from_memory(Cache(), trouble)
    assert not list(tmp_path.iterdir())
    if name.startswith("~"):
        assert trouble in next(iter(doctor._cache())).detail


def test_a_relative_name_needs_a_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # B135
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", "c")
    served_from_memory(Cache(), "current folder is gone")
    served_from_memory(Cache("c"), "current folder is gone")


def test_the_default_directory_is_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLASHGEN_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert Cache().directory == tmp_path / "flashgen"


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702, 0o1777])
def test_a_directory_that_others_can_write_is_neither_read_nor_written(mode: int, tmp_path: Path) -> None:
    Cache(tmp_path / "c").get_or_build(*tiny())
    before = sorted((tmp_path / "c").rglob("*"))
    (tmp_path / "c").chmod(mode)
    assert served_from_memory(Cache(tmp_path / "c"), "others can write").hit is False
    assert sorted((tmp_path / "c").rglob("*")) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_directory_or_an_entry_of_another_user_is_not_used(tmp_path: Path) -> None:
    path = Cache(tmp_path / "c").get_or_build(*tiny()).path
    assert path is not None
    os.chown(path, 12345, -1)
    with one_warning("belongs to another user"):
        assert not Cache(tmp_path / "c").get_or_build(*tiny()).hit
    os.chown(tmp_path / "c", 12345, -1)
    served_from_memory(Cache(tmp_path / "c"), "belongs to another user")


# -- refusals


def test_no_compile_serves_hits_and_names_the_command_on_a_miss(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiles: list[str]) -> None:
    Cache(tmp_path).get_or_build(*tiny())
    monkeypatch.setenv("FLASHGEN_NO_COMPILE", "1")
    assert Cache(tmp_path).get_or_build(*tiny()).hit
    with pytest.raises(UnsupportedError, match=r"flashgen build specs/tiny_fwd\.yaml"):
        Cache(tmp_path).get_or_build(*tiny("tiny_other"))
    assert len(compiles) == 1
    assert Cache(tmp_path).build(*tiny("tiny_other")).path is not None  # asked for by name
    monkeypatch.setenv("FLASHGEN_NO_COMPILE", "0")
    assert Cache(tmp_path).get_or_build(*tiny("tiny_third")).path is not None


def test_a_refused_kernel_leaves_no_entry_and_its_text_where_the_error_says(tmp_path: Path) -> None:
    plan, source = tiny(text=TEXT + "oops")
    with pytest.raises(CompileError, match="rendered source") as caught:
        Cache(tmp_path).get_or_build(plan, source)
    path = tmp_path / "failed" / "tiny_add.sm_80.cu"
    assert str(path) in caught.value.next and path.read_text() == source.text
    assert not entries(tmp_path) and not leftovers(tmp_path)


# -- upkeep


def filled(directory: Path, count: int) -> list[Path]:
    """Entries last used 10, 20, ... seconds after 1970."""
    paths = []
    for i in range(count):
        path = Cache(directory).get_or_build(*tiny(f"tiny_{i}")).path
        assert path is not None
        os.utime(path, (10 * i + 10, 10 * i + 10))
        paths.append(path)
    return paths


def test_ls_lists_entries_with_sizes_oldest_first(tmp_path: Path) -> None:
    paths = filled(tmp_path, 3)
    os.truncate(paths[1] / META, 3)
    os.utime(paths[1], (20, 20))
    items = Cache(tmp_path).ls()
    assert [item.path for item in items] == paths and [item.used for item in items] == [10, 20, 30]
    assert [item.variant for item in items] == ["tiny_0", "(damaged)", "tiny_2"] and items[0].arch == "sm_80"
    assert items[0].bytes == sum(path.stat().st_size for path in paths[0].iterdir())
    assert Cache(tmp_path / "absent").ls() == []


def test_a_hit_counts_as_use(tmp_path: Path) -> None:
    paths = filled(tmp_path, 2)
    Cache(tmp_path).get_or_build(*tiny("tiny_0"))
    assert [item.path for item in Cache(tmp_path).ls()] == [paths[1], paths[0]]


def test_prune_by_size_and_by_age(tmp_path: Path) -> None:
    paths = filled(tmp_path, 4)
    cache = Cache(tmp_path)
    assert cache.prune(max_bytes=10**9, max_age_s=time.time()) == []
    assert [item.path for item in cache.prune(max_age_s=time.time() - 15)] == [paths[0]]
    sizes = {item.path: item.bytes for item in cache.ls()}
    assert [item.path for item in cache.prune(max_bytes=sizes[paths[2]] + sizes[paths[3]])] == [paths[1]]
    assert entries(tmp_path) == sorted(paths[2:]) and not leftovers(tmp_path)
    assert cache.prune(max_bytes=0) and not entries(tmp_path)


def test_prune_reaps_what_dead_processes_left_and_spares_living_ones(tmp_path: Path) -> None:
    filled(tmp_path, 1)
    bucket = entries(tmp_path)[0].parent
    old, new = bucket / f"{module.STAGING_PREFIX}old", tmp_path / f"{module.STAGING_PREFIX}new"
    for path in (old, new):
        path.mkdir()
    os.utime(old, (0, 0))
    Cache(tmp_path).prune()
    assert leftovers(tmp_path) == [new] and len(entries(tmp_path)) == 1


def test_clear_deletes_entries_and_nothing_else(tmp_path: Path) -> None:
    """Foreign files stay, and what symbolic links point at stays, inside and outside the directory."""
    directory, outside = tmp_path / "c", tmp_path / "outside"
    with pytest.raises(CompileError):
        Cache(directory).get_or_build(*tiny("tiny_bad", text="oops"))
    paths = filled(directory, 3)
    outside.mkdir()
    kept = [outside / "kernel.cu", directory / "notes.txt", directory / "ab" / "x", paths[0] / "mine.txt"]
    for path in kept:
        path.parent.mkdir(exist_ok=True)
        path.touch()
    links = [directory / "ab" / ("ab" + "0" * 62), directory / "cd", directory / f"{module.STAGING_PREFIX}x"]
    for link in links:
        link.symlink_to(outside)
    (paths[1] / "log.txt").unlink()
    (paths[1] / "log.txt").symlink_to(outside / "kernel.cu")
    cache = Cache(directory)
    assert {item.path for item in cache.clear()} == {paths[1], paths[2]}
    assert not paths[1].exists() and all(path.exists() for path in kept) and all(link.is_symlink() for link in links)
    assert not list(directory.glob("failed/*")) and not list(directory.glob("locks/*"))
    assert cache.get(*tiny("tiny_1")) is None


def test_the_emulators_objects_are_counted_and_cleared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that its toolchain publishes, with their locks and leftovers; foreign files and links stay."""
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "c"))
    cache = Cache()
    assert cache.emulator_objects() == {}
    made = {objects.kept(name * 64, lambda: b"x" * 7): 7 + objects.DIGEST_BYTES for name in "ab"}
    assert cache.emulator_objects() == made and cache.ls() == []

    folder, outside = tmp_path / "c" / "emulator", tmp_path / "outside.so"
    kept = [outside, folder / "mine.so", folder / ("a" * 64), folder / ("c" * 64 + ".so")]
    spare = [folder / ("a" * 64 + ending) for ending in (".1234", ".x1_y2z3w", ".so.lock")]
    for path in (*kept[:3], *spare):
        path.write_bytes(b"kept")
    kept[3].symlink_to(outside)
    assert cache.emulator_objects() == made
    assert cache.prune(max_bytes=0) == [] and cache.emulator_objects() == made
    assert cache.clear() == [] and cache.emulator_objects() == {}
    assert sorted(folder.iterdir()) == sorted(kept[1:]) and outside.read_bytes() == b"kept"


def test_a_linked_emulator_folder_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    kept = tmp_path / "outside" / ("a" * 64 + ".so")
    kept.touch()
    cache = Cache(tmp_path / "c")
    assert cache.directory is not None
    (cache.directory / "emulator").symlink_to(tmp_path / "outside")
    assert cache.emulator_objects() == {} and cache.clear() == [] and kept.exists()


def test_tiny_source_is_what_the_key_sees() -> None:
    plan = tiny_plan("a")
    assert cache_key(tiny_source(plan), plan) == cache_key(tiny_source(plan), Plan.from_json(plan.to_json()))
