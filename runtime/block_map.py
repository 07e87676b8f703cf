"""Masks that others keep as lists or as bits, as the bool tensors that mask expressions read. On the device, without a
wait for it, so that a CUDA graph may hold them.
"""
from __future__ import annotations

import torch
from torch import Tensor

from flashgen.errors import UnsupportedError

_WORDS = {torch.uint8: 8, torch.int8: 8, torch.int16: 16, torch.int32: 32, torch.int64: 64}


def block_map(kv_num_blocks: Tensor, kv_indices: Tensor, *, shape: tuple[int, int] | None = None) -> Tensor:
    """Bool [..., rows, columns] from lists of key blocks per row of query blocks, as torch's BlockMask keeps them.

    Args:
        kv_num_blocks: [..., rows], how many entries of each row's list count.
        kv_indices: [..., rows, width], numbers of key blocks in any order. Those past the count mean nothing.
        shape: (rows, columns) of the result, for a spec whose tensor has fixed dims: rows that are not listed see
            nothing. By default rows, and as many columns as lists are wide.

    A spec that reads it as `blocks[q_pos // 128, kv_pos // 128]` shares one map among all sequences and heads. For maps
    of their own, [batch, heads, rows, columns], flatten(0, 2) it and read
    `blocks[(batch * heads + head_q) * rows + q_pos // 128, kv_pos // 128]` with int params `heads` and `rows`.

    Raises UnsupportedError for shapes and dtypes that do not fit together.
    """
    for name, tensor in (("kv_num_blocks", kv_num_blocks), ("kv_indices", kv_indices)):
        if tensor.dtype not in (torch.int32, torch.int64):
            raise UnsupportedError(f"{name} is {tensor.dtype}", where=name, allowed="int32 or int64")
    if kv_indices.dim() < 2 or kv_num_blocks.shape != kv_indices.shape[:-1]:
        raise UnsupportedError(f"kv_num_blocks is {tuple(kv_num_blocks.shape)}, kv_indices {tuple(kv_indices.shape)}",
                               where="kv_indices", allowed="[..., rows] and [..., rows, width]")
    *lead, rows, width = kv_indices.shape
    total, columns = shape or (rows, width)
    if total < rows:
        raise UnsupportedError(f"shape has {total} rows, and the lists {rows}", where="shape",
                               allowed=f"{rows} rows or more")
    counts = torch.arange(width, device=kv_indices.device) < kv_num_blocks[..., None]
    inside = counts & (kv_indices >= 0) & (kv_indices < columns)
    place = torch.where(inside, kv_indices, columns).long()  # what does not count goes past the end
    found = torch.zeros(*lead, total, columns + 1, dtype=torch.bool, device=kv_indices.device)
    found[..., :rows, :].scatter_(-1, place, True)
    return found[..., :columns].contiguous()


def unpack_bits(packed: Tensor, columns: int) -> Tensor:
    """Bool [..., columns] from whole numbers [..., words]: bit i of word w, from the lowest, is column w * bits + i.

    Tree masks of drafted tokens are often kept so; a mask expression reads them as bools. UnsupportedError where words
    hold fewer bits than that, or are no whole numbers.
    """
    bits = _WORDS.get(packed.dtype)
    if bits is None or packed.dim() < 1:
        raise UnsupportedError(f"packed is {packed.dtype} {tuple(packed.shape)}", where="packed",
                               allowed=", ".join(map(str, _WORDS)))
    if not 0 <= columns <= packed.shape[-1] * bits:
        raise UnsupportedError(f"{columns} columns of {packed.shape[-1]} words with {bits} bits", where="columns",
                               allowed=f"0 to {packed.shape[-1] * bits}")
    shifts = torch.arange(bits, device=packed.device, dtype=packed.dtype)
    return (packed[..., None] >> shifts & 1).bool().flatten(-2)[..., :columns].contiguous()
