"""What the emulator compiled: shared objects on disk, by content, whole or not at all.

    <cache>/emulator/<key>.so     the object; behind its last byte the SHA-256 of all before it, which loaders ignore

An object is verified when a process first takes it, and one that is not what was published is compiled anew. Where the
cache cannot be used, objects live in a temporary folder: of one process and its forks, gone when that process ends.
"""
from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

from flashgen.errors import EnvironmentError_
from flashgen.runtime.compile.cache import default_directory, directory_trouble, held
from flashgen.runtime.compile.entry import trusted

LOCK_TIMEOUT_S = 120.0   # as long as a compiler may take; then compile anyway
DIGEST_BYTES = hashlib.sha256().digest_size
TEMPORARY_PREFIX = "flashgen-objects-"

_verified: dict[str, Path] = {}   # by key
_temporary: Path | None = None
_warned = False
_lock = threading.Lock()          # of the temporary folder


def _in_child() -> None:
    global _lock
    _lock = threading.Lock()      # a thread that does not exist here may have held it


os.register_at_fork(after_in_child=_in_child)


def kept(key: str, build: Callable[[], bytes]) -> Path:
    """The file of an object. `build` compiles it where it is not there, or damaged.

    Raises what `build` raises, and EnvironmentError_ if no folder can hold it.
    """
    found = _verified.get(key)
    if found is not None and found.exists():
        return found
    folder = directory() or temporary()
    target = folder / f"{key}.so"
    if not _is_whole(target):
        with held(folder / f"{key}.so.lock", LOCK_TIMEOUT_S):
            if not _is_whole(target, warn=True):
                target = _published(build(), target)
    _verified[key] = target
    return target


def directory() -> Path | None:
    """Where objects outlive the process: below the kernel cache. None, after one warning, if that cannot be used."""
    cache = default_directory()
    trouble = directory_trouble(cache)
    if trouble is None and cache is not None:
        trouble = directory_trouble(cache / "emulator")
        if trouble is None:
            return cache / "emulator"
    _warn_once(trouble)
    return None


def temporary() -> Path:
    """A folder of this process, which removes it when it ends. A fork of it goes on using the same one.

    What a process leaves that is killed, the next one removes.
    """
    global _temporary
    with _lock:
        while _temporary is None or not _temporary.is_dir():  # not any more: its process ended before this fork of it
            try:
                _remove_abandoned()
                _temporary = Path(tempfile.mkdtemp(prefix=TEMPORARY_PREFIX))
                handle = os.open(_temporary, os.O_RDONLY)  # open, and so locked, for as long as the process is there
            except OSError as err:
                raise _full(err) from err
            with contextlib.suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_SH)
            atexit.register(_remove, _temporary, os.getpid())
        return _temporary


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned() -> None:
    """Remove this user's folders that no process holds."""
    for folder in Path(tempfile.gettempdir()).glob(f"{TEMPORARY_PREFIX}*"):
        with contextlib.suppress(OSError):
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(handle).st_uid == os.geteuid():
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(handle)


def _is_whole(path: Path, warn: bool = False) -> bool:
    """Whether the file is there, and is what was published."""
    try:
        # No link is followed, and a pipe in its place does not hold us up.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
            info = os.fstat(file.fileno())
            data = file.read() if stat.S_ISREG(info.st_mode) else b""
        why = "" if trusted(info.st_uid) else "it belongs to another user"
        if hashlib.sha256(data[:-DIGEST_BYTES]).digest() != data[-DIGEST_BYTES:]:
            why = f"its {len(data)} bytes do not end in their checksum"
    except FileNotFoundError:
        return False
    except OSError as err:
        why = err.strerror or str(err)
    if why and warn:
        warnings.warn(f"flashgen: {path} is damaged ({why}); compiling it anew", RuntimeWarning, stacklevel=2)
    return not why


def _published(data: bytes, target: Path) -> Path:
    """Where the object is now: at `target`, or after one warning in the temporary folder."""
    try:
        return _written(data, target)
    except OSError as err:
        if target.parent == _temporary:
            raise _full(err) from err
        _warn_once(f"{target.parent} cannot be written ({err.strerror})")
    try:
        return _written(data, temporary() / target.name)
    except OSError as err:
        raise _full(err) from err


def _written(data: bytes, target: Path) -> Path:
    handle, fresh = tempfile.mkstemp(prefix=f"{target.stem}.", dir=target.parent)
    try:
        with open(handle, "wb") as file:
            file.write(data + hashlib.sha256(data).digest())
            file.flush()
            os.fsync(file.fileno())  # or a power cut after the rename leaves half of it
        os.replace(fresh, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(fresh)
        raise
    return target


def _full(err: OSError) -> EnvironmentError_:
    return EnvironmentError_(f"the emulator can keep no compiled object ({err.strerror or err})",
                             where=tempfile.tempdir or "the folder for temporary files",
                             allowed="a cache folder, or a folder for temporary files, that can be written",
                             next="FLASHGEN_CACHE_DIR or TMPDIR names another one")


def _warn_once(trouble: str | None) -> None:
    """After the first warning the user knows."""
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(f"flashgen: the emulator compiles anew in every process: {trouble}. FLASHGEN_CACHE_DIR names "
                      "another directory", RuntimeWarning, stacklevel=2)
