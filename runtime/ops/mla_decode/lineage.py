"""The generations of a decode over a latent cache: naive, absorbed, and the families that answer it. No torch.

All start from a cache of latents and one new token or a few for each request, of a model with DeepSeek's head sizes:

- `naive` multiplies the cache into full K and V of every head, as the definition has it, and attends to those;
- `absorbed` moves these products to q and to the result, so that all heads attend to the latents themselves, by
  torch's products with the scores in device memory;
- a family does the same in one kernel.

The products that absorbing moves, of W_uk with q and of W_uv with the result, belong to the layers around attention:
they do not grow with the cache, and no generation is charged for them.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from flashgen.codegen.dtype import DTYPES
from flashgen.codegen.explain.cost import Cost, Moved
from flashgen.codegen.explain.explain import explain_plan
from flashgen.codegen.families.registry import by_generation, lower
from flashgen.codegen.target import TARGETS
from flashgen.errors import FlashgenError, UnsupportedError
from flashgen.runtime.measure.lineage import FORWARD, STEP, Generation, Lineage, shipped_specs
from flashgen.runtime.ops.mla_decode.bench import AXES, HEAD_DIM_QK, HEAD_DIM_V, MlaCase, cases_of, variant_for

OP = "mla_decode"
NOPE, ROPE, V_DIM, LATENT = 128, HEAD_DIM_QK - HEAD_DIM_V, 128, HEAD_DIM_V  # of a head; DeepSeek-V2 and V3
NAIVE, ABSORBED = "naive", "absorbed"
STORIES = {NAIVE: "the latent cache is multiplied into full K and V of each head, at every token",
           ABSORBED: "W_uk moves into q and W_uv behind the result; torch's products, S and P in device memory"}


class DecodeLineage(Lineage):
    stem = "lineage-mla-decode"
    words: ClassVar = {"batch": "batch", "cached": "seqlen_kv", "heads": "num_heads_q", "new": "seqlen_q",
                       "dtype": "dtype"}
    axes = AXES
    sweep = "seqlen_kv"
    module = "flashgen.runtime.ops.mla_decode.lineage_timed"

    def case(self, values: dict[str, Any], where: str) -> MlaCase:
        [found] = cases_of({"seqlen_q": 1, **values}, where)
        return found

    def in_json(self, case: MlaCase) -> dict[str, Any]:
        return {name: getattr(case, name) for name in self.words.values()}

    def generations(self, case: MlaCase, archs: Sequence[str], num_sms: int, backward: bool) -> list[Generation]:
        target = TARGETS[archs[0]]
        found = [
            Generation(NAIVE, STORIES[NAIVE], FORWARD, (), naive_flops(case), case.bytes + weight_bytes(case),
                       Cost.of(*_naive(case), target)),
            Generation(ABSORBED, STORIES[ABSORBED], FORWARD, (), case.flops, case.bytes,
                       Cost.of(*_absorbed(case), target))]
        for family in by_generation(OP):
            found.append(_family(family.name, family.story, case, archs))
        steps = [Generation(one.name, one.story, STEP, refused="a decode has no backward pass") for one in found]
        return [one for pair in zip(found, steps, strict=True) for one in pair] if backward else found


def _family(name: str, story: str, case: MlaCase, archs: Sequence[str]) -> Generation:
    own = [spec for spec in shipped_specs() if spec.family == name]
    fitting = [spec for arch in archs for spec in own if spec.arch == arch]
    if not fitting:
        runs_on = ", ".join(dict.fromkeys(spec.arch for spec in own))
        return Generation(name, story, refused=f"it has no kernels for {archs[0]}, only for {runs_on}")
    try:
        spec = variant_for(case, fitting)
        cost = explain_plan(lower(spec), spec, batch=case.batch, seqlen_q=case.seqlen_q, seqlen_kv=case.seqlen_kv,
                            num_heads_q=case.num_heads_q).cost()
    except UnsupportedError as err:
        return Generation(name, story, refused=err.what)
    except FlashgenError:
        cost = None
    return Generation(name, story, FORWARD, (spec,), case.flops, case.bytes, cost)


# -- what the baselines move


def weight_bytes(case: MlaCase) -> int:
    """Of W_uk and W_uv."""
    return case.num_heads_q * LATENT * (NOPE + V_DIM) * DTYPES[case.dtype].bytes


def naive_flops(case: MlaCase) -> int:
    """Of the products that make K and V, and of attention over them."""
    keys = case.batch * case.seqlen_kv * case.num_heads_q
    return 2 * keys * LATENT * (NOPE + V_DIM) + 2 * keys * case.seqlen_q * (NOPE + ROPE + V_DIM)


def _naive(case: MlaCase) -> tuple[Mapping[str, Moved], int]:
    """(kernels, scratch bytes): K is put together of what its product gives and of the shared RoPE columns."""
    size, tokens = DTYPES[case.dtype].bytes, case.batch * case.seqlen_kv
    keys, rows = tokens * case.num_heads_q, case.rows
    nope, value, key = keys * NOPE * size, keys * V_DIM * size, keys * (NOPE + ROPE) * size
    latent, rope = tokens * LATENT * size, tokens * ROPE * size
    product, attention = 2 * keys * LATENT, 2 * keys * case.seqlen_q
    return {"K": Moved(latent + weight_bytes(case) // 2, nope, product * NOPE),
            "V": Moved(latent + weight_bytes(case) // 2, value, product * V_DIM),
            "RoPE": Moved(nope + rope, key, 0),
            "attention": Moved(key + value + rows * (NOPE + ROPE) * size, rows * V_DIM * size,
                               attention * (NOPE + ROPE + V_DIM))}, nope + value + key


def _absorbed(case: MlaCase) -> tuple[Mapping[str, Moved], int]:
    """(kernels, scratch bytes): S and P in the dtype of the inputs, as torch's products give and take them."""
    size, tokens, rows = DTYPES[case.dtype].bytes, case.batch * case.seqlen_kv, case.rows
    scores, pairs = rows * case.seqlen_kv * size, rows * case.seqlen_kv
    return {"scores": Moved((tokens + rows) * HEAD_DIM_QK * size, scores, 2 * pairs * HEAD_DIM_QK),
            "softmax": Moved(scores, scores, 0),
            "values": Moved(scores + tokens * HEAD_DIM_V * size, rows * HEAD_DIM_V * size, 2 * pairs * HEAD_DIM_V)
            }, 2 * scores


LINEAGE = DecodeLineage()
