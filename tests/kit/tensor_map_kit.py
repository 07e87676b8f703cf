"""A plan with tensor maps, counters and partials, small enough to write a kernel for by hand, and a driver to watch."""
from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cuda.bindings import driver

from flashgen.codegen.families.registry import program_of
from flashgen.codegen.families.shared.launch import Sizes
from flashgen.codegen.plan import CTYPES, Constant, Launch, Param, Plan, Region, Role, TensorMap
from flashgen.codegen.program import Program, Step
from flashgen.codegen.render import reached_headers
from flashgen.codegen.source import Source
from flashgen.runtime.launch import counters, kernel, tensor_map
from flashgen.runtime.launch import driver as checked

TENSORS = ("q", "k", "v", "out")
ROWS, COLUMNS = 16, 64  # of a box, and of a tile
SIZES = ("batch", "seqlen_q", "seqlen_kv", "num_heads_q", "heads_per_kv_head", "m_tiles", "num_tiles", "num_work_tiles",
         "full_tiles", "tiles_per_split", "max_splits", "heads_per_section", "heads_before_the_end",
         "heads_at_the_end")

# out = q ^ k ^ v, bit by bit, of rows with the same number: one warp copies a box of each and stores what is inside.
BODY = """
  unsigned char* const boxes = dyn_smem();
  uint64_t* const full = (uint64_t*)(boxes + 3 * 2048);
  const int lane = threadIdx.x;
  if (lane == 0) {
    mbarrier_init(full, 1);
    fence_mbarrier_init();
  }
  sync_block();
  int parity = 0;
  for (int tile = blockIdx.x; tile < p.num_tiles; tile += gridDim.x) {
    const int row = tile % p.m_tiles * 16, head = tile / p.m_tiles % p.num_heads_q;
    const int batch = tile / p.m_tiles / p.num_heads_q, kv_head = head / p.heads_per_kv_head;
    if (lane == 0) {
      mbarrier_arrive_expect_tx(full, 3 * 2048);
      tma_load_4d(boxes, &p.q_map, full, 0, row, head, batch);
      tma_load_4d(boxes + 2048, &p.k_map, full, 0, row, kv_head, batch);
      tma_load_4d(boxes + 4096, &p.v_map, full, 0, row, kv_head, batch);
    }
    mbarrier_wait_parity(full, parity);
    parity ^= 1;
    for (int i = lane; i < 16 * 64; i += 32) {
      const int r = i / 64, c = i % 64, at = r * 64 + ((c / 8 ^ r % 8) * 8 + c % 8);
      const uint16_t* const x = (const uint16_t*)boxes;
      if (row + r < p.seqlen_q)
        p.out[batch * p.out_batch_stride + (row + r) * p.out_row_stride + head * p.out_head_stride + c] =
            x[at] ^ x[1024 + at] ^ x[2048 + at];
    }
    sync_block();
  }
  if (lane == 0 && p.partials != nullptr) p.partials[blockIdx.x] = 1.0f;
  if (lane == 0 && atom_add_acq_rel(p.counters + 1, 1) == (int)gridDim.x - 1) RESET
"""
RESET = "p.counters[1] = 0;"


def fa3_like(*, kv_layout: str = "dense", partials: bool = True, head_dim_v: int = COLUMNS) -> Plan:
    """Parameters in the order of the fa3 family, without lse."""
    varlen = kv_layout == "varlen"
    pointers = [Param("q", "element_ptr", ""), Param("k", "element_ptr", ""), Param("v", "element_ptr", ""),
                Param("out", "element_out", "")]
    pointers += [Param(f"cu_seqlens_{name}", "i32_ptr", "") for name in ("q", "kv") if varlen]
    pointers += [Param("counters", "i32_out", "")] + [Param("partials", "f32_out", "")] * partials
    axes = ("row", "head") if varlen else ("batch", "row", "head")
    strides = [Param(f"{t}_{axis}_stride", "i64", "") for t in ("q", "k", "v", "out") for axis in axes]
    return Plan(
        variant="fa3_like", target="sm_90a", family="fa3", pass_="fwd",
        spec=(("kv_layout", kv_layout), ("dtype", "bf16"), ("head_dim_qk", COLUMNS), ("head_dim_v", head_dim_v)),
        template="", element="bf16",
        constants=(Constant("BLOCK_M", ROWS, ""), Constant("BLOCK_N", ROWS, ""), Constant("MAX_SPLITS", 4, ""),
                   Constant("PARTIAL_FLOATS", 32, "")),
        slots=(), flags=(("tile_counter", False),),
        params=(*(Param(f"{t}_map", "tensor_map", "") for t in "qkv"), *pointers, *strides,
                *(Param(name, "i32", "") for name in SIZES), Param("scale_log2", "f32", "")),
        smem=(Region("MEMORY", 0, 3 * 2048 + 16, "three boxes and a barrier"),), roles=(Role("all", 1),),
        launch=Launch(32, 1, 3 * 2048 + 16, ""),
        tensor_maps=tuple(TensorMap(f"{t}_map", t, COLUMNS, ROWS, 128) for t in "qkv"))


