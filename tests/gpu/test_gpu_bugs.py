"""Public attention-kernel faults as small inputs: empty rows, masks, varlen, 32-bit overflow, strides, head counts.

The number in a test's name is the fault's row in the project's list. Everything is judged by the accuracy contract;
asserts beyond it spell out what the row is about. Streams, graphs, compile and refusals: test_gpu_runtime.py.
"""
from __future__ import annotations

import math

import pytest
import torch
from kit import attend, solved, verified
from torch import Tensor

from flashgen.runtime.ops.attention.op import head_major, run_poisoned, spread
from flashgen.runtime.ops.attention.problem import Inputs, Problem
from flashgen.runtime.verify.compare import check, check_bits, named

pytestmark = pytest.mark.gpu
LAYOUTS = pytest.mark.parametrize("varlen", [False, True], ids=["dense", "varlen"])


def one_sequence(varlen: bool, seqlen_q: int, seqlen_kv: int, *heads_and_dims: int, **rest: object) -> Problem:
    lengths = ((seqlen_q,), (seqlen_kv,)) if varlen else (seqlen_q, seqlen_kv)
    return Problem(1, *lengths, *heads_and_dims, **rest)  # type: ignore[arg-type]


def empty_rows(lse: Tensor) -> list[int]:
    """Rows without a key, read from lse [..., rows] of one head and sequence."""
    return [i for i, value in enumerate(lse.reshape(-1).tolist()) if value == -math.inf]


# Empty and masked rows, online-softmax state

@LAYOUTS
@pytest.mark.parametrize("seqlen_q, seqlen_kv, causal, window, empty", [
    (4, 2, True, (-1, -1), range(2)), (8, 4, "top_left", (0, -1), range(4, 8)), (4, 1, False, (0, 0), range(3)),
    (300, 100, True, (-1, -1), range(200)), (300, 100, "top_left", (9, -1), range(109, 300)),
])
def test_b001_rows_without_a_key(seqlen_q: int, seqlen_kv: int, causal: bool | str, window: tuple[int, int],
                                 empty: range, varlen: bool, device: str) -> None:
    out, lse = solved(one_sequence(varlen, seqlen_q, seqlen_kv, causal=causal, window=window), device)
    assert empty_rows(lse) == list(empty)
    assert not out.reshape(seqlen_q, -1)[list(empty)].any() and not out.isnan().any() and not lse.isnan().any()


@LAYOUTS
def test_b003_very_low_scores_still_average(varlen: bool, device: str) -> None:
    inputs = one_sequence(varlen, 1, 16, 1, 1, 128, 128).make_inputs(device)
    inputs.q.fill_(40)
    inputs.k.fill_(-48)
    out, lse = verified(inputs)
    assert lse.item() == pytest.approx(128**-0.5 * -245760 + math.log(16), rel=2e-6)
    torch.testing.assert_close(out.float().reshape(-1), inputs.v.float().reshape(16, -1).mean(0), rtol=0, atol=4e-3)


@LAYOUTS
def test_b004_a_masked_key_gains_no_weight(varlen: bool, device: str) -> None:
    inputs = one_sequence(varlen, 2, 2, dtype="fp16", causal=True, softmax_scale=1.0).make_inputs(device)
    inputs.q.fill_(1)
    for j, (key, value) in enumerate([(-312.5, 1), (3, 100)]):  # row 0 sees key 0 alone, at a score of -20000
        inputs.k.reshape(2, -1)[j] = key
        inputs.v.reshape(2, -1)[j] = value
    out, lse = verified(inputs)
    assert (out.reshape(2, -1)[0] == 1).all() and lse.reshape(-1)[0].item() == pytest.approx(-20000, rel=1e-6)


def test_b004_a_length_of_one_beside_a_tail(device: str) -> None:
    inputs = Problem(1, (1,), (1,), tail=1).make_inputs(device)
    out, _ = verified(inputs)
    check_bits(out[0], inputs.v[0], "the only value")


