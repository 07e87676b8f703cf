"""What a family provides: how attention is computed, from the fields of a spec to the plan of a kernel.

A folder holds all of it, and registry.py its row. Its family.py imports facts and launch rules alone: what lowers and
explains is imported when it is called, and options are plain classes, so that a bundle is served without pydantic and
the generator.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, NamedTuple

from flashgen.codegen.families.shared.loops import KvLoop
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
    short: Callable[[Any], str] = "{}".format  # its part of a variant's name, for values other than the default
    override: bool = False                     # whether overrides may set it
    after: str = ""                            # the common field that it details, behind which it stands
    limits: Mapping[str, Any] = field(default_factory=dict)  # ge and le, for numbers


class Trait(NamedTuple):
    """An option that decides which calls a kernel serves, or serves well."""

    option: str
    unasked: Any                               # the value wanted by a call that does not say
    serving: Callable[[Any], tuple[Any, ...]]  # the values that serve a call which wants this one, the best first


def lazily(module: str, name: str) -> Callable[..., Any]:
    """A function that imports the one of a module when it is called: what lowers and explains needs specs."""
    def call(*arguments: Any, **keywords: Any) -> Any:
        return getattr(import_module(module), name)(*arguments, **keywords)
    return call


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
    op: str                                  # the operation, by which registry.fastest_first finds families
    about: str
    lower: Callable[[Any, Any], Any]         # from (Spec, Target) to Plan
    launch: Callable[[Mapping[str, Plan], Any, int], Program]  # from plans by pass, the sizes of a call, and SMs
    smallest: Callable[[Plan], Any]          # the sizes of the smallest call of a plan
    explain: Callable[..., Any] | None = None  # from (plan, spec), registers=, variants= and the sizes of a call
    one_variant: bool = False                # the same kernel for all variants of a file
    prefer: Prefer | None = None             # which values of traits serve a call of these sizes best
    loops: Callable[[Plan], tuple[KvLoop, ...]] | None = None  # over tiles of keys, for the skeleton
    kernels: tuple[tuple[tuple[str, Any], ...], ...] = ((),)  # of one call, in their order: traits that tell them apart
    shown: str | None = None                 # the kernel that stands for a call, where it has several
    only: tuple[Only, ...] = ()              # what it takes of a spec, beside what the family takes
    follows: bool = False                    # its kernels follow from a spec of another pass, whose gradients they make

    @property
    def kernel_names(self) -> tuple[str | None, ...]:
        """The values of the spec field `kernel`."""
        return tuple(dict(traits).get("kernel") for traits in self.kernels)


@dataclass(frozen=True)
class Family:
    name: str
    feature: str              # key of target.FEATURES: what its targets have
    cards: str                # the GPUs that it runs on, in words
    arch: str                 # the target that examples show
    rank: int                 # the family of lowest rank, which is the fastest, serves a call if it can
    passes: tuple[Pass, ...]
    options: type             # the class of its own spec fields
    only: tuple[Only, ...]    # what it takes of the common fields
    rules: tuple[Rule, ...] = ()
    traits: tuple[Trait, ...] = ()       # in order of weight: the first decides before the others
    tiles: TileTable[Any] | None = None  # None: it has one tile
    typical: Mapping[str, Any] = field(default_factory=dict)  # fields of the variant that stands for a spec file
    short_names: tuple[str, ...] = ()    # what specs' names may begin with instead of its name
    default: bool = False                # names that begin with no family mean this one
    needs_maps: bool = False             # its kernels read q, k and v through tensor maps
    named_only: bool = False             # no look-up chooses it, of shipped specs or of bundles: a call names its spec
    emulated: bool = False               # it serves calls on CPU tensors that name no spec
    engine: str = "cuda"                 # what its text is for: a row of runtime/launch/engines.py
    fallback: bool = False               # it serves calls that name no spec where no other family has the device
    trace_depth: int = 1                 # calls from its kernels' bodies to the statements that tell what happens
    generation: int = 0                  # its place in the lineage of attention, the oldest first; 0: not said
    story: str = ""                      # what it brought, in a line

    def __post_init__(self) -> None:
        assert self.feature in FEATURES and self.passes, self.name

    @property
    def by_op(self) -> dict[str, Pass]:
        return {found.op: found for found in self.passes}

    @property
    def by_name(self) -> dict[str, Pass]:
        return {found.name: found for found in self.passes}
