"""Hardware facts, one row per compilation target; self-checking.

Sources: CUDA C++ Programming Guide, "Compute Capabilities" (shared memory, registers, warps, blocks per SM);
PTX ISA "Target ISA Notes" of each instruction (features). `devices` holds the datasheet rates of the card that the
roofline in `flashgen explain` is drawn for; they are leads, measured ceilings are in docs/.
"""
from __future__ import annotations

from dataclasses import dataclass

KIB = 1024
SMEM_RESERVED_PER_BLOCK_BYTES = 1024  # the driver keeps 1 KiB of each resident block (cc >= 8.0)


@dataclass(frozen=True)
class Device:
    """A card the roofline can be drawn for: dense bf16 tensor rate, bandwidth and size of device memory, SMs, L2."""

    name: str
    num_sms: int
    bf16_tflops: float
    memory_gbps: float
    l2_mib: int
    memory_gb: int

    @property
    def l2_bytes(self) -> int:
        return self.l2_mib * KIB * KIB

    @property
    def memory_bytes(self) -> int:
        return self.memory_gb * 10**9


@dataclass(frozen=True)
class Target:
    name: str                      # as NVRTC spells it: --gpu-architecture=<name>
    cc: int                        # compute capability, 10 * major + minor; of gfx targets the number in the name
    smem_per_block_bytes: int      # opt-in maximum of dynamic shared memory per block
    smem_per_sm_bytes: int
    max_warps_per_sm: int
    max_blocks_per_sm: int
    features: frozenset[str]
    device: Device
    regs_per_sm: int = 65536
    regs_per_thread: int = 255
    max_threads_per_block: int = 1024
    warp_lanes: int = 32

    def __post_init__(self) -> None:
        assert self.smem_per_block_bytes + SMEM_RESERVED_PER_BLOCK_BYTES <= self.smem_per_sm_bytes, self
        assert self.cc == int(self.name.removeprefix("sm_").removeprefix("gfx").rstrip("af")), self
        assert self.features <= FEATURES.keys(), self.features - FEATURES.keys()

    @property
    def max_threads_per_sm(self) -> int:
        return self.warp_lanes * self.max_warps_per_sm

    @property
    def capability(self) -> str:
        """As users know it: 9.0, or gfx942."""
        return f"{self.cc / 10:.1f}" if self.is_nvidia else self.name

    @property
    def is_nvidia(self) -> bool:
        """Whether NVRTC compiles for it."""
        return self.name.startswith("sm_")

    def runs_on(self, cc: int) -> bool:
        """Whether a cubin of this target loads on a device of compute capability `cc` (10 * major + minor).

        Cubins run on the same major version with an equal or higher minor one; an `a` target only on its own.
        """
        if self.name.endswith("a"):
            return cc == self.cc
        return cc // 10 == self.cc // 10 and cc >= self.cc


FEATURES: dict[str, str] = {
    "cp_async": "cp.async (16-byte asynchronous copies to shared memory)",
    "ldmatrix": "ldmatrix",
    "mma_sync": "mma.sync m16n8k16 with bf16 and fp16 inputs",
    "mma_fp8": "mma.sync with fp8 inputs",
    "tma": "cp.async.bulk.tensor and mbarrier transactions",
    "wgmma": "wgmma.mma_async and setmaxnreg",
    "tcgen05": "tcgen05.mma",
    "triton": "Triton's compiler",
}
_AMPERE = frozenset({"cp_async", "ldmatrix", "mma_sync", "triton"})
_ADA = _AMPERE | {"mma_fp8"}
_HOPPER = _ADA | {"tma"}

A100 = Device("A100-SXM4-80GB", 108, 312.0, 2039.0, 40, 80)
A10 = Device("A10", 72, 125.0, 600.0, 6, 24)
L40S = Device("L40S", 142, 362.0, 864.0, 96, 48)
H200 = Device("H200-SXM", 132, 989.4, 4800.0, 50, 141)
B200 = Device("B200", 148, 2250.0, 8000.0, 126, 180)
MI300X = Device("MI300X", 304, 1307.4, 5300.0, 256, 192)  # its Infinity Cache stands in for L2
RTX5090 = Device("RTX 5090", 170, 209.5, 1792.0, 96, 32)

TARGETS: dict[str, Target] = {
    t.name: t
    for t in (
        Target("sm_80", 80, 163 * KIB, 164 * KIB, 64, 32, _AMPERE, A100),
        Target("sm_86", 86, 99 * KIB, 100 * KIB, 48, 16, _AMPERE, A10),
        Target("sm_89", 89, 99 * KIB, 100 * KIB, 48, 24, _ADA, L40S),
        Target("sm_90", 90, 227 * KIB, 228 * KIB, 64, 32, _HOPPER, H200),
        Target("sm_90a", 90, 227 * KIB, 228 * KIB, 64, 32, _HOPPER | {"wgmma"}, H200),
        Target("sm_100a", 100, 227 * KIB, 228 * KIB, 64, 32, _HOPPER | {"tcgen05"}, B200),
        Target("sm_120", 120, 99 * KIB, 100 * KIB, 48, 24, _HOPPER, RTX5090),
        # AMD Instinct MI300 ISA, "Hardware": 64 KiB of LDS and 2048 threads in wavefronts of 64 for each compute unit.
        Target("gfx942", 942, 63 * KIB, 64 * KIB, 32, 32, frozenset({"triton"}), MI300X, 131072, 512, 1024, 64),
    )
}