@LAYOUTS
def test_b005_empty_rows_lead_or_sit_mid_tile(varlen: bool, device: str) -> None:
    inputs = one_sequence(varlen, 32, 18, causal=True).make_inputs(device)
    leading, lse = verified(inputs)
    assert empty_rows(lse) == list(range(14))
    later = inputs.with_(causal="top_left", q=inputs.q.roll(-14, inputs.q.dim() - 3))  # the same rows, now in front
    trailing, _ = verified(later.with_(window=(17, -1)))
    torch.testing.assert_close(trailing.reshape(32, -1)[:18], leading.reshape(32, -1)[14:], rtol=0, atol=0.02)
    _, lse = verified(later.with_(window=(3, -1)))
    assert empty_rows(lse) == list(range(21, 32))


# Mask geometry

@LAYOUTS
@pytest.mark.parametrize("seqlen_q, seqlen_kv, head_dim", [(5, 2, 64), (2, 5, 64), (3, 128, 128)])
def test_b007_causal_is_bottom_right(seqlen_q: int, seqlen_kv: int, head_dim: int, varlen: bool, device: str) -> None:
    problem = one_sequence(varlen, seqlen_q, seqlen_kv, 1, 1, head_dim, head_dim, causal=True)
    _, lse = solved(problem, device)
    assert empty_rows(lse) == list(range(max(0, seqlen_q - seqlen_kv)))


@LAYOUTS
@pytest.mark.parametrize("seqlen_q, seqlen_kv", [(1, 16), (2, 4), (130, 300)])
def test_b008_top_left_differs_from_bottom_right(seqlen_q: int, seqlen_kv: int, varlen: bool, device: str) -> None:
    inputs = one_sequence(varlen, seqlen_q, seqlen_kv, causal="top_left").make_inputs(device)
    out, _ = verified(inputs)
    check_bits(out.reshape(seqlen_q, -1)[0], inputs.v.reshape(seqlen_kv, -1)[0], "row 0 sees key 0 only")
    assert not torch.equal(out, verified(inputs.with_(causal=True))[0])


@LAYOUTS
@pytest.mark.parametrize("right", [3, 5, 7, 100, 2**31 - 1])
def test_b010_right_window(right: int, varlen: bool, device: str) -> None:
    _, lse = solved(one_sequence(varlen, 8, 3, window=(-1, right)), device)
    assert empty_rows(lse) == [i for i in range(8) if i - 5 + right < 0]


@LAYOUTS
def test_b012_four_keys_with_itself(varlen: bool, device: str) -> None:
    inputs = one_sequence(varlen, 8, 8, causal=True, window=(3, -1)).make_inputs(device)
    out, _ = verified(inputs)
    for key, seen in ((3, False), (4, True)):
        k = inputs.k.clone()
        k.reshape(8, -1)[key] *= -1
        assert torch.equal(run_poisoned(inputs.with_(k=k))[0].reshape(8, -1)[7], out.reshape(8, -1)[7]) != seen


@LAYOUTS
@pytest.mark.parametrize("seqlen_q, seqlen_kv", [(300, 4096), (1024, 1024)])
def test_b013_left_window_without_causal(seqlen_q: int, seqlen_kv: int, varlen: bool, device: str) -> None:
    solved(one_sequence(varlen, seqlen_q, seqlen_kv, 8, 2, 128, 128, window=(333, -1)), device)


# Varlen, zero length, shapes

def test_b015_sequences_of_no_and_one_row(device: str) -> None:
    inputs = Problem(3, (1, 0, 1), (3, 0, 5), 9, 3, causal=True).make_inputs(device)
    out, _ = verified(inputs)
    check_bits(attend(inputs, max_seqlen_q=1, max_seqlen_kv=5), out, "max_seqlen_q 1")


