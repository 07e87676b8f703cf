"""The GPU side of `flashgen bench`: inputs, peers, timers, host overhead."""
from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import importlib.util
import inspect
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

import flashgen
from flashgen.codegen.dtype import DTYPES
from flashgen.codegen.spec.spec import Spec
from flashgen.errors import EnvironmentError_, UnsupportedError, VerifyError
from flashgen.runtime.compile.nvrtc import version_text
from flashgen.runtime.doctor import driver_version
from flashgen.runtime.measure.bench import DATA, Call, Refused, Run
from flashgen.runtime.ops.attention.cases import Case
from flashgen.runtime.ops.attention.signature import ATTENTION
from flashgen.runtime.select.lookup import archs_for

TIMING_MS = 5.0      # of one timing at least: far above what an event resolves
FA3_MODULES = ("flash_attn_interface", "fa3_fwd_interface")  # built from source; the wheel fa3-fwd
PACKAGES = ("flashgen", "torch", "triton", "cuda-bindings", "nvidia-cuda-nvrtc", "fa3-fwd", "flash-attn-3")


@dataclass(frozen=True)
class Inputs:
    """[batch, seqlen, num_heads, head_dim], or packed, as flashgen takes them, and a place for the result."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_kv: Tensor | None = None

    @property
    def heads_first(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v as views [batch, num_heads, seqlen, head_dim], as torch takes them."""
        return self.q.transpose(1, 2), self.k.transpose(1, 2), self.v.transpose(1, 2)


Prepare = Callable[[Case], Callable[[Inputs], object]]


class CudaDevice:
    """The current CUDA device. EnvironmentError_ if there is none."""

    def __init__(self, timer: str = "graph", data: str = "normal") -> None:
        """`timer`: "graph" replays CUDA graphs, "events" times plain calls, host overhead included where it shows.
        `data`: one of bench.DATA."""
        if not torch.cuda.is_available():
            raise EnvironmentError_(
                "kernels are timed on a GPU, and torch sees no CUDA device", where="torch.cuda.is_available()",
                allowed="a CUDA device with its driver, and a torch built with CUDA",
                nearest="flashgen explain and flashgen tune --dry-run give the model's figures", next="flashgen doctor")
        if timer not in TIMERS:
            raise UnsupportedError(f"timer {timer}", where="--timer", allowed=", ".join(TIMERS))
        if data not in DATA:
            raise UnsupportedError(f"data {data}", where="--data", allowed=", ".join(DATA))
        self._timer, self.properties = TIMERS[timer], torch.cuda.get_device_properties()
        self.l2_bytes, self.num_sms = self.properties.L2_cache_size, self.properties.multi_processor_count
        self.timer_name, self.data = timer, data

    def facts(self) -> dict[str, Any]:
        versions: dict[str, Any] = {name: found for name in PACKAGES if (found := package_version(name)) is not None}
        versions |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(), "nvrtc": version_text()}
        return {"gpu": self.properties.name, "driver": driver_version(), "versions": versions}

    def archs(self) -> Sequence[str]:
        return archs_for(10 * self.properties.major + self.properties.minor)

    def absent(self, peer: str) -> str | None:
        return PEERS[peer][0]()

    def inputs(self, case: Case, sets: int) -> Sequence[Inputs]:
        """`sets` independent draws; out is poisoned."""
        generator = torch.Generator("cuda").manual_seed(0)
        return [draw(case, self.data, generator) for _ in range(sets)]

    def ours(self, case: Case, spec: Spec, inputs: Sequence[Inputs]) -> Sequence[Call]:
        def call(x: Inputs) -> Call:
            return lambda: flashgen.attention(
                x.q, x.k, x.v, causal=case.causal, window=case.window, spec=spec, out=x.out,
                cu_seqlens_q=x.cu_seqlens_q, cu_seqlens_kv=x.cu_seqlens_kv)

        calls = [call(x) for x in inputs]
        calls[0]()
        if not inputs[0].out.isfinite().all():  # a kernel that writes nothing would be fast
            raise VerifyError("out is not finite", where=f"{spec.variant}.{spec.arch}", next="flashgen verify")
        return calls

    def peer(self, name: str, case: Case, inputs: Sequence[Inputs]) -> Sequence[Call]:
        """Refused, with the peer's own words, if it does not serve the case."""
        with own_words():
            attend = PEERS[name][1](case)
            attend(inputs[0])
            torch.cuda.synchronize()
        return [functools.partial(attend, x) for x in inputs]

    def timer(self, calls: Sequence[Call]) -> Run:
        return self._timer(calls)

    def release(self) -> None:
        torch.cuda.empty_cache()


