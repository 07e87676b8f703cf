"""What an operation gives to be timed: cases, inputs, our calls, peers, and how the rows read. No torch."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, cast

from flashgen.errors import UnsupportedError
from flashgen.runtime.measure.bench import Call, Device, Peer, figures, results_name
from flashgen.runtime.measure.grid import Axis, default_grid

if TYPE_CHECKING:
    from flashgen.codegen.explain.counts import Shape
    from flashgen.codegen.spec.spec import Spec

Row = Mapping[str, Any]  # of the results, as JSON has it


class Case(Protocol):
    """One problem that is timed."""

    @property
    def label(self) -> str: ...
    @property
    def flops(self) -> int: ...
    @property
    def bytes(self) -> int: ...


class Job(Protocol):
    """A case with the kernel that serves it, and inputs on the device."""

    def ours(self) -> Sequence[Call]:
        """Our call for each set of inputs, once the first has run and what it wrote was looked at."""


class Timed(Protocol):
    """What of a bench needs torch: functions of a module."""

    def find(self, peer: str) -> Peer:
        """Refused says what is missing."""

    def inputs(self, device: Device, case: Any, spec: Any) -> Any:
        """For the case, on the device; other variants may share them."""

    def job(self, case: Any, spec: Any, inputs: Any) -> Job: ...


class Column(NamedTuple):
    """Of the table that a run prints. `title` begins with ">" where cells are aligned right."""

    title: str
    cell: Callable[[Row], str]


def decimals(value: float | None, count: int) -> str:
    return "" if value is None else f"{value:.{count}f}"


MS = Column(">ms", lambda row: f"{row['ours_ms']:.4f}")
TFLOPS = Column(">TFLOP/s", lambda row: f"{row['tflops']:.0f}")
GBPS = Column(">GB/s", lambda row: f"{row['gbps']:.0f}")


def peer_ms(name: str, refused: str = "refused") -> Column:
    return Column(f">{name} ms", lambda row: decimals(row["peers"][name], 4) if name in row["peers"] else refused)


def listed(means: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {mean:.3f}" for name, mean in means.items())


class Bench:
    """What is timed of an operation, beside whom, and how the rows read."""

    case: ClassVar[Callable[..., Any]]             # from the values of a row
    axes: ClassVar[Mapping[str, Axis]]             # the keys of a grid
    read: ClassVar[Callable[[str], Sequence[Any]]]  # the cases of a grid; SpecError says what is wrong
    pass_: ClassVar[str]                           # of the kernels that are timed
    peers: ClassVar[tuple[str, ...]]               # their names
    module: ClassVar[str]                          # a Timed
    data: ClassVar[tuple[str, ...]] = ("normal",)  # of measure.bench.DATA: what inputs can be drawn
    falls_back: ClassVar[bool] = False             # to plain calls for all of a row, where no graph holds a peer's
    keeps_rows: ClassVar[bool] = False             # the results are written after every row, as compiling takes long
    picture: ClassVar[bool] = False                # of the rows, by measure.plot

    def load(self, grid: str | None, specs: Sequence[Spec]) -> Sequence[Case]:
        """The cases of a grid, or of the default one of the first spec."""
        return type(self).read(grid or default_grid(specs[0].family, self.pass_))

    def stem(self, grid: str | None, data: str, specs: Sequence[Spec]) -> str:
        """The name of the results' file, without its ending."""
        return results_name(specs[0].family, self.pass_, grid, data)

    def work(self, cases: Sequence[Any], specs: Sequence[Spec], device: Device) -> Sequence[tuple[Any, Any]]:
        """(case, what serves it) of each row to be."""
        raise NotImplementedError

    def warm(self, cases: Sequence[Any], peers: Sequence[str]) -> None:
        """Compiles ahead what would make the first calls slow."""

    def timed(self) -> Timed:
        return cast("Timed", import_module(self.module))

    def row(self, job: Any, medians: Mapping[str, float], refused: Mapping[str, str], timer: str) -> dict[str, Any]:
        return {"case": {**self.in_json(job.case), "variant": f"{job.spec.variant}.{job.spec.arch}"},
                **figures(medians, refused, job.case.flops, job.case.bytes)}

    def notes(self, device: Device, seconds: Mapping[str, float]) -> dict[str, Any]:
        """What the document holds besides its rows."""
        return {}

    def in_json(self, case: Any) -> dict[str, Any]:
        """Of a case, what a grid can say."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(case).items()
                if key in self.axes}

    def case_of(self, row: Row) -> Any:
        """The case of a row, also of one that was read from JSON."""
        return type(self).case(**{key: tuple(value) if isinstance(value, list) else value
                                  for key, value in row["case"].items() if key != "variant"})

    def case_for(self, spec: Spec, shape: Shape) -> Case:
        """What `flashgen tune` times a variant on."""
        raise UnsupportedError(f"{spec.variant} has no tiles to choose from", where="tune")

    def heading(self, results: Row) -> str:
        """What the first line says after the device."""
        return ""

    def columns(self, peers: Sequence[str]) -> Sequence[Column]:
        """`peers`: those that are present."""
        raise NotImplementedError

    def means(self, rows: Sequence[Row], peers: Sequence[str]) -> list[str]:
        """Lines below the table."""
        return []

    def refusals(self, row: Row) -> list[str]:
        return [f"{name}: {why}" for name, why in row["refused"].items()]
