"""The generations of attention: each family that answers it, on one dense problem. No torch."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from flashgen.codegen.explain.cost import Cost
from flashgen.codegen.explain.explain import explain_plan
from flashgen.codegen.families.family import Family
from flashgen.codegen.families.registry import by_generation, lower
from flashgen.codegen.spec.spec import Spec
from flashgen.errors import FlashgenError, UnsupportedError
from flashgen.runtime.measure.lineage import FORWARD, STEP, Generation, Lineage, shipped_specs
from flashgen.runtime.ops.attention.bench import AXES, cases_of, variants_for
from flashgen.runtime.ops.attention.problem import Problem
from flashgen.runtime.ops.attention_backward.problem import BackwardProblem

OP, BACKWARD = "attention", "attention_backward"


class AttentionLineage(Lineage):
    stem = "lineage"
    words: ClassVar = {"batch": "batch", "seqlen": "seqlen_q", "seqlen_kv": "seqlen_kv", "heads": "num_heads_q",
                       "heads_kv": "num_heads_kv", "head_dim": "head_dim_qk", "head_dim_v": "head_dim_v",
                       "causal": "causal", "window": "window", "dtype": "dtype"}
    axes: ClassVar = {name: axis for name, axis in AXES.items() if name != "lengths"}
    sweep = "seqlen_q"
    module = "flashgen.runtime.ops.attention.lineage_timed"

    def case(self, values: dict[str, Any], where: str) -> Problem:
        [found] = cases_of(values, where)
        return found

    def in_json(self, case: Problem) -> dict[str, Any]:
        names = (*self.words.values(),)
        return {name: list(value) if isinstance(value := getattr(case, name), tuple) else value for name in names}

    def generations(self, case: Problem, archs: Sequence[str], num_sms: int, backward: bool) -> list[Generation]:
        found = []
        for family in by_generation(OP):
            forward = _forward(family, case, archs, num_sms)
            found.append(forward)
            if backward:
                found.append(_step(family, forward, case, archs, num_sms))
        return found


def _forward(family: Family, case: Problem, archs: Sequence[str], num_sms: int) -> Generation:
    try:
        spec = _serving(family, OP, case, archs, num_sms)
    except UnsupportedError as err:
        return Generation(family.name, family.story, refused=err.what)
    return Generation(family.name, family.story, FORWARD, (spec,), case.flops, case.bytes, _cost(spec, case))


def _step(family: Family, forward: Generation, case: Problem, archs: Sequence[str], num_sms: int) -> Generation:
    """A forward with the gradients behind it."""
    try:
        spec = _serving(family, BACKWARD, case, archs, num_sms)
    except UnsupportedError as err:
        return Generation(family.name, family.story, STEP, refused=err.what)
    if forward.refused:
        return Generation(family.name, family.story, STEP, refused=forward.refused)
    after, cost = _cost(spec, case), forward.cost
    return Generation(family.name, family.story, STEP, (*forward.specs, spec),
                      case.flops + BackwardProblem.of(case).flops, 2 * case.bytes,
                      cost.then(after) if cost and after else None)


def _serving(family: Family, op: str, case: Problem, archs: Sequence[str], num_sms: int) -> Spec:
    """The shipped variant that such a call gets. UnsupportedError without one."""
    if op not in family.by_op:
        raise UnsupportedError("it has no backward pass", where=family.name)
    name = family.by_op[op].name
    own = [spec for spec in shipped_specs() if spec.family == family.name and spec.pass_ == name]
    return variants_for(case, own, archs, num_sms)[0]


def _cost(spec: Spec, case: Problem) -> Cost | None:
    """None for a family that does not count its work."""
    window: dict[str, Any] = {"window": case.window} if case.window != (-1, -1) else {}
    try:
        return explain_plan(lower(spec), spec, batch=case.batch, seqlen_q=case.seqlen_q, seqlen_kv=case.seqlen_kv,
                            num_heads_q=case.num_heads_q, num_heads_kv=case.num_heads_kv, **window).cost()
    except FlashgenError:
        return None


LINEAGE = AttentionLineage()
