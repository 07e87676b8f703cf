"""A timeline as a page (inline SVG) or as a PNG: what a person reads to understand a kernel's pipeline."""
from __future__ import annotations

import html
from pathlib import Path

from flashgen.errors import EnvironmentError_
from flashgen.runtime.emulator.trace import KINDS, Timeline

COLORS = ("#9db4d0", "#a58bd0", "#7dbb8a", "#c3e3c9", "#cfcfdd", "#edba6a", "#f3e3e0")  # by kind
SECTIONS = ("#e6e6e6", "#f2f2f2")
WIDTH, LABEL = 1600, 150       # pixels of the page
ROW, SECTION_Y, FIRST_Y = 30, 20, 48
MIN_TEXT = 6                   # characters; a shorter piece of a label says nothing
MODEL = ("One block alone on its multiprocessor. Time is a model, not a measurement: each warp in order, by "
         "issue rates and latencies of {target}\n(runtime/emulator/costs.py). It shows what waits for what.")


def write(timeline: Timeline, path: Path) -> None:
    """A PNG if the name ends so, else HTML. EnvironmentError_ if it cannot be written, or without matplotlib."""
    try:
        if path.suffix == ".png":
            _write_png(timeline, path)
        else:
            path.write_text(page(timeline), encoding="utf-8")
    except OSError as err:
        raise EnvironmentError_(f"cannot be written ({err.strerror})", where=str(path), next="-o FILE") from err


def shortened(label: str, width: float) -> str:
    """What of a label fits into a bar that is `width` characters wide."""
    if len(label) <= width:
        return label
    return label[:int(width) - 1] + "…" if width > MIN_TEXT else ""


def page(timeline: Timeline) -> str:
    """HTML that needs nothing else; hover over a span for its statement and clocks."""
    scale = WIDTH / timeline.clocks
    rows = list(timeline.rows())
    height = FIRST_Y + ROW * len(rows)
    parts = []
    for tick in _ticks(timeline.clocks):
        x = LABEL + tick * scale
        parts.append(f'<text x="{x:.0f}" y="12">{tick}</text>'
                     f'<line x1="{x:.0f}" x2="{x:.0f}" y1="16" y2="{height}" stroke="#eee"/>')
    for i, (name, begin, end) in enumerate(timeline.trips()):
        parts.append(_box(LABEL + begin * scale, SECTION_Y, (end - begin) * scale, 22, SECTIONS[i % 2], name, name))
    for i, (label, spans) in enumerate(rows):
        y = FIRST_Y + ROW * i
        parts.append(f'<text x="{LABEL - 8}" y="{y + 19}" text-anchor="end">{html.escape(label)}</text>')
        parts += [_box(LABEL + s.begin * scale, y + 2, (s.end - s.begin) * scale, ROW - 4, COLORS[s.kind],
                       timeline.label(s), timeline.hint(s)) for s in spans]
    legend = " ".join(f'<span style="background:{COLORS[kind]}">&emsp;</span> {KINDS[kind]}&ensp;'
                      for kind in _seen(timeline))
    return f"""<!doctype html><meta charset="utf-8"><title>{html.escape(timeline.title)}</title>
<style>body {{ font: 13px sans-serif; margin: 20px }} svg text {{ font: 11px sans-serif; fill: #222 }}
td, th {{ padding: 2px 8px; text-align: right }}</style>
<h3>{html.escape(timeline.title)}</h3>
<p>{html.escape(MODEL.format(target=timeline.plan.target))}</p><p>{legend}</p>
<svg width="{LABEL + WIDTH + 10}" height="{height}">{"".join(parts)}</svg>
{_table(timeline)}
"""


def _box(x: float, y: float, width: float, height: float, color: str, label: str, hint: str) -> str:
    text = shortened(label, (width - 6) / 6.2)
    shown = f'<text x="{x + 3:.1f}" y="{y + height / 2 + 4:.1f}">{html.escape(text)}</text>' if text else ""
    return (f'<g><title>{html.escape(hint)}</title><rect x="{x:.2f}" y="{y}" width="{max(width, 0.3):.2f}" '
            f'height="{height}" fill="{color}" stroke="#fff" stroke-width="0.5"/>{shown}</g>')


def _seen(timeline: Timeline) -> list[int]:
    return sorted({span.kind for span in timeline.spans})


def _ticks(last: float) -> range:
    step = max(1, 10 ** (len(str(int(last))) - 1) // 2)
    return range(0, int(last) + 1, step)


def _table(timeline: Timeline) -> str:
    """Clocks of each kind, by warp."""
    head = "".join(f"<th>{kind}</th>" for kind in KINDS)
    body = []
    for label, spans in timeline.rows():
        if spans and spans[0].row < timeline.warps:
            cells = "".join(f"<td>{sum(s.clocks[kind] for s in spans):.0f}</td>" for kind in range(len(KINDS)))
            body.append(f"<tr><td>{html.escape(label)}</td>{cells}</tr>")
    return f"<table><tr><th>clocks</th>{head}</tr>{''.join(body)}</table>"


def _write_png(timeline: Timeline, path: Path) -> None:
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as err:
        raise EnvironmentError_(f"no picture: matplotlib cannot be imported ({err})", where=str(path),
                                next="pip install flashgen[plots]") from err
    rows = list(timeline.rows())
    figure = Figure(figsize=(16, 1.9 + 0.4 * len(rows)), dpi=100, layout="constrained")
    axes = figure.add_subplot()
    character = timeline.clocks / 212  # clocks that one of a label takes

    def bar(y: float, begin: float, end: float, color: str, label: str) -> None:
        axes.broken_barh([(begin, end - begin)], (y - 0.43, 0.86), facecolor=color, edgecolor="white", linewidth=0.5)
        text = shortened(label, (end - begin) / character - 1)
        axes.text(begin + character / 2, y, text, va="center", fontsize=8.5, color="#222222")

    for i, (name, begin, end) in enumerate(timeline.trips()):
        bar(-1.15, begin, end, SECTIONS[i % 2], name)
        axes.axvline(end, color="#bbbbbb", linewidth=0.8, zorder=0)
    for y, (_, spans) in enumerate(rows):
        for span in spans:
            bar(y, span.begin, span.end, COLORS[span.kind], timeline.label(span))
    axes.set_yticks([-1.15, *range(len(rows))], ["part of the kernel", *(label for label, _ in rows)], fontsize=10)
    axes.set(ylim=(len(rows) - 0.4, -1.75), xlim=(0, timeline.clocks))
    axes.set_xlabel("clocks\n" + MODEL.format(target=timeline.plan.target), fontsize=9)
    axes.set_title(timeline.title, fontsize=11, loc="left")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    figure.legend(handles=[Patch(color=COLORS[kind], label=KINDS[kind]) for kind in _seen(timeline)],
                  loc="outside lower center", ncols=len(KINDS), fontsize=9, frameon=False)
    figure.savefig(path)
