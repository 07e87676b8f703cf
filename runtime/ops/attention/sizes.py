"""What a call of attention, forward or backward, comes to in numbers: its sizes, and what it wants of kernels."""
from __future__ import annotations

from torch import Tensor

from flashgen.codegen.families.shared.launch import Sizes
from flashgen.runtime.launch.tensor_map import fits_maps
from flashgen.runtime.ops.attention.checks import check_head_dims, check_prefix_sums, check_window
from flashgen.runtime.ops.tensors import DTYPE_NAMES, check_scale, strides
from flashgen.runtime.select.selector import Wanted

Window = tuple[int, int]


def check_values(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None, cu_kv: Tensor | None, *, window: Window,
                 scale: float) -> None:
    """UnsupportedError for numbers that no kernel takes. The values of cu_seqlens_* are looked at on the CPU alone."""
    if cu_q is not None and cu_kv is not None and q.is_cpu:
        check_prefix_sums(cu_q, cu_kv, q.shape[0], k.shape[0])
    check_window(*window)
    check_scale(scale)
    check_head_dims(q.shape[-1], v.shape[-1])


def read_call(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None, causal: int, window: Window, scale: float, *,
              op: str) -> tuple[Sizes, Wanted]:
    """The sizes of a call, without strides, and what it wants of its kernels."""
    varlen = cu_q is not None
    batch, seqlen_q = (cu_q.shape[0] - 1, q.shape[0]) if cu_q is not None else (q.shape[0], q.shape[1])
    reach = max(seqlen_q, k.shape[-3])
    left, right = (-1 if side >= reach else side for side in window)
    windowed = left >= 0 or (right >= 0 and not causal)  # causal bounds the right side anyway
    sizes = Sizes(batch, seqlen_q, k.shape[-3], q.shape[-2], k.shape[-2], scale, causal == 2,
                  (left, 0 if causal else right))
    return sizes, Wanted(DTYPE_NAMES[q.dtype], q.shape[-1], v.shape[-1], bool(causal) and not windowed, windowed,
                         "varlen" if varlen else "dense", False, op=op)


def mappable(*tensors: Tensor | None) -> bool:
    """Whether tensor maps can describe all that are given."""
    return all(fits_maps(t.shape, t.stride(), t.element_size()) for t in tensors if t is not None)


def named_strides(**rows: Tensor) -> dict[str, int]:
    """Element strides of tensors [(batch,) row, head, column], by the names of parameters: q_batch_stride, ..."""
    return {f"{name}_{axis}_stride": stride for name, t in rows.items()
            for axis, stride in zip(("batch", "row", "head")[-t.dim() + 1:], strides(t), strict=True)}
