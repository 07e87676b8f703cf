"""Clocks of timed events, for timelines. They rank what a kernel waits for; they do not predict its speed.

Each number says where it comes from. "Guide": CUDA C++ Programming Guide, "Arithmetic Instructions" (results per clock
and multiprocessor). "Assumed": no measurement of ours; only proportions of a picture depend on it.
"""
from __future__ import annotations

QUARTERS = 4  # of a multiprocessor, each with its own tensor core and exponential unit; warps are dealt out in turn
WGMMA_FLOP = 4096  # bf16 per clock and multiprocessor. H200, wgmma alone, every shape; the datasheet's 989 TFLOP/s
# Through mma.sync. Datasheet TFLOP/s over multiprocessors and boost clock: A100 312 / 108 / 1.41 GHz, A10
# 125 / 72 / 1.70, L40S 362 / 142 / 2.52, RTX 5090 209.5 / 170 / 2.41. sm_90: 634 TFLOP/s measured on an H200
# (docs/fa2.md), taken at the clock of its 989. sm_100a: assumed, its datasheet speaks of tcgen05.
MMA_FLOP = {"sm_80": 2048, "sm_86": 1024, "sm_89": 1024, "sm_90": 2625, "sm_90a": 2625, "sm_100a": 2048, "sm_120": 512}
M16N8K16_FLOP = 2 * 16 * 8 * 16
EXP_CLOCKS = 32 / (16 / QUARTERS)      # guide: ex2, 16 per clock
SHUFFLE_CLOCKS = 32 / (32 / QUARTERS)  # guide: warp shuffles, 32 per clock; their latency is not modelled
FRAGMENT_CLOCKS = 512 / 128            # guide, shared memory: 32 banks of 4 bytes; an ldmatrix.x4 reads 512 bytes
ALU_CLOCKS = 0.5              # assumed, per access to registers: a multiply-add, 1 clock, has about two that are seen
ISSUE_CLOCKS = 2.0            # assumed: a copy's instruction
COPY_LATENCY_CLOCKS = 600.0   # assumed: device memory
COPY_BYTES_PER_CLOCK = 30.0   # a load-only kernel out of L2 on an H200: 6.8 TB/s over 132 multiprocessors at 1.7 GHz


def costs(target: str) -> tuple[float, ...]:
    """struct Costs of src/trace.h for a target."""
    mma = M16N8K16_FLOP / (MMA_FLOP[target] / QUARTERS)
    return (ALU_CLOCKS, EXP_CLOCKS, mma, FRAGMENT_CLOCKS, SHUFFLE_CLOCKS, ISSUE_CLOCKS, COPY_LATENCY_CLOCKS,
            COPY_BYTES_PER_CLOCK, float(WGMMA_FLOP))
