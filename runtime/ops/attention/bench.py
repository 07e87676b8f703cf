"""What `flashgen bench` times of attention: grids that list problems, the variants that serve them, and how the rows
read. No torch.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from flashgen.codegen.families.family import DenseCall
from flashgen.codegen.families.registry import pass_of
from flashgen.codegen.families.shared.launch import Sizes
from flashgen.errors import SpecError, UnsupportedError
from flashgen.runtime.measure.bench import DATA, Device, geomeans, least
from flashgen.runtime.measure.grid import COUNT, DTYPE, FLAG, Axis, combinations, read_grid
from flashgen.runtime.measure.suite import GBPS, MS, TFLOPS, Bench, Column, Row, decimals, listed, peer_ms
from flashgen.runtime.ops.attention.problem import Problem
from flashgen.runtime.select.handles import with_siblings

if TYPE_CHECKING:
    from flashgen.codegen.explain.counts import Shape
    from flashgen.codegen.spec.spec import Spec


# -- grids

def _whole(least: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(type(item) is int and item >= least for item in value)


_DENSE_KEYS = ("batch", "tokens", "seqlen_q", "seqlen_kv")
AXES = {
    **dict.fromkeys(_DENSE_KEYS, COUNT),
    "lengths": Axis(lambda value: _whole(0)(value) and sum(value) > 0, "lists of lengths from 0, one of them above",
                    True),
    **dict.fromkeys(("num_heads_q", "num_heads_kv", "hidden", "head_dim_qk", "head_dim_v"), COUNT),
    "causal": FLAG,
    "window": Axis(lambda value: _whole(-1)(value) and len(value) == 2, "[left, right], counts of keys or -1", True),
    "dtype": DTYPE,
}


def load_grid(grid: str) -> tuple[Problem, ...]:
    """Problems of a YAML file, or of YAML text that begins with `{` or `[`. SpecError says what is wrong.

    A mapping, whose lists multiply, or a list of such. `tokens` gives batch = tokens / seqlen_q, `hidden` gives
    num_heads_q = hidden / head_dim_qk; seqlen_kv, num_heads_kv and head_dim_v follow their twins unless given;
    `window` is a pair or a list of pairs. `lengths`, a list or a list of lists, makes a varlen case: of its sequences,
    each with as many keys as queries, in place of batch and seqlen.
    """
    return cases_of(*read_grid(grid))


def cases_of(values: object, where: str) -> tuple[Problem, ...]:
    """Each once."""
    return tuple(dict.fromkeys(_case(one, where) for one in combinations(values, where, AXES)))


def _case(values: dict[str, Any], where: str) -> Problem:
    if "lengths" in values:
        if both := [name for name in _DENSE_KEYS if name in values]:
            raise SpecError(f"gives both lengths and {both[0]}", where=where, allowed="one of the two")
        lengths = tuple(values.pop("lengths"))
        values |= {"batch": len(lengths), "seqlen_q": lengths, "seqlen_kv": lengths}
    for total, part, name in (("tokens", "seqlen_q", "batch"), ("hidden", "head_dim_qk", "num_heads_q")):
        if part not in values:
            raise SpecError(f"{part} is missing", where=where, allowed="whole numbers from 1")
        if (total in values) == (name in values):
            raise SpecError(f"gives {'both' if total in values else 'neither of'} {name} and {total}", where=where,
                            allowed="one of the two")
        if total in values:
            whole = values.pop(total)
            if whole % values[part]:
                raise SpecError(f"{total} {whole} is not a multiple of {part} {values[part]}", where=where,
                                allowed=f"{name} = {total} / {part} in whole numbers")
            values[name] = whole // values[part]
    for name, twin in (("seqlen_kv", "seqlen_q"), ("num_heads_kv", "num_heads_q"), ("head_dim_v", "head_dim_qk")):
        values.setdefault(name, values[twin])
    if values["num_heads_q"] % values["num_heads_kv"]:
        raise SpecError(f"num_heads_q {values['num_heads_q']} is not a multiple of num_heads_kv "
                        f"{values['num_heads_kv']}", where=where)
    if "window" in values:
        values["window"] = tuple(values["window"])
    return Problem(**values)


def variants_for(case: Problem, specs: Iterable[Spec], archs: Sequence[str], num_sms: int) -> list[Spec]:
    """The variants that serve a case, for the first of `archs` that has any.

    Of those that differ in `split` and `pack_gqa` only, the one that a call on a device with `num_sms` SMs gets. Of
    those whose kernels one call launches, the first.
    """
    windowed, layout = case.window != (-1, -1), "varlen" if case.varlen else "dense"
    fitting = [spec for spec in specs if spec.kv_layout == layout and spec.dtype == case.dtype
               and (spec.head_dim_qk, spec.head_dim_v) == (case.head_dim_qk, case.head_dim_v)
               and (spec.window if windowed else not spec.window and spec.causal == case.causal)]
    for arch in archs:
        found = [spec for spec in fitting if spec.arch == arch and with_siblings(spec)[0] == spec]
        twins: dict[Spec, list[Spec]] = {}
        for spec in found:
            twins.setdefault(spec.with_(split=False, pack_gqa=False), []).append(spec)
        if found:
            return [_best(specs, case, num_sms) for specs in twins.values()]
    raise UnsupportedError(f"no variant serves {case.label}", where="bench", allowed=", ".join(archs) + f", {layout}",
                           next="flashgen list SPEC; or narrow the grid")


def _best(twins: Sequence[Spec], case: Problem, num_sms: int) -> Spec:
    """As Registry.for_sizes."""
    if len(twins) == 1:
        return twins[0]
    (rows_q, rows_kv), = set(case.lengths)  # only dense ones have twins
    first, prefer = twins[0], pass_of(twins[0]).prefer
    call = DenseCall(first.arch, first.dtype, first.head_dim_qk, first.head_dim_v, first.causal)
    sizes = Sizes(case.batch, rows_q, rows_kv, case.num_heads_q, case.num_heads_kv)
    traits = (prefer(call, sizes, num_sms) if prefer else None) or ()
    return max(twins, key=lambda spec: [getattr(spec, name) == bool(value) for name, value in reversed(traits)])


# -- rows and tables


class AttentionBench(Bench):
    case, axes, read, pass_ = Problem, AXES, load_grid, "fwd"
    peers: ClassVar[tuple[str, ...]] = ("sdpa-fa2", "sdpa-cudnn", "flex", "fa3", "fa3-split", "torch-varlen")
    module = "flashgen.runtime.ops.attention.timed"
    data = DATA
    picture = True

    def work(self, cases: Sequence[Problem], specs: Sequence[Spec], device: Device) -> Sequence[tuple[Problem, Spec]]:
        return [(case, spec) for case in cases for spec in variants_for(case, specs, device.archs(), device.num_sms)]

    def notes(self, device: Device, seconds: Mapping[str, float]) -> dict[str, Any]:
        return {"data": device.data}

    def case_for(self, spec: Spec, shape: Shape) -> Problem:
        return Problem(shape.batch, shape.seqlen_q, shape.seqlen_kv, shape.num_heads_q, shape.num_heads_kv,
                    spec.head_dim_qk, spec.head_dim_v, spec.causal, shape.window, spec.dtype)

    def heading(self, results: Row) -> str:
        return "" if results["data"] == "normal" else f", {results['data']} data"

    def columns(self, peers: Sequence[str]) -> Sequence[Column]:
        return [Column("variant", lambda row: row["case"]["variant"]),
                Column("case", lambda row: self.case_of(row).shape), MS, TFLOPS, GBPS, *map(peer_ms, peers),
                Column(">speed / best peer", lambda row: decimals(row["ratio"], 3))]

    def means(self, rows: Sequence[Row], peers: Sequence[str]) -> list[str]:
        """Over all rows, by head dims where there are several, and the row that is worst for us."""
        worst, groups = least(rows), self.geomeans_by_head_dims(rows)
        if worst is None:
            return []
        return [f"speed over each peer, geometric mean: {listed(geomeans(rows))}",
                *(f"  {name}: {listed(means)}" for name, means in groups.items() if means and len(groups) > 1),
                f"least over the best peer: {worst['ratio']:.3f}, {self.case_of(worst).label}"]

    def geomeans_by_head_dims(self, rows: Sequence[Row]) -> dict[str, dict[str, float]]:
        """geomeans() of the rows of each pair of head dims, named as in Problem.head_dims."""
        groups: dict[str, list[Row]] = {}
        for row in rows:
            groups.setdefault(self.case_of(row).head_dims, []).append(row)
        return {name: geomeans(members) for name, members in groups.items()}


BENCH = AttentionBench()
