"""Gradients with `deterministic: true` on the emulator: the same bits in every order of blocks, and nobody waits for a
block that has not been launched."""
from __future__ import annotations

from typing import Any

import pytest
import torch
from emulated_backward import Call, backward_spec, check_backward

from flashgen.runtime.emulator.schedule import POLICIES, Schedule

ARCHS = {"fa2": "sm_90", "fa3": "sm_90a"}
MASKS: dict[str, dict[str, Any]] = {"full": {}, "causal": {"causal": True}, "window": {"window": True}}
# Sequences that none, one or several tiles divide; keys that no query sees, queries that see no key, rows of nobody.
PACKED = Call(((257, 300), (0, 50), (100, 330), (64, 0), (300, 100)), 2, 1, rest=(5, 9), window=(90, 20))


def same_bits(call: Call, fields: dict[str, Any], schedules: list[Schedule], dims: tuple[int, int] = (64, 64),
              family: str = "fa3") -> bool:
    """Whether all schedules give gradients of the same bits, which are right besides."""
    spec = backward_spec(family, ARCHS[family], dims, **fields)
    first, *others = (check_backward(spec, call, schedule, data=1) for schedule in schedules)
    return all(torch.equal(first[name], other[name]) for other in others for name in first)


def schedules(seeds: int = 2) -> list[Schedule]:
    """With few blocks that run at a time, down to one, and with many."""
    return [Schedule("random", 0, resident=1),
            *(Schedule(policy, seed, resident=3 + 5 * seed) for policy in POLICIES for seed in range(seeds))]


@pytest.mark.parametrize("family, dims", [("fa3", (64, 64)), ("fa3", (128, 128)), ("fa3", (192, 128)),
                                          ("fa2", (64, 64)), ("fa2", (256, 256))], ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_same_bits_in_every_order(mask: str, family: str, dims: tuple[int, int]) -> None:
    """Of two query heads to a kv head, over ragged tiles."""
    call = Call(((200, 450),), 2, 1, window=(150, 40))
    assert same_bits(call, {**MASKS[mask], "deterministic": True}, schedules(), dims, family)


@pytest.mark.parametrize("family", ARCHS)
@pytest.mark.parametrize("mask", MASKS)
def test_packed_sequences(mask: str, family: str) -> None:
    fields = {**MASKS[mask], "deterministic": True, "kv_layout": "varlen"}
    assert same_bits(PACKED, fields, schedules(1), family=family)
