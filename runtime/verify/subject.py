"""What is verified: one variant on one device or on the emulator, and a call of it from poisoned memory."""
from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import flashgen
from flashgen.codegen.spec.spec import Spec
from flashgen.errors import UnsupportedError
from flashgen.runtime.emulator.schedule import POLICIES, Schedule, scheduled
from flashgen.runtime.ops.attention.problem import Inputs

NAN = float("nan")


@dataclass(frozen=True)
class Subject:
    """One variant on one device, with what a failure's text needs."""

    spec: Spec
    device: str
    seed: int = 0
    path: str = ""
    emulated: bool = False

    @property
    def rerun(self) -> str:
        return (f"flashgen verify {self.path or self.spec.name} --variant {self.spec.variant} --seed {self.seed}"
                + (f" --emulate --arch {self.spec.arch}" if self.emulated else ""))

    def schedules(self) -> Sequence[AbstractContextManager[None]]:
        """What to run one problem under: twice the same on a device, each policy once on the emulator."""
        if not self.emulated:
            return nullcontext(), nullcontext()
        return tuple(scheduled(Schedule(policy, self.seed)) for policy in POLICIES)

    def label(self, problem: object) -> str:
        return f"{self.spec.variant}.{self.spec.arch}, seed {self.seed}, {problem}"

    def run(self, inputs: Inputs, out: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        return run_poisoned(inputs, spec=self.spec, lse=self.spec.lse, out=out)


def run_poisoned(inputs: Inputs, *, spec: Spec | None = None, lse: bool = True,
                 out: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """(out, lse or None) of flashgen.attention, into memory that held NaN before."""
    q, v = inputs.q, inputs.v
    if out is None:
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
    out.fill_(NAN)
    if lse:  # the call allocates lse itself; the caching allocator hands it this block again
        torch.full((q.numel() // max(1, q.shape[-1]),), NAN, dtype=torch.float32, device=q.device)
    result: Any = flashgen.attention(q, inputs.k, v, **inputs.keywords, return_lse=lse, out=out, spec=spec)
    returned, returned_lse = result if lse else (result, None)
    if returned.data_ptr() != out.data_ptr():
        raise UnsupportedError("attention did not return the tensor given as out", where="out")
    return out, returned_lse
