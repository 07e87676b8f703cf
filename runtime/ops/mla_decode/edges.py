"""Problems at the edges of a decode: lengths, head counts, pages and scales where kernels break."""
from __future__ import annotations

from collections.abc import Iterator

from flashgen.codegen.spec.spec import Spec
from flashgen.runtime.ops.mla_decode.problem import MlaProblem

PAGE_SIZES = {64: (64, 128), 1: (1, 16, 61), None: (None,)}  # by a spec's page_size
# (lengths, num_heads_q, seqlen_q, causal, sink, softmax_scale). Emulated: each tile of keys takes its time.
_Call = tuple[tuple[int, ...], int, int, bool, bool, float | None]
EMULATED_CALLS: tuple[_Call, ...] = (
    ((1, 0, 65), 16, 1, False, False, None), ((130, 2), 33, 2, True, True, 0.1))
CALLS: tuple[_Call, ...] = (
    ((0,), 16, 1, False, False, None),
    ((0, 0, 0), 128, 2, True, True, None),
    ((1,), 1, 1, True, False, None),
    ((63, 64, 65, 127, 128, 129, 0, 1), 16, 1, False, False, 0.3),
    ((5, 9, 1, 3, 64, 0, 0, 0), 4, 2, True, False, None),
    ((3000, 17, 513), 31, 3, True, True, None),
    ((200,) * 9, 33, 1, False, True, 1.0),
    ((8, 7, 600), 8, 8, True, False, None),
    ((1, 2, 3, 4), 24, 4, True, False, 0.01),
    ((4096,), 64, 1, False, False, None),
    ((70000, 1), 128, 1, False, False, None),
    (tuple(range(0, 5000, 37)), 128, 2, True, False, None),
    ((33000,) * 4, 16, 1, False, True, None),
    (tuple(i * i % 900 for i in range(700)), 64, 1, False, False, None),
)


def edge_problems(spec: Spec, seed: int, emulated: bool) -> Iterator[MlaProblem]:
    sizes = PAGE_SIZES[spec.page_size]
    for number, (lengths, heads, seqlen_q, causal, sink, scale) in enumerate(EMULATED_CALLS if emulated else CALLS):
        yield MlaProblem(lengths, heads, seqlen_q, sizes[number % len(sizes)], spec.head_dim_qk, causal, sink,
                         spec.dtype, scale, seed)


def identity_problem(spec: Spec, seed: int) -> MlaProblem:
    """The subject of the bitwise identities."""
    return MlaProblem((300, 1, 0, 900, 64), 16, 2, PAGE_SIZES[spec.page_size][-1], spec.head_dim_qk, True, False,
                      spec.dtype, seed=seed)
