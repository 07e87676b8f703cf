"""A decode on the device: inputs, our call on them, and FlashMLA, beside which it is timed."""
from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import flashgen
from flashgen.codegen.spec.spec import Spec
from flashgen.errors import VerifyError
from flashgen.runtime.measure.bench import Call, Device, Peer, Refused, own_words
from flashgen.runtime.measure.device import package_version
from flashgen.runtime.ops.mla_decode.bench import HEAD_DIM_QK, HEAD_DIM_V, MlaCase
from flashgen.runtime.ops.mla_decode.problem import MlaInputs, MlaProblem

PAGE_SIZE = 64
CRASH_HEADS, CRASH_TOKENS = 16, 256 * 1024
AGREE = 2e-2                        # of the largest value: a few roundings to bf16


def inputs(device: Device, case: MlaCase, spec: Spec) -> MlaInputs:
    """N(0, 1) tensors, pages in random order."""
    return MlaProblem((case.seqlen_kv,) * case.batch, case.num_heads_q, case.seqlen_q,
                      PAGE_SIZE if spec.kv_layout == "paged" else None, causal=case.seqlen_q > 1, dtype=case.dtype
                      ).make_inputs(device.place)


class DecodeJob:
    """Ours, which writes `out`, and the inputs that peers share."""

    def __init__(self, case: MlaCase, spec: Spec, inputs: MlaInputs) -> None:
        self.case, self.spec, self.inputs = case, spec, inputs
        self.out: Tensor = inputs.q.new_full((*inputs.q.shape[:-1], HEAD_DIM_V), float("nan"))

    def ours(self) -> Sequence[Call]:
        """With the schedule at hand."""
        x, spec, out = self.inputs, self.spec, self.out
        schedule = flashgen.mla_schedule(x.seqlens_kv, self.case.num_heads_q, self.case.seqlen_q)

        def call() -> object:
            return flashgen.mla_decode(x.q, x.kv_cache, x.seqlens_kv, **x.keywords, schedule=schedule, out=out,
                                       spec=spec)

        call()
        if not out.isfinite().all():  # a kernel that writes nothing would be fast
            raise VerifyError("out is not finite", where=f"{spec.variant}.{spec.arch}", next="flashgen verify")
        return [call]


job = DecodeJob


# -- FlashMLA

# Works out the metadata of inputs, whose cache is [pages, page_size, 1, head_dim_qk]; what it gives is timed.
Start = Callable[[MlaInputs], Callable[[], Tensor]]


def find(peer: str) -> Peer:
    """The package flash_mla, or else the extension with it in another wheel, which is loaded by itself: the package
    around it need not be importable. Refused says what is missing."""
    with own_words():
        if importlib.util.find_spec("flash_mla") is not None:
            start = _package_start(importlib.import_module("flash_mla"))
            return flashmla("flash_mla", package_version("flash_mla"), start)
        for package, (file, ops, make) in EXTENSIONS.items():
            found = importlib.util.find_spec(package)
            for folder in (found and found.submodule_search_locations) or ():
                if (path := Path(folder) / file).is_file():
                    torch.ops.load_library(path)
                    return flashmla(package, package_version(package), make(getattr(torch.ops, ops)))
    files = ", ".join(f"{package}/{file}" for package, (file, _, _) in EXTENSIONS.items())
    raise Refused(f"neither flash_mla nor one of {files} is on the path; pip install sgl-kernel")


def flashmla(package: str, version: str | None, start: Start) -> Peer:
    return Peer(lambda job: [started(start, job)], ((package, version),))


def started(start: Start, job: DecodeJob) -> Call:
    """Refused if FlashMLA would die of the case, or answers something else than `out` holds."""
    case, x = job.case, job.inputs
    if case.num_heads_q <= CRASH_HEADS and case.batch * case.seqlen_kv >= CRASH_TOKENS:
        raise Refused(f"with {CRASH_HEADS} query heads and {CRASH_TOKENS // 1024}k or more cached tokens in the "
                      "batch it dies of an illegal memory access, and the process with it")
    if x.page_table is None:
        raise Refused("it takes pages only")
    table = x.page_table.clone()
    table[:, -(-case.seqlen_kv // PAGE_SIZE):] = table[:, :1]  # it may read there
    call = start(x.with_(kv_cache=x.kv_cache.unsqueeze(2), page_table=table))
    difference = float((call().float() - job.out.float()).abs().max() / job.out.float().abs().max())
    if not difference < AGREE:
        raise Refused(f"its answer differs from ours by {difference:.2g} of the largest value")
    return call


def _package_start(module: Any) -> Start:
    """Versions whose metadata are tensors, and later ones that ignore these arguments and fill them in a first call."""
    def start(x: MlaInputs) -> Callable[[], Tensor]:
        metadata = module.get_mla_metadata(x.seqlens_kv, x.q.shape[1] * x.q.shape[2], 1)
        return lambda: module.flash_mla_with_kvcache(
            x.q, x.kv_cache, x.page_table, x.seqlens_kv, HEAD_DIM_V, *metadata, softmax_scale=HEAD_DIM_QK ** -0.5,
            causal=x.causal)[0]
    return start


def _sgl_start(ops: Any) -> Start:
    def start(x: MlaInputs) -> Callable[[], Tensor]:
        tokens, heads = x.q.shape[1:3]
        metadata = ops.get_mla_decoding_metadata(x.seqlens_kv, tokens * heads, 1, heads, False, None)
        return lambda: ops.fwd_kvcache_mla(x.q, x.kv_cache, HEAD_DIM_V, x.seqlens_kv, x.page_table, HEAD_DIM_QK ** -0.5,
                                           x.causal, *metadata, False, None)[0]
    return start


def _vllm_start(ops: Any) -> Start:
    """The op returns the metadata that it made, or was given."""
    def start(x: MlaInputs) -> Callable[[], Tensor]:
        arguments = x.q, x.kv_cache, HEAD_DIM_V, x.seqlens_kv, x.page_table, HEAD_DIM_QK ** -0.5, x.causal
        metadata = ops.dense_decode_fwd(*arguments, None, None, None)[2:]
        return lambda: ops.dense_decode_fwd(*arguments, *metadata, None)[0]
    return start


# Wheels with FlashMLA in a library of torch ops: file, namespace. The first is built from its sources as they are; the
# second has a version of its own.
EXTENSIONS: dict[str, tuple[str, str, Callable[[Any], Start]]] = {
    "sgl_kernel": ("flashmla_ops.abi3.so", "sgl_kernel", _sgl_start),
    "vllm": ("_flashmla_C.abi3.so", "_flashmla_C", _vllm_start),
}
