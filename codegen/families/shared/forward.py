"""What families have in common that compute attention for many queries: their pass, and what they take of a spec."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flashgen.codegen.families.family import Pass
from flashgen.codegen.spec.rule import Only

_HEAD_DIMS = range(8, 257, 8)

ONLY = (
    Only("head_dim_qk", _HEAD_DIMS, "what their tiles cover"),
    Only("head_dim_v", _HEAD_DIMS, "what their tiles cover"),
    Only("kv_layout", ("dense", "varlen")),
)


def forward(lower: Callable[[Any, Any], Any]) -> Pass:
    return Pass("fwd", "attention", "many queries", lower, _explain)


def _explain(plan: Any, spec: Any, **call: Any) -> Any:
    from flashgen.codegen.explain.text import explain_attention

    return explain_attention(plan, spec, **call)
