"""What `flashgen bench` times of a backward: the grids and variants of attention, with the FLOPs of five products.
No torch.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from flashgen.runtime.measure.bench import Device
from flashgen.runtime.ops.attention.bench import AXES, AttentionBench, load_grid
from flashgen.runtime.ops.attention_backward.problem import BackwardProblem

if TYPE_CHECKING:
    from flashgen.codegen.explain.counts import Shape
    from flashgen.codegen.spec.spec import Spec


def load_backward_grid(grid: str) -> tuple[BackwardProblem, ...]:
    """Problems of a grid of attention's. SpecError says what is wrong."""
    return tuple(map(BackwardProblem.of, load_grid(grid)))


class BackwardBench(AttentionBench):
    case, axes, read, pass_ = BackwardProblem, AXES, load_backward_grid, "bwd"
    peers: ClassVar[tuple[str, ...]] = ("sdpa-cudnn", "sdpa-fa2", "fa4", "torch-varlen")
    module = "flashgen.runtime.ops.attention_backward.timed"

    def notes(self, device: Device, seconds: Mapping[str, float]) -> dict[str, Any]:
        return {"data": device.data, "flops": "10 * pairs * head_dim: five products"}

    def case_for(self, spec: Spec, shape: Shape) -> BackwardProblem:
        return BackwardProblem.of(super().case_for(spec, shape))


BENCH = BackwardBench()
