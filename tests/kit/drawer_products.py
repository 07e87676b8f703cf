"""Conformance cases of mma.sync and wgmma.

With small integers every sum is exact, so the bits must agree; with normal numbers only within the accumulator.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import drawer_model as ptx
import numpy as np
from drawer_case import Arrays, Case

from flashgen.codegen.wgmma import WgmmaShape

MODES = {"none": 0, "128B": 1, "64B": 2, "32B": 3}  # the descriptor's field
CHUNKS = {0: 1, 1: 8, 2: 4, 3: 2}                   # 16-byte chunks in a row of the swizzle
# Relative to the products' size. fp32 sums round at 2^-23; with 8-bit inputs wgmma keeps fewer bits.
NORMAL_BOUND = {"bf16": 1e-5, "fp16": 1e-5, "e4m3": 1e-2, "e5m2": 1e-2}


def _integers(element: str) -> Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]:
    return lambda rng, shape: ptx.bits_of(element, rng.integers(-4, 5, shape).astype(np.float32))


def _normal(element: str) -> Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]:
    """Random patterns between 1/16 and 8 in size, both signs."""
    def draw(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        patterns = ptx.all_bits(element)
        with np.errstate(invalid="ignore"):
            size = np.abs(ptx.TO_FLOAT[element](patterns))
        return rng.choice(patterns[(size >= 1 / 16) & (size <= 8)], shape)
    return draw


# mma.sync

def _mma(element: str, kind: str, draw, bound: float) -> Case:
    def inputs(rng: np.random.Generator) -> Arrays:
        return {"a": draw(rng, (8, 32, 4, 2)), "b": draw(rng, (8, 32, 2, 2)),
                "d": rng.integers(-9, 9, (8, 32, 4)).astype(np.float32)}

    def model(inputs: Arrays) -> Arrays:
        a, b, d = np.empty((8, 16, 16)), np.empty((8, 16, 8)), np.empty((8, 16, 8))
        convert = ptx.TO_FLOAT[element]
        a[:, ptx.a_fragment(2, 32)[0], ptx.a_fragment(2, 32)[1]] = convert(inputs["a"])
        b[:, ptx.b_fragment()[0], ptx.b_fragment()[1]] = convert(inputs["b"])
        row, column = ptx.accumulator(8, 32)
        d[:, row, column] = inputs["d"]
        return {"d": (a @ b + d)[:, row, column].astype(np.float32)}

    return Case(f"mma_m16n8k16_{element}_{kind}", ("mma_sync",),
                {"a": "const uint32_t", "b": "const uint32_t", "d": "float"}, f"""
  for (int i = 0; i < 8; ++i) {{
    const int lane = 32 * i + threadIdx.x;
    uint32_t a[4];
    float d[4];
    for (int r = 0; r < 4; ++r) a[r] = p.a[4 * lane + r];
    for (int r = 0; r < 4; ++r) d[r] = p.d[4 * lane + r];
    mma_m16n8k16({element}{{}}, d, a, p.b[2 * lane], p.b[2 * lane + 1]);
    for (int r = 0; r < 4; ++r) p.d[4 * lane + r] = d[r];
  }}
