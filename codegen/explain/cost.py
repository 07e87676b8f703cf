"""What a call costs, whatever its family: bytes of device memory, FLOPs, scratch memory and the time at least.

An Explanation answers `cost()` with it, and `flashgen lineage` sets the generations of attention side by side.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from flashgen.codegen.target import Device, Target

# Of L2, what k and v may take. The card's L2 is two halves, and a line that SMs of both sides read lies in both; q, out
# and what else passes through take their share besides.
L2_SHARE = 0.5


@dataclass(frozen=True)
class Moved:
    """One kernel of a call: bytes of device memory, and FLOPs, a multiply-add as two."""

    read: int
    written: int
    flops: int

    @property
    def bytes(self) -> int:
        return self.read + self.written

    def ms(self, target: Target) -> float:
        return floor_ms(self.bytes, self.flops, target.device)


def floor_ms(moved_bytes: int, flops: int, device: Device) -> float:
    """Of one kernel, at the datasheet's rates: whichever takes longer."""
    return max(moved_bytes / device.memory_gbps / 1e6, flops / device.bf16_tflops / 1e9)


class Cost(NamedTuple):
    """Of a whole call, all of its kernels."""

    read: int           # bytes from device memory
    written: int        # bytes to it
    flops: int          # that are issued, padding and masked tiles included
    scratch_bytes: int  # buffers between the kernels of a call
    ms: float           # at least: at the datasheet's rates, kernel after kernel

    @property
    def bytes(self) -> int:
        return self.read + self.written

    @classmethod
    def of(cls, kernels: Mapping[str, Any], scratch_bytes: int, target: Target) -> Cost:
        """Of kernels that run one after the other, each with the numbers of a Moved."""
        each = kernels.values()
        return cls(sum(one.read for one in each), sum(one.written for one in each), sum(one.flops for one in each),
                   scratch_bytes, sum(floor_ms(one.read + one.written, one.flops, target.device) for one in each))

    def then(self, other: Cost) -> Cost:
        """With another call after it, whose buffers come when those of the first are gone."""
        return Cost(self.read + other.read, self.written + other.written, self.flops + other.flops,
                    max(self.scratch_bytes, other.scratch_bytes), self.ms + other.ms)


def kv_bytes_read(asked: int, head_bytes: int, heads: int, tiles_per_head: int, resident: int, device: Device) -> int:
    """Bytes of k and v that come from device memory, of `asked` that blocks ask for; L2 serves the rest.

    `head_bytes`: k and v of one of `heads` kv heads, over all sequences. `tiles_per_head`: the query tiles that read
    them. `resident`: the blocks that run at one time.

    Blocks begin head after head, so those that run at one time work on few heads. If k and v of these heads fit into
    L2, they stay there until their last query tile is done, and each byte is moved once. If not, the blocks of one
    wave still walk along the keys in step and share each tile, but the next wave finds nothing left: once per wave.
    """
    live = min(heads, -(-resident // tiles_per_head))
    waves = 1 if live * head_bytes <= L2_SHARE * device.l2_bytes else -(-tiles_per_head // resident)
    return min(asked, heads * head_bytes * waves)
