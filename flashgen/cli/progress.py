"""How far a command is: a bar on a terminal, elsewhere a line every few seconds. All of it goes to standard error."""
from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

from flashgen.errors import EnvironmentError_

TELL_S = 5.0  # between two lines: a log of a minute's work stays readable, and nobody takes it for a hang

Step = Callable[[int, str], None]


class Ticks:
    """The time that a report waits on. Tests bring their own."""

    def __init__(self) -> None:
        self._over = threading.Event()

    def now(self) -> float:
        """Seconds since some moment."""
        return time.monotonic()

    def wait(self, seconds: float) -> bool:
        """True as soon as the work is over, False after `seconds`."""
        return self._over.wait(seconds)

    def stop(self) -> None:
        """Tells `wait` that the work is over."""
        self._over.set()


@contextlib.contextmanager
def progress(title: str, total: int, ticks: Ticks | None = None) -> Iterator[Step]:
    """Call the yielded function with (steps done, what is worked on), as often as there is news.

    Standard error gets a bar if it is a terminal and `total` is above 1. Otherwise it gets a line every TELL_S
    seconds, also while one step takes minutes; work that is over sooner says nothing.
    """
    with _bar(title, total) if total > 1 and sys.stderr.isatty() else _lines(title, total, ticks or Ticks()) as step:
        yield step


@contextlib.contextmanager
def loading_torch() -> Iterator[None]:
    """For an import that brings torch in: it takes seconds, and EnvironmentError_ says that it failed."""
    try:
        with progress("loading torch", 1):
            yield
    except ImportError as err:
        raise EnvironmentError_(f"torch cannot be imported: {err}", next="flashgen doctor") from err


@contextlib.contextmanager
def _lines(title: str, total: int, ticks: Ticks) -> Iterator[Step]:
    """A thread writes the lines: the work itself may be inside a compiler, which calls nothing of ours."""
    start, news = ticks.now(), (0, "")

    def step(done: int, what: str) -> None:
        nonlocal news
        news = (done, what)

    def tell() -> None:
        with contextlib.suppress(OSError, ValueError):  # nobody reads standard error any more
            while not ticks.wait(TELL_S):
                done, what = news
                print(f"{title}: {done} of {total} done, {ticks.now() - start:.0f} s{what and f'; {what}'}",
                      file=sys.stderr, flush=True)

    teller = threading.Thread(target=tell, name="flashgen progress", daemon=True)
    teller.start()
    try:
        yield step
    finally:
        ticks.stop()
        teller.join()


@contextlib.contextmanager
def _bar(title: str, total: int) -> Iterator[Step]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
               TextColumn("{task.fields[what]}", markup=False))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total, what="")
        yield lambda done, what: bar.update(task, completed=done, what=what)
