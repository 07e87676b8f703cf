"""Masks that others keep as lists or as bits, as the bool tensors that mask expressions read. On the device, without a
wait for it, so that a CUDA graph may hold them.
"""
from __future__ import annotations

import torch
from torch import Tensor

from flashgen.errors import UnsupportedError
from flashgen.runtime.ops.arguments import check_tensor, pair, whole

MAX_BLOCKS = 2**30  # rows or columns of a map: sequences have fewer keys
_SHAPE_ALLOWED = "(rows, columns) of the map, whole numbers from 0"
_WORDS = {torch.uint8: 8, torch.int8: 8, torch.int16: 16, torch.int32: 32, torch.int64: 64}


def block_map(kv_num_blocks: Tensor, kv_indices: Tensor, *, shape: tuple[int, int]) -> Tensor:
    """Bool [..., rows, columns] from lists of key blocks per row of query blocks, as torch's BlockMask keeps them.

    Args:
        kv_num_blocks: [..., listed rows] int32 or int64, how many entries of each row's list count: 0 to width.
        kv_indices: [..., listed rows, width], numbers of key blocks in any order, 0 to columns - 1. Those past the
            count mean nothing.
        shape: (rows, columns) of the result: blocks of queries and of keys. Rows that are not listed see nothing.

    A spec that reads it as `blocks[q_pos // 128, kv_pos // 128]` shares one map among all sequences and heads. For maps
    of their own, [batch, heads, rows, columns], flatten(0, 2) it and read
    `blocks[(batch * heads + head_q) * rows + q_pos // 128, kv_pos // 128]` with int params `heads` and `rows`.

    Raises UnsupportedError for shapes and dtypes that do not fit together, and on the CPU for counts and numbers
    outside their ranges. On a GPU a look at them would wait for it: there a count above the width counts as the width,
    and a number outside the map marks nothing.
    """
    for name, tensor in (("kv_num_blocks", kv_num_blocks), ("kv_indices", kv_indices)):
        check_tensor(name, tensor, "a tensor, int32 or int64")
        if tensor.dtype not in (torch.int32, torch.int64):
            raise UnsupportedError(f"{name} is {tensor.dtype}", where=name, allowed="int32 or int64")
    if kv_indices.dim() < 2 or kv_num_blocks.shape != kv_indices.shape[:-1]:
        raise UnsupportedError(f"kv_num_blocks is {tuple(kv_num_blocks.shape)}, kv_indices {tuple(kv_indices.shape)}",
                               where="kv_indices", allowed="[..., rows] and [..., rows, width]")
    if kv_num_blocks.device != kv_indices.device:
        raise UnsupportedError(f"kv_num_blocks is on {kv_num_blocks.device}, kv_indices on {kv_indices.device}",
                               where="kv_num_blocks", allowed="one device")
    *lead, listed, width = kv_indices.shape
    rows, columns = pair("shape", shape, _SHAPE_ALLOWED)
    rows = whole("shape", rows, listed, MAX_BLOCKS, f"{_SHAPE_ALLOWED}, with the {listed} listed rows or more")
    columns = whole("shape", columns, 0, MAX_BLOCKS, _SHAPE_ALLOWED)
    counted = torch.arange(width, device=kv_indices.device) < kv_num_blocks[..., None]
    inside = counted & (kv_indices >= 0) & (kv_indices < columns)
    if kv_indices.device.type == "cpu" and not torch.compiler.is_compiling() and type(kv_indices) is Tensor:
        _check_values(kv_num_blocks, kv_indices, counted & ~inside, columns)
    place = torch.where(inside, kv_indices, columns).long()  # what does not count goes past the end
    found = torch.zeros(*lead, rows, columns + 1, dtype=torch.bool, device=kv_indices.device)
    found[..., :listed, :].scatter_(-1, place, True)
    return found[..., :columns].contiguous()


def _check_values(counts: Tensor, indices: Tensor, wrong: Tensor, columns: int) -> None:
    """UnsupportedError for a count outside the lists, and where an entry is `wrong`."""
    width = indices.shape[-1]
    outside = counts[(counts < 0) | (counts > width)]
    if outside.numel():
        raise UnsupportedError(f"kv_num_blocks holds {int(outside[0])}", where="kv_num_blocks",
                               allowed=f"0 to {width}, the width of the lists")
    numbers = indices[wrong]
    if numbers.numel():
        raise UnsupportedError(f"kv_indices holds {int(numbers[0])} inside its count", where="kv_indices",
                               allowed=f"0 to {columns - 1}: key blocks of a map with {columns} columns",
                               nearest=f"shape=(..., {int(numbers.max()) + 1})" if int(numbers.min()) >= 0 else "")


def unpack_bits(packed: Tensor, columns: int) -> Tensor:
    """Bool [..., columns] from whole numbers [..., words]: bit i of word w, from the lowest, is column w * bits + i.

    Tree masks of drafted tokens are often kept so; a mask expression reads them as bools. UnsupportedError where words
    hold fewer bits than that, or are no whole numbers.
    """
    check_tensor("packed", packed)
    bits = _WORDS.get(packed.dtype)
    if bits is None or packed.dim() < 1:
        raise UnsupportedError(f"packed is {packed.dtype} {tuple(packed.shape)}", where="packed",
                               allowed=", ".join(map(str, _WORDS)))
    columns = whole("columns", columns, 0, packed.shape[-1] * bits,
                    f"0 to {packed.shape[-1] * bits}, the bits of {packed.shape[-1]} words")
    shifts = torch.arange(bits, device=packed.device, dtype=packed.dtype)
    return (packed[..., None] >> shifts & 1).bool().flatten(-2)[..., :columns].contiguous()
