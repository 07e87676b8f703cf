"""How the gradients kernel of fa3's backward is launched: a block for each tile of keys, the longest first."""
from __future__ import annotations

from collections.abc import Mapping

from flashgen.codegen.families.shared.backward import key_tiles
from flashgen.codegen.families.shared.launch import is_varlen
from flashgen.codegen.plan import Plan
from flashgen.codegen.program import Number

WAVES_PER_SECTION = 2  # fastest of 1 to 16 heads a section on an H200, at 2k and 8k keys


def grid(plan: Plan, values: Mapping[str, Number], num_sms: int) -> tuple[int, Mapping[str, Number]]:
    """Blocks of a call, and their order. Under a causal mask the key tiles of a head differ in length: sections of
    heads have about two waves of blocks, the longest first. Else a section is a head. Where blocks take turns, those of
    a head come last key tile first, and sections have several heads under all masks: neighbours of a head had better
    start one after the other."""
    heads = int(values["num_heads_kv"] * (1 if is_varlen(plan) else values["batch"]))
    n_tiles = max(int(values["n_tiles"]), 1)
    wanted = WAVES_PER_SECTION * -(-num_sms // n_tiles)
    several = plan.spec_value("causal") or plan.spec_value("deterministic")
    section = _section(heads, wanted) if several else 1
    return key_tiles(plan, values), {
        "num_heads": heads, "heads_per_section": section, "section_blocks": section * n_tiles}


def _section(heads: int, wanted: int) -> int:
    """Heads of a section: about as many as wanted, so that no small section is left for the end, whose few blocks
    would begin late with long ones."""
    around = range(max(1, -(-wanted // 2)), max(1, min(2 * wanted, heads)) + 1)
    return min(around or (heads,), key=lambda size: (-heads % size, abs(size - wanted)))
