"""What flashgen.attention_backward takes. Imports nothing, as ops/signature.py says."""
from __future__ import annotations

from flashgen.runtime.ops.signature import Arg, Option, Options, Shape, Signature, Tensors, inverse_root


def _shapes(tensors: Tensors, options: Options) -> tuple[Shape, ...]:
    return tuple(t.shape for t in tensors[1:4])


def _inverse_root(tensors: Tensors) -> float:
    return inverse_root(tensors[1:])


ATTENTION_BACKWARD = Signature(
    "attention_backward", "flashgen.runtime.ops.attention_backward.call",
    (Arg("dout", rows=True), Arg("q", rows=True), Arg("k", rows=True), Arg("v", rows=True), Arg("out", rows=True),
     Arg("lse"), Arg("dlse", optional=True), Arg("cu_seqlens_q", optional=True), Arg("cu_seqlens_kv", optional=True)),
    (Option("causal", "int"), Option("window_left", "SymInt"), Option("window_right", "SymInt"),
     Option("softmax_scale", "float", default=_inverse_root), Option("spec", "str"), Option("deterministic", "bool"),
     Option("ints", "SymInt[]", "[]"), Option("floats", "float[]", "[]")),
    _shapes, extra="tensors", results=("dq", "dk", "dv"), has_lse=False,
    gradient="flashgen.runtime.ops.attention_backward.call")
