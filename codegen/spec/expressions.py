"""Score and mask expressions of a Spec: read, checked against its other fields, and in the form that names its kernel.

What a kernel is made from is the canonical form, without the defaults of parameters: specs that write one thing in two
ways, or give other defaults, share a kernel.
"""
from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flashgen.codegen.expr.canon import canonical
from flashgen.codegen.expr.params import read_params
from flashgen.codegen.expr.parse import parse
from flashgen.codegen.expr.tree import Expr, Param, TensorParam, names_of
from flashgen.errors import SpecError

if TYPE_CHECKING:
    from flashgen.codegen.spec.fields import Common

NONE = "none"  # in place of an expression
SINK = TensorParam("sink", "float32", ("num_heads_q",))  # what `sink: per_head` adds to the parameters
_PACKED, _PADDED = ("total_q", "total_kv"), ("seqlen_q", "seqlen_kv")


@dataclass(frozen=True)
class Expressions:
    """The canonical trees, None for none, and the parameters that they read, sorted by name, then the sink."""

    score: Expr | None
    mask: Expr | None
    params: tuple[Param, ...]

    def __bool__(self) -> bool:
        return self.score is not None or self.mask is not None

    @property
    def signature(self) -> str:
        """Equal for two variants exactly if their expressions are the same program."""
        trees = (("score", self.score), ("mask", self.mask))
        return "; ".join([*(f"{name}: {tree.text}" for name, tree in trees if tree is not None),
                          *map(str, self.params)])

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.signature.encode()).hexdigest()[:8]


def checked_params(value: Any) -> tuple[Param, ...]:
    """What the field `params` holds, from a mapping as in YAML or from what another Spec holds. Raises SpecError."""
    if isinstance(value, tuple) and all(isinstance(item, Param.__args__) for item in value):  # type: ignore[attr-defined]
        return value
    return tuple(read_params(value, "Spec.params").values())


def plain_params(params: tuple[Param, ...]) -> dict[str, dict[str, Any]]:
    """The mapping that checked_params reads."""
    return {param.name: {"type": "tensor", "dtype": param.dtype, "shape": list(param.shape), "sorted": param.sorted}
            if isinstance(param, TensorParam) else {"type": param.type, "default": param.default} for param in params}


def expressions(spec: Common) -> Expressions:
    """Raises SpecError at Spec.score or Spec.mask, with the column in the text."""
    return _expressions(spec.score, spec.mask, spec.params, spec.sink)


@functools.lru_cache(maxsize=1024)
def _expressions(score: str, mask: str, params: tuple[Param, ...], sink: str) -> Expressions:
    known = {param.name: param for param in params}
    trees = {kind: None if text == NONE else canonical(parse(text, known, kind, f"Spec.{kind}"))  # type: ignore[arg-type]
             for kind, text in (("score", score), ("mask", mask))}
    used = {name for tree in trees.values() if tree is not None for name in names_of(tree)}
    read = [known[name] for name in sorted(used & known.keys())]
    return Expressions(trees["score"], trees["mask"], (*read, *((SINK,) if sink != NONE else ())))


# ---- rules between fields: rules.RULES lists them

def readable(spec: Common) -> SpecError | None:
    try:
        expressions(spec)
    except SpecError as error:
        return error
    if spec.sink != NONE and any(param.name == SINK.name for param in spec.params):
        return SpecError("sink: per_head brings a parameter of its own called sink", where=f"Spec.params.{SINK.name}",
                         allowed="another name", nearest="sink_param")
    return None


def shapes(spec: Common) -> SpecError | None:
    """A packed call has no common length, and a padded one no total."""
    absent, has = (_PADDED, _PACKED) if spec.kv_layout == "varlen" else (_PACKED, _PADDED)
    for param in expressions(spec).params:
        for dim in param.shape if isinstance(param, TensorParam) else ():
            if dim in absent:
                return SpecError(f"shape of {param.name} holds {dim} with kv_layout {spec.kv_layout}",
                                 where=f"Spec.params.{param.name}.shape", allowed=", ".join(has),
                                 nearest=has[absent.index(str(dim))], next="give each kv_layout a spec of its own")
    return None


def one_mask(spec: Common) -> SpecError | None:
    built_in = next((name for name in ("causal", "window") if getattr(spec, name)), None)
    if spec.mask == NONE or built_in is None:
        return None
    return SpecError(f"mask is an expression together with {built_in}", where="Spec.mask", allowed="one of the two",
                     next="`kv_pos <= q_pos and (...)` makes a mask causal")


def alignment(spec: Common) -> SpecError | None:
    if spec.align == "bottom_right" or (expressions(spec) and not spec.causal and not spec.window):
        return None
    return SpecError("align is top_left " + ("together with causal or window" if spec.causal or spec.window
                                             else "without an expression"), where="Spec.align",
                     allowed='bottom_right; a call says causal="top_left" to causal and window kernels')


def unnormalized(spec: Common) -> SpecError | None:
    if spec.normalize == "softmax":
        return None
    for name, value, fix in (("lse", True, "false"), ("sink", "per_head", "none")):
        if getattr(spec, name) == value:
            return SpecError(f"{name} is {str(value).lower()} with normalize: none, which has no denominator",
                             where=f"Spec.{name}", allowed=fix, nearest=f"{name}: {fix}")
    return None


def unused(specs: Sequence[Common]) -> Iterator[str]:
    """Parameters that no variant of a file reads."""
    read = {param.name for spec in specs for param in expressions(spec).params}
    yield from sorted({param.name for spec in specs for param in spec.params} - read)
