"""flashgen.mla_decode on a Hopper device: the contract, poisoned caches, long caches, graphs, known bugs of others.

Bug numbers are those of the list that the tests of the other families use.
"""
from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from mla_kit import MLA_SPECS, decode, decoded, solved, with_nans
from torch import Tensor

import flashgen
from flashgen.codegen.spec.spec import Spec
from flashgen.compat.flash_mla import flash_mla_with_kvcache, get_mla_metadata
from flashgen.errors import UnsupportedError
from flashgen.runtime.ops.mla_decode.op import layouts
from flashgen.runtime.ops.mla_decode.problem import MlaInputs, MlaProblem
from flashgen.runtime.verify.compare import check, check_bits, named
from flashgen.runtime.verify.subject import Subject
from flashgen.runtime.verify.verify import verify_spec

SPECS = MLA_SPECS
DECODES = [spec for spec in SPECS if spec.pass_ == "decode"]
HOPPER = not torch.cuda.is_available() or torch.cuda.get_device_capability() == (9, 0)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="the kernels are for compute capability 9.0")]


@pytest.mark.time_limit(600)
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.variant)
def test_shipped_variants_keep_the_contract(spec: Spec, cuda: str) -> None:
    failed = [result for result in verify_spec([spec]) if not result.ok]
    assert not failed, "\n".join(f"{result.problem}: {result.message}" for result in failed)


# ---- bugs seen elsewhere

@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("page_size", [64, 16, 1, None])
def test_b021_b022_what_no_request_has_does_not_count(page_size: int | None, special: float, device: str) -> None:
    for lengths in ((65, 1), (1, 3), (64, 128, 0), (1, 63, 200)):
        inputs = MlaProblem(lengths, 16, 1, page_size).make_inputs(device)
        decoded(inputs.with_(kv_cache=inputs.kv_cache.nan_to_num(special)), f"{lengths}, {special} past the end")


def test_b024_a_number_is_the_length_of_every_request(device: str) -> None:
    inputs = MlaProblem((5, 5, 5), 16, 1, 16).make_inputs(device)
    out = flashgen.mla_decode(inputs.q, inputs.kv_cache, 5, page_table=inputs.page_table)
    check_bits(out, decode(inputs), "out")


@pytest.mark.parametrize("seqlen_q", [1, 2])
def test_b028_requests_without_keys_are_written_every_time(seqlen_q: int, device: str) -> None:
    for heads in (4, 16, 128):
        problem = MlaProblem((5, 9, 1, 3, 64, 0, 0, 0), heads, seqlen_q, causal=True)
        for _ in range(3):
            out, lse = solved(problem, device)
            assert not out[5:].any() and torch.isneginf(lse[5:]).all()


@pytest.mark.parametrize("page_size", [64, 16])
@pytest.mark.parametrize("offset", [2**31, 2**32])
def test_b031_pages_far_into_the_cache(offset: int, page_size: int, cuda: str) -> None:
    inputs = MlaProblem((16,), 16, 1, page_size).make_inputs(cuda)
    assert inputs.page_table is not None
    here = int(inputs.page_table[0, 0])
    far = offset // (page_size * 576) + 1
    cache = torch.empty(far + 1, page_size, 576, dtype=torch.bfloat16, device=cuda)
    cache[far] = inputs.kv_cache[here]
    table = inputs.page_table.clone()
    table[0, 0] = far
    check_bits(decode(inputs.with_(kv_cache=cache, page_table=table)), decode(inputs), f"page {far}")


@pytest.mark.parametrize("lengths", [(0,), (0, 0, 0), (1,), (513, 0), (4097, 1, 0)], ids=str)
def test_b047_parts_in_which_a_row_sees_nothing(lengths: tuple[int, ...], device: str) -> None:
    """The last part of a cut request holds keys that only the last token sees."""
    for heads in (8, 16):
        solved(MlaProblem(lengths, heads, 8, causal=True), device)


