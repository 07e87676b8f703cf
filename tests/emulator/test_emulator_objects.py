"""What the emulator compiled: damage, folders that cannot be written, and temporary folders that go again."""
from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import filelock
import pytest
from emulator_kit import case_plan, small_case

from flashgen.errors import EnvironmentError_
from flashgen.runtime.emulator import objects
from flashgen.runtime.emulator.kernel import EmulatedKernel

KEY, DATA = "a" * 64, b"object" * 100
HANG_S = 240


class Builder:
    """Stands for the compiler, and counts."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> bytes:
        self.count += 1
        return DATA


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Builder:
    """For a process that has seen nothing yet; its cache is tmp_path / "c", temporary folders are in tmp_path."""
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "c"))
    for name, value in (("_verified", {}), ("_temporary", None), ("_warned", False)):
        monkeypatch.setattr(objects, name, value)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(objects.tempfile, "tempdir", str(tmp_path / "tmp"))
    return Builder()


@pytest.fixture
def said() -> Iterator[list[str]]:
    """The warnings of a test, as they come."""
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        found: list[str] = []
        warnings.showwarning = lambda message, *_: found.append(str(message))  # type: ignore[assignment]
        yield found


def anew() -> None:
    """As in another process."""
    objects._verified.clear()


def test_an_object_is_built_once_and_found_again(build: Builder, said: list[str]) -> None:
    path = objects.kept(KEY, build)
    anew()
    assert objects.kept(KEY, build) == path and build.count == 1 and not said
    assert path.read_bytes().startswith(DATA)


def _to(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def _replaced_by(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "truncated": lambda path: _to(path, path.read_bytes()[:100]),
    "empty": lambda path: _to(path, b""),
    "half written": lambda path: _to(path, path.read_bytes()[:300] + bytes(332)),
    "one bit": lambda path: _to(path, bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:]),
    "without a checksum": lambda path: _to(path, DATA),
    "a link": lambda path: _replaced_by(path, lambda path: path.symlink_to("/dev/zero")),
    "a pipe": lambda path: _replaced_by(path, os.mkfifo),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_object_is_compiled_anew(kind: str, build: Builder, said: list[str]) -> None:  # B122
    path = objects.kept(KEY, build)
    DAMAGE[kind](path)
    anew()
    assert objects.kept(KEY, build) == path and build.count == 2
    assert len(said) == 1 and str(path) in said[0] and "damaged" in said[0]
    anew()
    assert objects.kept(KEY, build) == path and build.count == 2 and path.read_bytes().startswith(DATA)


def test_a_folder_in_place_of_an_object_costs_a_warning(build: Builder, said: list[str]) -> None:  # B122
    _replaced_by(objects.kept(KEY, build), Path.mkdir)
    anew()
    assert objects.kept(KEY, build).parent == objects.temporary() and build.count == 2 and len(said) == 2


def test_an_object_is_on_the_disk_before_it_has_its_name(build: Builder,  # B122
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def counted(name: str, real: Callable[..., None]) -> None:
        monkeypatch.setattr(os, name, lambda *arguments: (calls.append(name), real(*arguments)))

    counted("fsync", os.fsync)
    counted("replace", os.replace)
    objects.kept(KEY, build)
    assert calls == ["fsync", "replace"]


def test_a_file_that_goes_is_built_again(build: Builder) -> None:
    objects.kept(KEY, build).unlink()
    assert objects.kept(KEY, build).exists() and build.count == 2


def test_a_kernel_outlives_its_file(build: Builder) -> None:  # B122
    """As when the cache is cleared while a process holds the kernel."""
    case = small_case("outlives", "p.out[t] = t;")
    kernel = EmulatedKernel(case_plan(case), case.source())
    kernel.path.unlink()
    assert kernel.path.exists()


def _place(subject: Any, flags: int = os.O_CREAT, *_: object, **__: object) -> str:
    """The path that a call of `os` would change; "" if it only reads."""
    if isinstance(subject, int):
        return os.readlink(f"/proc/self/fd/{subject}")
    return str(subject) if not isinstance(flags, int) or flags & os.O_CREAT else ""


def failing_in(folder: Path, name: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """os.<name> fails where it would change something in `folder`, and works elsewhere."""
    real = getattr(os, name)

    def call(*arguments: Any, **keywords: Any) -> Any:
        place = str(arguments[0]) if name == "mkdir" else _place(*arguments)
        if place.startswith(str(folder)):
            raise OSError(number, os.strerror(number))
        return real(*arguments, **keywords)

    monkeypatch.setattr(os, name, call)


@pytest.mark.parametrize("name", ["mkdir", "open", "fsync", "replace"])
@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC, errno.EDQUOT])
def test_a_folder_that_cannot_be_written_costs_one_warning(  # B123
        name: str, number: int, build: Builder, said: list[str], tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever call finds out: the making of the folder, the lock, the file, its end, its name."""
    if name != "mkdir":
        (tmp_path / "c" / "emulator").mkdir(mode=0o700, parents=True)
        (tmp_path / "c").chmod(0o700)
    failing_in(tmp_path / "c", name, number, monkeypatch)
    paths = [objects.kept(key * 64, build) for key in "aab"]
    assert build.count == 2 and {path.parent for path in paths} == {objects.temporary()}
    assert len(said) == 1 and os.strerror(number) in said[0] and "FLASHGEN_CACHE_DIR" in said[0]
    assert not [path for path in (tmp_path / "c").rglob("*") if path.is_file() and path.suffix != ".lock"]