""", inputs, model, hopper=False, absolute=bound * 100, relative=bound)


# wgmma

@dataclasses.dataclass(frozen=True)
class Operand:
    """Fields of a descriptor, and how far the second product's operand lies from the first's."""
    start: int
    mode: int
    leading: int
    stride: int
    advance: int

    def addresses(self, rows: int, element_bytes: int, major: str, step: int) -> np.ndarray:
        return ptx.operand_addresses(rows, element_bytes, major, start=self.start + step * self.advance,
                                     mode=self.mode, leading=self.leading, stride=self.stride)


def right_layout(rows: int, major: str, mode: int) -> Operand:
    """An operand of two k-steps in panels as a tensor copy leaves them, from byte 0.

    K-major panels are [rows][swizzle width]; MN-major ones [2 k-steps][swizzle width], side by side along M or N.
    """
    width = CHUNKS[mode]
    if major == "K_MAJOR":
        panel = rows * 16 * width
        return Operand(0, mode, panel if width == 1 else 0, 128 * width, 32 if width >= 4 else 2 // width * panel)
    panel = 32 * 16 * width
    if width == 1:
        return Operand(0, mode, 128, panel, 256)
    return Operand(0, mode, panel, 128 * width, 256 * width)


def variants(rows: int, major: str, mode: int) -> Iterator[Operand]:
    """The right strides, and wrong ones: they read other bytes, and the model says which."""
    right = right_layout(rows, major, mode)
    change = dataclasses.replace
    yield right
    yield change(right, start=2048)
    yield change(right, leading=right.stride, stride=max(right.leading, 16))
    yield change(right, stride=2 * right.stride)
    yield change(right, stride=right.stride // 2)
    yield change(right, leading=right.leading + 1024)
    yield change(right, leading=4080)
    if CHUNKS[mode] > 1:
        yield change(right, start=64 * CHUNKS[mode])  # in the middle of the swizzle's 8 rows; base offset stays 0


def shifted(operand: Operand, by: int) -> Operand:
    return dataclasses.replace(operand, start=operand.start + by)


def _runs(shape: WgmmaShape, modes: tuple[int, ...]) -> list[tuple[Operand, Operand]]:
    """(a, b) pairs: each variant of one beside the right layout of the other, which lies behind it."""
    found = []
    for mode in modes:
        a_right, b_right = (right_layout(64, shape.a_major, mode), right_layout(shape.n, shape.b_major, mode))
        if shape.a_source == "shared":
            found += [(a, shifted(b_right, 48 << 10)) for a in variants(64, shape.a_major, mode)]
        found += [(a_right, shifted(b, 48 << 10)) for b in variants(shape.n, shape.b_major, mode)]
    if len(modes) > 1:  # operands of different swizzles
        found.append((right_layout(64, shape.a_major, modes[-1]),
                      shifted(right_layout(shape.n, shape.b_major, modes[0]), 48 << 10)))
    return found


def _last_byte(shape: WgmmaShape, runs: list[tuple[Operand, Operand]]) -> int:
    size = shape.element_bytes
    return 16 + max(int(op.addresses(rows, size, major, step).max()) for pair in runs for step in (0, 1)
                    for op, rows, major in zip(pair, (64, shape.n), (shape.a_major, shape.b_major), strict=True))


def _wgmma_body(shape: WgmmaShape, image: int, runs: int) -> str:
    registers = shape.n // 2
    if shape.a_source == "shared":
        tie, call = "d", f"wgmma_ss<{shape.n}, {shape.a_major}, {shape.b_major}>({shape.element}{{}}, d, "
        first, second, load = "a", "wgmma_descriptor_advance(a, f[4])", ""
    else:
        tie, call = "d, a0, a1", f"wgmma_rs<{shape.n}, {shape.b_major}>({shape.element}{{}}, d, "
        first, second = "a0", "a1"
        load = """
    uint32_t a0[4], a1[4];
    for (int r = 0; r < 4; ++r) a0[r] = p.a[(run * 2 * 128 + threadIdx.x) * 4 + r];
    for (int r = 0; r < 4; ++r) a1[r] = p.a[((run * 2 + 1) * 128 + threadIdx.x) * 4 + r];"""
    descriptor = "const uint64_t {} = wgmma_descriptor(smem + {f}[0], (Swizzle){f}[1], {f}[2], {f}[3]);"
    a = descriptor.format("a", f="f") if shape.a_source == "shared" else ""
    return f"""
  unsigned char* smem = dyn_smem();
  for (int i = threadIdx.x; i < {image // 4}; i += 128) ((uint32_t*)smem)[i] = p.image[i];
  fence_proxy_async_shared();
  sync_block();
  for (int run = 0; run < {runs}; ++run) {{
    const int* f = p.fields + 10 * run;
    const int* g = f + 5;
    {a}
    {descriptor.format("b", f="g")}{load}
    float d[{registers}];
#pragma unroll
    for (int i = 0; i < {registers}; ++i) d[i] = 12345.0f;  // the first product must not add it
    wgmma_fence({tie});
    {call}{first}, b, 0);
    {call}{second}, wgmma_descriptor_advance(b, g[4]), 1);
    wgmma_commit();
    wgmma_wait<0>({tie});
#pragma unroll
    for (int i = 0; i < {registers}; ++i) p.d[(run * 128 + threadIdx.x) * {registers} + i] = d[i];
  }}
