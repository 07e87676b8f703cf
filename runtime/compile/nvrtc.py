"""Source -> Cubin through NVRTC, in this process. Needs no GPU, driver, nvcc or header file.

The bindings release the GIL while NVRTC works, so threads compile in parallel. A fork of this process waits for them:
locks of NVRTC, and of the library that reads the cubin, would be held for ever in the child. What NVRTC lets pass but
flashgen does not (spills, serialised wgmma, an ignored setmaxnreg) is a CompileError here.
"""
from __future__ import annotations

import contextlib
import functools
import importlib
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from flashgen.codegen.plan import Plan
from flashgen.codegen.source import Source
from flashgen.errors import CompileError, EnvironmentError_
from flashgen.runtime.compile.cubin import Cubin, Resources, read_resources

_ERROR = re.compile(r"^(?P<file>[^\n()]+)\((?P<line>\d+)\): (?:catastrophic |internal )?error[^:\n]*: (?P<what>.*)$",
                    re.MULTILINE)
_PTX_ERROR = re.compile(r"ptx input, line (?P<line>\d+); (?:error|fatal)\s*: (?P<what>.*)$", re.MULTILINE)
_TIMING = re.compile(r"^ptxas info\s*: Compile time = .*\n?", re.MULTILINE)
_AROUND_LINES = 3
NEWEST_TRIED = (13, 5)  # every shipped kernel compiles with each minor version from 13.0 to this one
_EXCERPTS_MAX = 6


@functools.cache
def _api() -> ModuleType:
    """cuda.bindings.nvrtc with the library loaded. EnvironmentError_ names the missing package."""
    try:
        from cuda.bindings import nvrtc
    except ImportError as err:
        raise EnvironmentError_(f"cuda-bindings cannot be imported: {err}",
                                next='pip install "cuda-bindings>=12.9.4,<14"') from err
    try:
        nvrtc.nvrtcVersion()  # the library is opened by the first call, not by the import
    except (RuntimeError, OSError) as err:
        raise EnvironmentError_(f"the NVRTC library cannot be loaded: {err}",
                                next="pip install nvidia-cuda-nvrtc (CUDA 13) or nvidia-cuda-nvrtc-cu12") from err
    return cast(ModuleType, nvrtc)


def _ok(result: tuple[Any, ...]) -> Any:
    """The values of a bindings call; CompileError if its status is not success."""
    status, *values = result
    if status != _api().nvrtcResult.NVRTC_SUCCESS:
        raise CompileError(f"NVRTC call failed: {status.name}")
    return values[0] if len(values) == 1 else tuple(values)


@functools.cache
def nvrtc_version() -> tuple[int, int]:
    """(major, minor) of the NVRTC that would compile. The first call opens the library; later ones are free."""
    major, minor = _ok(_api().nvrtcVersion())
    return major, minor


@functools.cache
def supported_archs() -> tuple[int, ...]:
    """Compute capabilities (10 * major + minor) this NVRTC compiles for."""
    return tuple(_ok(_api().nvrtcGetSupportedArchs()))


def version_text() -> str:
    return "{}.{}".format(*nvrtc_version())


def library_path() -> Path | None:
    """The file that NVRTC was loaded from, where the system tells."""
    nvrtc_version()
    with contextlib.suppress(OSError):
        # A file name may hold spaces; five fields come before it.
        rows = [row.split(None, 5) for row in Path("/proc/self/maps").read_text(errors="surrogateescape").splitlines()]
        return next((Path(row[5]) for row in rows if len(row) == 6 and "/libnvrtc.so" in row[5]), None)
    return None


def compile_options(source: Source) -> tuple[str, ...]:
    """Every option NVRTC gets for `source`. Part of the cache key."""
    options = (f"--gpu-architecture={source.arch}", "--std=c++17", "--ptxas-options=-v", *source.options)
    # From 12.9 on NVRTC would ask the driver's own cache, which makes timings and logs depend on the machine.
    return options + (("--no-cache",) if nvrtc_version() >= (12, 9) else ())


def compile_source(source: Source, *, plan: Plan) -> Cubin:
    """Compile `source` and check what came out against `plan`.

    Raises CompileError if NVRTC does not know the arch, refuses the text, or makes a kernel that spills beyond
    plan.allowed_spill_bytes or draws a C75xx / C76xx line. Raises EnvironmentError_ without NVRTC.
    """
    _check_arch(source, plan)
    options = compile_options(source)
    with _no_fork():
        image, log = _compile(source, plan, options)
        resources = read_resources(image, log, source.entry)
    _check_resources(resources, source, plan, log)
    return Cubin(image, options, version_text(), log, resources)


