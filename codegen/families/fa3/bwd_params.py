"""Parameters of the gradients kernels of fa3's backward, which are the same for narrow and wide heads."""
from __future__ import annotations

from typing import TYPE_CHECKING

from flashgen.codegen.families.shared.backward_lower import gradient_params, gradient_sizes, gradient_strides
from flashgen.codegen.plan import Param
from flashgen.codegen.slots import MASKS

if TYPE_CHECKING:
    from flashgen.codegen.families.fa3.options import Spec


# How many key tiles there are is known on the device only where sequences are packed: postprocess then ends dQ.
_DQ = (Param("dq", "element_out", "as q; for the last block of a head"),
       Param("arrived_blocks", "i32_out", "[batch, num_heads_kv], blocks whose sums of dQ have arrived; at rest 0"))


def gradients_params(spec: Spec, mask: str) -> tuple[Param, ...]:
    """Tensor maps first, for their alignment; then pointers and 64-bit strides, so that the struct has no holes."""
    varlen = spec.kv_layout == "varlen"
    heads = "kv heads" + ("" if varlen else " of all sequences")
    return (
        *(Param(f"{name}_map", "tensor_map", f"of {name}: [head_dim, rows, heads, batch]")
          for name in ("q", "k", "v", "dout", "dk", "dv")),
        *gradient_params(spec), *(() if varlen else _DQ), *gradient_strides(spec),
        *(() if varlen else (Param(f"dq_{axis}_stride", "i64", "elements") for axis in ("batch", "row", "head"))),
        *gradient_sizes(spec), *MASKS[mask],
        Param("num_heads", "i32", heads),
        Param("heads_per_section", "i32", "of them, whose blocks come in turns, the longest first"),
        Param("section_blocks", "divisor", "blocks of a section: n_tiles * heads_per_section"),
        *(() if varlen else (
            Param("converts_dq", "i32", "1: the last block of a head rounds its dQ; 0: the next kernel does"),)),
    )
