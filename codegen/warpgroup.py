"""What wgmma asks of a kernel's shape: rows and registers of a warpgroup.

Source: PTX ISA, "Register Fragments and Shared Memory Matrix Layouts" of wgmma.mma_async.
"""
from __future__ import annotations

from dataclasses import dataclass

WARPGROUP_WARPS = 4
WARPGROUP_THREADS = 32 * WARPGROUP_WARPS
WARPGROUP_ROWS = 64   # of the accumulator of every wgmma
WARP_ROWS = 16        # of them
MAX_WARPGROUPS = 4    # of consumers, with 112 registers per thread; five would have 80, too few for any tile
# Registers beside accumulators and fragments: descriptors, loop state, row max and sum. A floor: below it a kernel
# certainly spills.
OVERHEAD_REGISTERS = 24


@dataclass(frozen=True)
class RegisterNeed:
    """Registers of one thread of a warpgroup that keeps scores, probabilities and output of 64 query rows."""

    scores: int         # fp32, one key tile
    probabilities: int  # 16 bits each, the tile before: operand of the PV product, if that is in registers
    out: int            # fp32
    overhead: int = OVERHEAD_REGISTERS

    @property
    def total(self) -> int:
        return self.scores + self.probabilities + self.out + self.overhead

    def __str__(self) -> str:
        return (f"scores {self.scores} + probabilities {self.probabilities} + output {self.out} + {self.overhead} = "
                f"{self.total}")


def register_need(block_n: int, cols_v: int, p_operand: str = "registers") -> RegisterNeed:
    """For key tiles of `block_n` keys and `cols_v` columns of output: 64 rows over 128 threads."""
    def per_thread(columns: int) -> int:
        return WARPGROUP_ROWS * columns // WARPGROUP_THREADS
    packed = per_thread(block_n) // 2 if p_operand == "registers" else 0
    return RegisterNeed(per_thread(block_n), packed, per_thread(cols_v))