def _compile(source: Source, plan: Plan, options: tuple[str, ...]) -> tuple[bytes, str]:
    """(cubin, what the compiler said)."""
    api = _api()
    program = _ok(api.nvrtcCreateProgram(source.text.encode(), source.file_name.encode(), len(source.headers),
                                         [text.encode() for _, text in source.headers],
                                         [name.encode() for name, _ in source.headers]))
    # Reading the cubin needs elftools; its import (40 ms) runs while NVRTC has released the GIL.
    reader = threading.Thread(target=importlib.import_module, args=("elftools.elf.elffile",), daemon=True)
    reader.start()
    try:
        (status,) = api.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        log = _TIMING.sub("", _fetch(api.nvrtcGetProgramLogSize, api.nvrtcGetProgramLog, program)
                          .rstrip(b"\0").decode(errors="replace"))
        if status != api.nvrtcResult.NVRTC_SUCCESS:
            ptx = _fetch(api.nvrtcGetPTXSize, api.nvrtcGetPTX, program).decode(errors="replace")
            raise _refused(source, plan, status.name, log, ptx)
        return _fetch(api.nvrtcGetCUBINSize, api.nvrtcGetCUBIN, program), log
    finally:
        reader.join()
        api.nvrtcDestroyProgram(program)


_idle = threading.Condition()   # its lock is reentrant, so that a signal handler may fork anywhere
_inside: list[int] = []         # threads that compile


@contextmanager
def _no_fork() -> Iterator[None]:
    with _idle:
        _inside.append(threading.get_ident())
    try:
        yield
    finally:
        with _idle:
            _inside.remove(threading.get_ident())
            _idle.notify_all()


def _before_fork() -> None:
    _idle.acquire()
    _idle.wait_for(lambda: set(_inside) <= {threading.get_ident()})  # its own: a signal handler, while it rests


def _in_child() -> None:
    global _idle
    _idle = threading.Condition()


os.register_at_fork(before=_before_fork, after_in_parent=lambda: _idle.release(), after_in_child=_in_child)


def _fetch(size: Any, get: Any, program: Any) -> bytes:
    buffer: bytes = b" " * _ok(size(program))  # the bindings write into it
    _ok(get(program, buffer))
    return buffer


def _check_arch(source: Source, plan: Plan) -> None:
    match = re.fullmatch(r"sm_(\d+)[af]?", source.arch)
    if match is None or int(match[1]) not in supported_archs():
        raise CompileError(f"NVRTC {version_text()} does not compile for {source.arch}", where=plan.kernel_name,
                           allowed=", ".join(f"sm_{arch}" for arch in supported_archs()),
                           next="pip install a newer nvidia-cuda-nvrtc, or drop this arch from the spec")


def _refused(source: Source, plan: Plan, status: str, log: str, ptx: str) -> CompileError:
    """The error for a text NVRTC refused: each message with the lines around it, then the log."""
    files = {source.file_name: source.text, **dict(source.headers)}
    found = [(match["file"], int(match["line"]), match["what"]) for match in _ERROR.finditer(log)]
    if not found:  # ptxas knows only lines of the PTX, which still exists then
        files["PTX"] = ptx
        found = [("PTX", int(match["line"]), match["what"]) for match in _PTX_ERROR.finditer(log)]
    spots = list(dict.fromkeys((file, line) for file, line, _ in found))
    excerpts = [_excerpt(file, line, files.get(file, "")) for file, line in spots[:_EXCERPTS_MAX]]
    where = f"{spots[0][0]}:{spots[0][1]}" if spots else source.file_name
    what = found[0][2] if found else status
    return CompileError(f"NVRTC {version_text()} refuses {plan.variant} for {source.arch}: {what}", where=where,
                        details="\n".join([*excerpts, "--- log", log.strip()]))


def _excerpt(file: str, line: int, text: str) -> str:
    """The lines around `line` (from 1) of `text`, numbered, the line itself marked."""
    lines = text.splitlines()
    first, last = max(1, line - _AROUND_LINES), min(len(lines), line + _AROUND_LINES)
    rows = [f"{'>' if number == line else ' '}{number:5d} | {lines[number - 1]}" for number in range(first, last + 1)]
    return "\n".join([f"--- {file}:{line}", *rows])


def _check_resources(resources: Resources, source: Source, plan: Plan, log: str) -> None:
    faults = list(resources.warnings)
    allowed = plan.allowed_spill_bytes
    if max(resources.spill_store_bytes, resources.spill_load_bytes, resources.stack_bytes) > allowed:
        faults.append(f"spills {resources.spill_store_bytes} bytes of stores, {resources.spill_load_bytes} of loads; "
                      f"stack {resources.stack_bytes} bytes, at {resources.registers} registers per thread")
    if faults:
        raise CompileError(f"{plan.variant} for {source.arch}: {'; '.join(faults)}", where=plan.kernel_name,
                           allowed=f"{allowed} spilled bytes, and no C75xx or C76xx line",
                           nearest="a smaller tile, more warps, or fewer blocks per SM", next=_tried_compiler(),
                           details=f"--- log\n{log.strip()}")


def _tried_compiler() -> str:
    """Another compiler allots registers another way, and a shipped kernel has none to spare."""
    if nvrtc_version() <= NEWEST_TRIED:
        return ""
    major, minor = NEWEST_TRIED
    return (f"pip install 'nvidia-cuda-nvrtc<{major}.{minor + 1}': NVRTC {version_text()} is newer than any that the "
            f"shipped kernels were compiled with")
