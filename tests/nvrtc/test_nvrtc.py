"""NVRTC: what is refused, what the message shows, and that resources are read right. No GPU."""
from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from dataclasses import replace
from types import ModuleType

import pytest
from sampling import one_in
from tiny import HEADER, SETMAXNREG_TEXT, SPILL_TEXT, TEXT, tiny, tiny_plan, tiny_source

from flashgen.codegen.render import plan_and_source
from flashgen.codegen.source import Source
from flashgen.codegen.spec.spec import load_specs, spec_path
from flashgen.codegen.target import TARGETS
from flashgen.errors import CompileError, EnvironmentError_
from flashgen.runtime.compile import cubin, nvrtc
from flashgen.runtime.compile.nvrtc import compile_options, compile_source, nvrtc_version, supported_archs


def skip_unless_known(target: str) -> None:
    """Older NVRTCs are supported too: 12.4 stops at sm_90."""
    if TARGETS[target].cc not in supported_archs():
        pytest.skip(f"this NVRTC does not know {target}")


@pytest.mark.parametrize("target", TARGETS)
def test_every_target_compiles_and_the_same_text_gives_the_same_bytes(target: str) -> None:
    skip_unless_known(target)
    plan, source = tiny(target=target)
    first, second = (compile_source(source, plan=plan) for _ in range(2))
    assert first == second
    assert first.image.startswith(b"\x7fELF") and first.options == compile_options(source)
    assert 0 < first.resources.registers < 32 and first.resources.code_bytes > 0
    assert first.resources.stack_bytes == first.resources.spill_load_bytes == first.resources.spill_store_bytes == 0


@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "sm_120"])
def test_static_shared_memory_excludes_what_the_driver_reserves(target: str) -> None:
    skip_unless_known(target)
    text = TEXT.replace("if (", "__shared__ float s[100]; s[threadIdx.x] = params.a[0]; __syncthreads();\n"
                                "    params.out[32] = s[31 - threadIdx.x];\n    if (")
    plan, source = tiny(target=target, text=text)
    assert compile_source(source, plan=plan).resources.static_smem_bytes == 400


def test_spills_beyond_the_plan_are_refused_with_their_size_and_allowed_ones_reported() -> None:
    plan, source = tiny(text=SPILL_TEXT)
    with pytest.raises(CompileError, match=r"tiny_add for sm_80: spills [1-9]\d* bytes of stores") as caught:
        compile_source(source, plan=plan)
    assert "bytes spill stores" in caught.value.details and caught.value.allowed.startswith("0 spilled bytes")
    resources = compile_source(source, plan=replace(plan, allowed_spill_bytes=1 << 16)).resources
    assert min(resources.spill_store_bytes, resources.spill_load_bytes, resources.stack_bytes) > 0
    limit = max(resources.spill_store_bytes, resources.spill_load_bytes, resources.stack_bytes)
    compile_source(source, plan=replace(plan, allowed_spill_bytes=limit))
    with pytest.raises(CompileError):
        compile_source(source, plan=replace(plan, allowed_spill_bytes=limit - 1))


def test_a_newer_compiler_that_spills_is_named_with_one_that_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, source = tiny(text=SPILL_TEXT)
    monkeypatch.setattr(nvrtc, "NEWEST_TRIED", nvrtc.nvrtc_version())
    with pytest.raises(CompileError) as caught:
        compile_source(source, plan=plan)
    assert not caught.value.next
    monkeypatch.setattr(nvrtc, "NEWEST_TRIED", (nvrtc.nvrtc_version()[0], nvrtc.nvrtc_version()[1] - 1))
    with pytest.raises(CompileError) as caught:
        compile_source(source, plan=plan)
    assert f"nvidia-cuda-nvrtc<{nvrtc.version_text()}'" in caught.value.next


