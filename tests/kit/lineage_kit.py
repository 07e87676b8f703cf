"""What the tests of a lineage share: predicted rows, and a run on a stand-in for the device."""
from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from flashgen.runtime.measure import lineage
from flashgen.runtime.measure.bench import Call, Refused, Run
from flashgen.runtime.measure.lineage import Generation, parse_problem, predict
from flashgen.runtime.ops.attention.lineage import AttentionLineage
from flashgen.runtime.ops.registry import lineages

HOPPER = ("sm_90a", "sm_90")


def rows_of(problem: str, lengths: Sequence[int] = (), target: str = "sm_90a", **options: Any) -> list[dict[str, Any]]:
    words = parse_problem(problem)
    found = lineage.lineage_for([*words], lineages())
    return predict(found, found.cases(words, lengths), target, **options)["rows"]


def by_name(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {row["generation"]: row for row in rows}


class OutOfMemory(RuntimeError):
    pass


class FakeDevice:
    """Timings are what the calls answer."""

    l2_bytes, num_sms, place, timer, data, out_of_memory = 50 * 2**20, 132, "cpu", "graph", "normal", OutOfMemory

    def facts(self) -> dict[str, Any]:
        return {"gpu": "NVIDIA H200", "driver": "580.1", "versions": {"torch": "2"}}

    def archs(self) -> Sequence[str]:
        return HOPPER

    def timed(self, timer: str, calls: Sequence[Call]) -> Run:
        if timer == "graph" and calls[0]() == 3.0:
            raise Refused("cannot be captured in a CUDA graph")
        return calls[0]  # type: ignore[return-value]

    def peak_bytes(self, call: Call) -> int:
        return 5

    def release(self) -> None: ...


class FakeJob:
    def __init__(self, case: Any, generation: Generation, inputs: Any) -> None:
        self.case, self.name = case, generation.name

    def calls(self) -> list[Call]:
        if self.name == "standard" and self.case.seqlen_q > 64:
            raise OutOfMemory
        if self.name == "fa3":
            raise ImportError("no such kernel\nmore")
        return [lambda: 3.0 if self.name == "fa2" else 8.0]

    def held_bytes(self) -> int:
        return 100

    def error(self) -> float:
        return 1.23456e-3


class FakeLineage(AttentionLineage):
    def timed(self) -> Any:
        def inputs(device: Any, case: Any, past_l2: bool = True) -> object:
            if case.seqlen_q > 4096:
                raise OutOfMemory
            return object()
        return SimpleNamespace(inputs=inputs, job=FakeJob)


PROBLEM = {"batch": 1, "heads": 1, "head_dim": 64}


def measured(lengths: Sequence[int], **options: Any) -> dict[str, Any]:
    found = FakeLineage()
    return lineage.measure(FakeDevice(), found, found.cases(PROBLEM, lengths), rounds=1, **options)
