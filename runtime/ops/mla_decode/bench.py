"""What `flashgen bench` times of decodes: over a paged cache, beside FlashMLA where it can be imported, and beside the
marks that it left on the same kind of card. No torch.

As the marks were made: CUDA graph replays, the schedule worked out beforehand, the merge of split requests included,
and the same inputs every time, so that small caches stay in L2.
"""
from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from flashgen.codegen.dtype import DTYPES
from flashgen.errors import SpecError, UnsupportedError
from flashgen.files import BadFile, Rule, between, build, one_of, parse_json, read_file
from flashgen.runtime.measure.bench import OURS, Device, digits, gpu_folder
from flashgen.runtime.measure.grid import COUNT, DTYPE, ROOT, combinations, read_grid
from flashgen.runtime.measure.suite import GBPS, MS, TFLOPS, Bench, Column, Row, decimals, listed, peer_ms

if TYPE_CHECKING:
    from flashgen.codegen.spec.spec import Spec
    from flashgen.runtime.ops.mla_decode.timed import DecodeJob

Size = Annotated[int, between(1, 2**31 - 1)]
AXES = {**dict.fromkeys(("batch", "seqlen_q", "seqlen_kv", "num_heads_q"), COUNT), "dtype": DTYPE}
HEAD_DIM_QK, HEAD_DIM_V = 576, 512


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


@dataclass(frozen=True)
class Mark:
    """A row of benchmarks/marks. `ms` is the median of a call."""

    num_heads_q: Size
    seqlen_q: Size
    batch: Size
    seqlen_kv: Size
    ms: Annotated[float, Rule("a number above 0", lambda ms: ms > 0)]
    tflops: float
    gbps: float


@dataclass(frozen=True)
class Marks:
    """A file of benchmarks/marks."""

    what: str
    gpu: str
    driver: str
    cuda: str
    torch: str
    date: str
    dtype: Annotated[str, one_of(DTYPES)]
    head_dims: tuple[Size, Size]
    page_size: Size
    note: str
    rows: tuple[Mark, ...]


def load_cases(grid: str) -> tuple[MlaCase, ...]:
    """Cases of a grid with AXES. SpecError says what is wrong."""
    return cases_of(*read_grid(grid))


def cases_of(values: object, where: str) -> tuple[MlaCase, ...]:
    """Each once."""
    found = combinations(values, where, AXES)
    for one in found:
        if missing := [name for name, axis in AXES.items() if axis is COUNT and name not in one]:
            raise SpecError(f"{missing[0]} is missing", where=where, allowed=COUNT.allowed)
    return tuple(dict.fromkeys(MlaCase(**one) for one in found))


def marks_for(gpu: str) -> tuple[str, dict[MlaCase, float]]:
    """(where they are from, ms of each case that has one): FlashMLA's on a card of this name; ("", {}) without.
    SpecError if the file is damaged."""
    path = ROOT / "benchmarks" / "marks" / f"flashmla_{gpu_folder(gpu)}.json"
    if not path.is_file():
        return "", {}
    try:
        found = build(parse_json(read_file(path)), Marks)
    except (BadFile, OSError) as err:
        what = err.of(path.name) if isinstance(err, BadFile) else f"{path.name} cannot be read ({err.strerror})"
        raise SpecError(what, where=str(path), allowed=getattr(err, "allowed", ""),
                        next="git checkout benchmarks/marks") from err
    return f"{path.name}, {found.date}", {
        MlaCase(row.batch, row.seqlen_q, row.seqlen_kv, row.num_heads_q, found.dtype): row.ms for row in found.rows}


def variant_for(case: MlaCase, specs: Sequence[Spec]) -> Spec:
    """Of the decodes that serve a case, the one that copies pages as boxes."""
    fitting = [spec for spec in specs if spec.pass_ == "decode" and spec.head_dim_qk == HEAD_DIM_QK
               and spec.dtype == case.dtype]
    if not fitting:
        raise UnsupportedError(f"no variant serves {case.label}", where="bench", next="flashgen list mla_h100",
                               allowed="pass decode, head_dim_qk 576, dtype " + ", ".join(sorted({
                                   spec.dtype for spec in specs})))
    return max(fitting, key=lambda spec: spec.page_size or 0)


# -- rows and tables


class DecodeBench(Bench):
    case, axes, read, pass_ = MlaCase, AXES, load_cases, "decode"
    peers = ("flashmla",)
    module = "flashgen.runtime.ops.mla_decode.timed"

    def __init__(self) -> None:
        self.source, self.marks = "", dict[MlaCase, float]()  # of the device that is timed

    def work(self, cases: Sequence[MlaCase], specs: Sequence[Spec], device: Device) -> Sequence[tuple[MlaCase, Spec]]:
        self.source, self.marks = marks_for(device.facts()["gpu"])
        return [(case, variant_for(case, specs)) for case in cases]

    def row(self, job: DecodeJob, medians: Mapping[str, float], refused: Mapping[str, str], timer: str
            ) -> dict[str, Any]:
        """`speed` is ours over the mark's, None without one."""
        mark = self.marks.get(job.case)
        return {**super().row(job, medians, refused, timer), "mark_ms": mark,
                "speed": mark and digits(mark / medians[OURS])}

    def notes(self, device: Device, seconds: Mapping[str, float]) -> dict[str, Any]:
        return {"marks": self.source}

    def heading(self, results: Row) -> str:
        return f"; marks: {results['marks'] or 'none for this card'}"

    def columns(self, peers: Sequence[str]) -> Sequence[Column]:
        return [Column("variant", lambda row: row["case"]["variant"]),
                Column("case", lambda row: self.case_of(row).label), MS, TFLOPS, GBPS,
                Column(">mark ms", lambda row: decimals(row["mark_ms"], 4)),
                Column(">speed / mark", lambda row: decimals(row["speed"], 3)), *map(peer_ms, peers),
                *([Column(">speed / peer", lambda row: decimals(row["ratio"], 3))] if peers else [])]

    def means(self, rows: Sequence[Row], peers: Sequence[str]) -> list[str]:
        found = (("the marks", geomeans_by_heads(rows)), (", ".join(peers), geomeans_by_heads(rows, "ratio")))
        return [f"speed over {over}, geometric mean: {listed(means)}" for over, means in found if means]


def geomeans_by_heads(rows: Sequence[Mapping[str, Any]], figure: str = "speed") -> dict[str, float]:
    """Our speed over the marks (or as `figure` "ratio" over the best peer), as the geometric mean of the rows with one:
    of each head count, then of all."""
    groups: dict[str, list[float]] = {}
    for row in rows:
        if row[figure] is not None:
            groups.setdefault(f"H{row['case']['num_heads_q']}", []).append(row[figure])
    everything = [speed for speeds in groups.values() for speed in speeds]
    return {name: statistics.geometric_mean(speeds)
            for name, speeds in {**groups, **({"all": everything} if everything else {})}.items()}


BENCH = DecodeBench()