def test_a_local_array_is_refused_even_without_spills() -> None:
    text = TEXT.replace("if (", "float a[32]; for (int i = 0; i < params.n; i++) a[i % 32] = params.a[i];\n"
                                "    params.out[0] = a[params.n % 7];\n    if (")
    plan, source = tiny(text=text)
    with pytest.raises(CompileError, match="spills 0 bytes of stores, 0 of loads; stack 128 bytes"):
        compile_source(source, plan=plan)


def test_an_ignored_setmaxnreg_is_refused() -> None:
    plan, source = tiny(target="sm_90a", text=SETMAXNREG_TEXT)
    with pytest.raises(CompileError, match=r"\(C7508\).*setmaxnreg.*ignored"):
        compile_source(source, plan=plan)
    bounded = tiny_source(plan, SETMAXNREG_TEXT.replace("__global__", "__global__ __launch_bounds__(128, 1)"))
    assert compile_source(bounded, plan=plan).resources.warnings == ()


def test_an_error_in_the_text_shows_the_lines_around_it() -> None:
    plan, source = tiny(text=TEXT.replace("params.n)", "params.m)"))
    with pytest.raises(CompileError) as caught:
        compile_source(source, plan=plan)
    message = str(caught.value)
    assert message.startswith("tiny_add.sm_80.cu:4: ") and 'no member "m"' in message.splitlines()[0]
    assert "tiny_add for sm_80" in message and "NVRTC {}.{}".format(*nvrtc_version()) in message
    assert ">    4 |     if (threadIdx.x < params.m) {" in message and "     3 | extern" in message
    assert "1 error detected" in message  # the whole log


def test_an_error_in_a_header_shows_the_header() -> None:
    plan, source = tiny()
    broken = replace(source, headers=((HEADER[0], HEADER[1].replace("x + x", "x + y")),))
    with pytest.raises(CompileError, match=r"^flashgen/tiny\.cuh:2: ") as caught:
        compile_source(broken, plan=plan)
    assert ">    2 | __device__ inline float twice(float x) { return x + y; }" in str(caught.value)


def test_an_error_in_inline_ptx_shows_the_ptx() -> None:
    plan, source = tiny(text=SETMAXNREG_TEXT.replace("setmaxnreg.inc", "bogus"))
    with pytest.raises(CompileError, match="bogus") as caught:
        compile_source(source, plan=plan)
    assert any(line.startswith(">") and "bogus.sync" in line for line in str(caught.value).splitlines())


@pytest.mark.parametrize(("text", "what"), [('#include "absent.h"\n' + TEXT, "absent.h"),
                                            ("__global__ void other() {}", "_Z5otherv")])
def test_missing_headers_and_missing_kernels_are_named(text: str, what: str) -> None:
    plan, source = tiny(text=text)
    with pytest.raises(CompileError, match=what):
        compile_source(source, plan=plan)


@pytest.mark.parametrize("target", ["sm_20", "sm_999a", "compute_80", "gfx942"])
def test_an_unknown_arch_names_the_known_ones_and_the_version(target: str) -> None:
    plan = tiny_plan(target=target)
    with pytest.raises(CompileError, match=f"NVRTC .* does not compile for {target}") as caught:
        compile_source(tiny_source(plan), plan=plan)
    assert "sm_80, " in caught.value.allowed and "sm_90" in caught.value.allowed


@pytest.mark.parametrize("line", [
    "ptxas info    : (C7512) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ...",
    "ptxas info    : (C7602) Insufficient registers (128) to compile instruction"])
def test_c75_and_c76_lines_become_warnings_and_other_codes_do_not(line: str) -> None:
    plan, source = tiny()
    good = compile_source(source, plan=plan)
    assert cubin.read_resources(good.image, f"{line}\n{good.log}", source.entry).warnings == (line,)
    other = line.replace("(C7", "(C8")
    assert cubin.read_resources(good.image, f"{other}\n{good.log}", source.entry).warnings == ()


@pytest.mark.parametrize(("of", "to"), [("Used ", "Used 1"), ("     0 bytes stack", "     8 bytes stack"),
                                        ("Function properties for tiny_add", ""),
                                        (" registers", " registers, 8 bytes smem")])
