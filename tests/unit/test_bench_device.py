"""Peers, inputs and host overhead of the benchmarks on the CPU, or with stand-ins; one small run on a real GPU."""
from __future__ import annotations

import gc
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import attention_by_reference

import flashgen
from flashgen.cli.bench import ALL_PEERS
from flashgen.codegen.spec.spec import load_specs, spec_path
from flashgen.errors import VerifyError
from flashgen.runtime.launch.tensor_map import fits_maps
from flashgen.runtime.measure import bench, overhead
from flashgen.runtime.measure import device as bench_device
from flashgen.runtime.measure.bench import Refused
from flashgen.runtime.ops.attention import timed
from flashgen.runtime.ops.attention.bench import BENCH, load_grid
from flashgen.runtime.ops.attention.problem import Inputs, Problem
from flashgen.runtime.ops.attention.timed import draw
from flashgen.runtime.verify.reference import reference

SPECS = load_specs(spec_path("fa2_fwd")).specs


def test_peers_by_name() -> None:
    assert ",".join(timed.PEERS) == ",".join(BENCH.peers) == ALL_PEERS


def test_peers_refuse_masks_they_align_otherwise() -> None:
    for name in ("sdpa-fa2", "sdpa-cudnn"):
        prepare = timed.PEERS[name][1]
        with pytest.raises(Refused, match="top-left"):
            prepare(Problem(1, 4, 8, 1, 1, 64, 64, causal=True))
        with pytest.raises(Refused, match="window"):
            prepare(Problem(1, 4, 4, 1, 1, 64, 64, window=(1, 1)))
        prepare(Problem(1, 4, 8, 1, 1, 64, 64))
        with pytest.raises(Refused, match="packed"):
            prepare(Problem(1, (4,), (4,), 1, 1, 64, 64))
    with pytest.raises(Refused, match="packed"):
        timed.PEERS["flex"][1](Problem(1, (4,), (4,), 1, 1, 64, 64))
    with pytest.raises(Refused, match="sdpa-fa2"):
        timed.PEERS["torch-varlen"][1](Problem(1, 4, 8, 1, 1, 64, 64))


SMALL_CASES = [Problem(2, 33, 33, 4, 2, 16, 16), Problem(1, 33, 33, 2, 2, 16, 16, causal=True),
               Problem(1, 20, 33, 2, 1, 16, 16, causal=True), Problem(1, 20, 33, 2, 1, 16, 16, window=(5, 3)),
               Problem(1, 20, 33, 2, 1, 16, 16, causal=True, window=(5, -1))]


