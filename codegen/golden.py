"""Writes generated/: one kernel of each shipped spec as a person reads it, reviewed in diffs.

    python -m flashgen.codegen.golden

One per spec, because nobody reads five hundred; the others differ from it by a row of constants or a slot file. Where
a call launches several kernels of a spec, all of them.
"""
from __future__ import annotations

from pathlib import Path

from flashgen.codegen.families.registry import lower, pass_of
from flashgen.codegen.render import render
from flashgen.codegen.spec.spec import Spec, load_specs, shipped_spec_paths, variant_spec_paths

GENERATED = Path(__file__).resolve().parent.parent / "generated"
GOLDEN_VARIANTS = ("window_sinks",)  # of those with expressions, one that has all kinds of parts
GOLDEN_ARCH, GOLDEN_DTYPE, GOLDEN_HEAD_DIM = "sm_90", "bf16", 128


def golden_spec(path: Path) -> Spec:
    """The variant of a spec file that is committed: Hopper, bf16, dense (or the largest pages), causal, the head dim
    nearest to 128.

    Of a file without one of these the next best, so that every family has its kernel here.
    """
    return min(load_specs(path).specs, key=lambda s: (
        not s.arch.startswith(GOLDEN_ARCH), s.dtype != GOLDEN_DTYPE, -(s.page_size or 0), s.kv_layout != "dense",
        not s.causal, abs(s.head_dim_qk - GOLDEN_HEAD_DIM)))


def golden_files() -> dict[str, str]:
    """File name -> text of everything that belongs in generated/."""
    files = {}
    for path in (*shipped_spec_paths(), *(p for p in variant_spec_paths() if p.stem in GOLDEN_VARIANTS)):
        spec = golden_spec(path)
        for kernel in pass_of(spec).kernels:
            plan = lower(spec.with_(**dict(kernel)))
            files[f"{plan.kernel_name}.{plan.language}"] = render(plan).text
            files[f"{plan.kernel_name}.plan.json"] = plan.to_json() + "\n"
    return files


def main() -> None:
    files = golden_files()
    for stale in {path.name for path in GENERATED.glob("*.*")} - files.keys() - {"README.md"}:
        (GENERATED / stale).unlink()
    for name, text in files.items():
        (GENERATED / name).write_text(text, encoding="utf-8")
        print(GENERATED / name)


if __name__ == "__main__":
    main()
