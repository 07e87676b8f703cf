"""Devices, streams, CUDA graphs, torch.compile and refusals of `flashgen.attention`. Needs a CUDA device."""
from __future__ import annotations

import builtins
import io
import math
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kit import attend, verified
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import flashgen
from flashgen.codegen.spec.spec import Spec, Tile
from flashgen.codegen.target import TARGETS
from flashgen.errors import FlashgenError, PlanError
from flashgen.runtime.ops.attention.op import run_poisoned
from flashgen.runtime.ops.attention.problem import Inputs, Problem
from flashgen.runtime.verify.compare import check, check_bits, named

pytestmark = pytest.mark.gpu
SLEEP_CYCLES = 200_000_000  # about 0.1 s: whatever does not wait for it reads the old contents
DENSE = Problem(2, 130, 200, 6, 2, causal=True)
VARLEN = Problem(3, (130, 1, 9), (200, 40, 0), 6, 2, causal=True)
BOTH = pytest.mark.parametrize("problem", [DENSE, VARLEN], ids=["dense", "varlen"])


# Devices and streams

@BOTH
def test_b086_two_devices(problem: Problem, cuda: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device only")
    first = problem.make_inputs("cuda:0")
    second = first.with_(**{name: value.to("cuda:1") for name, value in vars(first).items()
                            if isinstance(value, Tensor)})
    expected = attend(first)
    with torch.cuda.device(0):
        for _ in range(2):
            for inputs in (second, first):
                out = attend(inputs)
                assert out.device == inputs.q.device and torch.cuda.current_device() == 0
                check_bits(out.to("cuda:0"), expected, f"on {inputs.q.device}")


@BOTH
def test_the_first_call_of_a_thread(problem: Problem, cuda: str) -> None:
    """It has no CUDA context until something binds one, and with `out` nothing is allocated there before the launch."""
    x = problem.make_inputs(cuda)
    expected = attend(x)
    found, failed = torch.empty_like(expected), list[BaseException]()

    def work() -> None:
        try:
            attend(x, out=found)
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not failed
    check_bits(found, expected, "of another thread")


@BOTH
def test_b087_the_current_stream_orders_the_call(problem: Problem, cuda: str) -> None:
    new = problem.make_inputs(cuda)
    expected = verified(new, problem)[0]
    stream = torch.cuda.Stream()
    for _ in range(3):
        old = new.with_(q=torch.zeros_like(new.q))
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(SLEEP_CYCLES)
            old.q.copy_(new.q)
            out = attend(old)
        stream.synchronize()
        check_bits(out, expected, "after a write on the same stream")


def test_b087_nothing_lands_on_the_default_stream(cuda: str) -> None:
    inputs = DENSE.make_inputs(cuda)
    expected = verified(inputs, DENSE)[0]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        attend(inputs)  # so that the stream's memory pool has its blocks: allocation may wait for the device
    torch.cuda.synchronize()
    torch.cuda._sleep(5 * SLEEP_CYCLES)
    busy = torch.cuda.Event()
    busy.record()
    with torch.cuda.stream(stream):
        out = attend(inputs)
    stream.synchronize()
    assert not busy.query(), "the call waited for the default stream"
    check_bits(out, expected, "beside a busy default stream")


def test_poisoned_memory_is_what_lse_gets(cuda: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that leaves lse unwritten must not find the right answer there."""
    def writes_nothing(q: Tensor, k: Tensor, v: Tensor, *, out: Tensor, **rest: Any) -> tuple[Tensor, Tensor]:
        return out, torch.empty(q.shape[0], q.shape[2], q.shape[1], device=cuda)

    monkeypatch.setattr(flashgen, "attention", writes_nothing)
    out, lse = run_poisoned(DENSE.make_inputs(cuda))
    assert lse is not None and lse.isnan().all() and out.isnan().all()


# CUDA graphs

def capture(call: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):  # compile and load outside the capture
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


@BOTH
def test_b089_replay_with_new_contents(problem: Problem, cuda: str) -> None:
    inputs = problem.make_inputs(cuda)
    graph, (out, lse) = capture(lambda: attend(inputs, return_lse=True))
    for seed in (1, 2):
        for x in (inputs.q, inputs.k, inputs.v):
            x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))
        out.fill_(math.nan)
        lse.fill_(math.nan)
        graph.replay()
        eager, eager_lse = attend(inputs, return_lse=True)
        check_bits(out, eager, "replayed out")
        check_bits(lse, eager_lse, "replayed lse")
        check(named(out, lse), inputs)


@pytest.mark.parametrize("hints", [{}, {"max_seqlen_q": 1, "max_seqlen_kv": 4096}], ids=["no hints", "hints"])
def test_b089_replay_with_new_lengths(hints: dict[str, int], cuda: str) -> None:
    """Captured with four caches of 64 keys; the lengths in device memory decide at each replay."""
    inputs = Problem(4, (1, 1, 1, 1), (64,) * 4, 8, 2, 128, 128, causal=True).make_inputs(cuda)
    k, v = (torch.randn(8192, 2, 128, device=cuda, dtype=torch.bfloat16) for _ in range(2))
    inputs = inputs.with_(k=k, v=v)
    assert inputs.cu_seqlens_q is not None and inputs.cu_seqlens_kv is not None
    out = torch.empty_like(inputs.q)
    graph, (_, lse) = capture(lambda: attend(inputs, return_lse=True, out=out, **hints))
    for queries, keys in (((1, 1, 1, 1), (64,) * 4), ((1, 1, 1, 1), (1, 300, 4096, 0)), ((1, 0, 1, 0), (70, 9, 3, 1)),
                          ((0, 3, 0, 1), (0, 513, 7, 64)), ((0, 0, 0, 0), (0, 0, 0, 0))):
        for cu, lengths in ((inputs.cu_seqlens_q, queries), (inputs.cu_seqlens_kv, keys)):
            cu.copy_(torch.tensor((0, *lengths)).cumsum(0))
        out.fill_(math.nan)
        lse.fill_(math.nan)
        graph.replay()
        check(named(out, lse), inputs, label=f"lengths {queries}, {keys}")


# torch.compile and the dispatcher

@BOTH
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_b091_compiles_without_a_break(problem: Problem, backend: str, cuda: str) -> None:
    inputs = problem.make_inputs(cuda)
    attention: Callable[..., Any] = flashgen.attention
    rest = inputs.keywords

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q * 2, k, v, **rest) + 1

    def with_lse(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return attention(q, k, v, **rest, return_lse=True)

    def into(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:
        attention(q, k, v, **rest, out=out)
        return out * 2

    def into_with_lse(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:
        return attention(q, k, v, **rest, out=out, return_lse=True)[1]

    def empty() -> Tensor:
        return torch.full_like(inputs.q, math.nan)

    q, k, v = inputs.q, inputs.k, inputs.v
    for function, more in ((plain, ()), (with_lse, ()), (into, (empty,)), (into_with_lse, (empty,))):
        torch._dynamo.reset()
        results = []
        for call in (function, torch.compile(function, fullgraph=True, backend=backend)):
            extra = tuple(make() for make in more)
            result = call(q, k, v, *extra)  # type: ignore[operator]
            results.append((*(result if isinstance(result, tuple) else (result,)), *extra))
        for eager, compiled in zip(*results, strict=True):
            assert compiled.stride() == eager.stride()
            check_bits(compiled, eager, f"{function.__name__} compiled")


def test_b091_one_graph_for_all_lengths(cuda: str) -> None:
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def compiled(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flashgen.attention(q, k, v, causal=True)

    for seqlen in (80, 200, 333):  # none equal to another size: torch would specialise on that
        inputs = Problem(2, seqlen, seqlen + 7, 4, 2, causal=True).make_inputs(cuda)
        with torch._dynamo.config.patch(error_on_recompile=seqlen != 80):
            check_bits(compiled(inputs.q, inputs.k, inputs.v), attend(inputs), f"seqlen_q {seqlen}")


class Recorder(TorchDispatchMode):
    """Collects the flashgen ops that run, with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, tuple[Any, tuple, dict]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func.namespace == "flashgen":
            self.calls[func._schema.name] = (func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


@BOTH
def test_b091_opcheck(problem: Problem, cuda: str) -> None:
    inputs = problem.make_inputs(cuda)
    with Recorder() as recorder:
        attend(inputs)
        attend(inputs, return_lse=True)
        attend(inputs, out=torch.zeros_like(inputs.q))
        attend(inputs, return_lse=True, out=torch.zeros_like(inputs.q))
    names = {f"flashgen::attention{rest}" for rest in ("", "_lse", "_out", "_out_lse")}
    assert set(recorder.calls) == names
    for op, args, kwargs in recorder.calls.values():
        torch.library.opcheck(op, args, kwargs)


@BOTH
def test_b091_tracing_opens_no_file(problem: Problem, cuda: str) -> None:
    """The fake has the shape, dtype and strides of the result, also for a variant that nobody compiled yet."""
    def refuse(*args: object, **rest: object) -> None:
        raise AssertionError(f"opened {args[:1]} while tracing")

    inputs = problem.make_inputs(cuda)
    attend(inputs)  # imports are done
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = inputs.with_(**{name: mode.from_tensor(value) for name, value in vars(inputs).items()
                               if isinstance(value, Tensor)})
        new = fake.with_(v=fake.v.new_empty(*fake.v.shape[:-1], 184))
        with pytest.MonkeyPatch.context() as patch:
            for module in (builtins, io):
                patch.setattr(module, "open", refuse)
            out, lse = attend(new, return_lse=True)
    rows = inputs.q.shape[:-1]
    assert out.shape == (*rows, 184) and out.dtype == inputs.q.dtype and out.is_contiguous()
    assert lse.dtype == torch.float32 and lse.numel() == math.prod(rows) and lse.device.type == "cuda"


# Refusals: by name, before anything is launched

def test_b093_a_tile_that_does_not_fit(cuda: str) -> None:
    inputs = Problem(1, 64, 64, 1, 1, 256, 256).make_inputs(cuda)
    out = torch.full_like(inputs.q, 7.0)
    with pytest.raises(PlanError, match=r"registers|shared memory"):
        attend(inputs, spec=_spec(head_dim_qk=256, tile=Tile(m=256, n=256)), out=out)
    assert (out == 7).all()


def _arch(here: bool) -> str:
    """A target that runs on the current device, or one that does not."""
    major, minor = torch.cuda.get_device_capability()
    return next(name for name, target in TARGETS.items() if target.runs_on(10 * major + minor) == here)


def _spec(**fields: Any) -> Spec:
    values: dict[str, Any] = {"name": "t", "family": "fa2", "pass": "fwd", "arch": _arch(True), "dtype": "bf16",
                              "head_dim_qk": 64}
    return Spec(**values | fields)


REFUSED: dict[str, tuple[Callable[[Inputs], Inputs], Callable[[], dict[str, Any]], str]] = {
    # name: (change of the inputs, further arguments, words of the message)
    "head dim 36": (lambda x: x.with_(q=x.q[..., :36], k=x.k[..., :36]), dict, "36|multiple of 8"),
    "head dim 36, packed rows": (lambda x: x.with_(q=x.q[..., :36].contiguous(), k=x.k[..., :36].contiguous()), dict,
                                 "36|multiple of 8"),
    "head dim 264": (lambda x: x.with_(q=torch.cat([x.q] * 5, -1)[..., :264], k=torch.cat([x.k] * 5, -1)[..., :264]),
                     dict, "264|256"),
    "q and k differ in head dim": (lambda x: x.with_(k=x.k[..., :32]), dict, "head_dim|32"),
    "q and k differ in batch": (lambda x: x.with_(q=x.q[:1]), dict, "batch"),
    "k and v differ in rows": (lambda x: x.with_(v=x.v[:, 1:]), dict, "seqlen_kv|199"),
    "heads do not divide": (lambda x: x.with_(q=x.q[:, :, :5]), dict, "num_heads"),
    "float32": (lambda x: x.with_(q=x.q.float(), k=x.k.float(), v=x.v.float()), dict, "float32"),
    "two dtypes": (lambda x: x.with_(v=x.v.half()), dict, "dtype|float16"),
    "two devices": (lambda x: x.with_(v=x.v.cpu()), dict, "device|cpu"),
    "unknown causal": (lambda x: x.with_(causal="sideways"), dict, "causal"),
    "window below -1": (lambda x: x.with_(window=(-2, 0)), dict, "window"),
    "scale 0": (lambda x: x.with_(softmax_scale=0.0), dict, "softmax_scale"),
    "scale below 0": (lambda x: x.with_(softmax_scale=-0.1), dict, "softmax_scale"),
    "scale NaN": (lambda x: x.with_(softmax_scale=math.nan), dict, "softmax_scale"),
    "scale inf": (lambda x: x.with_(softmax_scale=math.inf), dict, "softmax_scale"),
    "half of varlen": (lambda x: x.with_(cu_seqlens_q=torch.zeros(2, dtype=torch.int32, device=x.q.device)), dict,
                       "cu_seqlens"),
    "out of another shape": (lambda x: x, lambda: {"out": torch.empty(2, 129, 6, 64, dtype=torch.bfloat16,
                                                                      device="cuda")}, "out"),
    "spec without causal": (lambda x: x, lambda: {"spec": _spec()}, "causal"),
    "spec without window": (lambda x: x.with_(window=(3, -1)), lambda: {"spec": _spec(causal=True)}, "window"),
    "spec without lse": (lambda x: x, lambda: {"spec": _spec(causal=True, lse=False), "return_lse": True}, "lse"),
    "spec of another dtype": (lambda x: x, lambda: {"spec": _spec(causal=True, dtype="fp16")}, "dtype|fp16"),
    "spec of another head dim": (lambda x: x, lambda: {"spec": _spec(causal=True, head_dim_qk=128)}, "head_dim|128"),
    "spec of varlen": (lambda x: x, lambda: {"spec": _spec(causal=True, kv_layout="varlen")}, "varlen|kv_layout"),
    "spec of another arch": (lambda x: x, lambda: {"spec": _spec(causal=True, arch=_arch(False))}, "sm_|arch"),
}


@pytest.mark.parametrize("varlen", [False, True])
def test_spec_without_lse_serves(varlen: bool, device: str) -> None:
    problem = Problem(2, (130, 9), (200, 9), 6, 2) if varlen else Problem(2, 130, 200, 6, 2)
    inputs = problem.make_inputs(device)
    spec = _spec(lse=False, kv_layout="varlen" if varlen else "dense")
    out = flashgen.attention(inputs.q, inputs.k, inputs.v, **inputs.keywords, spec=spec)
    check_bits(out, attend(inputs, spec=spec.with_(lse=True)), "out without lse")


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str, cuda: str) -> None:
    change, more, words = REFUSED[name]
    inputs = change(DENSE.make_inputs(cuda))
    with pytest.raises(FlashgenError, match=words):
        attend(inputs, **more())


def test_cu_seqlens_of_another_form_are_refused(cuda: str) -> None:
    inputs = VARLEN.make_inputs(cuda)
    assert inputs.cu_seqlens_q is not None and inputs.cu_seqlens_kv is not None
    for bad in (inputs.cu_seqlens_q.long(), inputs.cu_seqlens_q[:-1], inputs.cu_seqlens_q[None],
                inputs.cu_seqlens_q.cpu()):
        with pytest.raises(FlashgenError, match="cu_seqlens"):
            attend(inputs.with_(cu_seqlens_q=bad))


def test_cu_seqlens_past_the_end_read_and_write_nothing_outside(cuda: str) -> None:
    """The device clamps prefix sums, so that wrong lengths cannot touch foreign memory."""
    inputs = VARLEN.make_inputs(cuda)
    guard = torch.full((3 * len(inputs.q), *inputs.q.shape[1:]), 7.0, dtype=torch.bfloat16, device=cuda)
    out = guard[len(inputs.q):2 * len(inputs.q)]
    for wrong in ([0, 130, 131, 2**31 - 1], [0, -5, 131, 140], [-2**31, 130, 131, 140], [0, 140, 3, 999]):
        cu = torch.tensor(wrong, dtype=torch.int32, device=cuda)
        attend(inputs.with_(cu_seqlens_q=cu), out=out)
        attend(inputs.with_(cu_seqlens_kv=cu), out=out)
    torch.cuda.synchronize()
    assert (guard[:len(out)] == 7).all() and (guard[2 * len(out):] == 7).all()


FORK = """
import os, torch, flashgen
from flashgen.errors import EnvironmentError_
q = torch.randn(1, 9, 1, 64, device="cuda", dtype=torch.bfloat16)
out = torch.empty_like(q)           # so that nothing of torch's meets the fork first
flashgen.attention(q, q, q, out=out)
pid = os.fork()
if pid == 0:
    try:
        flashgen.attention(q, q, q, out=out)
    except EnvironmentError_ as err:
        assert "forked" in str(err) and "spawn" in str(err), err
        t = torch.randn(1, 9, 1, 64).bfloat16()
        flashgen.attention(t, t, t)
        os._exit(7)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
flashgen.attention(q, q, q, out=out)
torch.cuda.synchronize()
"""


def test_a_fork_is_refused_by_name(cuda: str) -> None:  # B119
    """No CUDA context survives a fork. The parent goes on, and so does the emulator in the child."""
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
