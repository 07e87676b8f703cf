"""The table "claims, measured" of docs/lineage.md, from the plans and from files of results.

    python benchmarks/lineage_claims.py [--results benchmarks/results/h200] [--write docs/lineage.md]

What is predicted comes from the plans, on the card of sm_90a. What is measured comes from lineage.json,
lineage-mla-decode.json and end-to-end.json of the results' folder; the column is left out while there is none of them.
"""
from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from flashgen.codegen.explain.candidates import MMA_SYNC_FLOPS_PER_CLOCK
from flashgen.codegen.explain.counts import TENSOR_FLOPS_PER_CLOCK
from flashgen.codegen.explain.text import si
from flashgen.codegen.target import TARGETS
from flashgen.runtime.measure.lineage import predict
from flashgen.runtime.ops.attention.lineage import LINEAGE as ATTENTION
from flashgen.runtime.ops.mla_decode.lineage import LINEAGE as DECODE

TARGET = "sm_90a"
PROBLEM = {"batch": 8, "heads": 16, "head_dim": 128, "dtype": "fp16"}
DECODES = {"batch": 32, "heads": 64}
LENGTH = 8192
BEGIN, END = "<!-- claims: python benchmarks/lineage_claims.py --write docs/lineage.md -->", "<!-- end of claims -->"
ABSENT = "no such family yet"
Row = Mapping[str, Any]


class Results(NamedTuple):
    """Rows: predicted, and of the files that exist."""

    said: Sequence[Row]
    decodes: Sequence[Row]
    found: Sequence[Row]
    found_decodes: Sequence[Row]
    models: Sequence[Row]


def row_of(rows: Sequence[Row], name: str, length: int = LENGTH, passes: str = "fwd") -> Row | None:
    """The row of a generation that ran, or was predicted."""
    return next((row for row in rows if (row["generation"], row["length"], row["passes"]) == (name, length, passes)
                 and row["predicted"] and row["status"] in ("ok", "predicted")), None)


def read(folder: Path, name: str) -> list[Row]:
    path = folder / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8"))["rows"] if path.is_file() else []


def results(folder: Path | None) -> Results:
    rows = predict(ATTENTION, ATTENTION.cases(PROBLEM, (LENGTH,)), TARGET, backward=True)["rows"]
    decodes = predict(DECODE, DECODE.cases(DECODES, (LENGTH,)), TARGET)["rows"]
    found, found_decodes, models = (read(folder, name) if folder else [] for name in (
        ATTENTION.stem, DECODE.stem, "end-to-end"))
    return Results(rows, decodes, alike(found, rows), alike(found_decodes, decodes), models)


def alike(rows: Sequence[Row], said: Sequence[Row]) -> list[Row]:
    """Those of the problem that is predicted, at any length: a file may hold another."""
    def problem(row: Row) -> dict[str, Any]:
        return {name: value for name, value in row["case"].items() if not name.startswith("seqlen")}
    return [row for row in rows if problem(row) == problem(said[0])]


Cells = tuple[str | None, str | None]  # of a claim: predicted, measured; None: not known

# -- the cells


def speed(rows: Sequence[Row], name: str, over: str, part: str) -> float | None:
    one, other = row_of(rows, name), row_of(rows, over)
    if one is None or other is None or not (one[part] and other[part]):
        return None
    return other[part]["ms"] / one[part]["ms"]


def speeds(name: str, over: str, note: Callable[[float], str] = "{:.2f}".format) -> Callable[[Results], Cells]:
    def cells(found: Results) -> Cells:
        known = {row["generation"] for row in found.said}
        said = speed(found.said, name, over, "predicted")
        measured = speed(found.found, name, over, "measured")
        return (ABSENT if {name, over} - known else said and note(said)), measured and f"{measured:.2f}"
    return cells


def score_traffic(found: Results) -> Cells:
    """Bytes of a head of our standard, which keeps S in fp32; q, k, v and out count, too."""
    heads = PROBLEM["batch"] * PROBLEM["heads"]
    said, row = row_of(found.said, "standard"), row_of(found.found, "standard")
    measured = None
    if row is not None and "read" in row["measured"]:
        measured = si((row["measured"]["read"] + row["measured"]["written"]) / heads, "B")
    return said and si(said["predicted"]["bytes"] / heads, "B"), measured


def clocks(ratio: float) -> str:
    """The floors are alike, but mma.sync does not reach the datasheet's rate: the two instructions' rates instead."""
    return f"{TENSOR_FLOPS_PER_CLOCK / MMA_SYNC_FLOPS_PER_CLOCK:.2f}"


def share_of(found: Results, over: str) -> Cells:
    known = {row["generation"] for row in found.said}
    measured = speed(found.found, "triton", over, "measured")
    return ABSENT if "triton" not in known else "-", measured and f"{100 * measured:.0f} %"


# Products of a step: of the forward, of a backward that has P, and of one that makes S again.
FORWARD, STORED, AGAIN = 2, 4, 5


def more(products: int, than: int) -> Callable[[Results], Cells]:
    return lambda found: (f"+{100 * (products / than - 1):.0f} %", None)


def step_memory(found: Results) -> Cells:
    said, row = (row_of(rows, "fa3", passes="fwd+bwd") for rows in (found.said, found.found))
    return said and si(said["predicted"]["memory_bytes"], "B"), row and si(row["measured"]["peak_bytes"], "B")