def test_a_log_that_contradicts_the_cubin_is_an_error(of: str, to: str) -> None:
    plan, source = tiny()
    good = compile_source(source, plan=plan)
    assert of in good.log
    with pytest.raises(CompileError, match="log says"):
        cubin.read_resources(good.image, good.log.replace(of, to), source.entry)


def test_no_cache_is_asked_for_only_where_it_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    for version, known in (((12, 4), False), ((12, 8), False), ((12, 9), True), ((13, 0), True)):
        monkeypatch.setattr(nvrtc, "nvrtc_version", lambda version=version: version)
        assert ("--no-cache" in compile_options(tiny()[1])) is known


def test_without_nvrtc_the_message_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise RuntimeError("libnvrtc.so.13: cannot open shared object file")

    fake = ModuleType("cuda.bindings.nvrtc")
    fake.nvrtcVersion = missing  # type: ignore[attr-defined]
    bindings = ModuleType("cuda.bindings")
    bindings.nvrtc = fake  # type: ignore[attr-defined]
    nvrtc._api.cache_clear()
    try:
        monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
        with pytest.raises(EnvironmentError_, match="pip install nvidia-cuda-nvrtc"):
            nvrtc._api()
        monkeypatch.setitem(sys.modules, "cuda.bindings", None)
        with pytest.raises(EnvironmentError_, match='pip install "cuda-bindings'):
            nvrtc._api()
    finally:
        nvrtc._api.cache_clear()


def test_importing_needs_neither_nvrtc_nor_elftools() -> None:
    code = ("import sys, flashgen.runtime.compile.build, flashgen.runtime.select.bundle\n"
            "print(sorted({'cuda', 'elftools', 'jinja2', 'torch', 'filelock', 'pydantic'} & {*sys.modules}))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def ptx_of(source: Source) -> str:
    """What NVRTC makes of it before ptxas."""
    api = nvrtc._api()
    program = nvrtc._ok(api.nvrtcCreateProgram(source.text.encode(), b"kernel.cu", len(source.headers),
                                               [text.encode() for _, text in source.headers],
                                               [name.encode() for name, _ in source.headers]))
    options = [b"--gpu-architecture=compute_90a", b"--std=c++17"]
    assert api.nvrtcCompileProgram(program, len(options), options)[0] == api.nvrtcResult.NVRTC_SUCCESS
    return nvrtc._fetch(api.nvrtcGetPTXSize, api.nvrtcGetPTX, program).decode()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "variant", "stores"), [
    ("mla_h100", "mla_h100_bf16_d576v512_paged64", 16), ("fa3_fwd", "fa3_fwd_bf16_d128_causal_varlen", 8)])
def test_rows_of_the_output_are_stored_sixteen_bytes_at_a_time(name: str, variant: str, stores: int) -> None:
    """By a thread: its share of two rows. A pointer that loses its alignment on the way turns each into four."""
    skip_unless_known("sm_90a")
    spec = next(spec for spec in load_specs(spec_path(name)).specs if spec.variant == variant)
    text = ptx_of(plan_and_source(spec)[1])
    assert len(re.findall(r"st\.global\.v4\.u32", text)) == stores
    assert not re.search(r"(st\.global\.u32[^\n]*\n\s*){4}", text)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "variant"), one_in(4, [
    (name, spec.variant) for name in ("fa3_fwd", "fa3_fwd_d192_v128", "mla_h100", "mla_h100_caches")
    for spec in load_specs(spec_path(name)).specs if spec.dtype == "bf16" and spec.arch == "sm_90a"]))
def test_what_is_shipped_for_hopper_compiles_without_spills(name: str, variant: str) -> None:
    """With whichever NVRTC is here: each version allots registers its own way, and producer warps have few."""
    plan, source = plan_and_source(next(spec for spec in load_specs(spec_path(name)).specs if spec.variant == variant))
    assert compile_source(source, plan=plan).resources.spill_store_bytes == 0


