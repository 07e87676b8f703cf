"""`flashgen bench mla_h100` without a GPU: cases, marks, figures, tables, and FlashMLA played by a stand-in."""
from __future__ import annotations

import importlib
import json
import math
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from mla_kit import MLA_SPECS, truth_of

import flashgen
from flashgen.cli import bench as cli
from flashgen.errors import SpecError, UnsupportedError
from flashgen.runtime.measure.bench import Call, Peer, Refused, bench, gpu_folder
from flashgen.runtime.measure.grid import ROOT, default_grid
from flashgen.runtime.ops.mla_decode import bench as bench_mla
from flashgen.runtime.ops.mla_decode import timed
from flashgen.runtime.ops.mla_decode.bench import (
    BENCH,
    DecodeBench,
    MlaCase,
    geomeans_by_heads,
    load_cases,
    marks_for,
    variant_for,
)
from flashgen.runtime.ops.mla_decode.problem import MlaInputs
from flashgen.runtime.ops.mla_decode.timed import DecodeJob, Start, inputs, started

SPECS = MLA_SPECS
MARKS = json.loads((ROOT / "benchmarks" / "marks" / "flashmla_h200.json").read_text())
CASES = load_cases(default_grid("flashmla", "decode"))


@pytest.mark.parametrize(("changes", "words"), [  # B134
    ({"rows": {}}, "`rows` is an object"), ({"date": 5}, "`date` is 5"), ({"dtype": "fp8"}, '`dtype` is "fp8"'),
    ({"rows": [{**MARKS["rows"][0], "ms": 0}]}, "`rows\\[0\\].ms` is 0"), (None, "is not JSON")])
