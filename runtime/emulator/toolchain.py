"""Compiles kernels and the emulator itself with the machine's C++ compiler; objects are cached by content.

A kernel's text and plain headers are compiled as they are. `host/` comes first on the include path, so that the drawer
(flashgen/ptx/) is the host's. `-fsanitize=thread` makes the compiler call a function at each load and store; those are
ours, and its own runtime is not linked.
"""
from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import filelock

from flashgen.codegen.source import Source
from flashgen.errors import CompileError, EnvironmentError_
from flashgen.runtime.cache import default_directory, directory_trouble

HERE = Path(__file__).resolve().parent
HOST = HERE / "host"
DRAWER = "flashgen/ptx/"
COMPILERS = ("g++", "clang++")
COMMON = ("-std=c++17", "-fPIC")
RUNTIME_FLAGS = (*COMMON, "-O2")
# -O1: at -O2 the compiler merges loads, and the hooks see less; the kernel runs no faster.
KERNEL_FLAGS = (*COMMON, "-O1", "-g1", "-fno-math-errno", "-ffp-contract=off", "-w", "-fsanitize=thread")
OWN_FLAGS = {"g++": ("--param", "tsan-instrument-func-entry-exit=0", "-fno-gnu-unique", "-Wno-psabi"),
              "clang++": ("-mllvm", "-tsan-instrument-func-entry-exit=0")}
COMPILE_TIMEOUT_S = 120


@functools.cache
def compiler() -> tuple[str, str]:
    """(name, version line) of the C++ compiler. EnvironmentError_ where there is none."""
    for name in COMPILERS:
        if shutil.which(name):
            version = subprocess.run([name, "--version"], capture_output=True, text=True, check=True).stdout
            return name, version.partition("\n")[0]
    raise EnvironmentError_("the emulator compiles kernels with a C++ compiler, and there is none on PATH",
                            allowed=" or ".join(COMPILERS), next="apt install g++")


@functools.cache
def directory() -> Path:
    """Where objects are kept: below the kernel cache, or a folder of this process where that cannot be used."""
    cache = default_directory()
    if cache is None or directory_trouble(cache) is not None:
        cache = Path(tempfile.mkdtemp(prefix="flashgen-"))
    folder = cache / "emulator"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def compile_kernel(source: Source) -> Path:
    """The shared object of a kernel, compiled if need be. Raises CompileError with the compiler's message."""
    headers = [(name, text) for name, text in source.headers if not name.startswith(DRAWER)]
    name, version = compiler()
    flags = (*KERNEL_FLAGS, *OWN_FLAGS[name])
    key = _digest(version, *flags, source.text, source.entry, source.file_name, *(part for h in headers for part in h),
                  *_texts(HOST))

    def build(target: Path) -> None:
        with tempfile.TemporaryDirectory(prefix="flashgen-") as folder:
            for path, text in [*headers, (source.file_name, source.text)]:
                file = Path(folder, path)
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text)
            wrapper = Path(folder, "launch.cpp")
            wrapper.write_text(f'#include "{source.file_name}"\nEMU_KERNEL({source.entry})\n')
            # Compiled and linked apart: with -fsanitize=thread in the link, the sanitizer's own runtime would come in.
            _run([name, *flags, f"-I{HOST}", "-I.", "-include", "cuda_shim.h", "-c", "launch.cpp", "-o", "launch.o"],
                 source.file_name, folder)
            _run([name, "-shared", "launch.o", "-o", str(target)], source.file_name, folder)

    return _cached(key, build)


def runtime_library() -> Path:
    """The shared object of the emulator itself, compiled if need be."""
    sources = sorted((HERE / "src").glob("*.cpp"))
    name, version = compiler()
    key = _digest(version, *RUNTIME_FLAGS, *_texts(HERE / "src"), str((HOST / "emu.h").read_text()))

    def build(target: Path) -> None:
        with tempfile.TemporaryDirectory(prefix="flashgen-") as folder, ThreadPoolExecutor() as pool:
            objects = [str(Path(folder, source.stem + ".o")) for source in sources]
            steps = [[name, *RUNTIME_FLAGS, "-c", str(source), "-o", made]
                     for source, made in zip(sources, objects, strict=True)]
            list(pool.map(lambda step: _run(step, "runtime/emulator", folder), steps))
            _run([name, "-shared", *objects, "-ldl", "-o", str(target)], "runtime/emulator", folder)

    return _cached(key, build)


def _cached(key: str, build: Callable[[Path], None]) -> Path:
    target = directory() / f"{key}.so"
    if not target.exists():
        with filelock.FileLock(f"{target}.lock", timeout=COMPILE_TIMEOUT_S):
            if not target.exists():
                fresh = target.with_suffix(f".{os.getpid()}")
                build(fresh)
                fresh.replace(target)
    return target


def _run(command: Sequence[str], what: str, folder: str) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S)
    if done.returncode != 0:
        raise CompileError(f"{compiler()[1]} refuses it", where=what, details=done.stderr[:4000],
                           next="the emulator compiles what NVRTC compiles: flashgen build shows its opinion")


def _texts(folder: Path) -> list[str]:
    return [path.read_text() for path in sorted(folder.rglob("*")) if path.is_file()]


def _digest(*parts: str) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(hashlib.sha256(part.encode()).digest())
    return digest.hexdigest()
