"""The Plan: every number and choice of one kernel, each with its reason. Pure data; no CUDA text, no tensors.

`families/<name>/lower.py` makes plans, `verify` refuses those that do not fit their target, `render` prints them.
One tuple `params` renders the CUDA struct and packs the launch bytes; `smem` is the only source of offsets.
"""
from __future__ import annotations

import dataclasses
import json
import struct
from dataclasses import dataclass
from typing import Annotated, Any

from flashgen import files
from flashgen.codegen.target import SMEM_RESERVED_PER_BLOCK_BYTES, Target
from flashgen.codegen.warpgroup import WARPGROUP_ROWS
from flashgen.codegen.wgmma import WgmmaShape
from flashgen.errors import PlanError
from flashgen.files import Arch, Bytes, Name, between, one_of, spelled

# A plan may come from a file, so its annotations say what a field may hold: Plan.from_json refuses everything else.
Slot = Annotated[str, spelled(r"[a-z0-9_]{1,80}", "a file name of lower-case letters, digits and _")]
Template = Annotated[str, spelled(r"[a-z0-9_]{1,80}/[a-z0-9_]{1,80}\.(cu|py)\.j2", "FAMILY/NAME.cu.j2 or .py.j2")]
Warps = Annotated[int, between(0, 32)]           # a block has at most 32
Arrivals = Annotated[int, between(0, 2**20 - 1)]  # what an mbarrier can count
BoxSize = Annotated[int, between(1, 256)]        # elements of a copy along one dimension


@dataclass(frozen=True)
class Constant:
    """One `constexpr` of the generated file."""

    name: Name
    value: int
    reason: str


@dataclass(frozen=True)
class Region:
    """A named piece of dynamic shared memory."""

    name: Name
    offset_bytes: Bytes
    size_bytes: Bytes
    holds: str


@dataclass(frozen=True)
class CType:
    cuda: str
    code: str  # of the struct module
    bytes: int
    align_bytes: int = 0  # 0: its size

    @property
    def align(self) -> int:
        return self.align_bytes or self.bytes


CTYPES: dict[str, CType] = {
    "element_ptr": CType("const Element*", "Q", 8),
    "element_out": CType("Element*", "Q", 8),
    "f32_out": CType("float*", "Q", 8),
    "f32_sum": CType("float*", "Q", 8),  # added to: the caller has filled it
    "i32_out": CType("int32_t*", "Q", 8),
    "tensor_map": CType("TensorMap", "128s", 128, 64),
    "i32_ptr": CType("const int32_t*", "Q", 8),
    "f32_ptr": CType("const float*", "Q", 8),
    "bool_ptr": CType("const bool*", "Q", 8),
    "i64_ptr": CType("const int64_t*", "Q", 8),
    "i64": CType("int64_t", "q", 8),
    "i32": CType("int32_t", "i", 4),
    "divisor": CType("Divisor", "12s", 12, 4),  # an int32 by which the kernel divides: runtime/launch/kernel.py
    "f32": CType("float", "f", 4),
}


@dataclass(frozen=True)
class Param:
    """One member of the kernel's only argument. `ctype` is a key of CTYPES."""

    name: Name
    ctype: Annotated[str, one_of(CTYPES)]
    about: str  # shape and unit, for the reader of the generated file

    @property
    def may_be_null(self) -> bool:
        """Of pointers that no call has to give: their `about` says what null means."""
        return "null:" in self.about


@dataclass(frozen=True)
class TensorMap:
    """How TMA sees a tensor: [columns, rows, heads, batch], of which a copy takes one panel of one head;
    or, with `box_panels`, [columns of a panel, rows, panels, batch or pages], of which it takes several panels.

    `name` is a parameter of type tensor_map, `tensor` the pointer parameter it describes. Varlen: batch is 1.
    """

    name: Name
    tensor: Name
    box_cols: BoxSize    # elements, contiguous: one panel
    box_rows: BoxSize
    swizzle_bytes: Annotated[int, one_of((0, 32, 64, 128))]  # of a row of the panel
    box_panels: Annotated[int, between(0, 256)] = 0
    packed: bool = False  # [columns, heads of a kv head, rows, kv heads, batch]; whole rows, at most box_rows / heads