def test_hits_come_from_a_folder_that_cannot_be_written(build: Builder, said: list[str], tmp_path: Path,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:  # B123
    path = objects.kept(KEY, build)
    anew()
    for name in ("mkdir", "open", "replace"):
        failing_in(tmp_path / "c", name, errno.EROFS, monkeypatch)
    assert objects.kept(KEY, build) == path and build.count == 1 and said == []


def test_where_nothing_can_be_written_the_error_names_the_way_out(build: Builder, tmp_path: Path,  # B123
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    failing_in(tmp_path, "replace", errno.ENOSPC, monkeypatch)
    with pytest.warns(RuntimeWarning), pytest.raises(EnvironmentError_, match=r"(?s)No space left.*TMPDIR"):
        objects.kept(KEY, build)


def test_a_lock_that_is_never_released_is_not_waited_for_for_ever(build: Builder, said: list[str],  # B123
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "LOCK_TIMEOUT_S", 0.0)
    folder = objects.directory()
    assert folder is not None
    holder = filelock.FileLock(folder / f"{KEY}.so.lock")
    with ThreadPoolExecutor(1) as pool:
        pool.submit(holder.acquire).result()
        assert objects.kept(KEY, build).parent == folder and said == []
        pool.submit(holder.release).result()


# ---- temporary folders

SCRIPT = """
import os, sys, warnings
warnings.simplefilter("always")
from flashgen.runtime.emulator import objects
first = objects.kept("a" * 64, lambda: b"x")
pid = os.fork()
if pid == 0:
    assert objects.kept("b" * 64, lambda: b"x").parent == first.parent
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0 and first.exists()
assert sorted(os.listdir(os.environ["TMPDIR"])) == sorted([first.parent.name, *sys.argv[2:]])
if sys.argv[1] == "killed":
    os.kill(os.getpid(), 9)
"""


def homeless(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items()
                   if name not in ("FLASHGEN_CACHE_DIR", "XDG_CACHE_HOME")}
    return subprocess.run([sys.executable, "-c", SCRIPT, *arguments], capture_output=True, text=True, timeout=HANG_S,
                          env={**environment, "HOME": "/", "TMPDIR": str(folder),
                               "PYTHONPATH": os.pathsep.join(sys.path)})


def test_without_a_home_a_process_and_its_forks_have_one_folder_that_goes(tmp_path: Path) -> None:  # B136
    done = homeless(tmp_path, "ends")
    assert done.returncode == 0 and done.stderr.count("RuntimeWarning: flashgen") == 1, done.stderr
    assert "there is no home directory" in done.stderr and os.listdir(tmp_path) == []


def test_what_a_killed_process_left_goes_with_the_next(build: Builder, tmp_path: Path,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:  # B136
    """And what a living one holds, here this one, stays."""
    held = objects.temporary()
    folder = held.parent
    assert homeless(folder, "killed", held.name).returncode == -signal.SIGKILL
    assert len(os.listdir(folder)) == 2
    assert homeless(folder, "ends", held.name).returncode == 0
    assert os.listdir(folder) == [held.name]
