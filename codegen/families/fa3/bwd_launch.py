"""What the launch of fa3's backward adds to the sizes of a call: the order of its blocks."""
from __future__ import annotations

WAVES_PER_SECTION = 2  # fastest of 1 to 16 heads a section on an H200, at 2k and 8k keys


def block_order(num_sms: int, num_heads: int, n_tiles: int, causal: bool) -> dict[str, int]:
    """`num_heads`: kv heads, dense calls those of all sequences. Without a causal mask all key tiles of a head are about
    as long, so that heads follow each other; else about two waves of blocks come longest first."""
    section = min(num_heads, max(1, WAVES_PER_SECTION * -(-num_sms // max(n_tiles, 1)))) if causal else 1
    return {"num_heads": num_heads, "heads_per_section": section, "section_blocks": section * n_tiles}
