"""What the gradients kernels of fa3's backward have in common, for narrow and wide heads: parameters and numbers."""
from __future__ import annotations

from typing import TYPE_CHECKING

from flashgen.codegen.families.shared.backward_lower import gradient_params, gradient_sizes, gradient_strides
from flashgen.codegen.plan import Param
from flashgen.codegen.slots import MASKS

if TYPE_CHECKING:
    from flashgen.codegen.families.fa3.options import Spec

CONSUMERS = 2          # warpgroups
CONSUMERS_BARRIER = 1  # a named barrier
BLOCK_BYTES = 64       # struct KeyBlock, at most


def gradients_params(spec: Spec, mask: str, row_terms: str) -> tuple[Param, ...]:
    """Tensor maps first, for their alignment; then pointers and 64-bit strides, so that the struct has no holes."""
    heads = "kv heads" + ("" if spec.kv_layout == "varlen" else " of all sequences")
    return (
        *(Param(f"{name}_map", "tensor_map", f"of {name}: [head_dim, rows, heads, batch]")
          for name in ("q", "k", "v", "dout", "dk", "dv")),
        *gradient_params(spec, row_terms), *gradient_strides(spec), *gradient_sizes(spec), *MASKS[mask],
        Param("num_heads", "i32", heads),
        Param("heads_per_section", "i32", "of them, whose blocks come in turns, the longest first"),
        Param("section_blocks", "divisor", "blocks of a section: n_tiles * heads_per_section"),
    )