@pytest.mark.parametrize("causal", [False, True])
def test_b017_rows_of_no_sequence(causal: bool, device: str) -> None:
    out, lse = solved(Problem(2, (4, 4), (4, 4), 4, 2, causal=causal, tail=2), device)
    assert not out[8:].any() and (lse[:, 8:] == -math.inf).all()
    _, lse = solved(Problem(2, (200, 3), (150, 3), 4, 2, causal=causal, tail=300), device)
    assert (lse[:, 203:] == -math.inf).all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("batch, seqlen_q, seqlen_kv", [
    (0, 64, 64), (2, 0, 4096), (2, 64, 0), (0, (), ()), (2, (0, 0), (7, 0)), (2, (0, 0), (0, 0)), (2, (3, 200), (0, 0)),
])
def test_b018_zero_sizes(batch: int, seqlen_q: int | tuple, seqlen_kv: int | tuple, causal: bool, device: str) -> None:
    out, lse = solved(Problem(batch, seqlen_q, seqlen_kv, 4, 2, causal=causal), device)
    assert not out.any() and (lse == -math.inf).all()


@pytest.mark.parametrize("hint", [1, 32, 40, 1 << 20])
def test_b020_max_seqlen_is_only_a_hint(hint: int, device: str) -> None:
    inputs = Problem(3, (40, 700, 2), (40, 700, 9), 4, 2, causal=True).make_inputs(device)
    out = torch.full_like(inputs.q, math.nan)
    _, lse = attend(inputs, max_seqlen_q=hint, max_seqlen_kv=hint, out=out, return_lse=True)
    check(named(out, lse), inputs)


# 32-bit overflow, grid limits

def far_apart(x: Tensor, axis: int, stride: int, memory: Tensor, offset: int) -> Tensor:
    """A view of x's shape in `memory`, with `stride` elements between neighbours along `axis`, holding x."""
    strides = list(x.contiguous().stride())
    strides[axis] = stride
    return memory.as_strided(x.shape, strides, offset).copy_(x)


@pytest.mark.parametrize("problem, axis, stride", [
    (Problem(2, 40, 40, 2, 2), 0, 2**31 + 64), (Problem(2, 40, 40, 2, 2), 0, 2**32 + 64),
    (Problem(1, 2, 2, 2, 2), 1, 2**31 + 64), (Problem(1, 2, 2, 2, 2), 1, 2**32 + 64),
    (Problem(1, 40, 40, 2, 2), 2, 2**32 + 64), (Problem(1, 40, 40, 1, 1), 1, 2**27 + 8),
    (Problem(2, (1, 1), (1, 1), 2, 2), 0, 2**31 + 64), (Problem(2, (1, 1), (1, 1), 2, 2), 0, 2**32 + 64),
    (Problem(3, (20, 1, 19), (20, 1, 19), 1, 1), 0, 2**27 + 8), (Problem(2, (1, 39), (1, 39), 2, 2), 1, 2**32 + 64),
], ids=lambda x: f"{'varlen' if x.varlen else 'dense'}" if isinstance(x, Problem) else str(x))
def test_b031_offsets_are_64_bit(problem: Problem, axis: int, stride: int, cuda: str) -> None:
    inputs = problem.make_inputs(cuda)
    plain = verified(inputs, problem)
    far = 1 << 20  # q, k, v and out side by side
    memory = torch.empty(stride * (inputs.q.shape[axis] - 1) + 5 * far, dtype=torch.bfloat16, device=cuda)
    q, k, v, out = (far_apart(x, axis, stride, memory, i * far)
                    for i, x in enumerate((inputs.q, inputs.k, inputs.v, torch.zeros_like(inputs.q))))
    for name, wide in (("q", inputs.with_(q=q)), ("k", inputs.with_(k=k)), ("v", inputs.with_(v=v))):
        check_bits(run_poisoned(wide)[0], plain[0], f"{name} spread over memory")
    check_bits(run_poisoned(inputs, out=out)[0], plain[0], "out spread over memory")


