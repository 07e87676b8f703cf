"""`flashgen bench` for flashmla: decodes over a paged cache, beside FlashMLA where it can be imported, and beside marks
that it left on the same kind of card.

As the marks were made: CUDA graph replays, the schedule worked out beforehand, the merge of split requests included,
and the same inputs every time, so that small caches stay in L2.
"""
from __future__ import annotations

import importlib
import importlib.util
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from flashgen.codegen.dtype import DTYPES
from flashgen.errors import SpecError, UnsupportedError, VerifyError
from flashgen.files import BadFile, Rule, between, build, one_of, parse_json, read_file
from flashgen.runtime.measure.bench import (
    CALLS_PER_GRAPH,
    OURS,
    ROUNDS,
    Call,
    Refused,
    digits,
    document,
    gpu_folder,
    interleave,
)
from flashgen.runtime.ops.attention.cases import ROOT, combinations

if TYPE_CHECKING:
    from torch import Tensor

    from flashgen.codegen.spec.spec import Spec
    from flashgen.runtime.measure.device import CudaDevice
    from flashgen.runtime.ops.mla_decode.problem import MlaInputs

Size = Annotated[int, between(1, 2**31 - 1)]
KEYS = ("batch", "seqlen_q", "seqlen_kv", "num_heads_q", "dtype")
HEAD_DIM_QK, HEAD_DIM_V, PAGE_SIZE = 576, 512, 64
CRASH_HEADS, CRASH_TOKENS = 16, 256 * 1024
AGREE = 2e-2                        # of the largest value: a few roundings to bf16


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
    """Cases of a grid, as bench_cases.load_grid reads them, with KEYS. SpecError says what is wrong."""
    where, values = combinations(grid, KEYS)
    for one in values:
        if missing := [name for name in KEYS[:-1] if name not in one]:
            raise SpecError(f"{missing[0]} is missing", where=where, allowed="whole numbers from 1")
    return tuple(dict.fromkeys(MlaCase(**one) for one in values))


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


def row_of(case: MlaCase, spec: Spec, medians: Mapping[str, float], refused: Mapping[str, str], mark: float | None
           ) -> dict[str, Any]:
    """A row of the results. `speed` is ours over the mark's, `ratio` over the best peer's; None without one."""
    ms = medians[OURS]
    peers = {name: digits(other) for name, other in medians.items() if name != OURS}
    return {"case": {**asdict(case), "variant": f"{spec.variant}.{spec.arch}"}, "ours_ms": digits(ms),
            "mark_ms": mark, "speed": mark and digits(mark / ms), "peers": peers, "refused": dict(refused),
            "ratio": digits(min(peers.values()) / ms) if peers else None,
            "tflops": digits(case.flops / ms / 1e9), "gbps": digits(case.bytes / ms / 1e6)}


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


def bench(device: CudaDevice, specs: Sequence[Spec], cases: Sequence[MlaCase], peers: Sequence[str] = (), *,
          rounds: int = ROUNDS, progress: Callable[[int, str], None] = lambda done, what: None,
          given_commit: str | None = None, make: Callable[[MlaCase, Spec], Decode] | None = None) -> dict[str, Any]:
    """All cases: the document that bench.write_results stores. `make` makes what is timed; by default make_decode.

    A peer that cannot be imported is listed under `absent`, one that refuses a case under that row's `refused`. One
    that is timed adds its package to `versions`: None for a folder that is no installed package.
    """
    facts, present, absent = device.facts(), {}, {}
    for name in peers:
        try:
            present[name] = PEERS[name]()
        except Refused as err:
            absent[name] = err.what
    versions = {**facts["versions"], **{peer.package: peer.version for peer in present.values()}}
    source, marks = marks_for(facts["gpu"])
    rows = []
    for done, case in enumerate(cases):
        progress(done, case.label)
        spec = variant_for(case, specs)
        medians, refused = _measure(device, (make or make_decode)(case, spec), present, rounds)
        rows.append(row_of(case, spec, medians, refused, marks.get(case)))
        device.release()
    progress(len(cases), "")
    return document({**facts, "versions": versions}, given_commit, marks=source, absent=absent, rows=rows)


def _measure(device: CudaDevice, decode: Decode, peers: Mapping[str, Peer], rounds: int
             ) -> tuple[dict[str, float], dict[str, str]]:
    """(median ms, why a peer refused). The graphs, which hold tensors, end with this call."""
    from flashgen.runtime.measure.device import own_words

    runs, refused = {OURS: device.timer([decode.ours] * CALLS_PER_GRAPH)}, {}
    for name, peer in peers.items():
        try:
            with own_words():
                runs[name] = device.timer([decode.peer(peer)] * CALLS_PER_GRAPH)
        except Refused as err:
            refused[name] = err.what
    return interleave(runs, rounds), refused