def test_b048_lse_is_natural_and_merges_halves(device: str) -> None:
    inputs = MlaProblem((4096,), 16, 1, None).make_inputs(device)
    whole, lse = decoded(inputs)
    halves = [decode(inputs.with_(kv_cache=part, seqlens_kv=torch.full_like(inputs.seqlens_kv, 2048)), return_lse=True)
              for part in (inputs.kv_cache[:, :2048], inputs.kv_cache[:, 2048:4096])]
    weights = [torch.exp(part_lse - lse).transpose(1, 2)[..., None] for _, part_lse in halves]
    assert torch.allclose(sum(weights), torch.ones_like(weights[0]), atol=1e-4)
    merged = sum(w * out.float() for w, (out, _) in zip(weights, halves, strict=True))
    torch.testing.assert_close(merged, whole.float(), atol=2e-3, rtol=1e-2)


@pytest.mark.parametrize("seqlen_q", range(1, 9))
def test_b072_new_tokens_see_what_they_should(seqlen_q: int, device: str) -> None:
    for causal in (False, True):
        solved(MlaProblem((seqlen_q, 1, 300, 64), 8, seqlen_q, causal=causal), device)


@pytest.mark.parametrize("heads", [1, 2, 4, 8, 16, 24, 31, 32, 33, 48, 63, 64, 65, 96, 127, 128])
def test_b074_any_number_of_heads(heads: int, device: str) -> None:
    for seqlen_q, spec_page in ((1, 64), (2, 64), (1, 1), (3, None)):
        solved(MlaProblem((700, 1, 65), heads, seqlen_q, spec_page, causal=True, sink=heads % 2 > 0), device)


def test_sinks_at_the_edges(device: str) -> None:
    """B060: also logits that overflow an exponential."""
    inputs = MlaProblem((700, 0, 3), 16, 1, sink=True).make_inputs(device)
    for value in (math.inf, -math.inf, 100.0, -100.0, 0.5):
        decoded(inputs.with_(sink=torch.full((16,), value, device=device)), f"sink {value}")


@pytest.mark.parametrize("page_size", [64, 16, None])
def test_a_nan_reaches_the_rows_that_see_it(page_size: int | None, device: str) -> None:
    inputs = MlaProblem((3000, 66, 3), 16, 2, page_size, causal=True).make_inputs(device)
    decoded(with_nans(inputs), "NaN inside")


# ---- long caches, many requests

@pytest.mark.time_limit(300)
@pytest.mark.parametrize("lengths", [(32768,) * 8, (262144,), (32768,) * 32, (1 << 20,), (32768,) * 128,
                                     tuple(range(100, 65000, 1000))], ids=lambda x: f"{len(x)}x{x[-1]}")
@pytest.mark.parametrize("heads", [16, 128])
def test_long_caches(lengths: tuple[int, ...], heads: int, cuda: str) -> None:
    """256k to 4M cached tokens."""
    solved(MlaProblem(lengths, heads, 1), cuda)


@pytest.mark.time_limit(300)
def test_many_requests(cuda: str) -> None:
    lengths = tuple(i * 7919 % 130 for i in range(5000))
    for page_size in (64, 16):
        solved(MlaProblem(lengths, 16, 1, page_size), cuda)


def test_pools_and_strides(device: str) -> None:
    for spec in DECODES:
        layouts(Subject(spec, device), MlaProblem((300, 1, 0, 900, 64), 33, 2, None if spec.kv_layout == "dense" else
                                                  64, spec.head_dim_qk, True, dtype=spec.dtype))


# ---- what changes no bit

@pytest.mark.parametrize("heads", [16, 64, 128])
def test_runs_give_the_same_bits(heads: int, cuda: str) -> None:
    inputs = MlaProblem((5000, 3, 0, 800, 65), heads, 2, causal=True).make_inputs(cuda)
    first = decoded(inputs)
    for _ in range(20):
        for name, found, expected in zip(("out", "lse"), decoded(inputs, judged=False), first, strict=True):
            check_bits(found, expected, name)


