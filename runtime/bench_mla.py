"""`flashgen bench` for flashmla: decodes over a paged cache, beside marks that FlashMLA left on the same kind of card.

As the marks were made: CUDA graph replays, the schedule worked out beforehand, the merge of split requests included,
and the same inputs every time, so that small caches stay in L2.
"""
from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from flashgen.codegen.dtype import DTYPES
from flashgen.errors import SpecError, UnsupportedError, VerifyError
from flashgen.runtime.bench import CALLS_PER_GRAPH, ROUNDS, Call, document, gpu_folder, interleave
from flashgen.runtime.bench_cases import ROOT, combinations

if TYPE_CHECKING:
    from flashgen.codegen.spec import Spec
    from flashgen.runtime.bench_device import CudaDevice

KEYS = ("batch", "seqlen_q", "seqlen_kv", "num_heads_q", "dtype")
HEAD_DIM_QK, HEAD_DIM_V, PAGE_SIZE = 576, 512, 64


@dataclass(frozen=True)
class MlaCase:
    """`batch` requests with `seqlen_kv` cached tokens each; several queries are causal."""

    batch: int
    seqlen_q: int
    seqlen_kv: int
    num_heads_q: int
    dtype: str = "bf16"

    @property
    def label(self) -> str:
        """As in `H128 Q2 B32 S8192`."""
        return f"H{self.num_heads_q} Q{self.seqlen_q} B{self.batch} S{self.seqlen_kv}" + (
            f" {self.dtype}" if self.dtype != "bf16" else "")

    @property
    def rows(self) -> int:
        return self.batch * self.seqlen_q * self.num_heads_q

    @property
    def flops(self) -> int:
        """As if every query saw every key, as FlashMLA counts; a multiply-add counts as two."""
        return 2 * self.rows * self.seqlen_kv * (HEAD_DIM_QK + HEAD_DIM_V)

    @property
    def bytes(self) -> int:
        """Cache, q and out once each."""
        cache = self.batch * self.seqlen_kv * HEAD_DIM_QK
        return (cache + self.rows * (HEAD_DIM_QK + HEAD_DIM_V)) * DTYPES[self.dtype].bytes


def load_cases(grid: str) -> tuple[MlaCase, ...]:
    """Cases of a grid, as bench_cases.load_grid reads them, with KEYS. SpecError says what is wrong."""
    where, values = combinations(grid, KEYS)
    for one in values:
        if missing := [name for name in KEYS[:-1] if name not in one]:
            raise SpecError(f"{missing[0]} is missing", where=where, allowed="whole numbers from 1")
    return tuple(dict.fromkeys(MlaCase(**one) for one in values))


def marks_for(gpu: str) -> tuple[str, dict[MlaCase, float]]:
    """(where they are from, ms of each case that has one): FlashMLA's on a card of this name; ("", {}) without."""
    path = ROOT / "benchmarks" / "marks" / f"flashmla_{gpu_folder(gpu)}.json"
    if not path.is_file():
        return "", {}
    found = json.loads(path.read_text(encoding="utf-8"))
    return f"{path.name}, {found['date']}", {
        MlaCase(**{name: row[name] for name in KEYS[:-1]}, dtype=found["dtype"]): row["ms"] for row in found["rows"]}


def variant_for(case: MlaCase, specs: Sequence[Spec]) -> Spec:
    """Of the decodes that serve a case, the one that copies pages as boxes."""
    fitting = [spec for spec in specs if spec.pass_ == "decode" and spec.head_dim_qk == HEAD_DIM_QK
               and spec.dtype == case.dtype]
    if not fitting:
        raise UnsupportedError(f"no variant serves {case.label}", where="bench", next="flashgen list mla_h100",
                               allowed="pass decode, head_dim_qk 576, dtype " + ", ".join(sorted({
                                   spec.dtype for spec in specs})))
    return max(fitting, key=lambda spec: spec.page_size or 0)


def row_of(case: MlaCase, spec: Spec, ms: float, mark: float | None) -> dict[str, Any]:
    """A row of the results. `speed` is ours over the mark's, None without one."""
    figures = {"tflops": case.flops / ms / 1e9, "gbps": case.bytes / ms / 1e6}
    return {"case": {**asdict(case), "variant": f"{spec.variant}.{spec.arch}"}, "ours_ms": float(f"{ms:.5g}"),
            "mark_ms": mark, "speed": mark and float(f"{mark / ms:.5g}"),
            **{name: float(f"{value:.5g}") for name, value in figures.items()}}


def geomeans_by_heads(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Our speed over the marks, as the geometric mean of the rows with one: of each head count, then of all."""
    groups: dict[str, list[float]] = {}
    for row in rows:
        if row["speed"] is not None:
            groups.setdefault(f"H{row['case']['num_heads_q']}", []).append(row["speed"])
    everything = [speed for speeds in groups.values() for speed in speeds]
    return {name: statistics.geometric_mean(speeds)
            for name, speeds in {**groups, **({"all": everything} if everything else {})}.items()}


def bench(device: CudaDevice, specs: Sequence[Spec], cases: Sequence[MlaCase], *, rounds: int = ROUNDS,
          progress: Callable[[int, str], None] = lambda done, what: None, given_commit: str | None = None,
          calls: Callable[[MlaCase, Spec], Call] | None = None) -> dict[str, Any]:
    """All cases: the document that bench.write_results stores. `calls` makes what is timed; by default decode_call."""
    facts = device.facts()
    source, marks = marks_for(facts["gpu"])
    rows = []
    for done, case in enumerate(cases):
        progress(done, case.label)
        spec = variant_for(case, specs)
        run = device.timer([(calls or decode_call)(case, spec)] * CALLS_PER_GRAPH)
        rows.append(row_of(case, spec, interleave({"ours": run}, rounds)["ours"], marks.get(case)))
        del run  # the graph holds its tensors
        device.release()
    progress(len(cases), "")
    return document(facts, given_commit, marks=source, rows=rows)


def decode_call(case: MlaCase, spec: Spec) -> Call:
    """A decode of N(0, 1) tensors with pages in random order, its schedule at hand."""
    import flashgen
    from flashgen.runtime.mla_problem import MlaProblem

    problem = MlaProblem((case.seqlen_kv,) * case.batch, case.num_heads_q, case.seqlen_q,
                         PAGE_SIZE if spec.kv_layout == "paged" else None, causal=case.seqlen_q > 1, dtype=case.dtype)
    x = problem.make_inputs("cuda")
    out = x.q.new_full((*x.q.shape[:-1], HEAD_DIM_V), float("nan"))
    schedule = flashgen.mla_schedule(x.seqlens_kv, case.num_heads_q, case.seqlen_q)

    def call() -> object:
        return flashgen.mla_decode(x.q, x.kv_cache, x.seqlens_kv, **x.keywords, schedule=schedule, out=out, spec=spec)

    call()
    if not out.isfinite().all():  # a kernel that writes nothing would be fast
        raise VerifyError("out is not finite", where=f"{spec.variant}.{spec.arch}", next="flashgen verify")
    return call
