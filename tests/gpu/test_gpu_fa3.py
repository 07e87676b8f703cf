"""The fa3 family on Hopper: every shipped variant against fp64, and what its design adds to go wrong.

Blocks that stay for several tiles, the tile counter, split keys, TMA copies, a softmax reference that
is looked at rarely: each has problems here that reach it. With --on-cpu the tests are tested, not the kernels.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from emulator_kit import with_nans_in_v
from kit import attend, solved, tiles_of_warpgroups, verified
from torch import Tensor

from flashgen.codegen.families.registry import lower, program_of
from flashgen.codegen.families.shared.launch import Sizes
from flashgen.codegen.spec.spec import Spec, load_specs, shipped_spec_paths
from flashgen.runtime.launch.tensor_map import fits_maps
from flashgen.runtime.ops.attention.edges import Mask, company_problem, masks, tile_shape
from flashgen.runtime.ops.attention.op import alone_and_in_company, head_major, run_poisoned, spread
from flashgen.runtime.ops.attention.problem import Inputs, Problem
from flashgen.runtime.ops.attention.timed import draw
from flashgen.runtime.select.lookup import why
from flashgen.runtime.select.selector import Wanted
from flashgen.runtime.verify.compare import check, check_bits, named
from flashgen.runtime.verify.subject import NAN, Subject
from flashgen.runtime.verify.verify import verify_spec

pytestmark = pytest.mark.gpu
SMS = 132  # of the whole card: fewer only make more tiles per block
FULL, CAUSAL, TOP_LEFT = (False, (-1, -1)), (True, (-1, -1)), ("top_left", (-1, -1))

SHIPPED = [(path, spec) for path in shipped_spec_paths() for spec in load_specs(path).specs
           if (spec.family, spec.pass_) == ("fa3", "fwd")]
SPECS = [spec for _, spec in SHIPPED]


def over(specs: list[Spec]) -> Any:
    return pytest.mark.parametrize("spec", specs, ids=[spec.variant for spec in specs])


@pytest.fixture(autouse=True)
def _on_hopper(device: str) -> None:
    if device == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("fa3 kernels are for compute capability 9.0")


def problem_of(spec: Spec, batch: int, seqlen_q: int, seqlen_kv: int, heads: tuple[int, int], mask: Mask,
               **rest: Any) -> Problem:
    """Dense, or varlen with `batch` sequences of these lengths, as the spec is."""
    lengths: Any = (seqlen_q, seqlen_kv)
    if spec.kv_layout == "varlen":
        lengths = ((seqlen_q,) * batch, (seqlen_kv,) * batch)
    return Problem(batch, *lengths, *heads, spec.head_dim_qk, spec.head_dim_v, causal=mask[0], window=mask[1],
                   dtype=spec.dtype, **rest)


def run(spec: Spec, inputs: Inputs, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    found, lse = run_poisoned(inputs, spec=spec, lse=True, out=out)
    assert lse is not None
    return found, lse


def same(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], what: str) -> None:
    for name, a, b in zip(("out", "lse"), found, expected, strict=True):
        check_bits(a, b, f"{name}, {what}")


def wanted(inputs: Inputs, **changes: Any) -> Wanted:
    """What lookup is asked for a call without a window."""
    names = {torch.bfloat16: "bf16", torch.float16: "fp16"}
    maps = all(fits_maps(t.shape, t.stride(), t.element_size()) for t in (inputs.q, inputs.k, inputs.v))
    layout = "dense" if inputs.cu_seqlens_q is None else "varlen"
    return replace(Wanted(names[inputs.q.dtype], inputs.q.shape[-1], inputs.v.shape[-1], bool(inputs.causal), False,
                          layout, True, tensor_maps=maps), **changes)


@pytest.fixture(autouse=True)
def _tall_tiles(device: str) -> Iterator[None]:
    """The lengths of problems are about tiles of all warpgroups."""
    with tiles_of_warpgroups():
        yield


# The accuracy contract

@pytest.mark.parametrize("path, spec", SHIPPED, ids=[spec.variant for spec in SPECS])
def test_verify(path: str, spec: Spec, device: str) -> None:
    """Edges of tiles, more than two work tiles per block, sequences alone and batched, strides, NaN in future keys."""
    failures = [row for row in verify_spec([spec], path=str(path)) if not row.ok]
    assert not failures, "\n\n".join(row.message for row in failures[:3])


@pytest.mark.parametrize("path, spec", SHIPPED, ids=[spec.variant for spec in SPECS])
def test_verify_as_served(path: str, spec: Spec, device: str) -> None:
    """The same with as many warpgroups as are best for each call: mostly one, for so few rows."""
    with tiles_of_warpgroups(None):
        failures = [row for row in verify_spec([spec], path=str(path)) if not row.ok]
    assert not failures, "\n\n".join(row.message for row in failures[:3])


@over(SPECS)
def test_any_number_of_warpgroups(spec: Spec, device: str) -> None:
    """It changes no bit of a row, unless its keys are cut elsewhere."""
    plan = lower(spec)
    tile_m, tile_n, _ = tile_shape(plan)
    for number, mask in enumerate(masks(spec)):
        problem = problem_of(spec, 2, 2 * tile_m + 9, 7 * tile_n + 5, (6, 2), mask, seed=number)
        inputs = problem.make_inputs(device)
        tall = verified(inputs, problem, spec=spec)
        for warpgroups in range(1, plan.constant("WARPGROUPS")):
            with tiles_of_warpgroups(warpgroups):
                found = verified(inputs, f"{problem} with {warpgroups} warpgroups", spec=spec)
            if not spec.split:
                same(found, tall, f"{warpgroups} warpgroups")


@over(SPECS)
def test_what_is_not_finite_reaches_those_who_see_it(spec: Spec, device: str) -> None:
    tile_m, tile_n, _ = tile_shape(lower(spec))
    for number, mask in enumerate(masks(spec)):
        problem = problem_of(spec, 2, tile_m + 9, 3 * tile_n + 5, (2, 1), mask, seed=number)
        plain = problem.make_inputs(device)
        verified(with_nans_in_v(plain), f"{problem} with inf and NaN in v", spec=spec)
        row = 2 * tile_n + 1
        for name, position in (("q", tile_m + 1), ("k", row)):
            x = getattr(plain, name).clone()
            (x if problem.varlen else x[0])[position, 0, 3] = NAN
            verified(plain.with_(**{name: x}), f"{problem} with NaN in {name}", spec=spec)


def inside_nan(x: Tensor) -> Tensor:
    """The same values, with NaN rows before and after, and a NaN head on either side."""
    axis = x.dim() - 3
    shape = list(x.shape)
    shape[axis] += 600
    shape[axis + 1] += 2
    wide = x.new_full(shape, NAN)
    view = wide.narrow(axis, 300, x.shape[axis])[..., 1:-1, :]
    return view.copy_(x)


@over(SPECS)
def test_neighbours_in_memory_stay_out_of_it(spec: Spec, device: str) -> None:
    """NaN around the tensors reaches nothing, and what is around out stays."""
    tile_m, tile_n, _ = tile_shape(lower(spec))
    tail = 300 if spec.kv_layout == "varlen" else 0
    for mask in masks(spec)[:2]:
        problem = problem_of(spec, 2, tile_m + 1, tile_n + 3, (4, 2), mask, tail=tail)
        inputs = problem.make_inputs(device)
        expected = verified(inputs, problem, spec=spec)
        hidden = inputs.with_(**{name: inside_nan(getattr(inputs, name)) for name in ("q", "k", "v")})
        out = inside_nan(expected[0])
        around = out._base if out._base is not None else out
        same(run(spec, hidden, out), expected, "in the middle of NaN")
        out.fill_(NAN)
        assert around.isnan().all(), "something was written beside out"


DATA_SPECS = [spec for spec in SPECS if spec.dtype == "bf16" and not spec.window and not spec.split]


@over(DATA_SPECS)
@pytest.mark.parametrize("data", ["growing", "falling", "wide"])
def test_scores_that_grow_fall_or_stand_out(data: str, spec: Spec, device: str) -> None:
    """The reference of a row is raised many times, never after the first tile, or by a lot."""
    lengths: Any = ((517, 130), (2049, 400)) if spec.kv_layout == "varlen" else (517, 2049)
    case = Problem(2, *lengths, 4, 2, spec.head_dim_qk, spec.head_dim_v, spec.causal)
    x = draw(case, data.replace("falling", "growing"), 1, device)
    inputs = x.with_(k=x.k.flip(-3)) if data == "falling" else x
    out, lse = run(spec, inputs)
    # The same scores written as a scale of 8, which is what the contract's bound on lse goes by.
    scaled = inputs.with_(q=inputs.q / 8, softmax_scale=8 * spec.head_dim_qk**-0.5)
    check(named(out, lse), scaled, label=f"{spec.variant}, {data}, {case.label}")


# The same call, the same bits

def busy_problems(spec: Spec) -> list[Problem]:
    """More than two work tiles for each SM, of different lengths; and fewer tiles than SMs, over many keys."""
    tile_m, tile_n, _ = tile_shape(lower(spec))
    mask = masks(spec)[-1]
    few = problem_of(spec, 1, tile_m + 1, 20 * tile_n + 1, (4, 2), mask)
    if spec.kv_layout == "dense":
        return [few, problem_of(spec, 5, 3 * tile_m - 1, 5 * tile_n + 3, (20, 5), mask)]
    lengths = (1, 17, 5 * tile_m, 0, 3, 2 * tile_m + 1, tile_m, 900, 2)
    return [few, replace(few, batch=len(lengths), seqlen_q=lengths, seqlen_kv=lengths, num_heads_q=24, num_heads_kv=6,
                         tail=5)]


@over([spec for spec in SPECS if spec.dtype == "bf16"])
def test_a_call_repeats_its_bits(spec: Spec, device: str) -> None:
    for problem in busy_problems(spec):
        inputs = problem.make_inputs(device)
        expected = verified(inputs, problem, spec=spec)
        for number in range(20 if device == "cuda" else 1):
            same(run(spec, inputs), expected, f"repetition {number} of {problem}")


INVARIANT = [spec for spec in SPECS if spec.dtype == "bf16" and spec.kv_layout == "dense" and not spec.split]


@over(INVARIANT)
def test_batch_invariant(spec: Spec, cuda: str) -> None:
    """Alone, where a call would be cut along its keys, and beside others, where it would not be: the same bits."""
    invariant = spec.with_(batch_invariant=True)
    tile_m, tile_n, _ = tile_shape(lower(invariant))
    for mask in masks(spec):
        company = company_problem(invariant, tile_m, mask, seed=3)
        for problem in (company, replace(company, batch=5, seqlen_kv=20 * tile_n + 7, num_heads_q=18, num_heads_kv=6)):
            alone_and_in_company(Subject(invariant, cuda), problem)


# Tiles cut along the keys

SPLIT = [spec for spec in SPECS if spec.split and not spec.pack_gqa]
PACKED = [spec for spec in SPECS if spec.pack_gqa]


def parts(spec: Spec, problem: Problem) -> int:
    """Blocks that share the keys of a tile of the last wave."""
    assert isinstance(problem.seqlen_q, int) and isinstance(problem.seqlen_kv, int)
    sizes = Sizes(problem.batch, problem.seqlen_q, problem.seqlen_kv, problem.num_heads_q, problem.num_heads_kv,
                  window=problem.window)
    return int(program_of(lower(spec), sizes, SMS).step("fwd").values["max_splits"])


@over(SPLIT)
def test_split_tails(spec: Spec, device: str) -> None:
    """One tile, a few, one over a full wave, and one less than one; parts with NaN."""
    tile_m, tile_n, _ = tile_shape(lower(spec))
    for mask in masks(spec):
        for batch, heads, seqlen_q, key_tiles in ((1, 1, tile_m, 60), (1, 2, tile_m + 1, 33), (2, 3, 1, 16),
                                                  (1, SMS + 1, tile_m, 12), (1, SMS - 1, tile_m - 1, 12)):
            problem = problem_of(spec, batch, seqlen_q, key_tiles * tile_n - 3, (heads, 1), mask)
            if heads < SMS - 1:
                assert parts(spec, problem) > 1
            solved(problem, device, spec=spec)
        problem = problem_of(spec, 1, 2 * tile_m, 33 * tile_n, (2, 1), mask)
        verified(with_nans_in_v(problem.make_inputs(device)), problem, spec=spec)
    assert spec.causal or parts(spec, problem_of(spec, 1, tile_m, 12 * tile_n, (SMS + 1, 1), FULL)) > 1


@over(PACKED)
def test_packed_heads(spec: Spec, device: str) -> None:
    """Groups that fill a warpgroup's rows and groups that do not; one query, a tile, several; whole and in parts."""
    tile_n = tile_shape(lower(spec))[1]
    for mask in masks(spec):
        for heads in ((8, 1), (32, 8), (6, 2), (64, 1), (5, 5)):
            for batch, seqlen_q, key_tiles in ((1, 1, 60), (2, 5, 33), (1, 70, 9), (40, 1, 4)):
                solved(problem_of(spec, batch, seqlen_q, key_tiles * tile_n - 3, heads, mask), device, spec=spec)
        problem = problem_of(spec, 2, 9, 33 * tile_n, (12, 2), mask)
        verified(with_nans_in_v(problem.make_inputs(device)), problem, spec=spec)


