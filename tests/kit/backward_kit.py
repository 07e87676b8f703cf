"""Backward kernels played by the fp64 reference, for tests of what lies around them."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from tiny import tiny_plan
from torch import Tensor

from flashgen.codegen.families.shared.launch import Sizes
from flashgen.codegen.plan import Param, Plan
from flashgen.codegen.program import Buffer, Program, Step
from flashgen.runtime.ops.attention_backward import call
from flashgen.runtime.select.selector import Wanted
from flashgen.runtime.verify.gradients import gradients

STEPS = ("preprocess", "gradients", "postprocess")
POINTERS = tuple(Param(name, kind, "") for name, kind in (
    ("q", "element_ptr"), ("dout", "element_ptr"), ("lse", "f32_ptr"), ("dlse", "f32_ptr"), ("dq", "element_out"),
    ("dk", "element_out"), ("dv", "element_out"), ("neg_lse", "f32_out")))


class FakeKernel:
    """One of the three: the second computes all of it, in the place of the emulator's kernels."""

    num_sms = 4
    asked: ClassVar[list[Wanted]] = []          # of each call that was prepared
    launches: ClassVar[list[dict[str, Any]]] = []  # the tensors of each launch

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def launcher(self, step: Step) -> Callable[..., None]:
        def launch(x: dict[str, Tensor], filled: set[str]) -> None:
            if step.kernel != "gradients":
                return
            users = {name: value for name, value in step.values.items() if name.startswith("user_")}
            self.launches.append({**x, "values": users})
            sizes: Any = step.values
            left, right = sizes["window"]
            found = gradients(
                x["dout"], x["q"], x["k"], x["v"], dlse=x["dlse"], softmax_scale=sizes["softmax_scale"],
                causal="top_left" if sizes["top_left"] and right == 0 else right == 0, window=(left, right),
                cu_seqlens_q=x["cu_seqlens_q"], cu_seqlens_kv=x["cu_seqlens_kv"])
            for name, right_one in zip(("dq", "dk", "dv"), found, strict=True):
                x[name].copy_(right_one)
        return launch


def fake_kernels(monkeypatch: pytest.MonkeyPatch) -> type[FakeKernel]:
    """Calls for gradients find these kernels, whatever they ask for."""
    def kernels_for(wanted: Wanted, device: torch.device, sizes: Sizes) -> list[FakeKernel]:
        FakeKernel.asked.append(wanted)
        return [FakeKernel(tiny_plan(f"fake_{name}", params=POINTERS, spec=(("kernel", name),))) for name in STEPS]

    def program_of(first: Plan, sizes: Sizes, num_sms: int, *others: Plan) -> Program:
        assert num_sms == FakeKernel.num_sms and len(others) == 2
        values: Any = sizes._asdict()
        return Program(tuple(Step(name, 1, 32, values) for name in STEPS), (Buffer("neg_lse", "f32", (3,)),))

    monkeypatch.setattr(FakeKernel, "asked", [])
    monkeypatch.setattr(FakeKernel, "launches", [])
    monkeypatch.setattr(call, "kernels_for", kernels_for)
    monkeypatch.setattr(call, "program_of", program_of)
    return FakeKernel


def backward_by_reference(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *,
                          spec: object = None, deterministic: bool | None = None, max_seqlen_q: int | None = None,
                          max_seqlen_kv: int | None = None, **keywords: Any) -> tuple[Tensor, ...]:
    """flashgen.attention_backward's signature over the fp64 reference."""
    return tuple(t.to(q.dtype) for t in gradients(dout, q, k, v, **keywords))
