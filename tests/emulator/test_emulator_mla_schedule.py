"""The schedule kernel on the emulator: whatever the lengths, every tile of every request has exactly one block, and the
blocks of a request know each other."""
from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import NamedTuple

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flashgen.codegen.families.flashmla.launch import MOST_SINGLE_TILES, OVERHEAD_TILES
from flashgen.codegen.families.registry import lower
from flashgen.codegen.program import Step
from flashgen.codegen.render import render
from flashgen.codegen.spec.spec import load_specs, spec_path
from flashgen.runtime.emulator.kernel import EmulatedKernel

TILE = 64
LENGTHS = st.one_of(
    st.lists(st.integers(0, 300), min_size=1, max_size=40),
    st.lists(st.sampled_from([0, 1, 63, 64, 65, 128, 4000]), min_size=1, max_size=12),
    st.builds(lambda length, count: [length] * count, st.integers(0, 5000), st.integers(1, 24)))


class SmPartition(NamedTuple):
    """A record of the schedule, as templates/flashmla/schedule.cu.j2 has it."""

    first_request: int
    first_tile: int
    last_request: int
    end_tile: int
    first_begin: int
    first_end: int
    last_begin: int
    last_end: int
    first_keys: int
    last_keys: int
    row_block: int
    row_blocks: int
    block_rows: int


class Piece(NamedTuple):
    begin: int
    end: int
    partition: int
    sharers: tuple[int, int]


@cache
def kernel() -> EmulatedKernel:
    plan = lower(next(s for s in load_specs(spec_path("mla_h100")).specs if s.pass_ == "schedule"))
    return EmulatedKernel(plan, render(plan))


def blocks_of(lengths: list[int], q_rows: int, blocks: int, overhead: int, single: int) -> list[SmPartition]:
    rows = torch.full((blocks, kernel().plan.constant("RECORD_WORDS")), -7, dtype=torch.int32)
    launch = kernel().launcher(Step("schedule", 1, 32, {
        "batch": len(lengths), "q_rows": q_rows, "blocks": blocks, "overhead_tiles": overhead,
        "most_single_tiles": single}))
    launch({"seqlens": torch.tensor(lengths, dtype=torch.int32), "schedule": rows})
    return [SmPartition(*row[:len(SmPartition._fields)]) for row in rows.tolist()]


def partitions_of(lengths: list[int], partitions: int, overhead: int, single: int) -> list[SmPartition]:
    """Of so few rows that one block has them all."""
    return blocks_of(lengths, 16, partitions, overhead, single)


