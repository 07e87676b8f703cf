"""The generations of attention on the device: their calls, and how far their results are from fp64."""
from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import flashgen
from flashgen.errors import VerifyError
from flashgen.runtime.measure.bench import Call, Device
from flashgen.runtime.measure.lineage import FORWARD, Generation
from flashgen.runtime.ops.attention import timed
from flashgen.runtime.ops.attention.dropout import spec_arguments
from flashgen.runtime.ops.attention.problem import Inputs, Problem
from flashgen.runtime.verify.gradients import gradients
from flashgen.runtime.verify.reference import reference


class Sets:
    """Sets of inputs, each with a place for the result and its gradient, and what is right for parts of the first."""

    def __init__(self, case: Problem, pairs: Sequence[tuple[Inputs, Tensor]]) -> None:
        self.case, self.pairs = case, pairs
        self._right: dict[bool, list[tuple[Tensor, ...]]] = {}

    @functools.cached_property
    def douts(self) -> list[Tensor]:
        return [torch.randn_like(out) for _, out in self.pairs]

    @property
    def places(self) -> list[tuple[int, int]]:
        """(batch, kv head) of the parts that are compared: the first, the last, and one between."""
        last = self.case.batch - 1, self.case.num_heads_kv - 1
        return list(dict.fromkeys(((0, 0), (last[0] // 2, last[1] // 2), last)))

    def part(self, tensor: Tensor, place: tuple[int, int]) -> Tensor:
        """[1, rows, heads, columns]: the heads of one kv head, or the query heads that share it."""
        batch, head = place
        group = tensor.shape[2] // self.case.num_heads_kv
        return tensor[batch:batch + 1, :, head * group:(head + 1) * group]

    def right(self, backward: bool) -> list[tuple[Tensor, ...]]:
        """(out,) or (out, dq, dk, dv) in fp64, for each place."""
        if backward not in self._right:
            self._right[backward] = [self._right_at(place, backward) for place in self.places]
        return self._right[backward]

    def _right_at(self, place: tuple[int, int], backward: bool) -> tuple[Tensor, ...]:
        x, _ = self.pairs[0]
        qkv = [self.part(t, place) for t in (x.q, x.k, x.v)]
        out, _ = reference(*qkv, **x.meaning)
        if not backward:
            return (out,)
        return (out, *gradients(self.part(self.douts[0], place), *qkv, **x.meaning, kind="exact"))


def inputs(device: Device, case: Problem, past_l2: bool = True) -> Sets:
    """As many sets as rotate past L2, or one."""
    pairs = timed.inputs(device, case, None)
    return Sets(case, pairs if past_l2 else pairs[:1])


class LineageJob:
    def __init__(self, case: Problem, generation: Generation, sets: Sets) -> None:
        self.case, self.generation, self.sets = case, generation, sets
        self.backward = generation.passes != FORWARD
        self.results: tuple[Tensor, ...] = ()

    def calls(self) -> Sequence[Call]:
        """Those of a forward write into memory that is there; those of a step allocate, as autograd's do."""
        if not self.backward:
            job = timed.job(self.case, self.generation.specs[0], self.sets.pairs)
            calls = job.ours()
            self.results = (job.first,)
            return calls
        forward, backward = (spec_arguments(spec, self.sets.pairs[0][1].device) for spec in self.generation.specs)
        steps = [functools.partial(_step, x, dout, forward, backward)
                 for (x, _), dout in zip(self.sets.pairs, self.sets.douts, strict=True)]
        self.results = steps[0]()
        return steps

    def held_bytes(self) -> int:
        x, out = self.sets.pairs[0]
        held = (x.q, x.k, x.v, self.sets.douts[0] if self.backward else out)
        return sum(t.numel() * t.element_size() for t in held)

    def error(self) -> float:
        """The largest of the results: of out, and of a step's gradients. VerifyError for one that is not finite."""
        worst = 0.0
        for number, result in enumerate(self.results):
            pairs = [(self.sets.part(result, place).double(), right[number])
                     for place, right in zip(self.sets.places, self.sets.right(self.backward), strict=True)]
            worst = max(worst, relative_error(pairs))
        return worst


job = LineageJob


def _step(x: Inputs, dout: Tensor, forward: dict[str, Any], backward: dict[str, Any]) -> tuple[Tensor, ...]:
    out, lse = flashgen.attention(x.q, x.k, x.v, return_lse=True, **{**x.keywords, **forward})
    return (out, *flashgen.attention_backward(dout, x.q, x.k, x.v, out, lse, **{**x.keywords, **backward}))


def relative_error(pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    """|found - right| / |right|, norms over all parts. VerifyError where that is no number."""
    apart = sum(float((found - right).square().sum()) for found, right in pairs)
    size = sum(float(right.square().sum()) for _, right in pairs)
    error = (apart / size) ** 0.5 if size else float("nan")
    if not error < float("inf"):
        raise VerifyError("the result is not finite", where="lineage", next="flashgen verify")
    return error
