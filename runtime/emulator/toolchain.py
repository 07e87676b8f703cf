"""Compiles kernels and the emulator itself with the machine's C++ compiler; objects.py keeps what comes out.

A kernel's text and plain headers are compiled as they are. `host/` comes first on the include path, so that the drawer
(flashgen/ptx/) is the host's. `-fsanitize=thread` makes the compiler call a function at each load and store; those are
ours, and its own runtime is not linked.
"""
from __future__ import annotations

import functools
import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from flashgen.codegen.source import Source
from flashgen.errors import CompileError, EnvironmentError_
from flashgen.runtime.emulator.objects import kept

HERE = Path(__file__).resolve().parent
HOST = HERE / "host"
DRAWER = "flashgen/ptx/"
COMPILERS = ("g++", "clang++")
COMMON = ("-std=c++17", "-fPIC")
RUNTIME_FLAGS = (*COMMON, "-O3", "-ffp-contract=off")
# -O1: at -O2 the compiler merges loads, and the hooks see less; the kernel runs no faster.
KERNEL_FLAGS = (*COMMON, "-O1", "-g1", "-fno-math-errno", "-ffp-contract=off", "-w", "-fsanitize=thread")
OWN_FLAGS = {"g++": ("--param", "tsan-instrument-func-entry-exit=0", "-fno-gnu-unique", "-Wno-psabi"),
              "clang++": ("-mllvm", "-tsan-instrument-func-entry-exit=0")}
COMPILE_TIMEOUT_S = 120
FORMAT = "2"  # of an object's file: raise it when objects.py writes another


@functools.cache
def compiler() -> tuple[str, str]:
    """(name, version line) of the C++ compiler. EnvironmentError_ where there is none."""
    for name in COMPILERS:
        if shutil.which(name):
            version = subprocess.run([name, "--version"], capture_output=True, text=True, check=True).stdout
            return name, version.partition("\n")[0]
    raise EnvironmentError_("the emulator compiles kernels with a C++ compiler, and there is none on PATH",
                            allowed=" or ".join(COMPILERS), next="apt install g++")


def compile_kernel(source: Source) -> Path:
    """The shared object of a kernel, compiled if need be. Raises CompileError with the compiler's message."""
    headers = [(name, text) for name, text in source.headers if not name.startswith(DRAWER)]
    name, version = compiler()
    flags = (*KERNEL_FLAGS, *OWN_FLAGS[name])
    key = _digest(version, *flags, source.text, source.entry, source.file_name, *(part for h in headers for part in h),
                  *_texts(HOST))

    def build() -> bytes:
        with _workplace() as folder:
            for path, text in [*headers, (source.file_name, source.text)]:
                file = folder / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text)
            (folder / "launch.cpp").write_text(f'#include "{source.file_name}"\nEMU_KERNEL({source.entry})\n')
            # Compiled and linked apart: with -fsanitize=thread in the link, the sanitizer's own runtime would come in.
            _run([name, *flags, f"-I{HOST}", "-I.", "-include", "cuda_shim.h", "-c", "launch.cpp", "-o", "launch.o"],
                 source.file_name, folder)
            return _linked([name, "launch.o"], source.file_name, folder)

    return kept(key, build)


def runtime_library() -> Path:
    """The shared object of the emulator itself, compiled if need be."""
    sources = sorted((HERE / "src").glob("*.cpp"))
    name, version = compiler()
    key = _digest(version, *RUNTIME_FLAGS, *_texts(HERE / "src"), str((HOST / "emu.h").read_text()))

    def build() -> bytes:
        with _workplace() as folder, ThreadPoolExecutor() as pool:
            steps = [[name, *RUNTIME_FLAGS, "-c", str(source), "-o", f"{source.stem}.o"] for source in sources]
            list(pool.map(lambda step: _run(step, "runtime/emulator", folder), steps))
            return _linked([name, *(step[-1] for step in steps), "-ldl"], "runtime/emulator", folder)

    return kept(key, build)


@contextmanager
def _workplace() -> Iterator[Path]:
    """A folder to compile in. EnvironmentError_ if there is no room for one."""
    try:
        with tempfile.TemporaryDirectory(prefix="flashgen-") as folder:
            yield Path(folder)
    except OSError as err:
        raise EnvironmentError_(f"there is no folder to compile in ({err.strerror or err})", where="the emulator",
                                allowed="a folder for temporary files that can be written",
                                next="TMPDIR names another one") from err


def _linked(command: Sequence[str], what: str, folder: Path) -> bytes:
    _run([command[0], "-shared", *command[1:], "-o", "object.so"], what, folder)
    return (folder / "object.so").read_bytes()


def _run(command: Sequence[str], what: str, folder: Path) -> None:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace",
                              timeout=COMPILE_TIMEOUT_S)
    except subprocess.TimeoutExpired as err:
        raise CompileError(f"{compiler()[1]} takes longer than {COMPILE_TIMEOUT_S} s", where=what,
                           next="try again when the machine is less busy") from err
    if done.returncode != 0:
        raise CompileError(f"{compiler()[1]} refuses it", where=what, details=done.stderr[:4000],
                           next="the emulator compiles what NVRTC compiles: flashgen build shows its opinion")


def _texts(folder: Path) -> list[str]:
    return [path.read_text() for path in sorted(folder.rglob("*")) if path.is_file()]


def _digest(*parts: str) -> str:
    digest = hashlib.sha256()
    for part in (FORMAT, *parts):
        digest.update(hashlib.sha256(part.encode()).digest())
    return digest.hexdigest()
