"""The template rules hold, the lint catches breaches, headers stand alone, generated/ is current."""
from __future__ import annotations

import shutil

import pytest
from sampling import one_in
from template_lint import lint

from flashgen.codegen import render as rendering
from flashgen.codegen.families.registry import lower
from flashgen.codegen.golden import GENERATED, golden_files, golden_spec
from flashgen.codegen.render import TEMPLATES, reached_headers, render
from flashgen.codegen.source import Source
from flashgen.codegen.spec.spec import Spec, shipped_spec_paths
from flashgen.codegen.target import TARGETS
from flashgen.codegen.wgmma import HEADER, WgmmaShape, render_wgmma

MAX_GENERATED_LINES, MAX_GENERATED_COLUMNS = 640, 110
LONGER = {  # kernel: (lines, why)
    "mla_h100_bf16_d576v512_paged1": (700, "pages of one row: four warps gather the rows one by one"),
    "window_sinks_bf16_d128_fa3_sink_x00855378": (660, "a mask by expression, and tiles that are found by their class"),
}


def test_templates_follow_the_rules():
    assert lint() == []


BREACHES = {
    "arithmetic": ("fa2/fwd.cu.j2", "{% if flags.lse %}", "{% if 1 + 1 %}", "bare boolean"),
    "comparison": ("fa2/fwd.cu.j2", "{% if flags.lse %}", "{% if plan.family == 'fa2' %}", "bare boolean"),
    "filter": ("fa2/fwd.cu.j2", "{{ plan.element }}", "{{ plan.element | upper }}", "Filter"),
    "else": ("fa2/fwd.cu.j2", "{% if flags.q_in_shared %}", "{% else %}", "else"),
    "set": ("fa2/fwd.cu.j2", "{% if flags.lse %}", "{% set x = 1 %}\n{% if flags.lse %}", "Assign"),
    "tag beside text": ("fa2/fwd.cu.j2", "{% if flags.lse %}", "int x; {% if flags.lse %}", "shares its line"),
    "ptx": ("fa2/fwd.cu.j2", "using Element", 'asm("bar.sync 0;");\nusing Element', "inline PTX"),
    "two instructions": ("include/flashgen/ptx/math.cuh", "  float y;\n", '  float y; asm("");\n', "more than one"),
    "foreign include": ("include/flashgen/mask.cuh", "#pragma once", "#pragma once\n#include <cuda_fp16.h>", "outside"),
    "python": ("triton/fwd.py.j2", "{% if flags.lse %}", "{% if plan.language == 'py' %}", "bare boolean"),
    "piece": ("fa3/walk/ranges/view.cuh.j2", "", "", "same pieces"),
    "slot opening": ("slots/mask/full.cuh.j2", "// mask: full.", "// full.", "must open"),
}


@pytest.mark.parametrize("name", BREACHES)
def test_lint_catches(name, tmp_path):
    file, old, new, expected = BREACHES[name]
    root = tmp_path / "templates"
    shutil.copytree(TEMPLATES, root)
    text = (root / file).read_text()
    assert old in text
    (root / file).write_text(text.replace(old, new, 1))
    if not old:
        (root / file).unlink()
    assert any(expected in line for line in lint(root)), lint(root)


def test_generated_files_are_current():
    files = {p.name: p.read_text() for p in GENERATED.iterdir() if p.name != "README.md"}
    assert files == golden_files(), "python -m flashgen.codegen.golden rewrites them"


@pytest.mark.parametrize("path", sorted((*GENERATED.glob("*.cu"), *GENERATED.glob("*.py"))), ids=lambda path: path.name)
def test_generated_kernels_are_pages(path):
    lines = path.read_text().splitlines()
    assert len(lines) <= LONGER.get(path.name.split(".")[0], (MAX_GENERATED_LINES,))[0]
    assert not [line for line in lines if len(line) > MAX_GENERATED_COLUMNS]
    assert not [line for line in lines if line.startswith(("//", "#")) and "None" in line]


def test_render_is_deterministic():
    plan = lower(golden_spec(shipped_spec_paths()[0]))
    first = render(plan)
    rendering.environment.cache_clear()
    rendering.header_text.cache_clear()
    assert render(plan) == first
    assert str(TEMPLATES) not in first.text


@pytest.mark.slow
def test_every_header_is_reached_or_compiled_alone():
    """A header compiles by itself, for the oldest and the newest target; one on wgmma for the target that has it."""
    pytest.importorskip("cuda.bindings.nvrtc")
    from flashgen.runtime.compile.nvrtc import compile_source

    plan = lower(golden_spec(shipped_spec_paths()[0]))
    for path in sorted((TEMPLATES / "include" / "flashgen").rglob("*.cuh")):
        include = path.relative_to(TEMPLATES / "include").as_posix()
        text = f'#include "{include}"\nextern "C" __global__ void probe() {{}}\n'
        on_wgmma = HEADER in path.read_text()
        shapes = {HEADER: render_wgmma([WgmmaShape("bf16", 64)])} if on_wgmma else {}
        for arch in ("sm_90a",) if on_wgmma else ("sm_80", "sm_120"):
            compile_source(Source(text, "probe", f"{path.stem}.cu", reached_headers(text, shapes), arch), plan=plan)


def test_slot_choice_changes_the_text_and_nothing_is_dead():
    base = Spec(name="t", family="fa2", pass_="fwd", arch="sm_90", dtype="bf16", head_dim_qk=64)
    texts = {render(lower(base.with_(**change))).text
             for change in ({}, {"causal": True}, {"window": True}, {"kv_layout": "varlen"}, {"lse": False})}
    assert len(texts) == 5
    full = render(lower(base)).text
    assert "window_left" not in full and "cu_seqlens" not in full


@pytest.mark.slow
@pytest.mark.parametrize("arch", [name for name, target in TARGETS.items() if target.is_nvidia and name != "sm_90a"])
def test_shipped_shapes_compile_without_spills(arch):
    """One mask and layout per head dim and target here; `flashgen build` of all is the release check."""
    pytest.importorskip("cuda.bindings.nvrtc")
    from flashgen.runtime.compile.nvrtc import compile_source

    for head_dim, head_dim_v, change in one_in(2, (
        (32, 32, {"window": True, "kv_layout": "varlen"}), (64, 64, {"causal": True}),
        (128, 128, {"kv_layout": "varlen"}), (192, 128, {}), (80, 80, {"window": True}),
    )):
        spec = Spec(name="t", family="fa2", pass_="fwd", arch=arch, dtype="fp16", head_dim_qk=head_dim,
                    head_dim_v=head_dim_v, **change)
        plan = lower(spec)
        resources = compile_source(render(plan), plan=plan).resources
        assert resources.spill_store_bytes == resources.spill_load_bytes == resources.stack_bytes == 0