@pytest.mark.slow
@pytest.mark.parametrize("dims", [(8, 8), (96, 64), (80, 80), (128, 80), (200, 200)], ids=str)
@pytest.mark.parametrize("variant", ["causal_split_packed", "causal_varlen"])
def test_head_dims_that_no_file_ships_compile_without_spills(variant: str, dims: tuple[int, int]) -> None:
    """They are served all the same, with the registers of their neighbours' tiles: the first two have spilled."""
    shipped = next(spec for spec in load_specs(spec_path("fa3_fwd")).specs
                   if spec.variant == f"fa3_fwd_bf16_d128_{variant}")
    plan, source = plan_and_source(shipped.with_(head_dim_qk=dims[0], head_dim_v=dims[1]))
    assert compile_source(source, plan=plan).resources.spill_store_bytes == 0


@pytest.mark.slow
@pytest.mark.parametrize(("name", "variant", "arch"), one_in(4, [
    (name, spec.variant, spec.arch) for name in ("fa1_fwd", "fa1_bwd") for spec in load_specs(spec_path(name)).specs
    if spec.kernel in (None, "gradients")]))
def test_what_is_shipped_of_fa1_compiles_without_spills(name: str, variant: str, arch: str) -> None:
    plan, source = plan_and_source(next(spec for spec in load_specs(spec_path(name)).specs
                                        if (spec.variant, spec.arch) == (variant, arch)))
    assert compile_source(source, plan=plan).resources.spill_store_bytes == 0


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90", "sm_100a", "sm_120"])
@pytest.mark.parametrize(("name", "dims"), one_in(4, [(name, dims) for name in ("fa1_fwd", "fa1_bwd") for dims in (
    (8, 8), (72, 40), (96, 96), (128, 128), (192, 128), (192, 192), (224, 224), (248, 248), (256, 256), (64, 256))]))
def test_head_dims_of_fa1_compile_without_spills(name: str, dims: tuple[int, int], arch: str) -> None:
    """Each tile of its tables at the largest head dims; the backward of (248, 248) for sm_86 has spilled."""
    skip_unless_known(arch)
    shipped = next(spec for spec in load_specs(spec_path(name)).specs
                   if spec.causal and spec.kernel in (None, "gradients"))
    plan, source = plan_and_source(shipped.with_(arch=arch, head_dim_qk=dims[0], head_dim_v=dims[1]))
    assert compile_source(source, plan=plan).resources.spill_store_bytes == 0


FORK = """
import os, signal, threading
from tiny import tiny
from flashgen.runtime.compile import nvrtc
inside, finished, real = threading.Event(), [], nvrtc._compile
def compile(*arguments):
    inside.set()
    result = real(*arguments)
    finished.append(1)
    return result
nvrtc._compile = compile
plan, source = tiny()
thread = threading.Thread(target=nvrtc.compile_source, args=(source,), kwargs={"plan": plan})
thread.start()
inside.wait()
pid = os.fork()
if pid == 0:
    signal.alarm(100)
    assert finished, "forked while a thread was in NVRTC"
    nvrtc.compile_source(source, plan=plan)
    os._exit(7)
thread.join()
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
nvrtc.compile_source(source, plan=plan)
"""


def test_a_fork_waits_for_threads_that_compile() -> None:  # B119
    """NVRTC's locks, held at the fork, would be held for ever in the child: it would hang at its first kernel."""
    path = os.pathsep.join(sys.path)
    subprocess.run([sys.executable, "-c", FORK], check=True, timeout=120, env={**os.environ, "PYTHONPATH": path})


def test_a_fork_waits_for_all_of_a_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library that reads a cubin holds locks as well (up to Python 3.11, those of cached properties)."""
    seen = []
    for name in ("_compile", "read_resources"):
        real = getattr(nvrtc, name)
        monkeypatch.setattr(nvrtc, name, lambda *arguments, real=real, **named: (
            seen.append(threading.get_ident() in nvrtc._inside), real(*arguments, **named))[1])
    plan, source = tiny()
    nvrtc.compile_source(source, plan=plan)
    assert seen == [True, True] and not nvrtc._inside