@dataclass(frozen=True)
class Decode:
    """Ours, which writes `out`, and the inputs that peers share."""

    case: MlaCase
    inputs: MlaInputs
    out: Tensor
    ours: Call

    def peer(self, peer: Peer) -> Call:
        """Refused if it would die of the case, or answers something else than `out` holds."""
        case, x = self.case, self.inputs
        if case.num_heads_q <= CRASH_HEADS and case.batch * case.seqlen_kv >= CRASH_TOKENS:
            raise Refused(f"with {CRASH_HEADS} query heads and {CRASH_TOKENS // 1024}k or more cached tokens in the "
                          "batch it dies of an illegal memory access, and the process with it")
        if x.page_table is None:
            raise Refused("it takes pages only")
        table = x.page_table.clone()
        table[:, -(-case.seqlen_kv // PAGE_SIZE):] = table[:, :1]  # it may read there
        call = peer.start(x.with_(kv_cache=x.kv_cache.unsqueeze(2), page_table=table))
        difference = float((call().float() - self.out.float()).abs().max() / self.out.float().abs().max())
        if not difference < AGREE:
            raise Refused(f"its answer differs from ours by {difference:.2g} of the largest value")
        return call


def make_decode(case: MlaCase, spec: Spec, device: str = "cuda") -> Decode:
    """A decode of N(0, 1) tensors with pages in random order, its schedule at hand."""
    import flashgen
    from flashgen.runtime.ops.mla_decode.problem import MlaProblem

    problem = MlaProblem((case.seqlen_kv,) * case.batch, case.num_heads_q, case.seqlen_q,
                         PAGE_SIZE if spec.kv_layout == "paged" else None, causal=case.seqlen_q > 1, dtype=case.dtype)
    x = problem.make_inputs(device)
    out = x.q.new_full((*x.q.shape[:-1], HEAD_DIM_V), float("nan"))
    schedule = flashgen.mla_schedule(x.seqlens_kv, case.num_heads_q, case.seqlen_q)

    def call() -> object:
        return flashgen.mla_decode(x.q, x.kv_cache, x.seqlens_kv, **x.keywords, schedule=schedule, out=out, spec=spec)

    call()
    if not out.isfinite().all():  # a kernel that writes nothing would be fast
        raise VerifyError("out is not finite", where=f"{spec.variant}.{spec.arch}", next="flashgen verify")
    return Decode(case, x, out, call)


# -- FlashMLA

Start = Callable[["MlaInputs"], Callable[[], "Tensor"]]


@dataclass(frozen=True)
class Peer:
    """`start` works out the metadata of inputs, whose cache is [pages, page_size, 1, head_dim_qk]; what it gives is
    timed."""

    package: str
    version: str | None
    start: Start


def find_flashmla() -> Peer:
    """The package flash_mla, or else the extension with it in another wheel, which is loaded by itself: the package
    around it need not be importable. Refused says what is missing."""
    import torch

    from flashgen.runtime.measure.device import own_words, package_version

    with own_words():
        if importlib.util.find_spec("flash_mla") is not None:
            start = _package_start(importlib.import_module("flash_mla"))
            return Peer("flash_mla", package_version("flash_mla"), start)
        for package, (file, ops, make) in EXTENSIONS.items():
            found = importlib.util.find_spec(package)
            for folder in (found and found.submodule_search_locations) or ():
                if (path := Path(folder) / file).is_file():
                    torch.ops.load_library(path)
                    return Peer(package, package_version(package), make(getattr(torch.ops, ops)))
    files = ", ".join(f"{package}/{file}" for package, (file, _, _) in EXTENSIONS.items())
    raise Refused(f"neither flash_mla nor one of {files} is on the path; pip install sgl-kernel")


PEERS: dict[str, Callable[[], Peer]] = {"flashmla": find_flashmla}


def _package_start(module: Any) -> Start:
    """Versions whose metadata are tensors, and later ones that ignore these arguments and fill them in a first call."""
    def start(x: MlaInputs) -> Callable[[], Tensor]:
        metadata = module.get_mla_metadata(x.seqlens_kv, x.q.shape[1] * x.q.shape[2], 1)
        return lambda: module.flash_mla_with_kvcache(
            x.q, x.kv_cache, x.page_table, x.seqlens_kv, HEAD_DIM_V, *metadata, softmax_scale=HEAD_DIM_QK ** -0.5,
            causal=x.causal)[0]
    return start


def _sgl_start(ops: Any) -> Start:
    def start(x: MlaInputs) -> Callable[[], Tensor]:
        tokens, heads = x.q.shape[1:3]
        metadata = ops.get_mla_decoding_metadata(x.seqlens_kv, tokens * heads, 1, heads, False, None)
        return lambda: ops.fwd_kvcache_mla(x.q, x.kv_cache, HEAD_DIM_V, x.seqlens_kv, x.page_table, HEAD_DIM_QK ** -0.5,
                                           x.causal, *metadata, False, None)[0]
    return start


def _vllm_start(ops: Any) -> Start:
    """The op returns the metadata that it made, or was given."""
    def start(x: MlaInputs) -> Callable[[], Tensor]:
        arguments = x.q, x.kv_cache, HEAD_DIM_V, x.seqlens_kv, x.page_table, HEAD_DIM_QK ** -0.5, x.causal
        metadata = ops.dense_decode_fwd(*arguments, None, None, None)[2:]
        return lambda: ops.dense_decode_fwd(*arguments, *metadata, None)[0]
    return start


# Wheels with FlashMLA in a library of torch ops: file, namespace. The first is built from its sources as they are; the
# second has a version of its own.
EXTENSIONS: dict[str, tuple[str, str, Callable[[Any], Start]]] = {
    "sgl_kernel": ("flashmla_ops.abi3.so", "sgl_kernel", _sgl_start),
    "vllm": ("_flashmla_C.abi3.so", "_flashmla_C", _vllm_start),
}
