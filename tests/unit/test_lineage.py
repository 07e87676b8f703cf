"""The generations of attention without a GPU: what tiles predict, and the rows of a run on a stand-in device."""
from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from lineage_kit import by_name, measured, rows_of

from flashgen.codegen.explain.cost import Cost, Moved, kv_bytes_read
from flashgen.codegen.explain.explain import explain, explain_plan
from flashgen.codegen.explain.text import OwnExplanation
from flashgen.codegen.families import registry
from flashgen.codegen.families.registry import FAMILIES, by_generation, lower
from flashgen.codegen.spec.spec import load_specs, spec_path
from flashgen.codegen.target import TARGETS
from flashgen.errors import SpecError, UnsupportedError
from flashgen.runtime.measure.lineage import Generation, parse_lengths, parse_problem, predict
from flashgen.runtime.measure.lineage_plot import point_of, walls
from flashgen.runtime.ops.attention.lineage import LINEAGE as ATTENTION
from flashgen.runtime.ops.mla_decode.lineage import LINEAGE as DECODE

H200 = TARGETS["sm_90a"].device

# ---- what tiles predict

def test_score_traffic_of_a_head_of_8192_tokens() -> None:
    """A score matrix in fp16 is 134 MB, and writing and reading S and P moves it four times: 537 MB. Our standard
    stores S in fp32, and its rows are so long that they are read twice: eight of these matrices."""
    matrix = 8192 * 8192 * 2
    assert round(matrix / 1e6) == 134 and round(4 * matrix / 1e6) == 537
    assert explain("fa2_fwd", batch=1, seqlen_q=8192, num_heads_q=1).traffic.scores == 4 * matrix  # type: ignore[attr-defined]
    row = by_name(rows_of("batch=1 seqlen=8192 heads=1 head_dim=128 dtype=fp16"))["standard"]["predicted"]
    tensors = 4 * 8192 * 128 * 2  # q, k, v and out
    assert row["bytes"] == 3 * matrix * 2 + 2 * matrix + tensors + 4 * 8192
    assert row["scratch_bytes"] == 3 * matrix


