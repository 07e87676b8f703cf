"""Header text of the wgmma products a kernel uses: one wrapper per shape, in the style of templates/include.

The operand lists of wgmma depend on N, so these are the one part of the PTX wrappers that is rendered. What they share,
and their signatures, are in ptx/wgmma.cuh: each wrapper here specialises wgmma_ss or wgmma_rs.
"""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from flashgen.errors import PlanError

HEADER = "flashgen/ptx/wgmma_shapes.cuh"  # the name under which kernels include the text
MAJORS = ("K_MAJOR", "MN_MAJOR")          # index: the immediate of the instruction
PTX_TYPES = {"bf16": "bf16", "fp16": "f16", "e4m3": "e4m3", "e5m2": "e5m2"}  # element tag -> PTX
STATEMENT_STEPS = 4                       # products in one statement; gemm_async.cuh says the same
_WIDTH = 108


@dataclass(frozen=True, order=True)
class WgmmaShape:
    """d[64, n] += a * b. `element` is a tag of prelude.cuh, `a_source` "shared" or "registers"; majors from MAJORS.

    `steps` products with the same d come in one statement: the list of its registers is most of what the compiler has
    to carry through its passes.
    """
    element: str
    n: int
    a_source: str = "shared"
    a_major: str = "K_MAJOR"   # fragments in registers have no other
    b_major: str = "K_MAJOR"
    steps: int = 1

    def __post_init__(self) -> None:
        """PlanError if the instruction has no such form."""
        if self.element not in PTX_TYPES:
            raise PlanError(f"wgmma of {self.element!r}", where="WgmmaShape.element", allowed=", ".join(PTX_TYPES))
        if self.n % 8 or not 8 <= self.n <= 256:
            raise PlanError(f"wgmma with n = {self.n}", where="WgmmaShape.n", allowed="multiples of 8 in 8..256",
                            nearest=str(min(max(8, -(-self.n // 8) * 8), 256)))
        if self.a_source not in ("shared", "registers"):
            raise PlanError(f"a from {self.a_source!r}", where="WgmmaShape.a_source", allowed="shared, registers")
        if not {self.a_major, self.b_major} <= set(MAJORS):
            raise PlanError(f"majors {self.a_major}, {self.b_major}", where="WgmmaShape", allowed=", ".join(MAJORS))
        if self.element_bytes == 1 and (self.a_major, self.b_major) != ("K_MAJOR", "K_MAJOR"):
            raise PlanError(f"{self.element} operands that are not K-major", where="WgmmaShape", allowed="K_MAJOR")
        if self.steps < 1:
            raise PlanError(f"{self.steps} steps", where="WgmmaShape.steps", allowed="1 and more")
        if self.a_source == "registers" and self.a_major != "K_MAJOR":
            raise PlanError("fragments of a that are not K-major", where="WgmmaShape.a_major", allowed="K_MAJOR")

    @property
    def element_bytes(self) -> int:
        return 1 if self.element in ("e4m3", "e5m2") else 2

    @property
    def k(self) -> int:
        """Elements of one row that a product takes: 32 bytes."""
        return 32 // self.element_bytes


def product_shapes(element: str, n: int, a_source: str, a_major: str, b_major: str, k: int) -> tuple[WgmmaShape, ...]:
    """The statements of a product over k: as gemm_async.cuh cuts it."""
    full, rest = divmod(-(-k // WgmmaShape(element, n).k), STATEMENT_STEPS)
    return tuple(WgmmaShape(element, n, a_source, a_major, b_major, steps)
                 for steps in ([STATEMENT_STEPS] if full else []) + ([rest] if rest else []))


def render_wgmma(shapes: Iterable[WgmmaShape]) -> str:
    """Text of the header HEADER with one wrapper for each of `shapes`, in their order. Same shapes, same bytes."""
    parts = ["// wgmma.mma_async (PTX ISA 9.7.15.5.2) for the shapes of this kernel. The contract is in wgmma.cuh.",
             "#pragma once", '#include "flashgen/ptx/wgmma.cuh"']
    for shape in sorted(set(shapes)):
        parts += ["", _wrapper(shape)]
    return "\n".join(parts) + "\n"


def _wrapper(shape: WgmmaShape) -> str:
    """One function. Operands: the accumulators, then a, b of every step, scale_d; the majors are literals."""
    registers, steps = shape.n // 2, shape.steps
    shared = shape.a_source == "shared"
    if shared:
        name, majors, a_type = "wgmma_ss", f"{shape.a_major}, {shape.b_major}", f"const uint64_t (&a)[{steps}]"
        a_operands = [f'"l"(a[{k}])' for k in range(steps)]
        a = [f"%{registers + k}" for k in range(steps)]
    else:
        name, majors, a_type = "wgmma_rs", shape.b_major, f"const uint32_t (&a)[{steps}][4]"
        a_operands = [f'"r"(a[{k}][{i}])' for k in range(steps) for i in range(4)]
        a = ["{" + ", ".join(f"%{registers + 4 * k + i}" for i in range(4)) + "}" for k in range(steps)]
    b = registers + len(a_operands)
    immediates = ["1", "1"]  # a and b are not negated
    if shape.element_bytes == 2:
        immediates += [str(MAJORS.index(major)) for major in ([shape.a_major] if shared else []) + [shape.b_major]]
    ptx = PTX_TYPES[shape.element]
    outputs = [f'"+f"(d[{i}])' for i in range(registers)]
    inputs = [*a_operands, *(f'"l"(b[{k}])' for k in range(steps)), '"r"(scale_d)']
    products = []
    for k in range(steps):
        add = "1" if k else "add"
        products += [f'      "wgmma.mma_async.sync.aligned.m64n{shape.n}k{shape.k}.f32.{ptx}.{ptx} "',
                     *_quoted([f"%{i}" for i in range(registers)]),
                     rf'      "{a[k]}, %{b + k}, {add}, {", ".join(immediates)};\n"']
    return "\n".join([
        "template <>",
        f"FG_DEVICE void {name}<{shape.n}, {majors}>({shape.element}, float (&d)[{registers}], {a_type},",
        f"    const uint64_t (&b)[{steps}], int scale_d) {{",
        "  asm volatile(",
        r'      "{\n"',
        r'      ".reg .pred add;\n"',
        rf'      "setp.ne.b32 add, %{b + steps}, 0;\n"',
        *products,
        '      "}"',
        *_lines(outputs, "      : "),
        *_lines(inputs, "      : "),
        "  );",
        "}",
    ]).replace("\n  );", ");")


def _lines(items: list[str], opening: str) -> list[str]:
    """`items` with commas between, broken at _WIDTH; `opening` before the first, spaces before the others."""
    lines = [opening + items[0]]
    for item in items[1:]:
        lines[-1] += ","
        if len(lines[-1]) + len(item) > _WIDTH:
            lines.append(" " * len(opening) + item)
        else:
            lines[-1] += f" {item}"
    return lines


def _quoted(items: list[str]) -> list[str]:
    """The accumulator list `{...}, ` as string literals, one a line."""
    lines = _lines(items, "{")
    lines[-1] += "},"
    return [f'      "{line.strip()} "' for line in lines]