@pytest.mark.parametrize("case", SMALL_CASES, ids=lambda case: case.label)
@pytest.mark.parametrize("name", ["sdpa", "flex"])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_peers_answer_the_same_question(name: str, case: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, uncompiled: heads, layout and mask as ours."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    generator = torch.Generator().manual_seed(0)

    def normal(seqlen: int, heads: int) -> torch.Tensor:
        return torch.randn(case.batch, seqlen, heads, 16, generator=generator)

    x = Inputs(normal(case.seqlen_q, case.num_heads_q), normal(case.seqlen_kv, case.num_heads_kv),
                            normal(case.seqlen_kv, case.num_heads_kv))
    try:
        attend = timed._flex(case, "cpu") if name == "flex" else timed._sdpa("MATH")(case)
    except Refused:
        assert name == "sdpa" and (case.window != (-1, -1) or case.seqlen_q != case.seqlen_kv)
        return
    expected, _ = reference(x.q, x.k, x.v, causal=case.causal, window=case.window)
    found: Any = attend(x)
    torch.testing.assert_close(found.transpose(1, 2).double(), expected.double(), atol=1e-4, rtol=1e-4)


FA3_STUB = """
def flash_attn_func(q, k, v, causal=False, window_size=(-1, -1), num_splits=1):
    return q, k, v, causal, window_size, num_splits

def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=False,
                           window_size=(-1, -1), num_splits=1):
    return q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, window_size, num_splits
"""


def test_fa3_is_found_under_either_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (absent, prepare), (_, splitting) = (timed.PEERS[name] for name in ("fa3", "fa3-split"))
    assert "fa3_fwd_interface" in (absent() or "")
    (tmp_path / "fa3_fwd_interface.py").write_text(FA3_STUB)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert absent() is None
    x = Inputs("q", "k", "v", cu_seqlens_q="cu_q", cu_seqlens_kv="cu_kv")  # type: ignore[arg-type]
    assert prepare(SMALL_CASES[2])(x) == ("q", "k", "v", True, (-1, -1), 1)
    assert prepare(SMALL_CASES[3])(x) == ("q", "k", "v", False, (5, 3), 1)
    assert splitting(SMALL_CASES[4])(x) == ("q", "k", "v", True, (5, 0), 0)
    packed = Problem(2, (3, 9), (7, 5), 1, 1, 64, 64, causal=True)
    assert prepare(packed)(x) == ("q", "k", "v", "cu_q", "cu_kv", 9, 7, True, (-1, -1), 1)


def test_torch_varlen_takes_windows_and_packed_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    module, found = pytest.importorskip("torch.nn.attention.varlen"), []

    def newer(q, k, v, cu_q, cu_kv, max_q, max_kv, *, window_size=(-1, -1), enable_gqa=False):  # type: ignore
        found.append((q.shape, k.shape, cu_q.tolist(), cu_kv.tolist(), max_q, max_kv, window_size, enable_gqa))

    def older(q, k, v, cu_q, cu_kv, max_q, max_kv, *, is_causal=False):  # type: ignore[no-untyped-def]
        found.append((max_q, max_kv, is_causal))

    window, packed = Problem(2, 3, 4, 2, 1, 8, 8, True, (5, -1)), Problem(2, (3, 9), (7, 5), 1, 1, 8, 8, causal=True)
    for function in (newer, older):
        monkeypatch.setattr(module, "varlen_attn", function)
        for case in (window, packed):
            try:
                timed._torch_varlen(case, "cpu")(draw(case, "normal", 0, "cpu"))
            except Refused:
                assert function is older and case is window
    assert found == [((6, 2, 8), (8, 1, 8), [0, 3, 6], [0, 4, 8], 3, 4, (5, 0), True),
                     ((12, 1, 8), (12, 1, 8), [0, 3, 12], [0, 7, 12], 9, 7, (-1, 0), False), (9, 7, True)]


@pytest.mark.parametrize("case", [Problem(2, 300, 400, 4, 2, 16, 8), Problem(2, (300, 1), (400, 200), 4, 2, 16, 8)],
                         ids=["dense", "varlen"])
def test_drawn_inputs(case: Problem) -> None:
    drawn = {data: draw(case, data, 1, "cpu") for data in bench.DATA}
    normal = drawn["normal"]
    assert normal.q.dtype == torch.bfloat16 and not torch.equal(normal.q, draw(case, "normal", 2, "cpu").q)
    rows = (2, 400) if not case.varlen else (600,)
    assert normal.k.shape == (*rows, 2, 16) and normal.v.shape == (*rows, 2, 8)
    assert torch.equal(drawn["wide"].q, 8 * normal.q) and torch.equal(drawn["wide"].k, normal.k)
    grown = (drawn["growing"].k.float() / normal.k.float())[..., 0, 0].flatten()
    expected = torch.cat([torch.linspace(0.2, 8, keys) for _, keys in case.lengths])
    torch.testing.assert_close(grown, expected, rtol=0.02, atol=0.0)
    if case.varlen:
        assert normal.cu_seqlens_q is not None and normal.cu_seqlens_kv is not None
        assert normal.cu_seqlens_q.tolist() == [0, 300, 301] and normal.cu_seqlens_kv.tolist() == [0, 400, 600]
        assert normal.cu_seqlens_q.dtype == torch.int32
    else:
        assert normal.cu_seqlens_q is None


def test_the_empty_op_takes_the_arguments_of_ours() -> None:
    q = torch.empty(1, 16, 1, 64, device="meta")
    for _ in range(2):  # its library goes, and can come again
        with overhead._empty_op() as empty:
            assert empty(q, q, q, None, None, 0, -1, -1, 0.125, "", out=q) is None
    import flashgen.runtime.ops.attention.call  # noqa: F401  defines ours

    ours = torch.ops.flashgen.attention_out.default._schema
    with overhead._empty_op():
        assert str(torch.ops.flashgen_bench.empty.default._schema).partition("(")[2] == str(ours).partition("(")[2]


class OnCpu:
    """A device whose timings are made up, so that the rest of a run can be looked at."""

    l2_bytes, num_sms, timer, data, place = 3 * 10**5, 132, "events", "growing", "cpu"

    def facts(self) -> dict[str, Any]:
        return {"gpu": "NVIDIA H200", "driver": "580.1", "versions": {"torch": "2"}}

    def archs(self) -> list[str]:
        return ["sm_90"]

    def timed(self, timer: str, calls: Any) -> Any:
        for call in calls:
            call()
        return lambda: 0.25

    def release(self) -> None: ...


def test_a_run_draws_calls_and_asks_the_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it but the kernels and the timers."""
    seen: list[Any] = []

    def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **keywords: Any) -> Any:
        seen.append((q, keywords["spec"].variant, keywords["out"].isnan().all()))
        return attention_by_reference(q, k, v, **keywords)

    monkeypatch.setattr(flashgen, "attention", ours)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(timed, "_fa3_module", lambda: None)
    grid = ("[{batch: 2, num_heads_q: 2, head_dim_qk: 64, seqlen_q: 100}, "
            "{lengths: [30, 40], hidden: 64, head_dim_qk: 64}]")
    results = bench.bench(OnCpu(), BENCH, SPECS, load_grid(grid), ["sdpa-fa2", "fa3"], rounds=1)
    dense, packed = results["rows"]
    assert [*results["absent"]] == ["fa3"] and results["data"] == "growing"
    assert dense["peers"] == {"sdpa-fa2": 0.25} and dense["refused"] == {} and dense["ratio"] == 1.0
    assert packed["peers"] == {} and "packed" in packed["refused"]["sdpa-fa2"]
    first = [q for q, name, poisoned in seen if poisoned]  # each set of inputs is written for the first time once
    assert {name for _, name, _ in seen} == {"fa2_fwd_bf16_d64", "fa2_fwd_bf16_d64_varlen"}
    assert [q.shape for q in first].count((2, 100, 2, 64)) == 3 and not torch.equal(first[0], first[1])


def test_a_result_that_is_not_finite_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashgen, "attention", lambda *_, **__: None)
    with pytest.raises(VerifyError, match="out is not finite"):
        bench.bench(OnCpu(), BENCH, SPECS, [Problem(1, 16, 16, 1, 1, 64, 64)], [])


# -- on a real GPU


@pytest.mark.gpu
@pytest.mark.time_limit(300)
def test_a_small_run(cuda: str) -> None:
    grid = "{batch: 2, num_heads_q: 4, num_heads_kv: 2, head_dim_qk: 64, seqlen_q: 1024, causal: [false, true]}"
    for timer in ("graph", "events"):
        device = bench_device.CudaDevice(timer)
        results = bench.bench(device, BENCH, SPECS, load_grid(grid), ["sdpa-fa2", "fa3"], rounds=3)
        for row in results["rows"]:
            assert row["ours_ms"] > 0 and math.isfinite(row["tflops"]) and "sdpa-fa2" in row["peers"]


@pytest.mark.gpu
def test_overhead_is_near_that_of_an_empty_op(cuda: str) -> None:
    found = overhead.measure_overhead()
    assert 0 < found["empty_op_us"] < found["fa2_out_us"] < 100  # the target, 15 us beyond, is the bench's
    if torch.cuda.get_device_capability() == (9, 0):
        assert {"fa3_us", "fa3_out_us", "flashmla_us", "flashmla_out_us", "flashmla_scheduled_us"} <= found.keys()


def test_nothing_is_collected_during_a_capture() -> None:
    class Cycle:
        def __init__(self, told: list[str]) -> None:
            self.itself, self.told = self, told

        def __del__(self) -> None:
            self.told.append("gone")

    told: list[str] = []
    Cycle(told)
    with bench_device.uncollected():
        assert told == ["gone"] and not gc.isenabled()
    assert gc.isenabled()


def test_overhead_has_calls_of_each_family(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which family serves them is seen by whether tensor maps can describe their tensors."""
    from flashgen.runtime.ops.attention import overhead as attention
    from flashgen.runtime.ops.mla_decode import overhead as mla_decode

    asked: list[tuple[str, bool]] = []
    monkeypatch.setattr(flashgen, "attention", lambda q, k, v, **more: asked.append(
        ("attention", fits_maps(k.shape, k.stride(), 2))))
    monkeypatch.setattr(flashgen, "mla_decode", lambda *x, **more: asked.append(("mla_decode", "schedule" in more)))
    monkeypatch.setattr(flashgen, "mla_schedule", lambda *x: None)
    for capability, names in (((9, 0), 7), ((8, 0), 2)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        cpu = torch.device("cpu")
        calls = attention.overhead_calls(cpu) | mla_decode.overhead_calls(cpu)
        assert len(calls) == names
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for name, call in {**attention.overhead_calls(cpu), **mla_decode.overhead_calls(cpu)}.items():
        call()
        assert asked[-1] == (("mla_decode", name == "flashmla_scheduled") if "mla" in name else
                             ("attention", name.startswith("fa3")))
