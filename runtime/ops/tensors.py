"""What the checks of all operations share: facts of tensors, and what every `out` and softmax_scale must be."""
from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor

from flashgen.codegen.dtype import DTYPES
from flashgen.codegen.expr.tree import FLOAT_MAX, FLOAT_NORMAL
from flashgen.codegen.families.shared.launch import LOG2_E
from flashgen.errors import UnsupportedError
from flashgen.runtime.ops.arguments import check_tensor, number
from flashgen.runtime.ops.overlap import extent, overlap, overlaps_itself

ALIGNMENT_BYTES = 16  # one cp.async
MAX_LENGTH = 2**30    # sums of two positions and a window stay within 32 bits
# The scale, and what kernels take of it, scale * log2(e), are normal float32: those below are 0 where a GPU flushes.
SCALE_MIN, SCALE_MAX = FLOAT_NORMAL, FLOAT_MAX / LOG2_E
SCALE_ALLOWED = f"a number, finite, above 0 and normal in float32: {SCALE_MIN!r} to {SCALE_MAX!r}"
DTYPE_NAMES = {getattr(torch, d.torch_name): d.name for d in DTYPES.values()}


def check_device(name: str, t: Tensor) -> None:
    if not (t.is_cuda or t.is_cpu):
        raise UnsupportedError(f"{name} is on {t.device}", where=name,
                               allowed="tensors on a CUDA device, or on the CPU, where kernels run emulated")


def scale_number(value: object) -> float:
    found = number("softmax_scale", value, SCALE_ALLOWED)
    try:
        return cast(float, found) if type(found) is torch.SymFloat else float(found)
    except OverflowError:  # a whole number past the largest double
        return math.inf if found > 0 else -math.inf


def check_scale(scale: float) -> None:
    """UnsupportedError for a scale that float32 cannot hold."""
    if not SCALE_MIN <= scale <= SCALE_MAX:
        raise UnsupportedError(f"softmax_scale={scale}", where="softmax_scale", allowed=SCALE_ALLOWED,
                               nearest="negate q for a negative scale" if scale < 0 else
                               "" if math.isnan(scale) else repr(min(max(scale, SCALE_MIN), SCALE_MAX)))


def strides(t: Tensor) -> list[int]:
    """Element strides of all but the last dimension; a dimension of size 1 has none that means anything."""
    return [stride if size != 1 else 0 for size, stride in zip(t.shape[:-1], t.stride()[:-1], strict=True)]


def is_aligned(t: Tensor) -> bool:
    """Whether 16-byte copies can read every row of it."""
    if t.shape[-1] != 1 and t.stride(-1) != 1:
        return False
    step = ALIGNMENT_BYTES // t.element_size()
    return t.numel() == 0 or (t.data_ptr() % ALIGNMENT_BYTES == 0 and all(s % step == 0 for s in strides(t)))


def check_dtype(name: str, t: Tensor, q: Tensor) -> None:
    """UnsupportedError unless kernels take the dtype of `t`, and it is that of q."""
    if t.dtype in DTYPE_NAMES and t.dtype == q.dtype:
        return
    beside = "" if t.dtype == q.dtype else f", q has {q.dtype}"
    raise UnsupportedError(f"{name} has dtype {t.dtype}{beside}", where=name,
                           allowed="one dtype for all: " + ", ".join(map(str, DTYPE_NAMES)))


def check_out(out: Tensor, shape: tuple[int, ...], q: Tensor) -> None:
    check_tensor("out", out, "a tensor, or None")
    if tuple(out.shape) != shape or out.dtype != q.dtype or out.device != q.device:
        raise UnsupportedError(f"out is {out.dtype} {tuple(out.shape)} on {out.device}", where="out",
                               allowed=f"{q.dtype} {shape} on {q.device}")
    if not is_aligned(out):
        raise UnsupportedError(f"out has strides {out.stride()} and starts at byte {out.data_ptr() % ALIGNMENT_BYTES} "
                               f"of 16", where="out", allowed="contiguous last dimension, rows 16-byte aligned",
                               next="leave out=None and copy the result")
    if overlaps_itself(out.shape, out.stride()):
        raise UnsupportedError(f"out {tuple(out.shape)} has strides {out.stride()}: its elements share memory",
                               where="out", allowed="a place of its own for each element",
                               next="leave out=None and copy the result")


def extents(*tensors: Tensor) -> tuple[int, ...]:
    """Bytes from the first element of each to the end of its last."""
    return tuple(extent(t.shape, t.stride()) * t.element_size() for t in tensors)


def check_shared(out: Tensor, **inputs: Tensor) -> None:
    """UnsupportedError where `out` shares an element with an input, which blocks still read while others write.

    Callers compare extents first: this is for the rare call whose ranges of addresses meet.
    """
    for name, t in inputs.items():
        distance = (out.data_ptr() - t.data_ptr()) // t.element_size()
        if overlap(t.shape, t.stride(), out.shape, out.stride(), distance):
            raise UnsupportedError(f"out shares memory with {name}", where="out",
                                   allowed="memory that no input lies in", next="leave out=None and copy the result")
