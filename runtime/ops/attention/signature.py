"""What flashgen.attention takes. Imports nothing, as ops/signature.py says."""
from __future__ import annotations

from flashgen.runtime.ops.signature import Arg, Option, Options, Shape, Signature, Tensors, inverse_root


def _shapes(tensors: Tensors, options: Options) -> tuple[Shape, ...]:
    q, _, v, cu_seqlens_q, _ = tensors
    lse = (q.shape[-2], q.shape[0]) if cu_seqlens_q is not None else (q.shape[0], q.shape[2], q.shape[1])
    return (*q.shape[:-1], v.shape[-1]), lse


ATTENTION = Signature(
    "attention", "flashgen.runtime.ops.attention.call",
    (Arg("q", rows=True), Arg("k", rows=True), Arg("v", rows=True), Arg("cu_seqlens_q", optional=True),
     Arg("cu_seqlens_kv", optional=True)),
    (Option("causal", "int"), Option("window_left", "SymInt"), Option("window_right", "SymInt"),
     Option("softmax_scale", "float", default=inverse_root), Option("spec", "str"), Option("ints", "SymInt[]", "[]"),
     Option("floats", "float[]", "[]")),
    _shapes, extra="tensors", gradient="flashgen.runtime.ops.attention.gradient")