def test_a_damaged_file_of_marks_is_an_error_with_the_field(
        changes: dict[str, Any] | None, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "benchmarks" / "marks" / "flashmla_h200.json"
    path.parent.mkdir(parents=True)
    path.write_text("" if changes is None else json.dumps({**MARKS, **changes}))
    monkeypatch.setattr(bench_mla, "ROOT", tmp_path)
    with pytest.raises(SpecError, match=rf"flashmla_h200\.json:? {words}") as caught:
        marks_for("NVIDIA H200")
    assert caught.value.where == str(path) and caught.value.allowed


def test_the_grid_holds_every_mark_and_what_crashed_there() -> None:
    source, marks = marks_for("NVIDIA H200")
    assert len(marks) == len(MARKS["rows"]) == 67 and source.startswith("flashmla_h200.json")
    assert {*marks} <= {*CASES} and len(CASES) == 80
    assert {case for case in CASES if case not in marks and case.num_heads_q == 16} >= {
        MlaCase(8, 1, 32768, 16), MlaCase(128, 1, 32768, 16)}
    assert marks_for("NVIDIA H100 PCIe") == ("", {})


def test_work_is_counted_as_the_marks_count_it() -> None:
    for row in MARKS["rows"]:
        case = MlaCase(row["batch"], row["seqlen_q"], row["seqlen_kv"], row["num_heads_q"])
        assert case.flops / row["ms"] / 1e9 == pytest.approx(row["tflops"], rel=0.02)
        assert case.bytes / row["ms"] / 1e6 == pytest.approx(row["gbps"], rel=0.02)
    assert MlaCase(1, 2, 64, 16, "fp16").label == "H16 Q2 B1 S64 fp16"


@pytest.mark.parametrize(("grid", "words"), [
    ("{batch: 1}", "seqlen_q is missing"), ("{bach: 1}", "nearest: batch"), ("{batch: 0}", "whole numbers from 1"),
    ("{batch: 1, seqlen_q: 1, seqlen_kv: 64, num_heads_kv: 1}", "unknown key num_heads_kv"), ("[]", "no mapping")])
def test_grids_that_are_none(grid: str, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        load_cases(grid) if grid != "[]" else load_cases("[1]")


def test_the_fast_path_is_timed_unless_another_is_named() -> None:
    case = MlaCase(1, 1, 64, 16)
    assert variant_for(case, SPECS).variant == "mla_h100_bf16_d576v512_paged64"
    rows = [spec for spec in SPECS if spec.page_size == 1 and spec.pass_ == "decode"]
    assert variant_for(case, rows).variant == "mla_h100_bf16_d576v512_paged1"
    assert variant_for(MlaCase(1, 1, 64, 16, "fp16"), SPECS).dtype == "fp16"
    with pytest.raises(UnsupportedError, match="H16 Q1 B1 S64"):
        variant_for(case, [spec for spec in SPECS if spec.head_dim_qk == 512])


class Device:
    """Our calls take 20 us, those of a peer 30; a peer's call "uncapturable" is refused."""

    data, timer, l2_bytes, num_sms, place = "normal", "graph", 1, 132, "cpu"

    def __init__(self) -> None:
        self.released = 0

    def facts(self) -> dict[str, Any]:
        return {"gpu": "NVIDIA H200", "driver": "580", "versions": {"torch": "2"}}

    def archs(self) -> Sequence[str]:
        return ["sm_90a"]

    def timed(self, timer: str, calls: Sequence[Any]) -> Callable[[], float]:
        assert len(calls) == 8 and timer == "graph"
        if calls[0] == "uncapturable":
            raise Refused("cannot be captured in a CUDA graph: no")
        return lambda: 0.02 if calls[0] == "ours" else 0.03

    def release(self) -> None:
        self.released += 1


class Made(DecodeBench):
    """Jobs without tensors."""

    def __init__(self, ours: str = "ours") -> None:
        super().__init__()
        self.ours = ours

    def timed(self) -> Any:
        return self

    def find(self, peer: str) -> Peer:
        return timed.find(peer)

    def inputs(self, device: Any, case: MlaCase, spec: Any) -> Any:
        return None

    def job(self, case: MlaCase, spec: Any, inputs: Any) -> Any:
        return SimpleNamespace(case=case, spec=spec, ours=lambda: [self.ours])


CASE = MlaCase(1, 1, 1024, 16)
RUN: dict[str, Any] = {"rounds": 2, "given_commit": "abc"}


def test_results_tables_and_means() -> None:
    device, seen = Device(), []
    cases = [CASE, MlaCase(1, 1, 4096, 16), MlaCase(8, 1, 32768, 16), MlaCase(1, 2, 1024, 128)]
    results = bench(device, Made(), SPECS, cases, (), **RUN,
                    progress=lambda done, what: seen.append(what))
    assert device.released == 4 and seen[0] == "H16 Q1 B1 S1024" and results["commit"] == "abc"
    first, _, unmarked, last = results["rows"]
    assert (first["mark_ms"], first["speed"], last["speed"]) == (0.0114, 0.57, 0.85)
    assert unmarked["mark_ms"] is None and unmarked["speed"] is None and json.dumps(results)
    assert results["absent"] == {} and (first["peers"], first["refused"], first["ratio"]) == ({}, {}, None)
    means = geomeans_by_heads(results["rows"])
    assert means["H16"] == pytest.approx(math.sqrt(0.57 * 1.12)) and [*means] == ["H16", "H128", "all"]
    head, table, mean = cli.tables(BENCH, results, [])
    assert "flashmla_h200.json" in str(head) and isinstance(table, cli.Table) and "H128 0.850" in str(mean)
    assert [row[1] for row in table.rows] == [case.label for case in cases] and table.rows[2][-1] == ""
    assert BENCH.stem(default_grid("flashmla", "decode"), "normal", SPECS) == "flashmla-decode"
    unmarked_job: Any = Made().job(cases[0], variant_for(cases[0], SPECS), None)
    row = Made().row(unmarked_job, {"flashgen": 0.01}, {}, "graph")
    assert row["gbps"] == pytest.approx(cases[0].bytes / 1e4, rel=1e-4) and geomeans_by_heads([row]) == {}
    assert gpu_folder("NVIDIA H200") == "h200"


def test_a_peer_in_rows_tables_and_means(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it raises leaves its row, and the others, as they are."""
    def start(job: Any) -> Any:
        if job.case.num_heads_q == 64:
            raise RuntimeError("bf16 only\nand a trace")
        return ["uncapturable" if job.case.seqlen_q == 2 else "peer"]

    monkeypatch.setattr(timed, "find", lambda peer: Peer(start, (("vllm", None),)))
    cases = [CASE, MlaCase(1, 1, 1024, 64), MlaCase(1, 1, 1024, 128), MlaCase(1, 2, 1024, 128)]
    results = bench(Device(), Made(), SPECS, cases, ["flashmla"], **RUN)
    assert results["versions"] == {"torch": "2", "vllm": None} and results["absent"] == {} and json.dumps(results)
    assert [row["peers"] for row in results["rows"]] == [{"flashmla": 0.03}, {}, {"flashmla": 0.03}, {}]
    assert [row["ratio"] for row in results["rows"]] == [1.5, None, 1.5, None]
    assert [row["speed"] is None for row in results["rows"]] == [False] * 4
    assert geomeans_by_heads(results["rows"], "ratio") == pytest.approx({"H16": 1.5, "H128": 1.5, "all": 1.5})
    _, table, marks, mean, *refused = cli.tables(BENCH, results, ["flashmla"])
    assert isinstance(table, cli.Table) and table.columns[-2:] == (">flashmla ms", ">speed / peer")
    assert [row[-2:] for row in table.rows] == [("0.0300", "1.500"), ("refused", "")] * 2
    assert str(marks).startswith("speed over the marks, geometric mean: H16 0.570, H64 ")
    assert mean == "speed over flashmla, geometric mean: H16 1.500, H128 1.500, all 1.500"
    assert refused == ["refused: flashmla: RuntimeError: bf16 only",
                       "refused: flashmla: cannot be captured in a CUDA graph: no"]


def test_ours_is_never_refused() -> None:
    with pytest.raises(Refused, match="captured"):
        bench(Device(), Made("uncapturable"), SPECS, [CASE], (), **RUN)


def test_an_absent_peer_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    only_folder(monkeypatch, tmp_path)
    results = bench(Device(), Made(), SPECS, [CASE], ["flashmla"], **RUN)
    assert "vllm/_flashmla_C.abi3.so" in results["absent"]["flashmla"] and results["versions"] == {"torch": "2"}
    _, table, _, absent = cli.tables(BENCH, results, ["flashmla"])
    assert isinstance(table, cli.Table) and table.columns[-1] == ">speed / mark"
    assert str(absent).startswith("absent: flashmla: neither flash_mla nor")


def test_peers_are_named_by_family() -> None:
    assert cli._names(cli.ALL_PEERS, BENCH.peers) == ["flashmla"] and cli._names("", ["flashmla"]) == []
    with pytest.raises(UnsupportedError, match="no peer fa3"):
        cli._names("fa3", BENCH.peers)


# -- where FlashMLA is from


def only_folder(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Nothing else can be found."""
    monkeypatch.setattr(sys, "path", [str(folder)])
    for name in ("vllm", "flash_mla"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    importlib.invalidate_caches()


@pytest.mark.parametrize("package", [True, False])
def test_the_extension_is_found_without_vllm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, package: bool) -> None:
    """In a folder that holds nothing else, and in a package, which is not executed."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "_flashmla_C.abi3.so").touch()
    if package:
        (tmp_path / "vllm" / "__init__.py").write_text("raise AssertionError('vllm is imported')")
        (tmp_path / "vllm-0.99.dist-info").mkdir()
        (tmp_path / "vllm-0.99.dist-info" / "METADATA").write_text("Name: vllm\nVersion: 0.99\n")
    loaded: list[Path] = []
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)
    monkeypatch.setattr(torch.ops, "_flashmla_C", SimpleNamespace(dense_decode_fwd=print), raising=False)
    only_folder(monkeypatch, tmp_path)
    found = timed.find("flashmla")
    assert loaded == [tmp_path / "vllm" / "_flashmla_C.abi3.so"]
    assert found.versions == (("vllm", "0.99" if package else None),)


def test_what_cannot_be_loaded_is_absent_in_its_own_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "_flashmla_C.abi3.so").touch()
    only_folder(monkeypatch, tmp_path)
    with pytest.raises(Refused, match=r"OSError: .*_flashmla_C.*: file too short"):
        timed.find("flashmla")
    (tmp_path / "flash_mla.py").write_text("import missing_below_it")
    importlib.invalidate_caches()
    with pytest.raises(Refused, match=r"ModuleNotFoundError.*missing_below_it"):  # the package comes first
        timed.find("flashmla")


# -- its calls

SMALL = MlaCase(2, 2, 96, 4)


def decode(monkeypatch: pytest.MonkeyPatch, case: MlaCase = SMALL, spec: Any = None) -> DecodeJob:
    """On the CPU, ours played by the reference."""
    def ours(q: torch.Tensor, cache: torch.Tensor, seqlens: torch.Tensor, **keywords: Any) -> None:
        inputs = MlaInputs(q, cache, seqlens, keywords["page_table"], keywords["causal"])
        keywords["out"].copy_(truth_of(inputs)[0])

    monkeypatch.setattr(flashgen, "mla_decode", ours, raising=False)
    monkeypatch.setattr(flashgen, "mla_schedule", lambda *_: None, raising=False)
    spec = spec or variant_for(case, SPECS)
    job = DecodeJob(case, spec, inputs(Device(), case, spec))
    job.ours()
    return job


def call_of(found: Peer, job: DecodeJob) -> Call:
    call, = found.start(job)
    return call


def honest(q: torch.Tensor, cache: torch.Tensor, head_dim_v: int, seqlens: torch.Tensor, table: torch.Tensor,
           softmax_scale: float, causal: bool) -> torch.Tensor:
    """FlashMLA's answer, and what it demands."""
    pages = -(-int(seqlens.max()) // 64)
    assert q.shape[-1] == 576 and head_dim_v == 512 and cache.shape[1:] == (64, 1, 576)
    assert table.shape[1] > pages and int(table.min()) >= 0 and int(table.max()) < cache.shape[0]
    return truth_of(MlaInputs(q, cache.squeeze(2), seqlens, table, causal, softmax_scale))[2]


def test_the_extension_is_called_with_the_metadata_it_made(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []

    def op(*arguments: Any) -> tuple[torch.Tensor, None, str, str]:
        *inputs, metadata, splits, out = arguments
        assert (metadata, splits, out) in ((None, None, None), ("metadata", "splits", None))
        seen.append(metadata)
        return honest(*inputs), None, "metadata", "splits"

    made, same = decode(monkeypatch), decode(monkeypatch)
    started(timed._vllm_start(SimpleNamespace(dense_decode_fwd=op)), made)()
    assert seen == [None, "metadata", "metadata"]
    assert torch.equal(made.inputs.page_table, same.inputs.page_table)  # type: ignore[arg-type]  # ours, as it was


def test_the_other_extension_is_called_with_metadata_made_beforehand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path
                                                                     ) -> None:
    made, calls = decode(monkeypatch), []

    def metadata(seqlens: torch.Tensor, rows: int, heads_kv: int, heads: int, fp8: bool, topk: None) -> list[str]:
        calls.append("metadata")
        assert (rows, heads_kv, heads, fp8, topk) == (8, 1, 4, False, None)
        return ["schedule", "splits"]

    def forward(*arguments: Any) -> list[torch.Tensor]:
        calls.append("forward")
        assert arguments[7:] == ("schedule", "splits", False, None)
        return [honest(*arguments[:7]), arguments[0]]

    for package, file in (("sgl_kernel", "flashmla_ops.abi3.so"), ("vllm", "_flashmla_C.abi3.so")):
        (tmp_path / package).mkdir()
        (tmp_path / package / file).touch()
    monkeypatch.setattr(torch.ops, "load_library", lambda path: calls.append(path.name))
    monkeypatch.setattr(torch.ops, "sgl_kernel", SimpleNamespace(get_mla_decoding_metadata=metadata,
                                                                 fwd_kvcache_mla=forward), raising=False)
    only_folder(monkeypatch, tmp_path)
    call: Any = call_of(found := timed.find("flashmla"), made)
    assert found.versions[0][0] == "sgl_kernel" and torch.allclose(call().float(), made.out.float(), atol=0.02)
    assert calls == ["flashmla_ops.abi3.so", "metadata", "forward", "forward"]


@pytest.mark.parametrize("lazy", [True, False])
def test_the_package_is_called_by_both_signatures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lazy: bool) -> None:
    def early(seqlens: torch.Tensor, rows_per_head_kv: int, heads_kv: int) -> tuple[object, object]:
        assert seqlens.tolist() == [96, 96] and (rows_per_head_kv, heads_kv) == (2 * 4, 1)
        return "metadata", "splits"

    def attend(q: torch.Tensor, k_cache: torch.Tensor, block_table: torch.Tensor, cache_seqlens: torch.Tensor,
               head_dim_v: int, tile_scheduler_metadata: object, num_splits: object, softmax_scale: float | None = None,
               causal: bool = False) -> tuple[torch.Tensor, None]:
        assert (tile_scheduler_metadata, num_splits) == (("lazy", None) if lazy else ("metadata", "splits"))
        return honest(q, k_cache, head_dim_v, cache_seqlens, block_table, softmax_scale or 0.0, causal), None

    module = ModuleType("flash_mla")
    module.__spec__ = ModuleSpec("flash_mla", None)
    module.__dict__.update(get_mla_metadata=(lambda *_, **__: ("lazy", None)) if lazy else early,
                           flash_mla_with_kvcache=attend)
    made = decode(monkeypatch)
    only_folder(monkeypatch, tmp_path)
    monkeypatch.setitem(sys.modules, "flash_mla", module)
    found = timed.find("flashmla")
    assert found.versions == (("flash_mla", None),)
    assert torch.allclose(call_of(found, made)().float(), made.out.float(), atol=0.02)  # type: ignore[attr-defined]


@pytest.mark.parametrize("wrong", [
    lambda out: out.mul(1.05), lambda out: out.roll(1, 0), lambda out: out.index_fill(0, torch.tensor([1]), math.nan)])
def test_other_work_is_refused(monkeypatch: pytest.MonkeyPatch, wrong: Callable[[torch.Tensor], torch.Tensor]) -> None:
    made = decode(monkeypatch)
    with pytest.raises(Refused, match=r"differs from ours by (0\.|1|nan)"):
        started(lambda x: lambda: wrong(made.out), made)
    started(lambda x: lambda: made.out.mul(1.015), made)


def test_cases_that_end_the_process_are_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: Start = lambda x: pytest.fail("it ran")  # noqa: E731
    for case in (MlaCase(8, 1, 32768, 16), MlaCase(32, 1, 8192, 16), MlaCase(256, 1, 1024, 8)):
        with pytest.raises(Refused, match="16 query heads and 256k"):
            started(ran, SimpleNamespace(case=case, inputs=None))  # type: ignore[arg-type]
    marked = marks_for("NVIDIA H200")[1]
    made = decode(monkeypatch)
    for case in marked:
        made.case = case
        started(lambda x: lambda: made.out, made)


def test_a_dense_cache_is_not_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    dense = next(spec for spec in SPECS if spec.kv_layout == "dense" and spec.head_dim_qk == 576)
    with pytest.raises(Refused, match="pages only"):
        started(lambda x: pytest.fail("it ran"), decode(monkeypatch, spec=dense))
