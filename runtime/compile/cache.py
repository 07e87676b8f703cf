"""Content-addressed cache of compiled kernels, on disk and in memory.

The key is a hash of exactly what decides the result, so nothing is ever stale: no times, no paths, no version
numbers beyond NVRTC's. An entry is a folder that is made elsewhere and renamed into place, so a reader sees all of
it or none; lengths and checksums are verified on load. The lock only saves duplicate work: without it, or after its
timeout, processes compile the same thing and the first rename wins. A directory that cannot be used costs one
warning, never the kernel.

    <directory>/<key[:2]>/<key>/{kernel.cu, kernel.cubin, plan.json, log.txt, meta.json}
    <directory>/locks/<key>.lock
    <directory>/failed/<variant>.<arch>.cu      the last text NVRTC refused
    <directory>/emulator/<key>.so               what the emulator compiled; emulator/objects.py writes and reads them
"""
from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import os
import re
import shutil
import stat
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from flashgen.codegen.plan import Plan
from flashgen.codegen.source import Source
from flashgen.errors import CompileError, UnsupportedError
from flashgen.files import BadFile
from flashgen.runtime.compile.cubin import as_text
from flashgen.runtime.compile.entry import (
    FILES,
    META,
    SCHEMA,
    Damaged,
    Entry,
    canonical,
    entry_files,
    read_entry,
    read_meta,
    trusted,
)
from flashgen.runtime.compile.nvrtc import compile_options, compile_source, nvrtc_version

STAGING_PREFIX = ".flashgen-"
STAGING_AGE_S = 3600.0   # older staging folders belong to processes that died
LOCK_TIMEOUT_S = 30.0    # several times the slowest compile; then compile anyway
_LOCK_POLL_S = 0.02


@dataclass(frozen=True)
class CacheItem:
    """One row of `flashgen cache ls`. `used` is the time of the last hit or of the build, in seconds since 1970."""

    key: str
    path: Path
    variant: str
    arch: str
    bytes: int
    used: float


def cache_key(source: Source, plan: Plan) -> str:
    """Hash (sha256, hex) of all that NVRTC sees and all that the launch is derived from."""
    options, version = (compile_options(source), nvrtc_version()) if plan.compiles_here else ((), None)
    seen = {"schema": SCHEMA, "text": source.text, "entry": source.entry, "file": source.file_name,
            "headers": source.headers, "arch": source.arch, "options": options, "nvrtc": version,
            "plan": plan.to_json()}
    return hashlib.sha256(canonical(seen)).hexdigest()


def default_directory() -> Path | None:
    """FLASHGEN_CACHE_DIR, else the user's cache folder. None if there is no home to put it in.

    A name that leads nowhere comes back as it is, relative: `directory_trouble` says so.
    """
    chosen = os.environ.get("FLASHGEN_CACHE_DIR")
    if chosen:
        found = os.path.expanduser(chosen)  # Path.expanduser raises for a user that does not exist
        return Path(found) if found.startswith("~") else _absolute(found)
    if not os.environ.get("XDG_CACHE_HOME") and os.environ.get("HOME", "") in ("", "/"):
        return None
    import platformdirs  # a caller who names a directory does not pay for it

    return platformdirs.user_cache_path("flashgen")


def _absolute(path: Path | str) -> Path:
    """`path` from the root; as it is if the current folder is gone."""
    try:
        return Path(os.path.abspath(path))
    except FileNotFoundError:
        return Path(path)


def directory_trouble(path: Path | None) -> str | None:
    """Make `path` if it is missing (mode 0700); say why it may not be used, or None if it may.

    Whoever can write the directory decides what runs on the GPU in this process: only its owner may. A directory of
    root is trusted, so that a container image can bring a filled one.
    """
    if path is None:
        return "there is no home directory"
    if not path.is_absolute():
        why = "no such user" if str(path).startswith("~") else "the current folder is gone"
        return f"{path} leads nowhere ({why})"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = path.stat()
    except (OSError, ValueError) as err:  # ValueError: a name with a NUL, or one that the file system cannot spell
        return f"{path} cannot be used ({getattr(err, 'strerror', None) or err})"
    if not trusted(info.st_uid):
        return f"{path} belongs to another user (uid {info.st_uid})"
    if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others can write {path} (mode {stat.S_IMODE(info.st_mode):04o}); chmod go-w makes it yours alone"
    return None


@contextlib.contextmanager
def held(path: Path, timeout_s: float) -> Iterator[None]:
    """Hold a lock file, or go on without it: it cannot be made, the file system has no locks, or the time is over.

    A lock here only saves work that several would do. The kernel releases it when its holder dies.
    """
    import filelock  # a hit does not pay for it

    with contextlib.ExitStack() as stack:
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            stack.enter_context(filelock.FileLock(path, timeout=timeout_s, poll_interval=_LOCK_POLL_S))
        except (OSError, NotImplementedError, RuntimeError):  # filelock.Timeout is an OSError
            pass  # RuntimeError: this thread holds it already, and a signal came in between
        yield


