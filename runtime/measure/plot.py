"""The picture of a bench run: grouped bars of TFLOP/s, one group per case. Needs matplotlib (extra `plots`)."""
from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flashgen.errors import EnvironmentError_
from flashgen.runtime.measure.bench import OURS
from flashgen.runtime.measure.suite import Bench

GROUP_INCHES, HEIGHT_INCHES = 0.9, 4.5


def series(suite: Bench, results: Mapping[str, Any]) -> tuple[list[str], dict[str, list[float | None]]]:
    """(labels of the cases, TFLOP/s by implementation; None where one has no figure), ours first."""
    rows, labels = results["rows"], []
    names = [OURS, *dict.fromkeys(name for row in rows for name in row["peers"])]
    bars: dict[str, list[float | None]] = {name: [] for name in names}
    for row in rows:
        case = suite.case_of(row)
        labels.append(case.label)
        times = {OURS: row["ours_ms"], **row["peers"]}
        for name in names:
            bars[name].append(case.flops / times[name] / 1e9 if name in times else None)
    return labels, bars


def draw(suite: Bench, results: Mapping[str, Any], path: Path) -> Path:
    """Write the PNG. EnvironmentError_ without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as err:
        raise EnvironmentError_(f"no picture: matplotlib cannot be imported ({err})", where=str(path),
                                next="pip install flashgen[plots]") from err
    labels, bars = series(suite, results)
    figure = Figure(figsize=(3 + GROUP_INCHES * len(labels), HEIGHT_INCHES), layout="constrained")
    axes = figure.add_subplot()
    width = 0.8 / len(bars)
    for number, (name, values) in enumerate(bars.items()):
        places = [group + (number - (len(bars) - 1) / 2) * width for group, v in enumerate(values) if v is not None]
        axes.bar(places, [v for v in values if v is not None], width, label=name)
    axes.set_xticks(range(len(labels)), [label.replace(" B", "\nB").replace(" S", "\nS", 1) for label in labels],
                    fontsize=8)
    axes.set_ylabel("TFLOP/s of visible pairs")
    axes.set_title(f"{results['gpu']}, {results['date'][:10]}", fontsize=10, loc="left")
    figure.legend(loc="outside upper right", ncols=len(bars), fontsize=8)
    figure.savefig(path, dpi=120)
    return path
