"""Lists of blocks and packed bits as bool tensors, alone and under a kernel."""
from __future__ import annotations

import pytest
import torch
from variant_kit import FAMILIES, small, solve

import flashgen
from flashgen.errors import UnsupportedError
from flashgen.runtime.ops.attention.problem import Problem


def test_lists() -> None:
    counts = torch.tensor([[2, 0], [1, 3]], dtype=torch.int32)
    lists = torch.tensor([[[2, 0, 1], [0, 1, 2]], [[1, 7, -1], [2, 1, 0]]], dtype=torch.int32)
    expected = torch.tensor([[[1, 0, 1], [0, 0, 0]], [[0, 1, 0], [1, 1, 1]]]).bool()
    assert torch.equal(flashgen.block_map(counts, lists, shape=(2, 3)), expected)
    wide = flashgen.block_map(counts, lists.long(), shape=(4, 5))
    assert wide.shape == (2, 4, 5) and torch.equal(wide[:, :2, :3], expected) and wide.sum() == expected.sum()
    assert wide.is_contiguous()


def test_compact_lists() -> None:
    """B130: numbers that do not fit a map are refused where the host can see them; none is dropped."""
    counts, lists = torch.tensor([1, 1, 1]), torch.tensor([[0], [1], [2]])
    assert torch.equal(flashgen.block_map(counts, lists, shape=(3, 3)), torch.eye(3).bool())
    with pytest.raises(TypeError):  # a compact list does not say how wide its map is
        flashgen.block_map(counts, lists)  # type: ignore[call-arg]
    for shape, changed, words in (((3, 2), lists, "holds 2"), ((3, 3), lists - 1, "holds -1")):
        with pytest.raises(UnsupportedError) as caught:
            flashgen.block_map(counts, changed, shape=shape)
        assert caught.value.where == "kv_indices" and words in caught.value.what
    for wrong in (-1, 2):
        with pytest.raises(UnsupportedError) as caught:
            flashgen.block_map(torch.tensor([1, wrong, 1]), lists, shape=(3, 3))
        assert caught.value.where == "kv_num_blocks" and f"holds {wrong}" in caught.value.what


def test_lists_of_a_block_mask() -> None:
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    mask = flex.create_block_mask(lambda b, h, q, kv: (kv <= q) & (q - kv < 300), None, None, 1024, 1024, device="cpu")
    seen = flashgen.block_map(mask.kv_num_blocks, mask.kv_indices, shape=(8, 8))
    if mask.full_kv_num_blocks is not None:
        seen |= flashgen.block_map(mask.full_kv_num_blocks, mask.full_kv_indices, shape=(8, 8))
    assert torch.equal(seen, mask.to_dense().bool())


@pytest.mark.parametrize(("counts", "lists", "shape"), [
    (torch.zeros(2), torch.zeros(2, 3, dtype=torch.int32), (2, 3)),
    (torch.zeros(3, dtype=torch.int32), torch.zeros(2, 3, dtype=torch.int32), (2, 3)),
    (torch.zeros(2, dtype=torch.int32), torch.zeros(2, 3, dtype=torch.int32), (1, 3)),
    (torch.zeros((), dtype=torch.int32), torch.zeros(2, dtype=torch.int32), (2, 3))])
def test_lists_that_do_not_fit(counts: torch.Tensor, lists: torch.Tensor, shape: tuple[int, int]) -> None:
    with pytest.raises(UnsupportedError):
        flashgen.block_map(counts, lists, shape=shape)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_bits(dtype: torch.dtype) -> None:
    bits = torch.iinfo(dtype).bits
    expected = torch.rand(5, 2 * bits + 3, generator=torch.Generator().manual_seed(0)) < 0.5
    padded = torch.nn.functional.pad(expected, (0, bits - 3)).unflatten(-1, (3, bits)).tolist()
    words = [[sum(1 << i for i, bit in enumerate(word) if bit) for word in row] for row in padded]
    signed = [[w - (1 << bits) if dtype.is_signed and w >> (bits - 1) else w for w in row] for row in words]
    packed = torch.tensor(signed, dtype=dtype)
    assert torch.equal(flashgen.unpack_bits(packed, 2 * bits + 3), expected)
    for wrong, columns in ((packed, 3 * bits + 1), (packed.float(), 1)):
        with pytest.raises(UnsupportedError):
            flashgen.unpack_bits(wrong, columns)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_map_for_each_head_of_each_sequence(family: str) -> None:
    counts = torch.tensor([[[1, 2], [2, 0]], [[0, 1], [3, 3]]], dtype=torch.int32)
    lists = torch.tensor([2, 0, 1], dtype=torch.int32).expand(2, 2, 2, 3)
    blocks = flashgen.block_map(counts, lists, shape=(2, 4)).flatten(0, 2)
    variant = small(family, mask="blocks[(batch * heads + head_q) * rows + q_pos // 64, kv_pos // 32]",
                    kv_layout="dense", params={"heads": {"type": "int"}, "rows": {"type": "int"}, "blocks": {
                        "type": "tensor", "dtype": "bool", "shape": [8, 4]}})
    solve(variant, Problem(2, 128, 128, 2, 1), {"blocks": blocks, "heads": 2, "rows": 2}, nans=True,
          policies=("random",))
