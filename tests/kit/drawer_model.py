"""Numpy models of what PTX instructions do, written from the text of the PTX ISA: formats, fragments, layouts."""
from __future__ import annotations

import numpy as np
from drawer_case import TensorMapSpec

CANONICAL_NAN_16 = 0x7fff  # what cvt makes of any NaN


# Element formats

def bf16_to_float(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def fp16_to_float(bits: np.ndarray) -> np.ndarray:
    return bits.astype(np.uint16).view(np.float16).astype(np.float32)


def e5m2_to_float(bits: np.ndarray) -> np.ndarray:
    """The upper byte of an fp16."""
    return fp16_to_float(bits.astype(np.uint16) << 8)


def e4m3_to_float(bits: np.ndarray) -> np.ndarray:
    """Sign, 4 bits of exponent with bias 7, 3 of mantissa; no infinities, S.1111.111 is NaN."""
    exponent, mantissa = bits.astype(np.int32) >> 3 & 15, bits.astype(np.float64) % 8
    size = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10))
    size[(bits & 127) == 127] = np.nan
    return np.where(bits & 128, -size, size).astype(np.float32)


def float_to_bf16(x: np.ndarray) -> np.ndarray:
    """cvt.rn.bf16.f32: to nearest, ties to even."""
    bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(x), CANONICAL_NAN_16, rounded).astype(np.uint16)


def float_to_fp16(x: np.ndarray) -> np.ndarray:
    """cvt.rn.f16.f32: to nearest, ties to even, beyond 65504 and half a step to infinity."""
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = x.astype(np.float16).view(np.uint16)
    return np.where(np.isnan(x), CANONICAL_NAN_16, rounded).astype(np.uint16)


def rounded_once(element: str, x: np.ndarray) -> np.ndarray:
    """fp64 values of a normal size straight to the element, to nearest, ties to even: not by way of fp32."""
    if element == "fp16":
        with np.errstate(over="ignore"):
            return np.where(np.isnan(x), CANONICAL_NAN_16, x.astype(np.float16).view(np.uint16)).astype(np.uint16)
    bits = x.view(np.uint64)
    short = (bits + np.uint64(2**44 - 1) + (bits >> 45 & 1)) >> 45 << 45  # 7 bits of mantissa, in fp64 still
    return float_to_bf16(np.where(np.isfinite(x), short.view(np.float64), x).astype(np.float32))


TO_FLOAT = {"bf16": bf16_to_float, "fp16": fp16_to_float, "e4m3": e4m3_to_float, "e5m2": e5m2_to_float}


def all_bits(element: str) -> np.ndarray:
    """Every bit pattern of an element type."""
    return np.arange(256, dtype=np.uint8) if element in ("e4m3", "e5m2") else np.arange(65536).astype(np.uint16)


def bits_of(element: str, values: np.ndarray) -> np.ndarray:
    """Bit patterns of values that the type represents exactly."""
    patterns = all_bits(element)
    table = TO_FLOAT[element](patterns)
    order = np.argsort(table, kind="stable")[: np.isfinite(table).sum() + np.isinf(table).sum()]
    found = order[np.searchsorted(table[order], values)]
    assert np.array_equal(table[found], values.astype(np.float32))
    return patterns[found]


def flush(x: np.ndarray) -> np.ndarray:
    """.ftz: subnormal floats become zeros of the same sign."""
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x)


# Fragments: arrays [lanes or threads][registers] of (row, column)

def halves(words: np.ndarray) -> np.ndarray:
    """[...] 32-bit registers -> [..., 2] 16-bit halves, the low one first."""
    return np.ascontiguousarray(words).view(np.uint16).reshape(*words.shape, 2)


def matrix_fragment() -> tuple[np.ndarray, np.ndarray]:
    """ldmatrix, stmatrix: (row, column) of lane l's two elements in an 8x8 matrix, each [32][2]."""
    lane, half = np.meshgrid(np.arange(32), np.arange(2), indexing="ij")
    return lane // 4, lane % 4 * 2 + half


