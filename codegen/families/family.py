"""What a family provides: how attention is computed, from the fields of a spec to the plan of a kernel.

A folder holds all of it, and registry.py its row. Its family.py imports facts and launch rules alone: what lowers and
explains is imported when it is called, and options are plain classes, so that a bundle is served without pydantic and
the generator.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from flashgen.codegen.families.shared.tiles import TileTable
from flashgen.codegen.plan import Plan
from flashgen.codegen.program import Program
from flashgen.codegen.spec.rule import Only, Rule
from flashgen.codegen.target import FEATURES


@dataclass(frozen=True)
class Option:
    """A spec field of the family alone: `name: Annotated[type, Option(...)] = default` in its class of options."""

    about: str
    unit: str = ""
    short: Callable[[Any], str] = "{}".format  # its part of a variant's name, where it has another value than default
    override: bool = False                     # whether overrides may set it
    after: str = ""                            # the common field that it details, behind which it stands
    limits: Mapping[str, Any] = field(default_factory=dict)  # of numbers: ge, le


class Trait(NamedTuple):
    """An option that decides which calls a kernel serves, or serves well."""

    option: str
    unasked: Any                               # what a call had better have that does not say
    serving: Callable[[Any], tuple[Any, ...]]  # from what a call had better have to what serves it, the best first


class DenseCall(NamedTuple):
    """What a dense call without a window says of its kernel, beside the family's own options."""

    arch: str
    dtype: str
    head_dim_qk: int
    head_dim_v: int
    causal: bool


# From a call, its sizes and the number of SMs to values of traits; None where the target has no kernels to choose from.
Prefer = Callable[[DenseCall, Any, int], tuple[tuple[str, Any], ...] | None]


@dataclass(frozen=True)
class Pass:
    """One kernel of the family, and the operation that it answers."""

    name: str                                # value of the spec field `pass`
    op: str                                  # a folder of runtime/ops, or a call beside it
    about: str
    lower: Callable[[Any, Any], Any]         # from (Spec, Target) to Plan
    launch: Callable[[Mapping[str, Plan], Any, int], Program]  # from plans by pass, the sizes of a call, and SMs
    smallest: Callable[[Plan], Any]          # the sizes of the smallest call of a plan
    explain: Callable[..., Any] | None = None  # from (plan, spec), registers=, variants= and the sizes of a call
    one_variant: bool = False                # the same kernel for all variants of a file
    prefer: Prefer | None = None             # which values of traits serve a call of these sizes best
    kernels: tuple[tuple[tuple[str, Any], ...], ...] = ((),)  # of one call, in their order: traits that tell them apart


@dataclass(frozen=True)
class Family:
    name: str
    feature: str              # key of target.FEATURES: what its targets have
    cards: str                # the same for people
    arch: str                 # the target that examples show
    rank: int                 # the lowest of the families that can serve a call does: the fastest
    passes: tuple[Pass, ...]
    options: type             # its own spec fields
    only: tuple[Only, ...]    # what it takes of the common fields
    rules: tuple[Rule, ...] = ()
    traits: tuple[Trait, ...] = ()       # the first decides most
    tiles: TileTable[Any] | None = None  # None: it has one tile
    typical: Mapping[str, Any] = field(default_factory=dict)  # what the variant has that stands for a file
    short_names: tuple[str, ...] = ()    # what specs' names may begin with instead of its name
    default: bool = False                # names that begin with no family mean this one
    needs_maps: bool = False             # its kernels read q, k and v through tensor maps
    emulated: bool = False               # it serves calls on CPU tensors that name no spec
    trace_depth: int = 1                 # calls from its kernels' bodies to the statements that tell what happens

    def __post_init__(self) -> None:
        assert self.feature in FEATURES and self.passes, self.name

    @property
    def by_op(self) -> dict[str, Pass]:
        return {found.op: found for found in self.passes}

    @property
    def by_name(self) -> dict[str, Pass]:
        return {found.name: found for found in self.passes}
