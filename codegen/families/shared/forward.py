"""What families have in common that compute attention for many queries: their pass, and what they take of a spec."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from flashgen.codegen.families.family import Pass, Prefer, lazily
from flashgen.codegen.families.shared.launch import smallest_call
from flashgen.codegen.families.shared.loops import KvLoop
from flashgen.codegen.plan import Plan
from flashgen.codegen.program import Program
from flashgen.codegen.spec.rule import Only

HEAD_DIMS = range(8, 257, 8)

ONLY = (
    Only("head_dim_qk", HEAD_DIMS, "what their tiles cover"),
    Only("head_dim_v", HEAD_DIMS, "what their tiles cover"),
    Only("kv_layout", ("dense", "varlen")),
)


def forward(lower: Callable[[Any, Any], Any], launch: Callable[[Mapping[str, Plan], Any, int], Program],
            loops: Callable[[Plan], tuple[KvLoop, ...]], prefer: Prefer | None = None) -> Pass:
    return Pass("fwd", "attention", "many queries", lower, launch, smallest_call,
                lazily("flashgen.codegen.explain.text", "explain_attention"), prefer=prefer, loops=loops,
                only=(Only("deterministic", (False,), "its results always have the same bits"),))