def accumulator(n: int, threads: int) -> tuple[np.ndarray, np.ndarray]:
    """(row, column) of register i of thread t in d[16 * warps][n], each [threads][n / 2]: mma.sync and wgmma alike."""
    t, i = np.meshgrid(np.arange(threads), np.arange(n // 2), indexing="ij")
    return t // 32 * 16 + t % 32 // 4 + i // 2 % 2 * 8, i // 4 * 8 + t % 4 * 2 + i % 2


def a_fragment(element_bytes: int, threads: int) -> tuple[np.ndarray, np.ndarray]:
    """(row, k) of the elements of A in four registers, each [threads][4][elements of 4 bytes]."""
    per_word = 4 // element_bytes
    t, r, e = np.meshgrid(np.arange(threads), np.arange(4), np.arange(per_word), indexing="ij")
    return t // 32 * 16 + t % 32 // 4 + r % 2 * 8, r // 2 * 4 * per_word + t % 4 * per_word + e


def b_fragment() -> tuple[np.ndarray, np.ndarray]:
    """mma.m16n8k16: (k, column) of the 16-bit elements of B in two registers, each [32][2][2]."""
    lane, r, e = np.meshgrid(np.arange(32), np.arange(2), np.arange(2), indexing="ij")
    return r * 8 + lane % 4 * 2 + e, lane // 4


# Shared-memory layouts

def swizzle(address: np.ndarray, width: int) -> np.ndarray:
    """The byte address that a swizzle of `width` bytes (0: none) makes of one: chunk bits XOR row bits."""
    chunks = max(width // 16, 1)
    return address ^ (address >> 7 & chunks - 1) << 4


def box_addresses(spec: TensorMapSpec, coords: np.ndarray) -> np.ndarray:
    """Byte offset in the buffer of each element of the box at `coords`, the contiguous one first; -1 outside."""
    index = np.indices(spec.box[::-1])[::-1].reshape(len(spec.box), -1)
    position = index + np.asarray(coords)[:, None]
    strides = np.array([spec.element_bytes, *spec.strides])
    inside = ((position >= 0) & (position < np.array(spec.dims)[:, None])).all(0)
    return np.where(inside, (position * strides[:, None]).sum(0), -1)


def _box_bytes(spec: TensorMapSpec, coords: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each byte of the box: its offset in the buffer (-1 outside) and in shared memory."""
    first = box_addresses(spec, coords)
    offsets = np.where(first[:, None] < 0, -1, first[:, None] + np.arange(spec.element_bytes)).ravel()
    return offsets, swizzle(np.arange(spec.box_bytes), spec.swizzle)


def tensor_load(spec: TensorMapSpec, buffer: np.ndarray, coords: np.ndarray) -> np.ndarray:
    """Shared-memory bytes after cp.async.bulk.tensor: zeros where the box lies outside."""
    offsets, places = _box_bytes(spec, coords)
    source = np.append(buffer.view(np.uint8).ravel(), np.uint8(0))  # -1 reads the zero
    image = np.empty(spec.box_bytes, np.uint8)
    image[places] = source[offsets]
    return image


def tensor_store(spec: TensorMapSpec, buffer: np.ndarray, image: np.ndarray, coords: np.ndarray) -> None:
    """Writes the box of shared-memory bytes `image` into `buffer`, without what lies outside."""
    offsets, places = _box_bytes(spec, coords)
    target = buffer.view(np.uint8).reshape(-1)
    target[offsets[offsets >= 0]] = image[places][offsets >= 0]


def tensor_add(spec: TensorMapSpec, buffer: np.ndarray, image: np.ndarray, coords: np.ndarray) -> None:
    """cp.reduce.async.bulk.tensor .add of fp32."""
    _, places = _box_bytes(spec, coords)
    values = np.ascontiguousarray(image[places]).view(np.float32)
    offsets = box_addresses(spec, coords)
    np.add.at(buffer.reshape(-1), offsets[offsets >= 0] // 4, values[offsets >= 0])


# wgmma operands

def operand_addresses(rows: int, element_bytes: int, major: str, *, start: int, mode: int, leading: int,
                      stride: int) -> np.ndarray:
    """Byte address of each element of a wgmma operand [rows][K] in shared memory, from its descriptor's fields.

    `rows` counts M or N. mode: 0 none, 1 128 B, 2 64 B, 3 32 B.
    """
    width = {0: 1, 1: 8, 2: 4, 3: 2}[mode]  # chunks of 16 bytes in a row of the swizzle
    row, k = np.meshgrid(np.arange(rows), np.arange(32 // element_bytes), indexing="ij")
    if major == "K_MAJOR":
        byte = k * element_bytes
        chunk = byte // 16 * (leading if width == 1 else 16)
        address = start + row // 8 * stride + row % 8 * 16 * width + chunk + byte % 16
    elif width == 1:
        address = start + row // 8 * stride + k // 8 * leading + k % 8 * 16 + row % 8 * 2
    else:
        group = row // 8
        address = start + group // width * leading + group % width * 16 + k // 8 * stride + k % 8 * 16 * width
        address += row % 8 * 2
    return swizzle(address, 16 * width if width > 1 else 0)


def gather(image: np.ndarray, addresses: np.ndarray, element: str) -> np.ndarray:
    """The elements at byte `addresses` of shared memory, as floats."""
    size = 1 if element in ("e4m3", "e5m2") else 2
    return TO_FLOAT[element](image.view(f"u{size}")[addresses // size])
