"""Tensor maps, counters and partials on a device: a small persistent kernel, on streams and in graphs. Needs cc 9.0."""
from __future__ import annotations

import ctypes
import functools
import threading
from typing import Any
from unittest import mock

import pytest
import torch
from tensor_map_kit import fa3_like, fa3_like_source, program_for

from flashgen.codegen.families.fa3.launch import counter_words
from flashgen.runtime.compile.nvrtc import compile_source
from flashgen.runtime.launch import program as bound
from flashgen.runtime.launch.counters import Counters, counters_of
from flashgen.runtime.launch.driver import adopt_context, api, check, device_facts
from flashgen.runtime.launch.kernel import Kernel

pytestmark = [pytest.mark.gpu, pytest.mark.time_limit(60)]
SHAPE = (2, 333, 8, 64)  # 336 tiles: more than two for each SM
SLEEP_CYCLES = 20_000_000


@functools.cache
def kernel() -> Kernel:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("compute capability 9.0 only")
    adopt_context(0)
    plan = fa3_like()
    return Kernel(plan, compile_source(fa3_like_source(plan), plan=plan).image, 0)


def words(slot: int) -> list[int]:
    """What a counter slot holds, once all launches are done."""
    torch.cuda.synchronize()
    held = (ctypes.c_int32 * counter_words(device_facts(0).num_sms))()
    check(api().cuMemcpyDtoH(ctypes.addressof(held), slot, ctypes.sizeof(held)))
    return list(held)


class Call:
    """One call of the kernel, prepared as flashgen.attention prepares its own, with counters to look at."""

    def __init__(self, counters: Counters | None = None, floats: int | None = None) -> None:
        self.q, self.k, self.v = (torch.randint(0, 2**15, SHAPE, dtype=torch.int16, device="cuda") for _ in range(3))
        self.out = torch.zeros_like(self.q)
        self.counters = counters or counters_of(0, counter_words(device_facts(0).num_sms))
        program = program_for(kernel().plan, self.q, self.k, self.v, self.out, SHAPE[0], kernel().num_sms)
        room = max(program.buffer("partials").size, program.steps[0].grid_x) if floats is None else floats
        program = program._replace(buffers=tuple(buffer._replace(shape=(room,)) if buffer.name == "partials" else buffer
                                                 for buffer in program.buffers))
        with mock.patch.object(bound, "counters_of", lambda *_: self.counters):
            self.launch = bound.BoundProgram(program, {"fwd": kernel()}, ("q", "k", "v", "out"), self.q.device)

    def __call__(self) -> torch.Tensor:
        self.launch(torch.cuda.current_stream().cuda_stream,
                    [t.data_ptr() for t in (self.q, self.k, self.v, self.out)])
        return self.out

    @property
    def right(self) -> bool:
        torch.cuda.synchronize()
        return torch.equal(self.out, self.q ^ self.k ^ self.v)


def capture(call: Any) -> torch.cuda.CUDAGraph:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def test_maps_follow_tensors_that_move(cuda: str) -> None:
    call = Call()
    call()
    assert call.right
    for name in ("q", "k", "v", "out"):
        setattr(call, name, torch.randint_like(call.q, 0, 2**15))
        call()
        assert call.right


def test_without_partials_the_pointer_is_null(cuda: str) -> None:
    call = Call(floats=0)
    call()
    assert call.right


def test_launches_of_one_stream_share_a_slot_and_leave_it_zero(cuda: str) -> None:
    call = Call()
    for _ in range(50):
        call()
    slot = call.counters.slot(torch.cuda.current_stream().cuda_stream)
    assert call.right and not any(words(slot))


def test_streams_have_slots_of_their_own(cuda: str) -> None:
    calls, streams = [Call() for _ in range(4)], [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    for _ in range(20):
        for call, stream in zip(calls, streams, strict=True):
            with torch.cuda.stream(stream):
                call()
    assert all(call.right for call in calls)
    slots = {calls[0].counters.slot(stream.cuda_stream) for stream in streams}
    assert len(slots) == 4 and not any(any(words(slot)) for slot in slots)


def test_threads_on_one_stream(cuda: str) -> None:
    """Their launches are ordered by the stream, whichever thread makes them."""
    calls, failed = [Call() for _ in range(4)], list[str]()
    torch.cuda.synchronize()

    def work(call: Call) -> None:
        adopt_context(0)
        for _ in range(50):
            call()
        torch.cuda.synchronize()
        if not call.right:
            failed.append("wrong")

    threads = [threading.Thread(target=work, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_a_block_is_allocated_during_a_capture(cuda: str) -> None:
    counters = Counters()  # with no slot yet
    call = Call(counters)
    Call()()  # the kernel is loaded, and torch's pools are warm
    graph = capture(call)
    assert len(counters._free) > 0 and not counters._of_stream
    for _ in range(3):
        call.out.zero_()
        graph.replay()
        assert call.right


def test_a_graph_beside_eager_work_on_its_stream(cuda: str) -> None:
    """Captured on the stream that torch captures on, replayed on another, while eager launches run on a third."""
    captured, eager = Call(), Call()
    captured()
    graph = capture(captured)
    slots = captured.counters
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    for _ in range(20):
        with torch.cuda.stream(streams[0]):
            graph.replay()
        with torch.cuda.stream(streams[1]):
            eager()
    assert captured.right and eager.right
    for stream in streams:
        assert not any(words(slots.slot(stream.cuda_stream)))


def test_each_captured_launch_has_a_slot(cuda: str) -> None:
    counters = Counters()
    calls = [Call(counters) for _ in range(3)]
    calls[0]()
    before = len(counters._free)

    def all_of_them() -> None:
        for call in calls:
            call()

    graphs = [capture(all_of_them) for _ in range(2)]
    assert before - len(counters._free) == 6
    streams = [torch.cuda.Stream() for _ in graphs]
    for _ in range(10):  # the graphs write the same results at the same time, each with counters of its own
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    assert all(call.right for call in calls)


def test_a_slot_is_made_while_the_default_stream_is_busy(cuda: str) -> None:
    """Zeroing must not wait for what is queued elsewhere, nor be overtaken by the launch it is for."""
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    torch.cuda._sleep(SLEEP_CYCLES)
    call = Call(Counters())
    with torch.cuda.stream(stream):
        stream.wait_stream(torch.cuda.default_stream())
        call()
    assert call.right
