"""What is verified: one variant on one device or on the emulator; and memory that shows what a call left unwritten."""
from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from flashgen.codegen.spec.spec import Spec
from flashgen.errors import UnsupportedError
from flashgen.runtime.emulator.schedule import POLICIES, Schedule, scheduled
from flashgen.runtime.verify.compare import Results, check_bits

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

    def same(self, problem: object, what: str, actual: Results, expected: Results) -> None:
        """VerifyError unless both results hold the same bits."""
        for name, right in expected.items():
            check_bits(actual[name], right, f"{name} ({what})", label=self.label(problem), rerun=self.rerun)


def poisoned(out: Tensor, lse_elements: int) -> Tensor:
    """`out`, filled with NaN. The call allocates lse itself; the caching allocator hands it a block of NaN."""
    torch.full((lse_elements,), NAN, dtype=torch.float32, device=out.device)
    return out.fill_(NAN)


def same_tensor(returned: Tensor, out: Tensor, call: str) -> Tensor:
    """`out`, where a call returned the tensor that it was given."""
    if returned.data_ptr() != out.data_ptr():
        raise UnsupportedError(f"{call} did not return the tensor given as out", where="out")
    return out
