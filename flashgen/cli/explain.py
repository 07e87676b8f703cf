"""`flashgen explain`."""
from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from flashgen.cli.common import Archs, Output, SpecArgument, Variants, command, select
from flashgen.errors import EnvironmentError_

if TYPE_CHECKING:
    from flashgen.codegen.explain.explain import Explanation
    from flashgen.codegen.spec.spec import Spec


def register(app: typer.Typer) -> None:
    command(app, explain)


def explain(spec: SpecArgument, arch: Archs = None, variant: Variants = None, problem: Annotated[str, typer.Option(
        "--problem", metavar="SIZES", help='Sizes of the call, such as "batch=2 seqlen_q=8192 num_heads_q=16". '
        "Names: batch, seqlen_q, seqlen_kv, num_heads_q, num_heads_kv, window=left,right.")] = "") -> Output:
    """Show one variant's plan, memory, work and roofline. Needs no GPU, and no compiler."""
    from flashgen.codegen.explain.counts import parse_shape
    from flashgen.codegen.explain.explain import explain as explain_spec
    from flashgen.codegen.explain.explain import typical

    specs = select([spec], arch, variant)
    chosen = typical(specs)
    explanation = explain_spec(chosen, registers=_registers(chosen), variants=len(specs), **parse_shape(problem))
    return Output(explanation.to_json(), [f"{explanation}\n{_launched(explanation)}look-up\n  {_served(chosen)}"])


def _launched(explanation: Explanation) -> str:
    """The blocks of a launch that has as many warpgroups as the call's rows ask for, at most the plan's."""
    from flashgen.codegen.families.registry import program_of
    from flashgen.codegen.families.shared.launch import Sizes
    from flashgen.codegen.warpgroup import WARPGROUP_ROWS

    plan, shape = explanation.plan, explanation.shape
    if all(param.name != "warpgroups" for param in plan.params):
        return ""
    packs = shape.batch if plan.spec_value("kv_layout") == "varlen" else 1
    sizes = Sizes(shape.batch, shape.seqlen_q * packs, shape.seqlen_kv * packs, shape.num_heads_q, shape.num_heads_kv,
                  window=shape.window)
    [step] = program_of(plan, sizes, explanation.target.device.num_sms).steps
    values = {name: int(value) for name, value in step.values.items()}
    rows, most, splits = values["block_rows"], plan.constant("BLOCK_M"), values["max_splits"]
    above = f", where the work above has {most}," if rows < most else ","
    cut = (f": the keys of {values['num_tiles'] - values['full_tiles']} tiles in up to {splits} splits" if splits > 1
           else ", none split along its keys")
    return (f"launch\n  {step.grid_x} blocks of {step.threads} threads: query tiles of {rows} rows{above} by "
            f"{rows // WARPGROUP_ROWS} of {most // WARPGROUP_ROWS} warpgroups\n  {values['num_work_tiles']} work tiles"
            f"{cut}\n")


def _served(spec: Spec) -> str:
    """Which kernel a call of the operation takes, of those that this one serves, and why not one of a faster family."""
    from flashgen.codegen.families.registry import FAMILIES, op_of, pass_of
    from flashgen.codegen.target import TARGETS
    from flashgen.runtime.select.lookup import why
    from flashgen.runtime.select.selector import Wanted, selector

    if op_of(spec) == "mla_decode":
        return "flashgen.mla_decode takes it by dtype, head_dim_qk, kv_layout and page size"
    if selector(spec.fields(), spec.arch).score != "none":
        return "no call gets it unasked: flashgen.attention(..., spec=..., params=...)"
    if FAMILIES[spec.family].fallback:  # calls ask every family for the first of their kernels
        spec = spec.with_(**dict(pass_of(spec).kernels[0]))
    wanted = Wanted(spec.dtype, spec.head_dim_qk, spec.head_dim_v, spec.causal, spec.window, spec.kv_layout, spec.lse,
                    op=op_of(spec),
                    traits=tuple((trait.option, getattr(spec, trait.option)) for trait in FAMILIES[spec.family].traits))
    target = TARGETS[spec.arch]
    on = f"compute capability {target.capability}" if target.is_nvidia else target.name
    return f"such calls on {on} get {why(wanted, target.cc)}"


def _registers(spec: Spec) -> int | None:
    """Registers per thread of the cached build. None without one, and where there is no NVRTC to name its key."""
    import warnings

    from flashgen.codegen.families.registry import lower
    from flashgen.codegen.render import render
    from flashgen.runtime.compile.cache import Cache

    plan = lower(spec)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an unusable cache is none of explain's business
            entry = Cache().get(plan, render(plan))
    except EnvironmentError_:
        return None
    return entry.cubin.resources.registers or None if entry else None