# Streams and graphs

CALLS = [
    ("split", Problem(1, 200, 5000, 4, 4, 128, 128)), ("packed", Problem(2, 1, 5000, 32, 8, 128, 128)),
    ("full", Problem(4, 700, 700, 24, 6, 128, 128)), ("causal", Problem(4, 700, 700, 24, 6, 64, 64, causal=True)),
    ("d256", Problem(3, 600, 700, 16, 4, 256, 256)),
    ("varlen", Problem(5, (1, 900, 17, 0, 2000), (1, 900, 17, 0, 2000), 24, 6, 128, 128, causal=True)),
]
each_call = pytest.mark.parametrize("problem", [problem for _, problem in CALLS], ids=[name for name, _ in CALLS])


def capture(call: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


@each_call
def test_a_graph_replayed_beside_eager_calls(problem: Problem, cuda: str) -> None:
    inputs = problem.make_inputs(cuda)
    expected = verified(inputs, problem)
    graph, replayed = capture(lambda: attend(inputs, return_lse=True))
    stream = torch.cuda.Stream()
    for number in range(10):
        for x in replayed:
            x.fill_(NAN)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            graph.replay()
        eager = [attend(inputs, return_lse=True) for _ in range(3)]
        torch.cuda.synchronize()
        for what, found in (("replayed", replayed), *(("eager", found) for found in eager)):
            same(found, expected, f"{what} in round {number}")


@each_call
def test_two_streams_at_once(problem: Problem, cuda: str) -> None:
    """The same problem on one, and all others in turn on the other."""
    cases = [(other.make_inputs(cuda), other) for _, other in CALLS]
    inputs = problem.make_inputs(cuda)
    expected, others = verified(inputs, problem), [verified(*case) for case in cases]
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    found, found_others = [], []
    for number in range(15):
        with torch.cuda.stream(streams[0]):
            found.append(attend(inputs, return_lse=True))
        with torch.cuda.stream(streams[1]):
            found_others.append(attend(cases[number % len(cases)][0], return_lse=True))
    torch.cuda.synchronize()
    for number, (mine, other) in enumerate(zip(found, found_others, strict=True)):
        same(mine, expected, f"call {number} on the first stream")
        same(other, others[number % len(cases)], f"call {number} on the second stream")


# Heads, strides, sizes

LAYOUTS = {"dense": Problem(2, 300, 500, 8, 2, 128, 128, causal=True),
           "varlen": Problem(3, (300, 1, 77), (500, 40, 77), 8, 2, 128, 128, causal=True)}
each_layout = pytest.mark.parametrize("problem", LAYOUTS.values(), ids=LAYOUTS)


@each_layout
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_shared_kv_heads_equal_their_copies(problem: Problem, head_dim: int, device: str) -> None:
    problem = replace(problem, head_dim_qk=head_dim, head_dim_v=head_dim)
    if not problem.varlen:  # whole query tiles, so that neither call packs heads: that sums in another order
        problem = replace(problem, seqlen_q=768, seqlen_kv=768)
    inputs = problem.make_inputs(device)
    copies = inputs.with_(k=inputs.k.repeat_interleave(4, -2), v=inputs.v.repeat_interleave(4, -2))
    same(verified(copies), verified(inputs, problem), "one kv head for four query heads")


@each_layout
def test_strides_change_no_bit(problem: Problem, device: str) -> None:
    inputs = problem.make_inputs(device)
    expected = verified(inputs, problem)
    pool = torch.stack([inputs.k, inputs.v], -2).unbind(-2)  # per head: its key row, then its value row
    for what, changes in (
            ("q heads first", {"q": head_major(inputs.q)}), ("q rows apart", {"q": spread(inputs.q)}),
            ("all heads first", {name: head_major(getattr(inputs, name)) for name in ("q", "k", "v")}),
            ("all rows apart", {name: spread(getattr(inputs, name)) for name in ("q", "k", "v")}),
            ("k and v in one pool", {"k": pool[0], "v": pool[1]})):
        assert why(wanted(inputs.with_(**changes)), 90).startswith("fa3:")
        same(run_of_any(inputs.with_(**changes)), expected, what)
    for change in (head_major, spread):
        out = change(expected[0])
        same(run_of_any(inputs, out), expected, f"out by {change.__name__}")


def run_of_any(inputs: Inputs, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    found, lse = run_poisoned(inputs, out=out)
    assert lse is not None
    return found, lse


@pytest.mark.parametrize("head_dims", [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)],
                         ids=lambda dims: f"d{dims[0]}v{dims[1]}")
@pytest.mark.parametrize("mask", [FULL, CAUSAL, TOP_LEFT, (True, (40, -1))],
                         ids=["full", "causal", "top_left", "window"])
def test_small_grids_and_no_keys(head_dims: tuple[int, int], mask: Mask, device: str) -> None:
    rest: dict[str, Any] = {"causal": mask[0], "window": mask[1]}
    for batch, seqlen_q, seqlen_kv, heads in ((1, 1, 1, 1), (1, 1, 5000, 1), (1, 129, 1, 1), (3, 7, 5, 2),
                                              (1, 1024, 1024, 4), (1, 128, 8192, 8)):
        solved(Problem(batch, seqlen_q, seqlen_kv, heads, 1, *head_dims, **rest), device)
    solved(Problem(4, (0, 1, 0, 2), (3, 1, 0, 900), 2, 2, *head_dims, **rest), device)
    for none in (Problem(2, 300, 0, 4, 2, *head_dims, **rest), Problem(2, (300, 1), (0, 0), 4, 2, *head_dims, **rest)):
        out, lse = solved(none, device)
        assert not out.any() and (lse == -math.inf).all()


# What no shipped variant has, and what the family cannot read

@pytest.mark.parametrize("head_dim", [40, 72, 80, 200])
@pytest.mark.parametrize("varlen", [False, True], ids=["dense", "varlen"])
def test_unshipped_head_dims(varlen: bool, head_dim: int, device: str) -> None:
    lengths: Any = ((300, 1, 77), (500, 40, 77)) if varlen else (300, 500)
    for causal, window in (FULL, CAUSAL, (True, (70, -1))):
        problem = Problem(3, *lengths, 6, 2, head_dim, head_dim, causal=causal, window=window)
        inputs = problem.make_inputs(device)
        windowed = window != (-1, -1)
        assert why(wanted(inputs, causal=causal and not windowed, window=windowed), 90).startswith("fa3:")
        verified(inputs, problem)
    if not varlen:  # few tiles over many keys: compiled with its parts
        solved(Problem(1, 100, 5000, 2, 1, head_dim, head_dim), device)


@each_layout
def test_expanded_tensors_are_served_by_fa2(problem: Problem, device: str) -> None:
    inputs = problem.make_inputs(device)
    for names in ("k", "v", "kv"):
        expanded = inputs.with_(**{name: getattr(inputs, name)[..., :1, :].expand_as(getattr(inputs, name))
                                   for name in names})
        assert why(wanted(expanded), 90).startswith("fa2:")
        found = verified(expanded, f"{problem}, {names} expanded")
        plain = expanded.with_(k=expanded.k.contiguous(), v=expanded.v.contiguous())
        named = attend(plain, return_lse=True, spec="fa2_fwd")
        same(found, named, f"{names} expanded and copied, by fa2")
