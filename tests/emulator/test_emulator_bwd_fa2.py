"""FA2's backward on the emulator: right, and without a fault of any kind, in all schedules."""
from __future__ import annotations

import pytest
from emulated_backward import Call, backward_spec, in_all_orders

# Lengths that tiles divide and that they do not; queries that see no key and keys that no query sees.
DENSE = (Call(((130, 200),)), Call(((64, 128), (64, 128)), 4, 2))
CAUSAL = (Call(((100, 230),), dlse=True), Call(((230, 100),)), Call(((230, 100),), top_left=True))
WINDOW = (Call(((200, 260),), window=(40, 20)), Call(((260, 130),), window=(70, 0), top_left=True),
          Call(((70, 300),), window=(20, -1)))
VARLEN = (Call(((70, 100), (0, 50), (130, 0), (140, 200)), rest=(5, 9)), Call(((0, 0), (1, 1), (129, 257)), dlse=True))


@pytest.mark.parametrize("head_dims, fields, calls", [
    ((64, 64), {}, DENSE),
    ((64, 64), {"causal": True}, CAUSAL),
    ((64, 64), {"window": True, "dtype": "fp16"}, WINDOW),
    ((64, 64), {"causal": True, "kv_layout": "varlen"}, VARLEN),
    ((72, 72), {}, DENSE[:1]),
    ((128, 128), {"causal": True, "dtype": "fp16"}, CAUSAL[:2]),
    ((192, 128), {"kv_layout": "varlen"}, VARLEN[:1]),
    ((256, 256), {"causal": True}, CAUSAL[:1]),
], ids=lambda value: str(value) if isinstance(value, (tuple, dict)) and len(str(value)) < 60 else "")
def test_gradients(head_dims: tuple[int, int], fields: dict[str, object], calls: tuple[Call, ...]) -> None:
    in_all_orders(backward_spec("fa2", "sm_90", head_dims, **fields), calls)


@pytest.mark.parametrize("arch, head_dims", [("sm_80", (64, 64)), ("sm_86", (128, 128)), ("sm_86", (200, 216)),
                                             ("sm_120", (256, 232))])
def test_tiles_of_smaller_cards(arch: str, head_dims: tuple[int, int]) -> None:
    """With one stage; with columns that warps share unevenly."""
    in_all_orders(backward_spec("fa2", arch, head_dims, causal=True), (Call(((150, 90),)),))
