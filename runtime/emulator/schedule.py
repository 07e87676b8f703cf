"""How a launch is interleaved: a policy for asynchronous work, and the seed of all choices."""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

POLICIES = ("eager", "lazy", "random")


@dataclass(frozen=True)
class Schedule:
    """One interleaving. The same schedule of the same launch takes the same steps."""

    policy: str = "random"  # eager: asynchronous work is done at its issue; lazy: when nothing else can go on; random
    seed: int = 0
    resident: int = 2       # blocks that run at a time, more where those cannot go on
    most_resident: int = 64  # at most; the machine has room for no more
    traced_block: int = -1  # whose timeline the statistics hold; -1: none

    def __str__(self) -> str:
        return f"policy {self.policy}, seed {self.seed}"


_DEFAULT = Schedule()
_current: ContextVar[Schedule] = ContextVar("schedule", default=_DEFAULT)


def current_schedule() -> Schedule:
    return _current.get()


_statistics: ContextVar[list[Any] | None] = ContextVar("statistics", default=None)


@contextmanager
def collecting() -> Iterator[list[Any]]:
    """The Statistics of each emulated launch in this context, in order."""
    rows: list[Any] = []
    token = _statistics.set(rows)
    try:
        yield rows
    finally:
        _statistics.reset(token)


def collect(statistics: Any) -> None:
    rows = _statistics.get()
    if rows is not None:
        rows.append(statistics)


@contextmanager
def scheduled(schedule: Schedule) -> Iterator[None]:
    """Emulated launches in this context follow `schedule`."""
    token = _current.set(schedule)
    try:
        yield
    finally:
        _current.reset(token)