class Cache:
    """Kernels by key: in memory, then in `directory`, else compiled. Safe among threads and processes."""

    def __init__(self, directory: Path | str | None = None) -> None:
        """`directory` defaults to FLASHGEN_CACHE_DIR, then to the user's cache folder. Touches no file yet."""
        self._asked = _absolute(directory) if directory is not None else default_directory()
        self._memory: dict[str, Entry] = {}
        self._warned = False

    @functools.cached_property
    def directory(self) -> Path | None:
        """The directory, made and checked at first use; None, after one warning, if it may not be used."""
        trouble = directory_trouble(self._asked)
        if trouble is None:
            return self._asked
        self.warn_once(trouble)
        return None

    # -- kernels

    def get(self, plan: Plan, source: Source) -> Entry | None:
        """The entry if it is here and whole. Never compiles, and leaves a damaged entry to the next build."""
        try:
            return self._find(cache_key(source, plan), plan)
        except Damaged:
            return None

    def get_or_build(self, plan: Plan, source: Source) -> Entry:
        """The entry, compiled if need be.

        Raises UnsupportedError if FLASHGEN_NO_COMPILE is set and it is not here, CompileError if NVRTC refuses it.
        """
        entry = self.get(plan, source)
        if entry is None and os.environ.get("FLASHGEN_NO_COMPILE", "") not in ("", "0"):
            raise UnsupportedError(
                f"not in the cache ({self.directory or 'memory only'}), and FLASHGEN_NO_COMPILE forbids to compile it",
                where=plan.kernel_name,
                next=f"flashgen build specs/{plan.family}_{plan.pass_}.yaml, or the spec file that defines it")
        return entry or self._build(plan, source)

    def build(self, plan: Plan, source: Source) -> Entry:
        """As get_or_build for callers who were asked to compile: FLASHGEN_NO_COMPILE does not apply."""
        return self.get(plan, source) or self._build(plan, source)

    def remember(self, entry: Entry) -> None:
        """Serve `entry` from memory from now on."""
        self._memory[entry.key] = replace(entry, hit=True)

    def _build(self, plan: Plan, source: Source) -> Entry:
        key, stuck = cache_key(source, plan), None
        with held(self.directory / "locks" / f"{key}.lock", LOCK_TIMEOUT_S) if self.directory else (
                contextlib.nullcontext()):
            try:
                entry = self._find(key, plan)  # another process may have built it while we waited
                if entry is not None:
                    return entry
            except Damaged as err:
                stuck = self._drop(key)
                where = f"in memory, since it cannot be replaced ({stuck})" if stuck else "now"
                warnings.warn(f"flashgen: the cache entry of {plan.kernel_name} is damaged ({err}); rebuilding it "
                              f"{where}; key {key}", RuntimeWarning, stacklevel=4)
            try:
                cubin = compile_source(source, plan=plan) if plan.compiles_here else as_text(source.text)
            except CompileError as err:
                raise self._with_text_kept(err, source) from err
            entry = Entry(key, cubin, plan, source.text, None, False)
            entry = replace(entry, path=None if stuck else self._publish(entry))
        self.remember(entry)
        return entry

    # -- reading

    def _folder(self, key: str) -> Path | None:
        return self.directory / key[:2] / key if self.directory else None

    def _find(self, key: str, plan: Plan) -> Entry | None:
        if key in self._memory:
            return self._memory[key]
        folder = self._folder(key)
        entry = read_entry(folder, key, plan) if folder else None
        if entry is not None:
            self._memory[key] = entry
            with contextlib.suppress(OSError):
                os.utime(entry.path or "")  # "last used", for prune alone
        return entry

    def _drop(self, key: str) -> str | None:
        """Move an entry out of the way, then delete it. Says why if that is not possible."""
        folder = self._folder(key)
        assert folder is not None
        grave = None
        try:
            grave = tempfile.mkdtemp(prefix=STAGING_PREFIX, dir=folder.parent)
            os.rename(folder, Path(grave) / key)
        except OSError as err:
            return err.strerror or str(err)
        finally:
            if grave is not None:
                shutil.rmtree(grave, ignore_errors=True)
        return None

    # -- writing

    def _publish(self, entry: Entry) -> Path | None:
        """Write the entry beside its place and rename it there. None, after one warning, if it cannot be written."""
        folder = self._folder(entry.key)
        if folder is None:
            return None
        staging = None
        try:
            folder.parent.mkdir(mode=0o700, exist_ok=True)
            staging = Path(tempfile.mkdtemp(prefix=STAGING_PREFIX, dir=folder.parent))
            for name, data in entry_files(entry).items():
                with open(staging / name, "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())  # or a power cut after the rename leaves a damaged entry
            os.rename(staging, folder)
        except OSError as err:
            if err.errno in (errno.ENOTEMPTY, errno.EEXIST):  # another process was first: the same key, the same kernel
                return folder
            self.warn_once(f"{folder.parent.parent} cannot be written ({err.strerror})")
            return None
        finally:
            if staging is not None:
                shutil.rmtree(staging, ignore_errors=True)  # gone already if the rename went through
        return folder

    def _with_text_kept(self, err: CompileError, source: Source) -> CompileError:
        """`err` pointing at a copy of the refused text, if one can be written."""
        if self.directory is None:
            return err
        path = self.directory / "failed" / source.file_name
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            path.write_text(source.text)
        except OSError:
            return err
        fields = err.to_json()
        fields["next"] = "; ".join(filter(None, [err.next, f"the rendered source is {path}"]))
        return CompileError(**fields)

    def warn_once(self, trouble: str) -> None:
        """One warning per Cache: after the first, the user knows."""
        if not self._warned:
            self._warned = True
            warnings.warn(f"flashgen: kernels stay in memory: {trouble}. FLASHGEN_CACHE_DIR names another directory",
                          RuntimeWarning, stacklevel=4)

    # -- upkeep

    def ls(self) -> list[CacheItem]:
        """All entries, whole or not, the least recently used first."""
        items = [item for folder in self._entry_folders() if (item := _item(folder)) is not None]
        return sorted(items, key=lambda item: (item.used, item.key))

    def prune(self, max_bytes: int | None = None, max_age_s: float | None = None) -> list[CacheItem]:
        """Delete entries unused for `max_age_s` seconds, then the least recently used until `max_bytes` hold the
        rest. Returns what was deleted. Also deletes what processes that died left behind."""
        self._reap(STAGING_AGE_S)
        items = self.ls()
        oldest, total = time.time() - max_age_s if max_age_s is not None else None, sum(item.bytes for item in items)
        removed = []
        for item in items:
            too_old = oldest is not None and item.used < oldest
            if (too_old or (max_bytes is not None and total > max_bytes)) and self._remove(item):
                total -= item.bytes
                removed.append(item)
        return removed

    def clear(self) -> list[CacheItem]:
        """Delete every entry, lock, refused text and emulator object. Returns the deleted entries. Other files stay."""
        removed = [item for item in self.ls() if self._remove(item)]
        self._reap(0.0)
        if self.directory:
            rest = [path for pattern in ("locks/*.lock", "failed/*.cu") for path in self.directory.glob(pattern)]
            # With an object goes its lock, and what a process that died left beside it.
            for path in [*rest, *self._emulator_files(r"\.so|\.so\.lock|\.\w+")]:
                with contextlib.suppress(OSError):
                    path.unlink()
        return removed

    def emulator_objects(self) -> dict[Path, int]:
        """Bytes of each shared object that the emulator compiled."""
        found = {}
        for path in self._emulator_files(r"\.so"):
            with contextlib.suppress(OSError):
                found[path] = path.lstat().st_size
        return found

    def _emulator_files(self, ending: str) -> list[Path]:
        if self.directory is None:
            return []
        return [file for folder in _children(self.directory, "emulator")
                for file in _children(folder, rf"[0-9a-f]{{64}}({ending})", os.DirEntry.is_file)]

    def _entry_folders(self) -> Iterator[Path]:
        if self.directory is None:
            return
        for bucket in _children(self.directory, r"[0-9a-f]{2}"):
            yield from _children(bucket, rf"{bucket.name}[0-9a-f]{{62}}")

    def _remove(self, item: CacheItem) -> bool:
        self._memory.pop(item.key, None)
        if self._drop(item.key) is not None:
            return False
        with contextlib.suppress(OSError):
            (item.path.parent.parent / "locks" / f"{item.key}.lock").unlink()
        return True

    def _reap(self, age_s: float) -> None:
        """Delete staging folders that nobody has touched for `age_s` seconds."""
        if self.directory is None:
            return
        pattern = re.escape(STAGING_PREFIX) + ".*"
        buckets = [self.directory, *_children(self.directory, r"[0-9a-f]{2}")]
        for folder in [path for bucket in buckets for path in _children(bucket, pattern)]:
            with contextlib.suppress(OSError):
                if folder.lstat().st_mtime <= time.time() - age_s:
                    shutil.rmtree(folder)


def _children(parent: Path, pattern: str, is_kind: Callable[..., bool] = os.DirEntry.is_dir) -> list[Path]:
    """What is in `parent`, of a kind, no symbolic link, and with a name that matches `pattern` in full."""
    try:
        with os.scandir(parent) as rows:
            return [Path(row.path) for row in rows
                    if re.fullmatch(pattern, row.name) and is_kind(row, follow_symlinks=False)]
    except OSError:
        return []


def _item(folder: Path) -> CacheItem | None:
    """The row for an entry's folder; None if it holds anything that an entry does not."""
    try:
        used = folder.lstat().st_mtime
        sizes = {row.name: row.stat(follow_symlinks=False).st_size for row in os.scandir(folder)}
    except OSError:
        return None
    if not sizes.keys() <= {*FILES, META}:
        return None
    try:
        meta = read_meta(folder)
        variant, arch = meta.variant, meta.arch
    except (OSError, BadFile):
        variant, arch = "(damaged)", "?"
    return CacheItem(folder.name, folder, variant, arch, sum(sizes.values()), used)