@dataclass(frozen=True)
class Barrier:
    """mbarriers in shared memory, one per stage, all completed by the same number of arrivals: `arrivals`, and as many
    as `warpgroup_arrivals` for each consumer warpgroup, where the launch decides how many there are."""

    name: Name
    count: Annotated[int, between(1, 2**16)]
    arrivals: Arrivals
    about: str
    warpgroup_arrivals: Arrivals = 0

    @property
    def expects(self) -> str:
        """How many arrivals, in CUDA."""
        if not self.warpgroup_arrivals:
            return str(self.arrivals)
        return f"{self.warpgroup_arrivals} * p.warpgroups" + (f" + {self.arrivals}" if self.arrivals else "")


@dataclass(frozen=True)
class Role:
    name: Name
    warps: Warps
    registers: Annotated[int, between(1, 256)] | None = None  # per thread after setmaxnreg; None: as launched


@dataclass(frozen=True)
class Launch:
    threads: Annotated[int, between(1, 1024)]          # at most, where the launch decides how many warpgroups multiply
    min_blocks_per_sm: Annotated[int, between(1, 32)]  # second argument of __launch_bounds__
    smem_bytes: Bytes
    grid: str  # the rule, in words; the arithmetic is in families/<family>/launch.py
    programmatic: bool = False  # may start while the kernel before it ends; it waits before it reads


@dataclass(frozen=True)
class Tile:
    """A tile that a kernel may have, where the first call times several."""

    m: Annotated[int, between(1, 1024)]
    n: Annotated[int, between(1, 1024)]
    warps: Warps
    stages: Annotated[int, between(1, 16)]


@dataclass(frozen=True)
class Part:
    """A value that an expression's text reads by name."""

    cuda_type: str
    name: Name
    text: str


@dataclass(frozen=True)
class Term:
    """What a score adds to the gradient of a tensor that its expression reads: `factor` times that of the score, to
    `element`. `sums`: how scores of a warp add up (templates/include/flashgen/parameter_sums.cuh)."""

    function: Name  # unlike that of all other terms
    gradient: Name  # the parameter that points at it
    factor: str
    element: str
    sums: Name


@dataclass(frozen=True)
class Expression:
    """A slot's expression in CUDA. `rest` gives the value for one score and reads the parts, which are computed before:
    `uniform` ones once (of masks, once a tile), `row` for each query row, `column` for each key. `whole` is all in one.

    Of masks, `tile_class` gives what some rows may see of a tile (templates/include/flashgen/span.cuh), and reads
    `class_rows`, which hang on rows alone. An interval has bounds of its `first` key and its `last` instead.
    Of scores in the backward, `slope` gives the derivative with respect to the score that the products made, and
    `terms` those with respect to elements of tensors.
    """

    slot: Slot
    about: str
    uniform: tuple[Part, ...] = ()
    row: tuple[Part, ...] = ()
    column: tuple[Part, ...] = ()
    rest: str = ""
    whole: str = ""
    tile_class: str = ""
    class_rows: tuple[Part, ...] = ()
    first: tuple[str, ...] = ()
    last: tuple[str, ...] = ()
    slope: str = ""
    terms: tuple[Term, ...] = ()


