"""flashgen.mla_schedule: which block of a decode does what, worked out on the device."""
from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flashgen.codegen.families.registry import program_of
from flashgen.codegen.families.shared.launch import QuerySizes
from flashgen.codegen.program import Program
from flashgen.runtime.launch.kernel import Kernel
from flashgen.runtime.ops import front
from flashgen.runtime.ops.arguments import whole
from flashgen.runtime.ops.front import Arguments, Ready, kernel_for
from flashgen.runtime.ops.mla_decode.checks import raise_first, wrong_lengths, wrong_sizes
from flashgen.runtime.ops.mla_decode.signature import MLA_SCHEDULE, MlaSchedule
from flashgen.runtime.ops.signature import Shape
from flashgen.runtime.ops.tensors import check_device
from flashgen.runtime.select.selector import Wanted

if TYPE_CHECKING:
    from flashgen.runtime.emulator.kernel import EmulatedKernel

WANTED = Wanted("bf16", 576, 512, False, False, "paged", True, op="mla_schedule",
                traits=(("page_size", 64),))  # one serves all decodes


def mla_schedule(seqlens_kv: Tensor, num_heads_q: int, seqlen_q: int = 1) -> MlaSchedule:
    """Work out, on the device, how the blocks of a decode with these lengths share the work.

    Args:
        seqlens_kv: [batch] int32, keys of each request, as mla_decode takes them.
        num_heads_q, seqlen_q: of the queries.

    Give it to each mla_decode with the same lengths, heads and seqlen_q: such a call starts one kernel less. Raises as
    mla_decode.
    """
    num_heads_q, seqlen_q = whole("num_heads_q", num_heads_q, 0), whole("seqlen_q", seqlen_q, 0)
    raise_first(wrong_sizes(num_heads_q, seqlen_q))
    raise_first(wrong_lengths(seqlens_kv, None))
    check_device("seqlens_kv", seqlens_kv)
    rows, _ = front.call(OPERATION, (seqlens_kv,), (num_heads_q, seqlen_q))
    return MlaSchedule(rows, seqlens_kv.shape[0], num_heads_q, seqlen_q)


class Schedule(front.Operation):
    signature = MLA_SCHEDULE

    def prepare(self, call: Arguments) -> Ready:
        """Nothing is launched for no request."""
        seqlens, = call.tensors
        program, kernel = _program(seqlens, *call.options)
        return Ready(program, {"schedule": kernel}) if seqlens.shape[0] else Ready()


OPERATION = Schedule()


def schedule_kernel(device: torch.device) -> Kernel | EmulatedKernel:
    return kernel_for(WANTED, device)


def rows_shape(seqlens: Tensor, num_heads_q: int, seqlen_q: int) -> Shape:
    """The shape of the rows, for tensors without elements, too."""
    return _program(seqlens, num_heads_q, seqlen_q)[0].buffer("schedule").shape


def _program(seqlens: Tensor, num_heads_q: int, seqlen_q: int) -> tuple[Program, Kernel | EmulatedKernel]:
    kernel = schedule_kernel(seqlens.device)
    return program_of(kernel.plan, QuerySizes(seqlens.shape[0], seqlen_q, num_heads_q), kernel.num_sms), kernel
