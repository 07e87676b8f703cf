"""What an operation (what is asked, and what is right) provides to the engines verify, measure and emulator.

A folder beside this file is an operation. Its module `op` has the functions of Op; they may import torch. Its module
`bench` has BENCH, a Bench of measure/suite.py, and is imported before torch is.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from flashgen.codegen.explain.counts import Shape
    from flashgen.codegen.plan import Plan
    from flashgen.codegen.spec.spec import Spec
    from flashgen.runtime.verify.compare import Accuracy, Results, Truth
    from flashgen.runtime.verify.subject import Subject

Identity = Callable[["Subject", Any], "Accuracy"]  # runs a problem in several ways; VerifyError where bits differ


class Inputs(Protocol):
    """The tensors and options of one call."""

    def truth(self) -> Truth:
        """What is right for each output, in fp64, with its yardstick."""


class Problem(Protocol):
    """The sizes and the seed of one call, as frozen data: its repr is enough to repeat the call."""

    def make_inputs(self, device: str) -> Inputs: ...


class Example(NamedTuple):
    """A small call whose timeline the emulator draws: `prepare` makes its tensors and what else it is given."""

    prepare: Callable[[], Callable[[], object]]
    num_sms: int = 0   # it has to run on; 0: those of the emulator


class Op(Protocol):
    EXAMPLES: Mapping[str, Mapping[str, int]]  # sizes of the example, by pass

    def example(self, spec: Spec, shape: Shape) -> Example: ...

    def problems(self, spec: Spec, plan: Plan, seed: int, emulated: bool) -> Iterable[Problem]:
        """Calls at the edges of the variant's own tiles; for the emulator, as few blocks as reach every branch."""

    def few_problems(self, spec: Spec, plan: Plan) -> Iterable[Problem]:
        """Enough to tell that a kernel is wrong as a whole: a small call, and one with many tiles."""

    def inputs(self, problem: Any, spec: Spec, device: str) -> Inputs:
        """Those of a problem, with values for what the spec asks beside them."""

    def run(self, subject: Subject, inputs: Any) -> Results:
        """The call that users make, into memory that held NaN before."""

    def unordered(self, spec: Spec) -> tuple[str, ...]:
        """The results whose bits may differ from run to run: sums of parts that come in any order."""

    def identities(self, spec: Spec, plan: Plan, seed: int) -> Iterable[tuple[str, Identity, Problem]]:
        """What has to give the same bits: (name, test, subject of the test)."""