def draw(case: Case, data: str, generator: torch.Generator) -> Inputs:
    """Inputs from N(0, 1), changed as `data` says, on the generator's device.

    Kernels take shortcuts that depend on the data: "growing" raises the maximum of a row again and again, as keys
    scaled by 0.2 to 8 along each sequence do; "wide" (q times 8) makes the largest weight stand out.
    """
    dtype, device = getattr(torch, DTYPES[case.dtype].torch_name), generator.device
    sides = list(zip(*case.lengths, strict=True))
    rows_q, rows_kv = ((sum(side),) if case.varlen else (case.batch, side[0]) for side in sides)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=dtype, generator=generator)

    q, k, v = (normal(*rows, heads, head_dim) for rows, heads, head_dim in (
        (rows_q, case.num_heads_q, case.head_dim_qk), (rows_kv, case.num_heads_kv, case.head_dim_qk),
        (rows_kv, case.num_heads_kv, case.head_dim_v)))
    if data == "growing":
        ramps = [torch.linspace(0.2, 8.0, keys) for keys in (sides[1] if case.varlen else sides[1][:1])]
        k *= torch.cat(ramps).to(device, dtype)[:, None, None]
    elif data == "wide":
        q *= 8
    cu_seqlens = [_prefix(side, device) if case.varlen else None for side in sides]
    return Inputs(q, k, v, q.new_full((*q.shape[:-1], case.head_dim_v), math.nan), *cu_seqlens)


def _prefix(lengths: Sequence[int], device: torch.device | str) -> Tensor:
    """[batch + 1] int32 prefix sums."""
    return torch.tensor((0, *lengths)).cumsum(0).to(device, torch.int32)


def package_version(package: str) -> str | None:
    """None if no such package is installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@contextlib.contextmanager
def own_words() -> Iterator[None]:
    """Whatever a library raises in here is Refused, in its words and those of the cause that it names."""
    try:
        yield
    except Refused:
        raise
    except Exception as err:
        words = [str(one).strip().partition("\n")[0] for one in (err, err.__cause__) if one is not None]
        raise Refused(": ".join([type(err).__name__, *words])) from err


# -- timers


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Without the garbage collector: a graph that it found would be destroyed, which ends a capture in progress."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def graph_timer(calls: Sequence[Call]) -> Run:
    """Replays of a CUDA graph that holds every call once: no host in between."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls[:2]:
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        with uncollected(), torch.cuda.graph(graph):
            for call in calls:
                call()
    except Exception as err:  # whatever a library raises where it waits for the device or allocates by itself
        raise Refused(f"cannot be captured in a CUDA graph: {err}", next="--timer events") from err
    return _long_enough(graph.replay, len(calls))


def event_timer(calls: Sequence[Call]) -> Run:
    """Plain calls, one after the other."""
    def run_all() -> None:
        for call in calls:
            call()
    return _long_enough(run_all, len(calls))


TIMERS: dict[str, Callable[[Sequence[Call]], Run]] = {"graph": graph_timer, "events": event_timer}


def _long_enough(work: Callable[[], object], calls: int) -> Run:
    """Times `work` as often in a row as fills TIMING_MS."""
    _elapsed_ms(work, 1)
    repeats = max(1, math.ceil(TIMING_MS / max(_elapsed_ms(work, 1), 1e-3)))
    return lambda: _elapsed_ms(work, repeats) / (repeats * calls)