def fa3_like_source(plan: Plan, reset: str = RESET) -> Source:
    """BODY as a kernel of the plan."""
    headers = ("atomic", "fence", "mbarrier", "smem", "tma", "warp")
    includes = [f'#include "flashgen/ptx/{name}.cuh"' for name in headers]
    members = [f"  {CTYPES[p.ctype].cuda} {p.name};" for p in plan.params]
    text = "\n".join([
        *includes, "", "using Element = uint16_t;", "struct Params {", *members, "};", "",
        'extern "C" __global__ void __launch_bounds__(32, 1)', f"{plan.variant}(const __grid_constant__ Params p) {{",
        *BODY.replace("RESET", reset).strip("\n").splitlines(), "}", ""])
    return Source(text, plan.variant, f"{plan.kernel_name}.cu", reached_headers(text), plan.target)


def program_for(plan: Plan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, batch: int,
                num_sms: int = 4) -> Program:
    """Of a call with these tensors, [batch, rows, heads, columns] or without batch, on `num_sms` SMs."""
    varlen = q.dim() == 3
    axes = ("row", "head") if varlen else ("batch", "row", "head")
    strides = {f"{name}_{axis}_stride": stride if size != 1 else 0  # as ops/attention gives them
               for name, t in zip(TENSORS, (q, k, v, out), strict=True)
               for axis, stride, size in zip(axes, t.stride(), t.shape[:-1], strict=False)}
    sizes = Sizes(batch, q.shape[-3], k.shape[-3], q.shape[-2], k.shape[-2], strides=strides)
    return program_of(plan, sizes, num_sms)


def step_of(*arguments: Any, **more: Any) -> Step:
    """The only step of program_for."""
    [step] = program_for(*arguments, **more).steps
    return step


class WatchedDriver:
    """The driver's names, with the calls of a launch and of an allocation played here: no device is needed.

    A map it encodes holds its address, then 16, 24, ... to tell the words apart.
    """

    def __init__(self) -> None:
        self.encoded: list[tuple[Any, ...]] = []
        self.replaced: list[tuple[int, int]] = []  # (map's place, address)
        self.launches: list[bytes] = []            # parameter blocks
        self.allocated: list[int] = []
        self.params_bytes = 0
        self.context = driver.CUcontext(0)         # of the thread; the primary one is 5

    def __getattr__(self, name: str) -> Any:
        return getattr(driver, name)

    def cuTensorMapEncodeTiled(self, *arguments: Any) -> tuple[Any, ...]:
        self.encoded.append(arguments)
        made = driver.CUtensorMap()
        made.opaque = [driver.cuuint64_t(arguments[2])] + [driver.cuuint64_t(8 * i) for i in range(2, 17)]
        return driver.CUresult.CUDA_SUCCESS, made

    def cuTensorMapReplaceAddress(self, tensor_map: Any, address: int) -> tuple[Any, ...]:
        self.replaced.append((tensor_map.getPtr(), address))
        ctypes.c_uint64.from_address(tensor_map.getPtr()).value = address
        return (driver.CUresult.CUDA_SUCCESS,)

    def cuLaunchKernelEx(self, config: Any, function: Any, arguments: int, extra: Any) -> tuple[Any, ...]:
        place = ctypes.c_void_p.from_address(arguments).value
        assert place is not None and place % 64 == 0, "tensor maps are 64-byte aligned"
        self.launches.append(ctypes.string_at(place, self.params_bytes))
        return (driver.CUresult.CUDA_SUCCESS,)

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> tuple[Any, ...]:
        return driver.CUresult.CUDA_SUCCESS, mode

    def cuCtxGetCurrent(self) -> tuple[Any, ...]:
        return driver.CUresult.CUDA_SUCCESS, self.context

    def cuDeviceGet(self, index: int) -> tuple[Any, ...]:
        return driver.CUresult.CUDA_SUCCESS, driver.CUdevice(index)

    def cuDevicePrimaryCtxRetain(self, device: Any) -> tuple[Any, ...]:
        return driver.CUresult.CUDA_SUCCESS, driver.CUcontext(5)

    def cuCtxSetCurrent(self, context: Any) -> tuple[Any, ...]:
        self.context = context
        return (driver.CUresult.CUDA_SUCCESS,)

    def cuMemAlloc(self, size: int) -> tuple[Any, ...]:
        self.allocated.append(size)
        return driver.CUresult.CUDA_SUCCESS, driver.CUdeviceptr(len(self.allocated) << 32)

    def cuStreamCreate(self, flags: int) -> tuple[Any, ...]:
        assert flags == 1, "a stream that does not wait for the default one"
        return driver.CUresult.CUDA_SUCCESS, driver.CUstream(77)

    def cuMemsetD8Async(self, place: int, value: int, size: int, stream: Any) -> tuple[Any, ...]:
        assert place == len(self.allocated) << 32 and value == 0 and size == self.allocated[-1]
        return (driver.CUresult.CUDA_SUCCESS,)

    def cuStreamSynchronize(self, stream: Any) -> tuple[Any, ...]:
        return (driver.CUresult.CUDA_SUCCESS,)

    cuStreamDestroy = cuStreamSynchronize


def watch(monkeypatch: pytest.MonkeyPatch) -> WatchedDriver:
    """One in place of the driver."""
    watched = WatchedDriver()
    for module in (checked, kernel, tensor_map, counters):
        monkeypatch.setattr(module, "api", lambda: watched)
    monkeypatch.setattr(counters, "_is_capturing", lambda: False)
    return watched


def watched_kernel(plan: Plan, watched: WatchedDriver) -> Any:
    """What a Launcher and a BoundProgram need of a Kernel."""
    watched.params_bytes = plan.params_bytes()
    made = SimpleNamespace(plan=plan, function=driver.CUfunction(1))
    made.launcher = lambda step, order: kernel.Launcher(made, step, order)
    return made
