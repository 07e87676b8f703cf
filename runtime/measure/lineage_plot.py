"""The two pictures of a lineage: the roofline with a point for each generation, and time against sequence length, with
the wall where memory ends. Needs matplotlib (extra `plots`)."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flashgen.errors import EnvironmentError_
from flashgen.runtime.measure.lineage import OUT_OF_MEMORY, title_of

Row = Mapping[str, Any]
SIZE, DPI = (7.0, 4.5), 120
MARKERS = "osD^vP*X<>"  # points of two generations may lie on each other


def _figure(path: Path) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as err:
        raise EnvironmentError_(f"no picture: matplotlib cannot be imported ({err})", where=str(path),
                                next="pip install flashgen[plots]") from err
    return Figure(figsize=SIZE, layout="constrained")


def point_of(row: Row) -> tuple[float, float] | None:
    """(FLOPs per byte of device memory, TFLOP/s): measured as far as the row is, else predicted. None for a row that
    has neither, or ran out of memory."""
    said, found = row["predicted"], row["measured"]
    if said is None or row["status"] == OUT_OF_MEMORY:
        return None
    moved = found["read"] + found["written"] if "read" in found else said["bytes"]
    return said["flops"] / moved, found.get("tflops", said["tflops"])


def ms_of(row: Row) -> float | None:
    """Measured; of a row that was not, the floor."""
    if row["status"] == OUT_OF_MEMORY:
        return None
    said = row["predicted"]
    found: float | None = row["measured"].get("ms", said and said["ms"])
    return found


def walls(rows: Sequence[Row]) -> dict[str, int]:
    """The shortest length at which each generation ran out of memory."""
    found: dict[str, int] = {}
    for row in rows:
        if row["status"] == OUT_OF_MEMORY:
            name, length = title_of(row), row["length"]
            found[name] = min(length, found.get(name, length))
    return found


def points_of(rows: Sequence[Row]) -> tuple[int, dict[str, tuple[float, float]]]:
    """(length, the generations' points): of the longest length at which most generations have one."""
    by_length: dict[int, dict[str, tuple[float, float]]] = {}
    for row in rows:
        if point := point_of(row):
            by_length.setdefault(row["length"], {})[title_of(row)] = point
    return max(by_length.items(), key=lambda item: (len(item[1]), item[0]), default=(0, {}))


def draw_roofline(results: Row, path: Path) -> Path:
    """Write the PNG, of one length (points_of). EnvironmentError_ without matplotlib."""
    figure, card = _figure(path), results["card"]
    length, points = points_of(results["rows"])
    axes = figure.add_subplot()
    balance = 1e3 * card["bf16_tflops"] / card["memory_gbps"]
    places = [place for place, _ in points.values()] or [balance]
    ends = min(*places, balance) / 3, max(*places, balance) * 3
    slope = card["memory_gbps"] / 1e3
    axes.plot([ends[0], balance, ends[1]], [slope * ends[0], card["bf16_tflops"], card["bf16_tflops"]], color="black",
              linewidth=1, label=f"{card['name']}: {card['bf16_tflops']:g} TFLOP/s, {card['memory_gbps']:g} GB/s")
    for number, (name, (intensity, tflops)) in enumerate(points.items()):
        axes.plot([intensity], [tflops], MARKERS[number % len(MARKERS)], label=f"{name}, {length}", fillstyle="none",
                  markersize=8 + 2 * number)
    axes.set(xscale="log", yscale="log", xlabel="FLOPs per byte of device memory", ylabel="TFLOP/s")
    return _written(figure, axes, results, path)


def draw_lengths(results: Row, path: Path) -> Path:
    """Write the PNG: a line for each generation, which ends where memory does. EnvironmentError_ without matplotlib."""
    figure, rows = _figure(path), results["rows"]
    axes, colors = figure.add_subplot(), {}
    for number, name in enumerate(dict.fromkeys(map(title_of, rows))):
        own = sorted((row["length"], ms) for row in rows if title_of(row) == name and (ms := ms_of(row)) is not None)
        if own:
            [line] = axes.plot(*zip(*own, strict=True), label=name, marker=MARKERS[number % len(MARKERS)],
                               fillstyle="none")
            colors[name] = line.get_color()
    for name, length in walls(rows).items():
        axes.axvline(length, color=colors.get(name, "gray"), linestyle="--", linewidth=1,
                     label=f"{name}: out of memory at {length}")
    lengths = sorted({row["length"] for row in rows})
    axes.set(xscale="log", yscale="log", xlabel=results["sweep"], ylabel="ms")
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.minorticks_off()
    return _written(figure, axes, results, path)


def _written(figure: Any, axes: Any, results: Row, path: Path) -> Path:
    first = results["rows"][0] if results["rows"] else {"label": "", "length": ""}
    problem = " ".join(word for word in first["label"].split() if word != f"S{first['length']}")
    kind = "" if results["driver"] else ", predicted"
    axes.set_title(f"{results['gpu']}{kind}, {results['date'][:10]}; {problem}", fontsize=9, loc="left")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    try:
        figure.savefig(path, dpi=DPI)
    except OSError as err:
        raise EnvironmentError_(f"cannot be written ({err.strerror})", where=str(path), next="-o DIR") from err
    return path