@dataclass(frozen=True)
class Plan:
    variant: Name                            # the kernel's name without its target
    target: Arch
    family: Name
    pass_: Name
    spec: tuple[tuple[Name, object], ...]    # the variant's spec fields as (name, value), in table order
    template: Template                       # skeleton, relative to templates/
    element: Name                            # element type tag in CUDA
    constants: tuple[Constant, ...]
    slots: tuple[tuple[Slot, Slot], ...]     # (slot, choice): templates/slots/<slot>/<choice>.cuh.j2
    flags: tuple[tuple[Name, bool], ...]     # bare booleans the skeleton may test
    params: tuple[Param, ...]
    smem: tuple[Region, ...]
    roles: tuple[Role, ...]
    launch: Launch
    tensor_maps: tuple[TensorMap, ...] = ()
    barriers: tuple[Barrier, ...] = ()       # in shared-memory region BARRIERS, in this order
    wgmma_shapes: tuple[WgmmaShape, ...] = ()
    register_usage_level: Annotated[int, between(0, 10)] | None = None  # of ptxas, None: its default
    notes: tuple[str, ...] = ()              # why this tile, who measured it
    allowed_spill_bytes: Bytes = 0
    expressions: tuple[Expression, ...] = ()
    tried: tuple[Tile, ...] = ()             # tiles of which the first call on a device takes the fastest

    @property
    def compiles_here(self) -> bool:
        """Whether its image is a cubin. Else it is the text, which is compiled where it is launched."""
        return self.language == "cu"

    @property
    def language(self) -> str:
        """Suffix of its files of text: cu or py."""
        return "py" if self.template.endswith(".py.j2") else "cu"

    @property
    def compiler_options(self) -> tuple[str, ...]:
        """NVRTC options that this plan asks for, beside those every kernel gets."""
        level = self.register_usage_level
        return () if level is None else (f"--ptxas-options=--register-usage-level={level}",)

    @property
    def step(self) -> str:
        """The kernel's name in a program: which kernel of its pass it is, or, of a pass with one, the pass."""
        return str(dict(self.spec).get("kernel") or self.pass_)

    @property
    def kernel_name(self) -> str:
        """`<variant>.<target>`, the name of files; the CUDA entry is `variant`."""
        return f"{self.variant}.{self.target}"

    def constant(self, name: str) -> int:
        """PlanError if it has none of this name: its family always has, so the plan comes from elsewhere."""
        for constant in self.constants:
            if constant.name == name:
                return constant.value
        raise PlanError(f"has no constant {name}", where=self.kernel_name,
                        allowed=", ".join(c.name for c in self.constants))

    @property
    def rows_alone(self) -> int:
        """Query rows that leave out the key tiles that none of them sees: a warpgroup's, or a block's."""
        return WARPGROUP_ROWS if self.wgmma_shapes else self.constant("BLOCK_M")

    @property
    def pointers(self) -> list[str]:
        """The parameters that are pointers, in order."""
        return [p.name for p in self.params if CTYPES[p.ctype].code == "Q"]

    def spec_value(self, name: str) -> object:
        return dict(self.spec)[name]

    def params_format(self) -> str:
        """Format for `struct.pack`: native sizes, explicit padding, so that it equals the CUDA struct."""
        return params_layout(self.params)[0]

    def params_bytes(self) -> int:
        return struct.calcsize(self.params_format())

    def to_dict(self) -> dict[str, Any]:
        raw = dataclasses.asdict(self)
        for name in ("expressions", "tried"):
            if not raw[name]:
                del raw[name]
        return raw

    def to_json(self) -> str:
        """Stable text: same plan, same bytes."""
        return json.dumps(self.to_dict(), sort_keys=True, indent=1)

    @classmethod
    def from_json(cls, text: str | bytes) -> Plan:
        """What to_json wrote. PlanError, with the field, for any other text: nothing of it is used unchecked."""
        try:
            raw = files.parse_json(text)
            plan: Plan = files.build({"expressions": [], "tried": [], **raw} if isinstance(raw, dict) else raw, cls)
            return plan
        except files.BadFile as err:
            raise PlanError(err.of("a plan"), allowed=err.allowed) from None


def params_layout(params: tuple[Param, ...]) -> tuple[str, dict[str, int]]:
    """(struct format with explicit padding, offset in bytes by name) of the C struct with these members."""
    code, offset, offsets, align = "<", 0, {}, 1
    for param in params:
        ctype = CTYPES[param.ctype]
        pad = -offset % ctype.align
        code += "x" * pad + ctype.code
        offset += pad
        offsets[param.name] = offset
        offset += ctype.bytes
        align = max(align, ctype.align)
    return code + "x" * (-offset % align), offsets


