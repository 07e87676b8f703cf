"""Gradients with `deterministic: true` on the emulator: the same bits in every order of blocks, and nobody waits for a
block that may not have been launched."""
from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import emulated_backward
import pytest
import torch
from emulated_backward import Call, backward_spec, check_backward

from flashgen.codegen.plan import Plan
from flashgen.codegen.render import render
from flashgen.codegen.source import Source
from flashgen.errors import VerifyError
from flashgen.runtime.emulator.schedule import Schedule

Results = dict[str, torch.Tensor]
Change = Callable[[str], str]
ARCHS = {"fa2": "sm_90", "fa3": "sm_90a"}
MASKS: dict[str, dict[str, Any]] = {"full": {}, "causal": {"causal": True}, "window": {"window": True}}
# One block at a time, in the order of launch: whoever waits for a later one is stuck.
IN_TURN = Schedule("eager", 0, resident=1, most_resident=1)
SCHEDULES = (IN_TURN, Schedule("random", 1, resident=8), Schedule("lazy", 2, resident=3),
             Schedule("eager", 3, resident=9))


def results(call: Call, schedule: Schedule, family: str = "fa3", dims: tuple[int, int] = (64, 64), **fields: Any
            ) -> Results:
    """The gradients, which are right, and the sums of dQ in fp32, which show more of the order."""
    spec = backward_spec(family, ARCHS[family], dims, **{"deterministic": True, **fields})
    return check_backward(spec, call, schedule, data=1)


def same(first: Results, second: Results) -> bool:
    return all(torch.equal(first[name], second[name]) for name in first)


def check_bits(call: Call, **fields: Any) -> None:
    first = results(call, IN_TURN, **fields)
    for schedule in SCHEDULES[1:]:
        assert same(first, results(call, schedule, **fields)), f"other bits of {call}, {fields}, {schedule}"


@pytest.mark.parametrize("mask, family, dims", [
    *((mask, family, dims) for mask in MASKS
      for family, dims in (("fa3", (64, 64)), ("fa3", (128, 128)), ("fa3", (192, 128)), ("fa2", (64, 64)))),
    ("causal", "fa2", (256, 256)),
], ids=str)
def test_same_bits_in_every_order(mask: str, family: str, dims: tuple[int, int]) -> None:
    """Of two query heads to a kv head, over ragged tiles."""
    check_bits(Call(((150, 390),), 2, 1, window=(200, 40)), family=family, dims=dims, **MASKS[mask])


@pytest.mark.parametrize("family", ARCHS)
@pytest.mark.parametrize("mask, call", [
    ("causal", Call(((150, 390),), 1, 1, top_left=True)),  # tiles of keys that no query sees take no turn
    ("causal", Call(((390, 140), (390, 140)), 2, 2)),      # and query tiles that see no key have none
    ("window", Call(((300, 300),), 1, 1, window=(10, 0))),  # nor do tiles that the window leaves out
    ("window", Call(((140, 390),), 1, 1, window=(-1, -1), top_left=True)),
], ids=["keys unseen", "queries unseeing", "narrow window", "unbounded window"])
def test_tiles_that_take_no_turn(mask: str, call: Call, family: str) -> None:
    check_bits(call, family=family, **MASKS[mask])


@pytest.mark.parametrize("family", ARCHS)
@pytest.mark.parametrize("mask", MASKS)
def test_packed_sequences(mask: str, family: str) -> None:
    """That none, one or several tiles divide."""
    call = Call(((129, 290), (0, 50), (64, 0), (70, 130)), 1, 1, rest=(5, 9), window=(90, 20))
    fields: dict[str, Any] = {**MASKS[mask], "kv_layout": "varlen", "family": family}
    check_bits(call, **fields)


def test_more_blocks_than_run_at_a_time() -> None:
    """In two windows of starts, each in any order."""
    check_bits(Call(((64, 1300),), 4, 4), causal=True)


# ---- tests of the tests

def planted(monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    """The kernel `gradients` with a fault."""
    def changed(plan: Plan) -> Source:
        source = render(plan)
        if plan.step != "gradients":
            return source
        text = change(source.text)
        assert text != source.text, "the fault is not there"
        return replace(source, text=text)

    monkeypatch.setattr(emulated_backward, "render", changed)


def without(text: str) -> Change:
    return lambda source: source.replace(text, ";", 1)


def without_waits(text: str) -> str:
    return re.sub(r"wait_until_equal\(.*?\);", ";", text, flags=re.DOTALL)


MANY = Call(((200, 390),), 2, 1)


@pytest.mark.parametrize("family, dims", [("fa3", (64, 64)), ("fa3", (192, 128)), ("fa2", (64, 64))], ids=str)
def test_free_order_has_other_bits(family: str, dims: tuple[int, int]) -> None:
    found = [results(MANY, schedule, family, dims, deterministic=False) for schedule in SCHEDULES[1:]]
    assert not all(same(found[0], other) for other in found[1:])


@pytest.mark.parametrize("family, dims", [("fa3", (64, 64)), ("fa3", (192, 128)), ("fa2", (64, 64))], ids=str)
def test_nobody_may_skip_a_wait(family: str, dims: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    first = results(MANY, IN_TURN, family, dims)
    planted(monkeypatch, without_waits)
    assert not all(same(first, results(MANY, schedule, family, dims)) for schedule in SCHEDULES[1:])


def test_sums_have_arrived_before_the_next_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    first = results(MANY, IN_TURN)
    planted(monkeypatch, without("bulk_wait<0>();  // it has been added"))
    assert not all(same(first, results(MANY, Schedule(policy, seed, resident=8)))
                   for policy in ("random", "lazy") for seed in range(2))


@pytest.mark.parametrize("family", ARCHS)
@pytest.mark.parametrize("name, change, schedule", [
    ("turns the other way round", without("tile = p.n_tiles - 1 - tile;"), IN_TURN),
    ("a turn too far", lambda text: text.replace("/ BLOCK_N - 1 - w.n_tile", "/ BLOCK_N - w.n_tile"), SCHEDULES[1]),
    ("turns of tiles without a pair", lambda text: text.replace(
        "min_int(m_tile * BLOCK_M + BLOCK_M, w.seqlen_q) - 1", "m_tile * BLOCK_M + BLOCK_M - 1"), SCHEDULES[1]),
    ("no turn is passed", without("st_release(turns, turn + 1);"), SCHEDULES[1]),
], ids=lambda value: value if isinstance(value, str) else "")
def test_wrong_turns_hang(name: str, change: Change, schedule: Schedule, family: str, monkeypatch: pytest.MonkeyPatch
                          ) -> None:
    planted(monkeypatch, change)
    with pytest.raises(VerifyError, match=r"deadlock|a semaphore in device memory"):
        results(Call(((230, 390),), 1, 1, top_left=True, window=(300, 20)), schedule, family, window=True)
