"""Calls of mla_decode whose host time `flashgen bench --overhead` measures: tiny ones."""
from __future__ import annotations

from collections.abc import Callable

import torch

import flashgen


def overhead_calls(device: torch.device) -> dict[str, Callable[[], object]]:
    """By name: flashmla, which launches a schedule first; with `out=`; with a schedule that was kept. None elsewhere
    than on Hopper."""
    if torch.cuda.get_device_capability(device) != (9, 0):
        return {}
    q, cache, out = (torch.zeros(shape, dtype=torch.bfloat16, device=device)
                     for shape in ((1, 1, 16, 576), (2, 64, 576), (1, 1, 16, 512)))
    lengths, pages = (torch.tensor(values, dtype=torch.int32, device=device) for values in ([99], [[0, 1]]))
    kept = flashgen.mla_schedule(lengths, 16)
    return {"flashmla": lambda: flashgen.mla_decode(q, cache, lengths, page_table=pages),
            "flashmla_out": lambda: flashgen.mla_decode(q, cache, lengths, page_table=pages, out=out),
            "flashmla_scheduled": lambda: flashgen.mla_decode(q, cache, lengths, page_table=pages, schedule=kept)}
