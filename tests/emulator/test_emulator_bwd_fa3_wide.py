"""FA3's backward of head dims above 128 on the emulator: right, and without a fault of any kind, in all schedules."""
from __future__ import annotations

import pytest
from emulated_backward import Call, backward_spec, in_all_orders

from flashgen.codegen.families.fa3.bwd_wide import dq_split
from flashgen.codegen.families.registry import lower
from flashgen.errors import PlanError

# Lengths that tiles divide and that they do not; queries that see no key and keys that no query sees.
DENSE = (Call(((130, 200),)), Call(((64, 128), (64, 128)), 4, 2))
CAUSAL = (Call(((100, 230),), dlse=True), Call(((230, 100),)), Call(((100, 230),), top_left=True))
WINDOW = (Call(((200, 260),), window=(40, 20)), Call(((260, 130),), window=(70, 0), top_left=True))
VARLEN = (Call(((70, 100), (0, 50), (130, 0), (140, 200)), rest=(5, 9)), Call(((0, 0), (1, 2), (129, 257)), dlse=True))


@pytest.mark.parametrize("head_dims, fields, calls", [
    ((256, 256), {}, DENSE),
    ((256, 256), {"causal": True, "dtype": "fp16"}, CAUSAL),
    ((192, 192), {"window": True}, WINDOW),
    ((192, 128), {"causal": True, "kv_layout": "varlen"}, VARLEN),
    ((192, 128), {"dtype": "fp16"}, DENSE[:1]),
    ((136, 200), {"causal": True}, CAUSAL[:1]),
    ((72, 136), {"kv_layout": "varlen"}, VARLEN[:1]),
    ((248, 8), {}, DENSE[:1]),
], ids=lambda value: str(value) if isinstance(value, (tuple, dict)) and len(str(value)) < 60 else "")
def test_gradients(head_dims: tuple[int, int], fields: dict[str, object], calls: tuple[Call, ...]) -> None:
    in_all_orders(backward_spec("fa3", "sm_90a", head_dims, **fields), calls)


def test_columns_of_dq_are_shared_in_whole_panels() -> None:
    for cols in range(80, 257, 16):
        first = dq_split(cols)
        assert first % 64 == 0 and 0 < first < cols and max(first, cols - first) <= 128


def test_refuses_heads_whose_dq_cannot_be_shared() -> None:
    with pytest.raises(PlanError, match="head_dim_qk above 64"):
        lower(backward_spec("fa3", "sm_90a", (64, 256)))