def bandwidth(found: Results) -> Cells:
    said, row = row_of(found.decodes, "flashmla"), row_of(found.found_decodes, "flashmla")
    assert said is not None
    peak = TARGETS[TARGET].device.memory_gbps

    def share(one: Row, part: str) -> str:
        return f"{100 * one['predicted']['bytes'] / one[part]['ms'] / 1e6 / peak:.0f} %"
    return f"{share(said, 'predicted')} at most", row and share(row, "measured")


LATENT = 512 + 64  # numbers that a token keeps in a layer, as latent and RoPE columns


def times_smaller(heads: int, columns: int) -> Callable[[Results], Cells]:
    """Than K and V of so many heads, with so many columns of both."""
    return lambda found: (f"{heads * columns / LATENT:.1f}", None)


def lite_cache(found: Results) -> Cells:
    """Of DeepSeek-V2-Lite's heads: as measured, the bytes of whole caches."""
    kept = {row["attention"]: row["cache_bytes"] for row in found.models
            if row["model"].startswith("deepseek") and row["kind"] == "decode" and "cache_bytes" in row
            and (row["batch"], row["length"]) == (1, LENGTH)}
    both = {"naive", "flashgen"} <= {*kept}
    return times_smaller(16, 192 + 128)(found)[0], f"{kept['naive'] / kept['flashgen']:.1f}" if both else None


def context(name: str) -> Callable[[Results], Cells]:
    """The longest sequence of the problem: its tensors, and for standard S in fp32 and P."""
    def cells(found: Results) -> Cells:
        room = TARGETS[TARGET].device.memory_bytes / PROBLEM["batch"]
        row, scores = 4 * 2 * PROBLEM["heads"] * PROBLEM["head_dim"], 6 * PROBLEM["heads"] * (name == "standard")
        most = (math.sqrt(row**2 + 4 * scores * room) - row) / (2 * scores) if scores else room / row
        longest = max((one["length"] for one in found.found if one["generation"] == name and one["passes"] == "fwd"
                       and one["status"] == "ok"), default=0)
        return si(most, "tokens"), str(longest) if longest else None
    return cells


_TRAFFIC, _RECOMPUTE = f"S and P move 537 MB a head, S = {LENGTH}, fp16", "recomputing costs 25 to 33 % more FLOPs"
_CACHE, _CONTEXT = "the KV cache is 13 times smaller", "longer contexts in the same memory"
CLAIMS: tuple[tuple[str, Callable[[Results], Cells]], ...] = (
    (f"{_TRAFFIC}: with S and P in 16 bits", lambda found: (si(4 * 2 * LENGTH**2, "B"), None)),
    (f"{_TRAFFIC}: our standard, S in fp32", score_traffic),
    ("FA1 is 2 to 4 times as fast as standard", speeds("fa1", "standard")),
    ("FA2 is about 2 times as fast as FA1", speeds("fa2", "fa1")),
    ("FA3 is 1.5 to 2 times as fast as FA2", speeds("fa3", "fa2", clocks)),
    ("Triton reaches 80 to 90 % of hand-written: of fa2", lambda found: share_of(found, "fa2")),
    ("Triton reaches 80 to 90 % of hand-written: of fa3", lambda found: share_of(found, "fa3")),
    (f"{_RECOMPUTE}: S alone again, of the backward", more(AGAIN, STORED)),
    (f"{_RECOMPUTE}: S alone again, of a step", more(FORWARD + AGAIN, FORWARD + STORED)),
    (f"{_RECOMPUTE}: the whole forward again, of a step", more(2 * FORWARD + STORED, FORWARD + STORED)),
    ("no memory of S x S: a step of fa3", step_memory),
    ("no memory of S x S: P alone, in 16 bits", lambda found: (
        si(2 * PROBLEM["batch"] * PROBLEM["heads"] * LENGTH**2, "B"), None)),
    (f"FlashMLA is near the card's bandwidth: {DECODES['heads']} heads", bandwidth),
    (f"{_CACHE}: than 32 heads of 128", times_smaller(32, 2 * 128)),
    (f"{_CACHE}: than DeepSeek-V2-Lite's own 16 heads", lite_cache),
    (f"{_CACHE}: than DeepSeek-V3's own 128 heads", times_smaller(128, 192 + 128)),
    (f"{_CACHE}: than Llama-3-8B's 8 kv heads", times_smaller(8, 2 * 128)),
    (f"{_CONTEXT}: standard", context("standard")),
    (f"{_CONTEXT}: fa3", context("fa3")),
)


def table(found: Results) -> str:
    lines = [(claim, *(cell or "-" for cell in cells(found))) for claim, cells in CLAIMS]
    measured = any(line[2] != "-" for line in lines)
    rows = [line[:3 if measured else 2] for line in (("claim", "predicted", "measured"), *lines)]
    text = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([text[0], "|" + "---|" * len(rows[0]), *text[1:]]) + "\n"


def written(page: str, text: str) -> str:
    """The page with the table between its marks."""
    before, _, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise SystemExit(f"the page has no {BEGIN} with {END} behind it")
    return f"{before}{BEGIN}\n{text}{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results" / "h200")
    parser.add_argument("--write", type=Path, help="a page with the marks of the table")
    options = parser.parse_args()
    text = table(results(options.results))
    print(text, end="")
    if options.write:
        page = options.write.read_text(encoding="utf-8")
        options.write.write_text(written(page, text), encoding="utf-8")


if __name__ == "__main__":
    main()
