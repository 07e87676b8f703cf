"""Bytes of device memory that a call moves, counted by Nsight Compute: one child process for each generation.

The child (counted.py) runs one call between the marks of a profiler range, so that ncu looks at the kernels of that
call and at no other, whoever wrote them. L2 keeps what the call before left: --cache-control none. Before the range the
child reads a buffer of twice L2, so that nothing of the inputs is there. What a call leaves in L2 at its end is not
counted as written: at most the size of L2.
"""
from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from flashgen.errors import EnvironmentError_
from flashgen.runtime.measure.lineage import STEP, Generation, Lineage

METRICS = {"dram__bytes_read.sum": "read", "dram__bytes_write.sum": "written"}
UNITS = {"byte": 1, "Kbyte": 10**3, "Mbyte": 10**6, "Gbyte": 10**9, "Tbyte": 10**12}
MODULE = "flashgen.runtime.measure.counted"
LIMIT_S = 300


def find_ncu() -> str:
    """Its path. EnvironmentError_ without one."""
    path = shutil.which("ncu")
    if path is None:
        raise EnvironmentError_("ncu is not on PATH", where="--counters", allowed="Nsight Compute's command line, ncu",
                                nearest="without --counters the bytes are predicted", next="install Nsight Compute")
    return path


def parse_csv(text: str) -> dict[str, int]:
    """{"read": bytes, "written": bytes, "kernels": count} of what `ncu --csv` prints. EnvironmentError_ for what holds
    no counts."""
    lines = text.splitlines()
    start = next((number for number, line in enumerate(lines) if "Metric Name" in line), None)
    if start is None:
        raise _nothing(text)
    found, kernels = dict.fromkeys(METRICS.values(), 0.0), set()
    for row in csv.DictReader(_rows(lines[start:])):
        name = METRICS.get(row["Metric Name"] or "")
        if name is None:
            continue
        unit, value = row["Metric Unit"], row["Metric Value"].replace(",", "")
        try:
            found[name] += float(value) * UNITS[unit]
        except (KeyError, ValueError):
            raise EnvironmentError_(f"ncu says {row['Metric Name']} is {value!r} {unit!r}", where="--counters",
                                    allowed=f"numbers of {', '.join(UNITS)}", next="ncu --version") from None
        kernels.add(row["ID"])
    if not kernels:
        raise _nothing(text)
    return {**{name: round(value) for name, value in found.items()}, "kernels": len(kernels)}


def _rows(lines: Iterable[str]) -> list[str]:
    """Without what ncu and the program print between."""
    return [line for line in lines if line.startswith('"')]


def _nothing(text: str) -> EnvironmentError_:
    told = [line for line in text.splitlines() if "==ERROR==" in line or "ERR_" in line]
    allowed = "a user who may read the GPU's counters (ERR_NVGPUCTRPERM: ask for it, or run as root)"
    return EnvironmentError_("ncu counted no kernel" + (f": {told[0]}" if told else ""), where="--counters",
                             allowed=allowed, next="without --counters the bytes are predicted",
                             details="\n".join(text.splitlines()[-5:]))


def command_of(ncu: str, task: Mapping[str, Any]) -> list[str]:
    return [ncu, "--metrics", ",".join(METRICS), "--csv", "--print-units", "base", "--cache-control", "none",
            "--profile-from-start", "off", "--target-processes", "application-only",
            sys.executable, "-m", MODULE, json.dumps(task)]


def counter(ncu: str, lineage: Lineage) -> Callable[[Any, Generation], dict[str, int]]:
    """What `measure` asks for the bytes of a generation."""
    def count(case: Any, generation: Generation) -> dict[str, int]:
        task = {"stem": lineage.stem, "case": lineage.in_json(case), "generation": generation.name,
                "backward": generation.passes == STEP}
        try:
            ran = subprocess.run(command_of(ncu, task), capture_output=True, text=True, timeout=LIMIT_S,
                                 env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))})
        except (OSError, subprocess.TimeoutExpired) as err:
            raise EnvironmentError_(f"{generation.name}, {case.label}: {err}", where="--counters",
                                    next="without --counters the bytes are predicted") from err
        if ran.returncode:
            raise EnvironmentError_(f"ncu, or {MODULE} under it, ended with {ran.returncode}", where="--counters",
                                    next="without --counters the bytes are predicted",
                                    details="\n".join((ran.stdout + ran.stderr).splitlines()[-10:]))
        return parse_csv(ran.stdout)
    return count
