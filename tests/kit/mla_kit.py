"""What the tests of mla_decode share: the reference as a stand-in kernel, and one judged call from poisoned memory."""
from __future__ import annotations

import math
import os
from typing import Any

import torch
from torch import Tensor

import flashgen
from flashgen.codegen.spec.spec import Spec, load_specs, spec_path
from flashgen.runtime.ops.mla_decode.problem import MlaInputs, MlaProblem
from flashgen.runtime.verify.compare import check, named

# Every decode that is shipped, and their schedule.
MLA_SPECS = tuple(spec for file in ("mla_h100", "mla_h100_caches") for spec in load_specs(spec_path(file)).specs)


def truth_of(inputs: MlaInputs) -> tuple[Tensor, Tensor, Tensor]:
    """(out and lse in fp64, out of torch's plain attention in q's dtype)."""
    truth = inputs.truth()
    assert truth["out"].plain is not None
    return truth["out"].exact, truth["lse"].exact, truth["out"].plain


def mla_by_reference(q: Tensor, kv_cache: Tensor, seqlens_kv: Tensor | int, *, schedule: Any = None,
                     return_lse: bool = False, out: Tensor | None = None, head_dim_v: int = 512, spec: object = None,
                     lse_counts_sink: bool = True, **keywords: Any) -> Any:
    """flashgen.mla_decode's signature over the fp64 reference."""
    if isinstance(seqlens_kv, int):
        seqlens_kv = torch.full((q.shape[0],), seqlens_kv, dtype=torch.int32)
    inputs = MlaInputs(q, kv_cache, seqlens_kv, **keywords)
    exact, lse, _ = truth_of(inputs)
    if not lse_counts_sink:
        lse = truth_of(inputs.with_(sink=None))[1]
    result = exact.to(q.dtype) if out is None else out.copy_(exact)
    return (result, lse.float()) if return_lse else result


def decode(inputs: MlaInputs, **more: Any) -> Any:
    return flashgen.mla_decode(inputs.q, inputs.kv_cache, inputs.seqlens_kv, **inputs.keywords, **more)


def decoded(inputs: MlaInputs, problem: MlaProblem | str = "", *, spec: Spec | None = None, judged: bool = True,
            **more: Any) -> tuple[Tensor, Tensor]:
    """(out, lse) into memory that held NaN before, judged against fp64."""
    from flashgen.runtime.ops.mla_decode.problem import run_poisoned

    out, lse = run_poisoned(inputs, spec=spec, **more)
    if judged:
        check(named(out, lse), inputs, label=f"{spec.variant if spec else 'mla_decode'}, {problem}",
                  rerun=f"pytest '{os.environ.get('PYTEST_CURRENT_TEST', '').partition(' ')[0]}'")
    return out, lse


def with_nans(inputs: MlaInputs) -> MlaInputs:
    """Of three requests: with NaN in a value of the first, the last key of the second, a RoPE column of the third."""
    cache = inputs.kv_cache.clone()
    for i, position, column in ((0, 20, 7), (1, 65, 100), (2, 2, 570)):
        at = (i, position) if inputs.page_table is None else (
            int(inputs.page_table[i, position // cache.shape[1]]), position % cache.shape[1])
        cache[at][column] = math.nan
    return inputs.with_(kv_cache=cache)


def with_last_keys(inputs: MlaInputs, value: float, column: int = 100) -> MlaInputs:
    """With `value` in each request's last key, which under a causal mask only the last token sees."""
    cache, rows = inputs.kv_cache.clone(), inputs.kv_cache.shape[1]
    for i, length in enumerate(inputs.seqlens_kv.tolist()):
        if length > 0:
            page = i if inputs.page_table is None else int(inputs.page_table[i, (length - 1) // rows])
            cache[page, (length - 1) % rows, column] = value
    return inputs.with_(kv_cache=cache)


def solved(problem: MlaProblem, device: str = "cpu", **more: Any) -> tuple[Tensor, Tensor]:
    return decoded(problem.make_inputs(device), problem, **more)