def tiles_of(length: int) -> int:
    return max(1, -(-length // TILE))


def pieces_of(records: list[SmPartition], lengths: list[int]) -> list[list[Piece]]:
    """By request, in the order of the partitions."""
    found: list[list[Piece]] = [[] for _ in lengths]
    for number, partition in enumerate(records):
        if partition.first_request < 0:
            continue
        assert partition.first_keys == lengths[partition.first_request]
        assert partition.last_keys == lengths[partition.last_request]
        for request in range(partition.first_request, partition.last_request + 1):
            starts, ends = request == partition.first_request, request == partition.last_request
            sharers = ((partition.first_begin, partition.first_end) if starts else
                       (partition.last_begin, partition.last_end) if ends else (number, number))
            found[request].append(Piece(partition.first_tile if starts else 0,
                                        partition.end_tile if ends else tiles_of(lengths[request]), number, sharers))
            if starts and ends:
                assert sharers == (partition.last_begin, partition.last_end)
    return found


@settings(deadline=None, max_examples=80)
@given(LENGTHS, st.sampled_from([1, 2, 3, 4, 7, 13, 33, 66, 132]), st.sampled_from([1, 3, OVERHEAD_TILES]),
       st.sampled_from([0, 3, MOST_SINGLE_TILES]))
@example([64] * 9, 4, OVERHEAD_TILES, MOST_SINGLE_TILES)
@example([70000], 132, OVERHEAD_TILES, MOST_SINGLE_TILES)
def test_every_tile_has_one_block(lengths: list[int], partitions: int, overhead: int, single: int) -> None:
    records = partitions_of(lengths, partitions, overhead, single)
    used = [record.first_request >= 0 for record in records]
    assert used == sorted(used, reverse=True), "partitions without work come last"
    for pieces, length in zip(pieces_of(records, lengths), lengths, strict=True):
        tiles = tiles_of(length)
        assert pieces and pieces[0].begin == 0 and pieces[-1].end == tiles
        for before, after in pairwise(pieces):
            assert (after.begin, after.partition) == (before.end, before.partition + 1)
        for piece in pieces:
            assert piece.begin < piece.end and piece.sharers == (pieces[0].partition, pieces[-1].partition)
        if max(map(tiles_of, lengths)) > single:
            assert all(piece.end - piece.begin >= 2 for piece in pieces[1:-1]), "a partition of its own has two tiles"


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 3000), st.sampled_from([4, 33, 132]), st.integers(1, 20))
def test_work_is_even(length: int, partitions: int, count: int) -> None:
    """No partition costs more than its share and what the uncut rest of one more request may bring."""
    lengths = [length] * count
    costs = [0] * partitions
    for pieces in pieces_of(partitions_of(lengths, partitions, OVERHEAD_TILES, MOST_SINGLE_TILES), lengths):
        for piece in pieces:
            costs[piece.partition] += piece.end - piece.begin + OVERHEAD_TILES
    share = (tiles_of(length) + OVERHEAD_TILES) * count / partitions
    assert max(costs) <= share + 2 * OVERHEAD_TILES + 2 + tiles_of(length)


def test_short_requests_are_cut_into_single_tiles() -> None:
    """... and longer ones are not: every tile of the first has a partition, every two of the second."""
    for tiles, per_part in ((MOST_SINGLE_TILES, 1), (MOST_SINGLE_TILES + 2, 2)):
        [pieces] = pieces_of(partitions_of([tiles * TILE], 132, OVERHEAD_TILES, MOST_SINGLE_TILES), [tiles * TILE])
        assert [piece.end - piece.begin for piece in pieces] == [per_part] * (tiles // per_part)


@settings(deadline=None, max_examples=60)
@given(LENGTHS, st.integers(1, 300), st.sampled_from([5, 13, 66, 132]))
@example([4096], 128, 132)
@example([1024] * 8, 64, 132)
def test_every_row_has_a_block_for_every_tile(lengths: list[int], q_rows: int, blocks: int) -> None:
    """Blocks of one partition differ in their rows only, which are all there are; what is left over does nothing."""
    records = blocks_of(lengths, q_rows, blocks := max(blocks, -(-q_rows // 64)), OVERHEAD_TILES, MOST_SINGLE_TILES)
    row_blocks, rows = records[0].row_blocks, records[0].block_rows
    partitions = blocks // row_blocks
    assert rows in (16, 32, 64) and (row_blocks - 1) * rows < q_rows <= row_blocks * rows
    for number, record in enumerate(records[:partitions * row_blocks]):
        assert record == records[number - number % row_blocks]._replace(row_block=number % row_blocks)
    assert all(record.first_request < 0 for record in records[partitions * row_blocks:])
    pieces = pieces_of(records[:partitions * row_blocks:row_blocks], lengths)
    assert all(of[0].begin == 0 and of[-1].end == tiles_of(length) for of, length in zip(pieces, lengths, strict=True))


def test_few_keys_are_shared_out_by_rows_too() -> None:
    """Partitions are worth the merge as long as they have tiles; with many keys, 64 rows read them less often."""
    def rows(lengths: list[int], q_rows: int) -> int:
        return blocks_of(lengths, q_rows, 132, OVERHEAD_TILES, MOST_SINGLE_TILES)[0].block_rows

    assert rows([1024], 128) == rows([1024], 64) == 16 and rows([4096], 128) < 64
    assert rows([32768], 128) == rows([32768] * 32, 64) == rows([4096] * 32, 128) == 64