def test_generations_on_chip_move_each_tensor_once_while_keys_fit_in_l2() -> None:
    rows = by_name(rows_of("batch=2 seqlen=8192 heads=16 head_dim=128 causal=true"))
    once = 4 * 2 * 16 * 8192 * 128 * 2 + 4 * 2 * 16 * 8192  # q, k, v, out and lse
    assert rows["fa2"]["predicted"]["bytes"] == rows["fa3"]["predicted"]["bytes"] == once
    assert rows["standard"]["predicted"]["bytes"] > 90 * once
    for row in rows.values():
        assert row["predicted"]["flops"] == 4 * 128 * 2 * 16 * (8192 * 8193 // 2)
        assert row["predicted"]["flops_issued"] > row["predicted"]["flops"]
        assert row["predicted"]["ms"] >= row["predicted"]["bytes"] / H200.memory_gbps / 1e6 * (1 - 1e-4)


def test_l2_serves_what_live_heads_fit_and_a_wave_shares_the_rest() -> None:
    small = dict(heads=32, tiles_per_head=64, resident=132, device=H200)
    mib = 2**20
    assert kv_bytes_read(10**12, 8 * mib, **small) == 32 * 8 * mib      # 3 heads of 8 MiB fit in half of 50 MiB
    assert kv_bytes_read(10**12, 9 * mib, **small) == 32 * 9 * mib      # they do not, but a head is less than a wave
    assert kv_bytes_read(mib, 8 * mib, **small) == mib                  # nobody asks for more
    long = dict(heads=2, tiles_per_head=512, resident=132, device=H200)
    assert kv_bytes_read(10**12, 25 * mib // 2, **long) == 25 * mib     # two heads of 12.5 MiB fit
    assert kv_bytes_read(10**12, 26 * mib, **long) == 4 * 52 * mib      # a head is 4 waves, and does not


def test_costs_add_up() -> None:
    target = TARGETS["sm_90a"]
    kernels = {"a": Moved(4_800_000, 0, 0), "b": Moved(0, 0, 989_400_000_000)}
    first = Cost.of(kernels, 7, target)
    assert first == Cost(4_800_000, 0, 989_400_000_000, 7, first.ms) and first.ms == pytest.approx(0.001 + 1.0)
    assert first.then(Cost(1, 2, 3, 4, 5.0)) == Cost(4_800_001, 2, 989_400_000_003, 7, first.ms + 5.0)
    assert Cost(1, 2, 0, 0, 0.0).bytes == 3


@pytest.mark.parametrize("name", ["standard", "fa2_fwd", "fa3_fwd", "mla_h100", "fa2_bwd", "fa3_bwd"])
def test_every_explanation_has_a_cost(name: str) -> None:
    cost = explain(name).cost()
    assert min(cost.read, cost.written, cost.flops, cost.ms) > 0 and cost.scratch_bytes >= 0


@dataclasses.dataclass(frozen=True)
class OfKernels(OwnExplanation):
    moved: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class OfTensors(OfKernels):
    scratch_bytes: int = 7
    flops_issued: int = 9
    units: ClassVar = {"tensor cores": 2.0, "device memory": 3.0}


def test_an_explanation_that_says_what_is_moved_needs_no_cost_of_its_own() -> None:
    plan = explain("fa2_fwd").plan
    cost = OfKernels(plan, None, None, 1, {"a": Moved(1, 2, 3), "b": Moved(10, 20, 30)}).cost()
    assert cost[:4] == (11, 22, 33, 0)
    tensors = {"q": SimpleNamespace(read=1, written=2), "m and l": SimpleNamespace(read=5, written=6)}
    assert OfTensors(plan, None, None, 1, tensors).cost() == Cost(6, 8, 9, 7, 3.0)
    for own, moved in ((OfKernels, {}), (OfKernels, {"a": 5}), (OfKernels, tensors), (OfTensors, {"a": 5})):
        with pytest.raises(UnsupportedError, match="not counted"):
            own(plan, None, None, 1, moved).cost()


# ---- generations

def test_the_oldest_comes_first_and_each_tells_its_story() -> None:
    said = [family for family in FAMILIES.values() if family.generation]
    assert len({family.generation for family in said}) == len(said) and all(family.story for family in said)
    order = [family.name for family in by_generation("attention") if family.generation]
    assert order == [name for name in ("standard", "fa1", "fa2", "triton", "fa3") if name in order]
    assert {"standard", "fa2", "fa3"} <= {*order}


def test_a_family_that_joins_is_a_generation_without_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that says its place stands there; one that does not stands last."""
    made = {name: dataclasses.replace(FAMILIES["fa2"], name=name, default=False, generation=place, rank=9)
            for name, place in (("joined", 2), ("silent", 0))}
    monkeypatch.setattr(registry, "FAMILIES", {**FAMILIES, **made})
    order = by_generation("attention")
    assert "silent" in [family.name for family in order[sum(bool(family.generation) for family in order):]]
    rows = rows_of("batch=1 seqlen=64 heads=1 head_dim=64")
    assert [row["generation"] for row in rows if row["generation"] != "fa1"][:2] == ["standard", "joined"]
    assert by_name(rows)["joined"]["status"] == "refused" and "no variant serves" in by_name(rows)["joined"]["why"]


def test_a_step_is_a_forward_with_its_gradients() -> None:
    rows = {(row["generation"], row["passes"]): row
            for row in rows_of("batch=1 seqlen=1024 heads=2 head_dim=128", backward=True)}
    forward, step = rows["fa2", "fwd"]["predicted"], rows["fa2", "fwd+bwd"]["predicted"]
    assert step["flops"] == pytest.approx(3.5 * forward["flops"]) and step["bytes"] > 2 * forward["bytes"]
    assert rows["standard", "fwd+bwd"]["status"] == "refused"
    assert rows["standard", "fwd+bwd"]["why"] == "it has no backward pass"


def test_decodes_set_full_keys_beside_latents() -> None:
    rows = by_name(rows_of("batch=32 cached=8192 heads=128"))
    assert [*rows][:2] == ["naive", "absorbed"] and "flashmla" in rows
    tokens, heads = 32 * 8192, 128
    naive, absorbed = rows["naive"]["predicted"], rows["absorbed"]["predicted"]
    assert naive["scratch_bytes"] == tokens * heads * 2 * (128 + 128 + 192)
    assert absorbed["scratch_bytes"] == 2 * 2 * 32 * heads * 8192
    cache = tokens * 576 * 2
    assert cache < rows["flashmla"]["predicted"]["bytes"] < 1.1 * cache < absorbed["bytes"] < naive["bytes"]
    assert rows["flashmla"]["predicted"]["flops"] == absorbed["flops"] == 2 * tokens * heads * (576 + 512)
    assert by_name(rows_of("batch=1 cached=64 heads=16", target="sm_80"))["flashmla"]["status"] == "refused"
    backward = rows_of("batch=1 cached=64 heads=16", backward=True)
    assert {row["why"] for row in backward if row["passes"] == "fwd+bwd"} == {"a decode has no backward pass"}


def test_memory_ends_where_scores_no_longer_fit() -> None:
    rows = rows_of("batch=8 heads=16 head_dim=128 causal=true", (8192, 16384))
    assert [row["status"] for row in rows if row["generation"] == "standard"] == ["predicted", "out of memory"]
    assert {row["status"] for row in rows if row["generation"] == "fa2"} == {"predicted"}
    assert walls(rows) == {"standard": 16384}


# ---- words

def test_words_of_a_problem() -> None:
    assert parse_problem("batch=8 causal=true window=5,0 dtype=bf16") == {
        "batch": 8, "causal": True, "window": [5, 0], "dtype": "bf16"}
    [case] = ATTENTION.cases(parse_problem("batch=2 seqlen=64 heads=4 heads_kv=2 head_dim=64 window=5,0"))
    assert (case.seqlen_kv, case.num_heads_kv, case.window) == (64, 2, (5, 0))
    assert ATTENTION.cases(ATTENTION.in_json(case)) == [case]
    assert [one.seqlen_kv for one in DECODE.cases({"batch": 1, "heads": 16}, (64, 128))] == [64, 128]
    assert parse_lengths("1024, 2048") == [1024, 2048] and parse_lengths("") == []


@pytest.mark.parametrize(("problem", "words"), [
    ("batch", "'batch'"), ("batch=1 batch=2", "again"), ("bach=1", "unknown word bach"), ("batch=0", "batch is 0"),
    ("batch=1 seqlen=4 seqlen_q=4 heads=1 head_dim=64", "gives seqlen_q again"), ("batch=1 cached=4 heads=1 seqlen=3",
                                                                                 "of no one operation"),
    ("batch=1 cached=4", "num_heads_q is missing"), ("batch=1 seqlen=4 heads=1", "head_dim_qk is missing")])
def test_a_wrong_problem_is_refused_by_name(problem: str, words: str) -> None:
    with pytest.raises((SpecError, UnsupportedError), match=words):
        rows_of(problem)


def test_wrong_lengths_and_targets_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="1024,x"):
        parse_lengths("1024,x")
    with pytest.raises(SpecError, match="no target sm_91") as caught:
        rows_of("batch=1 seqlen=64 heads=1 head_dim=64", target="sm_91")
    assert caught.value.nearest


# ---- a run on a stand-in

def test_rows_of_a_run() -> None:
    stored: list[int] = []
    results = measured((64, 128, 8192), store=lambda results: stored.append(len(results["rows"])))
    count = len(by_generation("attention"))
    assert stored == [count, 2 * count, 3 * count] and results["gpu"] == "NVIDIA H200"
    first, second, third = (by_name(results["rows"][count * n:count * (n + 1)]) for n in range(3))
    assert first["standard"]["measured"] == {
        "ms": 8.0, "error": 1.23e-3, "peak_bytes": 105, "timer": "graph",
        "tflops": first["standard"]["measured"]["tflops"], "gbps": first["standard"]["measured"]["gbps"]}
    assert first["standard"]["measured"]["tflops"] == pytest.approx(4 * 64 * 64 * 64 / 8e9, rel=1e-4)
    assert first["fa2"]["measured"]["timer"] == "events"  # no graph held it
    assert (first["fa3"]["status"], first["fa3"]["why"]) == ("refused", "ImportError: no such kernel")
    assert second["standard"]["status"] == "out of memory" and second["fa2"]["status"] == "ok"
    assert {row["status"] for row in third.values() if row["variant"]} == {"out of memory"}
    json.dumps(results, allow_nan=False)


def test_counters_stand_beside_what_is_predicted() -> None:
    asked = []

    def counters(case: Any, generation: Generation) -> dict[str, int]:
        asked.append(generation.name)
        return {"read": 30, "written": 10, "kernels": 3}

    row = by_name(measured((64,), counters=counters)["rows"])["standard"]
    assert "standard" in asked and "fa3" not in asked  # what was refused is not counted
    assert row["measured"]["read"] == 30 and row["predicted"]["read"] > 30
    assert point_of(row) == (row["predicted"]["flops"] / 40, row["measured"]["tflops"])


SCHEMA = {"gpu": str, "driver": (str, type(None)), "versions": dict, "commit": (str, type(None)), "date": str,
          "target": str, "card": dict, "sweep": str, "rows": list}
ROW = {"case": dict, "label": str, "length": int, "generation": str, "story": str, "passes": str, "variant": str,
       "status": str, "why": str, "predicted": (dict, type(None)), "measured": dict}
SAID = {"read": int, "written": int, "bytes": int, "flops": int, "flops_issued": int, "scratch_bytes": int,
        "memory_bytes": int, "fits": bool, "ms": float, "tflops": float}


@pytest.mark.parametrize("make", [lambda: measured((64, 128)), lambda: predict(
    DECODE, DECODE.cases({"batch": 1, "cached": 64, "heads": 16}), "sm_90a")], ids=["measured", "predicted"])
def test_the_document_has_one_form(make: Callable[[], dict[str, Any]]) -> None:
    results = json.loads(json.dumps(make()))
    for form, found in ((SCHEMA, [results]), (ROW, results["rows"]),
                        (SAID, [row["predicted"] for row in results["rows"] if row["predicted"]])):
        assert found
        for one in found:
            assert set(one) == set(form)
            assert all(isinstance(one[name], kind) for name, kind in form.items()), one  # type: ignore[arg-type]


@pytest.mark.parametrize("heads, times", [(8, 0), (32, 1)])
def test_sums_of_dq_that_l2_cannot_hold_are_moved_once_more(heads: int, times: int) -> None:
    """1 MiB of fp32 for a head of 2048 rows of 128, of which an H200's L2 keeps 25."""
    spec = next(s for s in load_specs(spec_path("fa3_bwd")).specs if s.head_dim_qk == 128 and s.kv_layout == "dense")
    found: Any = explain_plan(lower(spec), spec, batch=1, seqlen_q=2048, seqlen_kv=2048, num_heads_q=heads,
                              num_heads_kv=heads)
    rows = heads * 2048
    assert found.moved["gradients"] == rows * (2 + 4) * 128 * 2 + 2 * rows * 4 + times * 2 * rows * 128 * 4
    once = found.moved["preprocess"] + found.moved["postprocess"] + rows * 6 * 128 * 2 + 2 * rows * 4
    assert sum(found.cost()[:2]) == once + times * 2 * rows * 128 * 4