def _elapsed_ms(work: Callable[[], object], repeats: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for _ in range(repeats):
        work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


# -- peers: (why it is absent or None, preparation for a case)


def _present() -> str | None:
    return None


def _square_only(case: Case) -> None:
    if case.varlen:
        raise Refused("it has no packed sequences")
    if case.causal and case.seqlen_q != case.seqlen_kv:
        raise Refused("its causal mask is aligned top-left, ours bottom-right: they differ unless seqlen_q = seqlen_kv")
    if case.window != (-1, -1):
        raise Refused("it has no window")


def _sdpa(backend: str) -> Prepare:
    def prepare(case: Case) -> Callable[[Inputs], object]:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        _square_only(case)
        chosen, gqa = getattr(SDPBackend, backend), case.num_heads_q != case.num_heads_kv

        def attend(x: Inputs) -> Tensor:
            with sdpa_kernel(chosen):
                return torch.nn.functional.scaled_dot_product_attention(
                    *x.heads_first, is_causal=case.causal, enable_gqa=gqa)
        return attend
    return prepare


def _flex(case: Case, device: str = "cuda") -> Callable[[Inputs], object]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if case.varlen:
        raise Refused("packed sequences are not set up for it")
    (seqlen_q, seqlen_kv), (left, right) = case.lengths[0], case.window
    shift = seqlen_kv - seqlen_q

    def visible(b: Tensor, h: Tensor, q_pos: Tensor, kv_pos: Tensor) -> Tensor:
        seen = kv_pos <= q_pos + shift if case.causal else kv_pos >= 0
        if left >= 0:
            seen = seen & (kv_pos >= q_pos + shift - left)
        return seen & (kv_pos <= q_pos + shift + right) if right >= 0 else seen

    torch.compiler.reset()  # past its limit of recompilations it would turn to an eager path without a word
    masked = case.causal or case.window != (-1, -1)
    mask = create_block_mask(visible, None, None, seqlen_q, seqlen_kv, device=device) if masked else None
    compiled = torch.compile(flex_attention, fullgraph=True, dynamic=False)
    return lambda x: compiled(*x.heads_first, block_mask=mask, enable_gqa=case.num_heads_q != case.num_heads_kv)


def _fa3_module() -> str | None:
    return next((name for name in FA3_MODULES if importlib.util.find_spec(name) is not None), None)


def _fa3_absent() -> str | None:
    return None if _fa3_module() else f"none of {', '.join(FA3_MODULES)} can be imported; pip install fa3-fwd"


def _fa3(num_splits: int) -> Prepare:
    """`num_splits`: blocks that share the keys of a query tile; 0 leaves it to its own rule, 1 is its default."""
    def prepare(case: Case) -> Callable[[Inputs], object]:
        module: Any = importlib.import_module(_fa3_module() or "")
        options: dict[str, Any] = {"causal": case.causal}
        if case.window != (-1, -1):
            options["window_size"] = case.visible
        if num_splits != 1:
            options["num_splits"] = num_splits
        if not case.varlen:
            return lambda x: module.flash_attn_func(x.q, x.k, x.v, **options)
        longest = [max(side) for side in zip(*case.lengths, strict=True)]
        return lambda x: module.flash_attn_varlen_func(x.q, x.k, x.v, x.cu_seqlens_q, x.cu_seqlens_kv, *longest,
                                                       **options)
    return prepare


def _torch_varlen(case: Case, device: str = "cuda") -> Callable[[Inputs], object]:
    """torch's FlashAttention-2 by the way that takes packed sequences and windows, which sdpa does not."""
    from torch.nn.attention.varlen import varlen_attn

    if not case.varlen and case.window == (-1, -1):
        raise Refused("without packed sequences or a window it is what sdpa-fa2 is")
    known, (left, right) = inspect.signature(varlen_attn).parameters, case.visible
    options: dict[str, Any] = {"enable_gqa": case.num_heads_q != case.num_heads_kv} if "enable_gqa" in known else {}
    if "window_size" in known:
        options["window_size"] = (left, right)
    elif left < 0 and right <= 0:
        options["is_causal"] = right == 0
    else:
        raise Refused("this torch's varlen_attn has no window")
    sides = list(zip(*case.lengths, strict=True))
    rest: list[Any] = [*(_prefix(side, device) for side in sides), *map(max, sides)]
    return lambda x: varlen_attn(x.q.flatten(0, -3), x.k.flatten(0, -3), x.v.flatten(0, -3), *rest, **options)


PEERS: dict[str, tuple[Callable[[], str | None], Prepare]] = {
    "sdpa-fa2": (_present, _sdpa("FLASH_ATTENTION")),
    "sdpa-cudnn": (_present, _sdpa("CUDNN_ATTENTION")),
    "flex": (lambda: None if importlib.util.find_spec("triton") else "triton is not installed", _flex),
    "fa3": (_fa3_absent, _fa3(1)),
    "fa3-split": (_fa3_absent, _fa3(0)),
    "torch-varlen": (lambda: None if importlib.util.find_spec("torch.nn.attention.varlen")
                     else "this torch has no torch.nn.attention.varlen", _torch_varlen),
}


# -- host overhead

OVERHEAD_CALLS = 200   # between two waits: fewer than a stream queues before the host must wait
OVERHEAD_ROUNDS = 25


def measure_overhead() -> dict[str, float]:
    """Microseconds of host time per warm call on tiny problems, medians: of calls of each operation and family, and of
    an empty torch op that was defined as attention's and takes the same arguments."""
    from flashgen.runtime.ops.attention import overhead as attention
    from flashgen.runtime.ops.mla_decode import overhead as mla_decode

    device = torch.device("cuda", torch.cuda.current_device())
    q, k, v, out = (torch.zeros(1, 16, 2, 64, dtype=torch.bfloat16, device=device) for _ in range(4))
    with _empty_op() as empty:
        calls: dict[str, Call] = {"empty_op": lambda: empty(q, k, v, None, None, 0, -1, -1, 0.125, "", out=out)}
        calls |= attention.overhead_calls(device) | mla_decode.overhead_calls(device)
        return {f"{name}_us": us for name, us in host_us(calls, torch.cuda.synchronize).items()}


def host_us(calls: dict[str, Call], wait: Callable[[], object], clock: Callable[[], float] = time.perf_counter
            ) -> dict[str, float]:
    """Median microseconds per call of each, interleaved. `wait` empties the queue outside the time."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(OVERHEAD_ROUNDS + 1):
        for name, call in calls.items():
            wait()
            start = clock()
            for _ in range(OVERHEAD_CALLS):
                call()
            elapsed = clock() - start
            if number:  # the first round compiles and fills the memo
                times[name].append(1e6 * elapsed / OVERHEAD_CALLS)
    wait()
    return {name: round(statistics.median(values), 3) for name, values in times.items()}


@contextlib.contextmanager
def _empty_op() -> Iterator[Callable[..., object]]:
    library = torch.library.Library("flashgen_bench", "DEF")
    library.define(f"empty({ATTENTION.schema()}, *, Tensor(a!) out) -> ()")
    library.impl("empty", lambda *_, out: None, "CUDA")
    torch.library.register_fake("flashgen_bench::empty", lambda *_, out: None, lib=library)
    try:
        yield torch.ops.flashgen_bench.empty
    finally:
        library._destroy()