def registers_per_thread_max(threads: int, min_blocks: int, target: Target) -> int:
    """What __launch_bounds__(threads, min_blocks) leaves each thread: the file split, in units of 8."""
    return min(target.regs_per_thread, target.regs_per_sm // (threads * min_blocks) // 8 * 8)


def verify(plan: Plan, target: Target) -> None:
    """Raise PlanError, with the arithmetic, if the plan does not fit the target."""

    def refuse(what: str, allowed: str, nearest: str = "") -> None:
        raise PlanError(what, where=plan.kernel_name, allowed=allowed, nearest=nearest,
                        next="flashgen explain SPEC shows the plan and its memory map")

    names = [param.name for param in plan.params]
    if twice := [name for name in names if names.count(name) > 1]:
        refuse(f"parameter {twice[0]} comes twice", "each name once")
    layout = params_layout(plan.params)[1]
    offsets = [layout[name] for name in plan.pointers]
    if not offsets or offsets != [offsets[0] + 8 * i for i in range(len(offsets))]:
        refuse("its pointers do not lie side by side", "one or more pointers, which a launch writes in one go")
    mapped = {row.tensor for row in plan.tensor_maps}
    maps = [param.name for param in plan.params if param.ctype == "tensor_map"]
    if not {*plan.pointers} >= mapped or sorted(maps) != sorted(row.name for row in plan.tensor_maps):
        refuse(f"tensor maps {', '.join(maps)} describe {', '.join(sorted(mapped))}",
               f"one map per parameter, of the pointers {', '.join(plan.pointers)}")
    if plan.target != target.name:
        refuse(f"plan is for {plan.target}, not {target.name}", plan.target)
    launch = plan.launch
    warps = sum(role.warps for role in plan.roles)
    if target.warp_lanes * warps != launch.threads:
        asked_threads = target.warp_lanes * warps
        refuse(f"roles ask for {warps} warps = {asked_threads} threads, the launch has {launch.threads}", "equal")
    if launch.threads > target.max_threads_per_block:
        refuse(f"{launch.threads} threads per block", f"at most {target.max_threads_per_block} on {target.name}")
    pool = registers_per_thread_max(launch.threads, launch.min_blocks_per_sm, target) * launch.threads
    asked = sum(32 * role.warps * (role.registers or 0) for role in plan.roles)
    if asked > pool:
        terms = " + ".join(f"{32 * r.warps} * {r.registers} ({r.name})" for r in plan.roles)
        refuse(f"roles ask for {terms} = {asked} registers", f"the {pool} that a block of {launch.threads} threads has")
    end = 0
    for region in plan.smem:
        if region.offset_bytes < end or region.offset_bytes % 16:
            refuse(f"shared-memory region {region.name} at {region.offset_bytes} overlaps or is misaligned",
                   f"16-byte aligned, from {end}")
        end = region.offset_bytes + region.size_bytes
    terms = " + ".join(f"{r.name} {r.size_bytes}" for r in plan.smem)
    if end != launch.smem_bytes:
        refuse(f"shared memory map ends at {end} bytes, the launch asks for {launch.smem_bytes}", "equal")
    if end > target.smem_per_block_bytes:
        refuse(f"needs {terms} = {end} bytes of shared memory per block",
               f"{target.smem_per_block_bytes} bytes on {target.name}",
               "a smaller tile.n, fewer stages, or a smaller tile.m")
    resident = launch.min_blocks_per_sm * (end + SMEM_RESERVED_PER_BLOCK_BYTES)
    if resident > target.smem_per_sm_bytes:
        refuse(f"{launch.min_blocks_per_sm} blocks per SM need {launch.min_blocks_per_sm} * ({end} + "
               f"{SMEM_RESERVED_PER_BLOCK_BYTES}) = {resident} bytes of shared memory",
               f"{target.smem_per_sm_bytes} bytes per SM on {target.name}", "fewer blocks per SM")
    if launch.min_blocks_per_sm * launch.threads > target.max_threads_per_sm:
        refuse(f"{launch.min_blocks_per_sm} blocks of {launch.threads} threads per SM",
               f"{target.max_threads_per_sm} threads per SM on {target.name}")
    if plan.params_bytes() > 4096:
        refuse(f"{plan.params_bytes()} bytes of parameters", "4096 bytes")