"""


def wgmma_case(shape: WgmmaShape, modes: tuple[int, ...], kind: str, *, only_right: bool = False) -> Case:
    """Two products a run, the second added to the first, over an image of shared memory filled at random."""
    runs, size, element = _runs(shape, modes), shape.element_bytes, shape.element
    if only_right:
        runs = [(right_layout(64, shape.a_major, mode), shifted(right_layout(shape.n, shape.b_major, mode), 48 << 10))
                for mode in modes]
    image = -(-_last_byte(shape, runs) // 1024) * 1024
    draw = {"integers": _integers, "normal": _normal}[kind](element)
    bound = 0.0 if kind == "integers" else NORMAL_BOUND[element]
    shared = shape.a_source == "shared"

    def inputs(rng: np.random.Generator) -> Arrays:
        arrays = {"image": draw(rng, (image // size,)),
                  "fields": np.array([dataclasses.astuple(a) + dataclasses.astuple(b) for a, b in runs], np.int32),
                  "d": np.zeros((len(runs), 128, shape.n // 2), np.float32)}
        return arrays if shared else {**arrays, "a": draw(rng, (len(runs), 2, 128, 4, 4 // size))}

    def model(inputs: Arrays) -> Arrays:
        row, column = ptx.accumulator(shape.n, 128)
        found = np.zeros_like(inputs["d"])
        for index, (a_operand, b_operand) in enumerate(runs):
            total = np.zeros((64, shape.n))
            for step in (0, 1):
                b = ptx.gather(inputs["image"], b_operand.addresses(shape.n, size, shape.b_major, step), element)
                if shared:
                    a = ptx.gather(inputs["image"], a_operand.addresses(64, size, shape.a_major, step), element)
                else:
                    a = np.empty((64, shape.k), np.float32)
                    a[ptx.a_fragment(size, 128)] = ptx.TO_FLOAT[element](inputs["a"][index, step])
                total += a.astype(np.float64) @ b.T.astype(np.float64)
            found[index] = total[row, column]
        return {"d": found}

    names = {"image": "const uint32_t", "fields": "const int", "d": "float"}
    majors = "".join("k" if major == "K_MAJOR" else "m" for major in (shape.a_major, shape.b_major))
    name = f"wgmma_{'ss' if shared else 'rs'}_{element}_n{shape.n}_{majors}_{kind}"
    return Case(name if len(modes) > 1 else f"{name}_mode{modes[0]}", ("fence", "warp", "wgmma"),
                names if shared else {**names, "a": "const uint32_t"}, _wgmma_body(shape, image, len(runs)), inputs,
                model, shapes=(shape,), threads=128, smem=image, absolute=bound * 64, relative=bound)


SWIZZLED, ALL = (1, 2, 3), (0, 1, 2, 3)
WIDTHS = (8, 16, 24, 80, 96, 176, 192, 256)  # beside 64 and 128


def product_cases() -> list[Case]:
    cases = [_mma(element, kind, draw(element), bound) for element in ("bf16", "fp16")
             for kind, draw, bound in (("integers", _integers, 0.0), ("normal", _normal, 1e-5))]
    for a_major in ("K_MAJOR", "MN_MAJOR"):
        for b_major in ("K_MAJOR", "MN_MAJOR"):
            for mode in ALL:  # one mode a case, so that a failure says which
                cases.append(wgmma_case(WgmmaShape("bf16", 64, "shared", a_major, b_major), (mode,), "integers"))
            cases.append(wgmma_case(WgmmaShape("fp16", 128, "shared", a_major, b_major), SWIZZLED, "normal"))
    for element in ("e4m3", "e5m2"):
        for mode in ALL:
            cases.append(wgmma_case(WgmmaShape(element, 64), (mode,), "integers"))
        cases.append(wgmma_case(WgmmaShape(element, 96), SWIZZLED, "normal", only_right=True))
        cases.append(wgmma_case(WgmmaShape(element, 64, "registers"), ALL, "integers"))
    for element in ("bf16", "fp16"):
        for b_major in ("K_MAJOR", "MN_MAJOR"):
            cases.append(wgmma_case(WgmmaShape(element, 64, "registers", b_major=b_major), SWIZZLED, "integers"))
    for n in WIDTHS:
        cases.append(wgmma_case(WgmmaShape("bf16", n), SWIZZLED, "integers", only_right=True))
        cases.append(wgmma_case(WgmmaShape("bf16", n, "registers", b_major="MN_MAJOR"), SWIZZLED, "integers",
                                only_right=True))
    return cases
