"""Calls of attention whose host time `flashgen bench --overhead` measures: tiny, for each family that can serve."""
from __future__ import annotations

from collections.abc import Callable

import torch

import flashgen


def overhead_calls(device: torch.device) -> dict[str, Callable[[], object]]:
    """By name: <family>, and <family>_out with `out=`."""
    q, k, v, out = (torch.zeros(1, 16, 2, 64, dtype=torch.bfloat16, device=device) for _ in range(4))
    one_head = k[:, :, :1].expand(-1, -1, 2, -1)  # no tensor map describes it, so that fa2 serves on every card
    calls: dict[str, Callable[[], object]] = {
        "fa2": lambda: flashgen.attention(q, one_head, one_head),
        "fa2_out": lambda: flashgen.attention(q, one_head, one_head, out=out)}
    if torch.cuda.get_device_capability(device) == (9, 0):
        calls |= {"fa3": lambda: flashgen.attention(q, k, v), "fa3_out": lambda: flashgen.attention(q, k, v, out=out)}
    return calls