def test_streams_beside_each_other(cuda: str) -> None:
    """Each stream has its counters, and a schedule of its own."""
    inputs = [MlaProblem((9000, 30 * i), 16, 1, seed=i).make_inputs(cuda) for i in range(4)]
    expected = [decode(x) for x in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    for _ in range(10):
        found = []
        for stream, x in zip(streams, inputs, strict=True):
            with torch.cuda.stream(stream):
                found.append(decode(x))
        torch.cuda.synchronize()
        for a, b in zip(found, expected, strict=True):
            check_bits(a, b, "out")


# ---- graphs, torch, the compatibility layer

@contextmanager
def captured(inputs: MlaInputs, **more: object) -> Iterator[tuple[torch.cuda.CUDAGraph, Tensor, Tensor]]:
    decode(inputs)  # compiles and loads
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = decode(inputs, return_lse=True, **more)
    yield graph, out, lse


@pytest.mark.parametrize("heads", [16, 128])
def test_b089_a_graph_serves_other_lengths(heads: int, cuda: str) -> None:
    most = MlaProblem((4096, 4096, 4096, 4096), heads, 1)
    inputs = most.make_inputs(cuda)
    cache = torch.randn_like(inputs.kv_cache)  # rows that one replay does not use, another does
    inputs = inputs.with_(kv_cache=cache)
    with captured(inputs) as (graph, out, lse):
        for lengths in ((64,) * 4, (1, 300, 4096, 0), (0, 0, 17, 64), (4096,) * 4, (0,) * 4):
            inputs.seqlens_kv.copy_(torch.tensor(lengths, dtype=torch.int32))
            out.fill_(math.nan)
            graph.replay()
            check(named(out, lse), inputs, label=str(lengths))
            check_bits(out, decode(inputs), "out, graph and eager")


def test_a_kept_schedule_in_a_graph(cuda: str) -> None:
    inputs = MlaProblem((4096, 5, 0, 700), 16, 2, causal=True).make_inputs(cuda)
    schedule = flashgen.mla_schedule(inputs.seqlens_kv, 16, 2)
    with captured(inputs, schedule=schedule) as (graph, out, lse):
        graph.replay()
        check(named(out, lse), inputs)
    with pytest.raises(UnsupportedError, match="seqlen_q 2"):
        decode(MlaProblem((3,) * 4, 16, 1).make_inputs(cuda), schedule=schedule)


def test_compiled(cuda: str) -> None:
    inputs = MlaProblem((4096, 5, 0, 700), 16, 2, causal=True, sink=True).make_inputs(cuda)

    @torch.compile(fullgraph=True)
    def layer(q: Tensor, cache: Tensor, lengths: Tensor) -> Tensor:
        schedule = flashgen.mla_schedule(lengths, 16, 2)
        return flashgen.mla_decode(q * 1.0, cache, lengths, **inputs.keywords, schedule=schedule)

    check_bits(layer(inputs.q, inputs.kv_cache, inputs.seqlens_kv), decode(inputs), "out")


def test_the_compatibility_layer(cuda: str) -> None:
    inputs, meta = MlaProblem((4096, 5, 0, 700), 64, 2, causal=True).make_inputs(cuda), get_mla_metadata()[0]
    for _ in range(2):
        out, lse = flash_mla_with_kvcache(inputs.q, inputs.kv_cache[:, :, None], inputs.page_table, inputs.seqlens_kv,
                                          512, meta, causal=True)
        check(named(out, lse.masked_fill(torch.isposinf(lse), -math.inf)), inputs)
        assert torch.isposinf(lse[2]).all()
    scaled, same = flash_mla_with_kvcache(inputs.q, inputs.kv_cache[:, :, None], inputs.page_table, inputs.seqlens_kv,
                                          512, meta, causal=True, attn_sink=torch.ones(64, device=cuda))
    check_bits(same, lse, "lse")
    check(named(scaled, None), inputs.with_(sink=torch.ones(64, device=cuda)))


def test_no_call_waits_for_the_device(cuda: str) -> None:
    """With the stream held up, calls return all the same."""
    inputs = MlaProblem((4096, 5), 16, 1).make_inputs(cuda)
    decode(inputs)
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)
    busy = torch.cuda.Event()
    for _ in range(5):
        decode(inputs)
    busy.record()
    assert not busy.query()
    torch.cuda.synchronize()