@pytest.mark.parametrize("batch, seqlen, num_heads", [(65536, 1, 1), (80000, 16, 1), (300, 16, 300), (1, 3, 70000)])
def test_b032_more_blocks_than_a_grid_side(batch: int, seqlen: int, num_heads: int, cuda: str) -> None:
    problem = Problem(batch, seqlen, seqlen, num_heads, num_heads, causal=True)
    inputs = problem.make_inputs(cuda)
    out, lse = verified(inputs, problem)
    axis, size = (0, batch) if batch > 1 else (2, num_heads)
    for first in range(0, size, 20000):
        count = min(20000, size - first)
        part, part_lse = run_poisoned(inputs.with_(
            **{name: getattr(inputs, name).narrow(axis, first, count) for name in ("q", "k", "v")}))
        check_bits(part, out.narrow(axis, first, count), "a chunk of the problem")
        assert part_lse is not None
        check_bits(part_lse, lse.narrow(axis // 2, first, count), "a chunk of the problem")


def test_b032_more_query_tiles_than_a_grid_side(cuda: str) -> None:
    rows = 65536 * 128 + 5
    inputs = Problem(1, rows, 16).make_inputs(cuda)
    out, lse = run_poisoned(inputs)
    assert lse is not None and not out.isnan().any() and lse.isfinite().all()
    for part in (slice(0, 999), slice(rows // 2, rows // 2 + 999), slice(rows - 999, rows)):
        check(named(out[:, part], lse[:, :, part]), inputs.with_(q=inputs.q[:, part]))


def test_b032_more_sequences_than_a_grid_side(cuda: str) -> None:
    count = 80000
    lengths = (1,) * count
    inputs = Problem(count, lengths, lengths, 2, 1, causal=True).make_inputs(cuda)
    out, lse = run_poisoned(inputs)
    assert lse is not None and not out.isnan().any() and lse.isfinite().all()
    check_bits(out, inputs.v.expand_as(out), "one key, its value")


@pytest.mark.time_limit(300)
def test_b034_one_head_past_2_to_31_bytes(cuda: str) -> None:
    seqlen_kv, rows = 2**23 + 64, 8  # a kv head of 2^31 bytes and more
    inputs = Problem(1, 128, seqlen_kv, 1, 1, 128, 128, causal=True).make_inputs(cuda)
    out, lse = run_poisoned(inputs)
    assert lse is not None and not out.isnan().any() and lse.isfinite().all()
    ends = seqlen_kv - 128 + rows  # keys that the last of the first rows sees
    for part, keys in ((slice(0, rows), slice(0, ends)), (slice(128 - rows, 128), slice(0, seqlen_kv))):
        check(named(out[:, part], lse[:, :, part]),
              inputs.with_(q=inputs.q[:, part], k=inputs.k[:, keys], v=inputs.v[:, keys]))


# Strides, alignment, head dims

STRIDED = Problem(2, 130, 200, 6, 2, causal=True)


@LAYOUTS
def test_b035_any_row_and_head_stride(varlen: bool, device: str) -> None:
    problem = Problem(2, (130, 9), (200, 9), 6, 2, causal=True) if varlen else STRIDED
    inputs = problem.make_inputs(device)
    plain = verified(inputs, problem)[0]
    for change in (spread, head_major):
        for name in ("q", "k", "v"):
            moved = inputs.with_(**{name: change(getattr(inputs, name))})
            check_bits(run_poisoned(moved)[0], plain, f"{name} by {change.__name__}")


def test_b035_strides_of_size_one_mean_nothing(device: str) -> None:
    inputs = Problem(1, 33, 1, 1, 1).make_inputs(device)
    plain = verified(inputs)[0]
    q = inputs.q.as_strided(inputs.q.shape, (7, 64, 3, 1))
    k, v = (x.as_strided(x.shape, (1, 5, 9, 1)) for x in (inputs.k, inputs.v))
    check_bits(run_poisoned(inputs.with_(q=q, k=k, v=v))[0], plain, "odd strides of size-1 dimensions")


@pytest.mark.parametrize("head_dim", [40, 72, 80, 96, 192, 224])
def test_b038_head_dims(head_dim: int, device: str) -> None:
    solved(Problem(1, (3,), (7,), 16, 16, head_dim, head_dim, causal=True, dtype="fp16"), device)
    solved(Problem(2, 140, 77, 4, 2, head_dim, head_dim, causal=True, dtype="fp16"), device)


def shifted(x: Tensor, elements: int = 1) -> Tensor:
    """The same values, `elements` past an aligned address."""
    flat = x.new_empty(x.numel() + 16)[elements:elements + x.numel()]
    return flat.copy_(x.reshape(-1)).view(x.shape)


def odd_pitch(x: Tensor) -> Tensor:
    """The same values in rows whose distance is no multiple of 16 bytes."""
    wide = x.new_full((*x.shape[:-1], x.shape[-1] + 2), math.nan)
    wide[..., :-2] = x
    return wide[..., :-2]


def columns_first(x: Tensor) -> Tensor:
    """The same values with a last dimension that is not contiguous."""
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


@LAYOUTS
@pytest.mark.parametrize("change", [shifted, odd_pitch, columns_first])
def test_b040_what_cannot_be_read_in_place_is_copied(change: object, varlen: bool, device: str) -> None:
    assert callable(change)
    problem = Problem(2, (130, 9), (200, 9), 6, 2) if varlen else STRIDED
    inputs = problem.make_inputs(device)
    plain = verified(inputs, problem)
    for name in ("q", "k", "v"):
        moved = run_poisoned(inputs.with_(**{name: change(getattr(inputs, name))}))
        for what, a, b in zip(("out", "lse"), moved, plain, strict=True):
            assert a is not None
            check_bits(a, b, f"{what} with {name} changed")


def test_b042_keys_and_values_interleaved(device: str) -> None:
    inputs = STRIDED.make_inputs(device)
    k, v = torch.stack([inputs.k, inputs.v], 2).unbind(2)
    check_bits(run_poisoned(inputs.with_(k=k, v=v))[0], verified(inputs)[0], "one pool for k and v")


@LAYOUTS
@pytest.mark.parametrize("seqlen_kv", [129, 600])
def test_b043_value_heads_smaller_than_key_heads(seqlen_kv: int, varlen: bool, device: str) -> None:
    solved(one_sequence(varlen, 130, seqlen_kv, 16, 16, 192, 128, causal=True), device)


# Head mapping

@LAYOUTS
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("heads", [(5, 1), (14, 2), (24, 2), (28, 4), (24, 4), (64, 4), (71, 1)])
def test_b044_any_ratio_of_heads(heads: tuple[int, int], head_dim: int, varlen: bool, device: str) -> None:
    solved(one_sequence(varlen, 1, 300, *heads, head_dim, head_dim, causal=True), device)


@pytest.mark.parametrize("seqlen_q", [1, 3])
def test_b046_out_is_filled_in_place(seqlen_q: int, device: str) -> None:
    inputs = Problem(2, seqlen_q, 100, 8, 2, causal=True).make_inputs(device)
    plain = verified(inputs)[0]
    for out in (torch.full_like(plain, math.nan), spread(plain), head_major(plain)):
        out.fill_(math.nan)
        result = attend(inputs, out=out)
        assert result.data_ptr() == out.data_ptr() and result.stride() == out.stride()
        check_bits(out, plain, "out given")


def test_inputs_stay_as_they_are(device: str) -> None:
    inputs = Problem(2, (130, 9), (200, 9), 6, 2, tail=3).make_inputs(device)
    before = Inputs(inputs.q.clone(), inputs.k.clone(), inputs.v.clone())
    verified(inputs)
    for name in ("q", "k", "v"):
        check_bits(getattr(inputs, name), getattr(before, name), name)
