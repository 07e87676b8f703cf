"""Specs: the shipped files, expansion, and the table of fields behind checks, names and documentation."""
from __future__ import annotations

import json
import pickle
import re
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from counted import python_calls
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from flashgen.codegen.families.flashmla.options import SCHEDULE
from flashgen.codegen.families.registry import FAMILIES
from flashgen.codegen.spec import fields as spec_fields
from flashgen.codegen.spec.rule import EXTRA
from flashgen.codegen.spec.rules import RULES
from flashgen.codegen.spec.spec import (
    Spec,
    Tile,
    fields_markdown,
    json_schema,
    load_specs,
    shipped_spec_paths,
    spec_path,
    specs_from_mapping,
)
from flashgen.codegen.target import TARGETS
from flashgen.errors import SpecError

BASE: dict[str, Any] = {
    "name": "k", "family": "fa2", "pass": "fwd", "arch": "sm_80", "dtype": "bf16", "head_dim_qk": 64}
HEAD = "name: k\nfamily: fa2\npass: fwd\narch: sm_80\ndtype: bf16\n"  # lines 1 to 5
FULL = HEAD + "head_dim_qk: 64\n"                                       # the next line is 7
FA3 = BASE | {"family": "fa3", "arch": "sm_90a"}
MLA = FA3 | {"family": "flashmla", "pass": "decode", "head_dim_qk": 576, "head_dim_v": 512, "kv_layout": "paged",
             "page_size": 64}
STANDARD = {"family": "standard", "kernel": "scores", "kv_layout": "dense", "window": False, "batch_invariant": False,
            "lse": True, "score": "none", "mask": "none", "align": "bottom_right", "sink": "none",
            "normalize": "softmax", "tile": None, "stages": None, "roles": None}
ROWS = spec_fields.rows_by_name()
quick = settings(deadline=None, derandomize=True, max_examples=200)


@pytest.fixture
def load(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def load(text: str | bytes) -> tuple[Spec, ...]:
        Path("s.yaml").write_bytes(text.encode() if isinstance(text, str) else text)
        return load_specs("s.yaml").specs
    return load


def refused(call, *args: object) -> SpecError:
    with pytest.raises(SpecError) as caught:
        call(*args)
    return caught.value


# ---- shipped files

def test_shipped_specs_hold_what_they_promise():
    files = {path.name: load_specs(path) for path in shipped_spec_paths()}
    main, mla = files["fa2_fwd.yaml"], files["fa2_fwd_d192_v128.yaml"]
    archs = {"sm_80", "sm_86", "sm_89", "sm_90", "sm_100a", "sm_120"}
    masks = {(False, False), (True, False), (False, True)}
    assert {(s.arch, s.dtype, s.head_dim_qk, s.head_dim_v, (s.causal, s.window), s.kv_layout) for s in main.specs} == {
        (arch, dtype, d, d, mask, layout) for arch, dtype, d, mask, layout in
        product(archs, ("bf16", "fp16"), (32, 64, 96, 128, 192, 256), masks, ("dense", "varlen"))}
    assert len(main.specs) == 432 and len(mla.specs) == 72
    assert {(s.head_dim_qk, s.head_dim_v) for s in mla.specs} == {(192, 128)}
    names = [f"{s.variant}.{s.arch}" for file in files.values() for s in file.specs]
    assert len(set(names)) == len(names)
    assert "fa2_fwd_bf16_d128_causal_varlen.sm_80" in names and "fa2_fwd_fp16_d192v128_window.sm_120" in names


def test_readme_is_generated():
    assert (shipped_spec_paths()[0].parent / "README.md").read_text() == fields_markdown(), \
        "run: python -m flashgen.codegen.spec.docs > specs/README.md"


def test_loading_calls_few_functions_for_a_variant():
    """Most of them are the YAML parser's, once for a file: what is done for a variant is a handful."""
    variants = sum(len(load_specs(path).specs) for path in shipped_spec_paths())
    assert variants >= 504
    calls = python_calls(lambda: [load_specs(path) for path in shipped_spec_paths()])
    assert calls < 250 * variants  # 143 on 2026-11-30


def test_import_pulls_in_only_pydantic_and_yaml():
    code = ("import sys, flashgen.codegen.spec.spec\n"
            "print(*{m.split('.')[0] for m, o in sys.modules.items() if 'site-packages' in (getattr(o, '__file__', '') "
            "or '')})")
    found = set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())
    pydantic_needs = {"pydantic", "pydantic_core", "annotated_types", "typing_extensions", "typing_inspection"}
    editable_hooks = {name for name in found if name.startswith(("__editable__", "_virtualenv", "distutils_hack"))}
    assert found - pydantic_needs - editable_hooks - {"flashgen", "_distutils_hack"} == {"yaml", "_yaml"} & found


# ---- expansion

def test_product_is_in_table_order_and_deterministic(load):
    text = "dtype: [fp16, bf16]\nhead_dim_qk: [128, 64]\nname: k\nfamily: fa2\npass: fwd\narch: [sm_90, sm_80]\n"
    specs = load(text)
    assert [(s.arch, s.dtype, s.head_dim_qk) for s in specs] == list(
        product(("sm_90", "sm_80"), ("fp16", "bf16"), (128, 64)))
    assert specs == load(text)
    reordered = specs_from_mapping(dict(reversed(list(yaml.safe_load(text).items()))))
    assert reordered == specs


def test_head_dim_v_follows_before_excludes_are_matched():
    specs = specs_from_mapping(BASE | {"head_dim_qk": [64, 128], "exclude": [{"head_dim_v": 64}]})
    assert [(s.head_dim_qk, s.head_dim_v) for s in specs] == [(128, 128)]
    assert specs_from_mapping(BASE | {"head_dim_v": None}) == specs_from_mapping(BASE | {"head_dim_v": 64})


def test_exclude_takes_lists_and_defaults():
    specs = specs_from_mapping(BASE | {
        "arch": ["sm_80", "sm_86", "sm_90"], "dtype": ["bf16", "fp16"],
        "exclude": [{"arch": ["sm_80", "sm_86"], "dtype": "bf16"},
                    {"arch": "sm_90", "causal": False, "dtype": "fp16"}]})
    assert [(s.arch, s.dtype) for s in specs] == [("sm_80", "fp16"), ("sm_86", "fp16"), ("sm_90", "bf16")]


def test_overrides_apply_in_order_and_the_last_wins():
    specs = specs_from_mapping(BASE | {
        "head_dim_qk": [64, 128, 256], "stages": 4,
        "overrides": [{"when": {"head_dim_qk": [128, 256]}, "set": {"stages": 2, "tile": {"m": 128, "n": 64}}},
                      {"when": {"head_dim_qk": 256}, "set": {"stages": None}}]})
    assert [(s.stages, s.tile) for s in specs] == [(4, None), (2, Tile(m=128, n=64)), (None, Tile(m=128, n=64))]


def test_mapping_fields_may_be_lists():
    specs = specs_from_mapping(BASE | {"tile": [{"m": 64, "n": 64}, {"m": 128, "n": 32}],
                                       "exclude": [{"tile": {"m": 64, "n": 64}}]})
    assert [s.variant for s in specs] == ["k_bf16_d64_m128n32"]


def test_anchors_and_merge_keys(load):
    specs = load(FULL + "tile: &t {m: 64, n: 32}\noverrides:\n"
                 "- when: &w {dtype: bf16}\n  set: {tile: {<<: *t, n: 64}}\n"
                 "- when: {<<: [*w, {arch: sm_80}]}\n  set: {stages: 3}\n")
    assert [s.variant for s in specs] == ["k_bf16_d64_m64n64_s3"]
    first_wins = load(FULL + "overrides:\n- when: &a {causal: false}\n  set: &s {stages: 2}\n"
                      "- when: *a\n  set: {<<: [{stages: 5}, *s]}\n")
    assert [s.stages for s in first_wins] == [5]


# ---- the Spec itself and its table

EXPRESSIONS: dict[str, list[Any]] = {
    "score": ["none", "cap * tanh(score / cap)", "score - slope[head_q]"], "mask": ["none", "kv_pos <= q_pos", "True"],
    "params": [{"cap": {"type": "float", "default": 30.0},
                "slope": {"type": "tensor", "dtype": "float32", "shape": ["num_heads_q"]}}]}


def values_of(row: spec_fields.Row) -> st.SearchStrategy[Any]:
    if row.parts:
        value = st.fixed_dictionaries({p.name.rpartition(".")[2]: values_of(p) for p in row.parts})
    elif row.name in EXPRESSIONS:
        value = st.sampled_from(EXPRESSIONS[row.name])
    elif row.name == "name":
        value = st.sampled_from(["k", "fa2_fwd", "fa2_bf16_d64", "k_bf16_d64_causal"])
    else:
        value = st.sampled_from(spec_fields.choices(row) or [])
    return st.none() | value if row.nullable else value


def keep_rules(values: dict[str, Any]) -> dict[str, Any]:
    """The same values, less what the rules between fields refuse."""
    kept = {row.name: values[row.name] if not row.families or values["family"] in row.families.split(", ")
            else row.default for row in spec_fields.rows()}
    passes = [found.name for found in FAMILIES[kept["family"]].passes]
    kept["pass"] = kept["pass"] if kept["pass"] in passes else passes[0]
    if kept["family"] == "flashmla":
        return keep_rules_of_mla(kept)
    if FAMILIES[kept["family"]].named_only:
        kept |= {name: values[0] for name, values, _ in FAMILIES[kept["family"]].only if kept[name] not in values}
    kept |= {"batch_invariant": False, "roles": None, "tile": None} if kept["family"] == "triton" else {
        "arch": kept["arch"] if TARGETS[kept["arch"]].is_nvidia else "sm_80"}
    kept["window"] = kept["window"] and not kept["causal"]
    kept |= {"kv_layout": {"paged": "varlen"}.get(kept["kv_layout"], kept["kv_layout"]),
             **{name: kept[name] and 8 + (kept[name] - 8) % 256 // 8 * 8 for name in ("head_dim_qk", "head_dim_v")}}
    built_in = kept["causal"] or kept["window"]
    kept["mask"] = "none" if built_in else kept["mask"]
    if built_in or kept["score"] == kept["mask"] == "none":
        kept["align"] = "bottom_right"
    if kept["normalize"] == "none":
        kept |= {"lse": False, "sink": "none", "dropout": False}
    changed = any(kept[name] != "none" for name in ("score", "mask", "sink")) or kept["normalize"] == "none"
    if kept["family"] == "fa3":
        warpgroups = 1 + (kept["roles"] or {"mma": 11})["mma"] % 4
        kept |= {"arch": "sm_90a", "roles": kept["roles"] and {"mma": 4 * warpgroups},
                 "tile": kept["tile"] and kept["tile"] | {"m": 64 * warpgroups},
                 "schedule": "overlap" if warpgroups == 1 and kept["schedule"] == "pingpong" else kept["schedule"],
                 "split": kept["split"] and not (
                     kept["batch_invariant"] or kept["window"] or kept["kv_layout"] == "varlen" or changed),
                 "pack_gqa": kept["pack_gqa"] and not (kept["window"] or kept["kv_layout"] == "varlen" or changed)}
    return keep_rules_of_pass(kept)


def keep_rules_of_pass(kept: dict[str, Any]) -> dict[str, Any]:
    found = FAMILIES[kept["family"]].by_name[kept["pass"]]
    kept |= {name: values[0] for name, values, _ in found.only if kept[name] not in values}
    kept["kernel"] = kept["kernel"] if kept["kernel"] in found.kernel_names else found.kernel_names[0]
    kept["deterministic"] = kept["deterministic"] and kept["mask"] == "none"
    kept["batch_invariant"] = kept["batch_invariant"] and (kept["pass"] != "bwd" or kept["deterministic"])
    return kept


def keep_rules_of_mla(kept: dict[str, Any]) -> dict[str, Any]:
    kept |= {"causal": False, "window": False, "lse": True, "batch_invariant": False, "tile": None, "stages": None,
             "roles": None, "arch": "sm_90a", "score": "none", "mask": "none", "align": "bottom_right",
             "sink": "none", "normalize": "softmax",
             "head_dim_qk": 576 if kept["head_dim_qk"] > 64 else 512, "head_dim_v": 512,
             "kv_layout": {"varlen": "dense"}.get(kept["kv_layout"], kept["kv_layout"])}
    kept["page_size"] = (kept["page_size"] or 64) if kept["kv_layout"] == "paged" else None
    return kept | dict(SCHEDULE) if kept["pass"] == "schedule" else kept


VALUES = st.fixed_dictionaries({row.name: values_of(row) for row in spec_fields.rows()}).map(keep_rules)
CONSTANT = ("arch", "params")  # no part of the variant by themselves


def spec(values: dict[str, Any]) -> Spec:
    read = {name: param for name, param in values.get("params", {}).items() if name in values["score"]}
    (only,) = specs_from_mapping(values | {"params": read})
    return only


@quick
@given(VALUES, VALUES, st.sets(st.sampled_from([row.name for row in spec_fields.rows()])))
def test_variants_are_c_identifiers_and_tell_all_but_arch_apart(values, others, taken):
    one, other = spec(values), spec(keep_rules(values | {name: others[name] for name in others if name not in taken}))
    assert re.fullmatch(r"[a-z][a-z0-9_]*", one.variant) and "__" not in one.variant
    assert (one.variant == other.variant) == (one.fields() == other.fields())


@pytest.mark.parametrize("row", [row for row in spec_fields.rows() if row.name not in CONSTANT], ids=lambda r: r.name)
@settings(quick, max_examples=12, suppress_health_check=[HealthCheck.filter_too_much])
@given(data=st.data())
def test_each_field_changes_the_variant_name(row, data):
    values = data.draw(VALUES)
    if row.name == "family":  # the overrides that one of the two lacks would change too
        values = values | {top.name: None for top in spec_fields.rows() if top.override}
    if row.families:
        values = values | {"family": data.draw(st.sampled_from(row.families.split(", ")))}
    if row.name in ("kernel", "deterministic"):  # which other passes lack
        values = values | {"pass": "bwd", "batch_invariant": False}
    if row.name in ("pass", "page_size"):
        values = values | {name: MLA[name] for name in MLA.keys() - {"name"}}
    elif values["family"] == "flashmla":  # in which most of them are fixed
        values = values | {"family": "fa2"}
    if row.name in ("causal", "window", "split", "pack_gqa"):
        values = values | {"causal": False, "window": False, "batch_invariant": False, "kv_layout": "dense"}
    values = keep_rules(values)
    changed = keep_rules(values | {row.name: data.draw(values_of(row))})
    assume(changed[row.name] != values[row.name])  # a family's rules undo many a change
    one, other = spec(values), spec(changed)
    before, after = dict(one.fields()), dict(other.fields())
    different = {name for name in before | after if before.get(name) != after.get(name)}
    assume(different - {"params"} == {row.name})
    assert other.variant != one.variant


def with_tuples(value: Any) -> Any:
    return tuple(map(with_tuples, value)) if isinstance(value, list) else value


@quick
@given(VALUES)
def test_specs_hash_pickle_and_survive_json(values):
    one = spec(values)
    assert pickle.loads(pickle.dumps(one)) == one == spec(values) and hash(one) == hash(spec(values))
    assert with_tuples(json.loads(json.dumps(one.fields()))) == one.fields()
    names = [name for name, _ in one.fields()]
    rows = [row for row in spec_fields.rows() if row.name != "arch"]
    assert names == [row.name for row in rows if row.name in names]
    assert {row.name for row in rows} - set(names) <= set(EXTRA)
    assert Spec.model_validate_json(one.model_dump_json(by_alias=True)) == one


def test_with_checks_and_head_dim_v_follows_only_an_equal_one():
    one = Spec(**BASE)
    assert one.head_dim_v == 64 and one.with_() == one
    assert (one.with_(head_dim_qk=80).head_dim_qk, one.with_(head_dim_qk=80).head_dim_v) == (80, 80)
    assert one.with_(head_dim_qk=192, head_dim_v=128).with_(head_dim_qk=80).variant == "k_bf16_d80v128"
    assert one.with_(head_dim_v=32).head_dim_qk == 64
    assert one.with_(pass_="fwd", tile={"m": 64, "n": 16}).tile == Tile(m=64, n=16)
    assert refused(lambda: one.with_(head_dim_qk=81)).nearest == "80"
    assert refused(lambda: one.with_(head_dim=80)).nearest.startswith("head_dim")
    assert refused(lambda: one.with_(causal=True, window=True)).where == "Spec.window"
    for loose in ({"causal": 1}, {"head_dim_qk": "64"}, {"head_dim_qk": 64.0}, {"tile": {"m": True, "n": 16}}):
        assert refused(lambda loose=loose: one.with_(**loose)).allowed
    with pytest.raises(ValueError):
        one.causal = True  # type: ignore[misc]


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.schema["type"] == "integer"])
def test_listed_numbers_are_exactly_those_that_pass(name):
    row = ROWS[name]
    base = {"fa3": FA3, "flashmla": MLA}.get(row.families, BASE)
    for number in range(-17, 300):
        top, _, part = name.partition(".")
        value = {"m": 16, "n": 16, part: number} if top == "tile" else {part: number} if part else number
        if name.startswith("head_dim") and number > 256 and number % 8 == 0:  # fine for the table, not for the family
            assert refused(specs_from_mapping, base | {top: value}).nearest == "256"
        elif number in (spec_fields.choices(row) or []):
            specs_from_mapping(base | {top: value})
        else:
            error = refused(specs_from_mapping, base | {top: value})
            assert error.what == f"{name} is {number}"
            assert abs(int(error.nearest) - number) == min(abs(c - number) for c in spec_fields.choices(row) or [])


def test_schema_allows_lists_and_holds_the_table():
    schema = json_schema()
    assert json.loads(json.dumps(schema)) == schema
    assert schema["required"] == list(BASE) and schema["additionalProperties"] is False
    assert [*ROWS] == [n for row in spec_fields.rows() for n in (row.name, *(part.name for part in row.parts))]
    assert list(schema["properties"]) == [*(row.name for row in spec_fields.rows()), "exclude", "overrides"]
    head_dim, items = schema["properties"]["head_dim_qk"], {"type": "integer", "minimum": 8, "maximum": 576}
    assert head_dim["anyOf"][0] == items | {"multipleOf": 8} == head_dim["anyOf"][1]["items"]
    when_set = schema["properties"]["overrides"]["items"]["properties"]
    assert list(when_set["set"]["properties"]) == [
        "tile", "stages", "roles", "blocks_per_sm", "q_operand", "q_stages", "p_operand", "schedule"]
    assert "(only fa3)" in schema["properties"]["split"]["description"]
    lines = fields_markdown().splitlines()
    for row in ROWS.values():
        assert any(line.startswith(f"| `{row.name}` | {row.about} | {row.unit} |")
                   and line.endswith(f"| {row.families} |") for line in lines)
    for rule in RULES:
        assert f"- {rule.about}" in lines


# ---- families

@pytest.mark.parametrize(("changes", "suffix"), [
    ({}, "fa3"), ({"q_stages": 2}, "fa3_q2"), ({"schedule": "overlap"}, "fa3_overlap"), ({"split": True}, "fa3_split"),
    ({"pack_gqa": True}, "fa3_packed"), ({"pack_gqa": True, "split": True}, "fa3_split_packed"),
    ({"split": False}, "fa3"),
    ({"tile": {"m": 192, "n": 80}, "roles": {"mma": 12}, "stages": 3, "q_stages": 1, "schedule": "pingpong"},
     "fa3_m192n80_s3_w12_q1_pingpong"),
])
def test_names_of_fa3_overrides(changes, suffix):
    assert spec(FA3 | changes).variant == f"k_bf16_d64_{suffix}"


def test_a_name_that_begins_with_its_family_says_it_once():
    for name, family, variant in (("fa3_fwd", "fa3", "fa3_fwd_bf16_d64"), ("fa3_fwd", "fa2", "fa3_fwd_bf16_d64_fa2"),
                                  ("fa2_fwd", "fa3", "fa2_fwd_bf16_d64_fa3"), ("fa3x", "fa3", "fa3x_bf16_d64_fa3")):
        assert spec(FA3 | {"name": name, "family": family}).variant == variant


@pytest.mark.parametrize(("changes", "variant"), [
    ({}, "k_bf16_d576v512_flashmla_paged64"), ({"name": "mla_h100"}, "mla_h100_bf16_d576v512_paged64"),
    ({"name": "flashmla", "page_size": 1, "dtype": "fp16"}, "flashmla_fp16_d576v512_paged1"),
    ({"name": "mla", "kv_layout": "dense", "page_size": None, "head_dim_qk": 512}, "mla_bf16_d512"),
    ({"name": "mla", "pass": "schedule"}, "mla_schedule"),
])
def test_names_of_mla(changes, variant):
    assert spec(MLA | changes).variant == variant


def test_the_shipped_mla_files_have_each_cache_once():
    specs = {file: load_specs(spec_path(file)).specs for file in ("mla_h100", "mla_h100_caches")}
    caches = {file: [(s.dtype, s.head_dim_qk, s.kv_layout, s.page_size) for s in found if s.pass_ == "decode"]
              for file, found in specs.items()}
    assert caches["mla_h100"] == [(dtype, 576, "paged", 64) for dtype in ("bf16", "fp16")]
    assert sorted(caches["mla_h100_caches"], key=str) == sorted(
        ((dtype, *cache) for dtype in ("bf16", "fp16")
         for cache in ((512, "dense", None), (576, "dense", None), (576, "paged", 1))), key=str)
    assert [s.variant for found in specs.values() for s in found if s.pass_ != "decode"] == ["mla_h100_schedule"]


def test_a_file_may_hold_both_families():
    specs = specs_from_mapping(BASE | {
        "family": ["fa2", "fa3"], "arch": ["sm_80", "sm_90a"], "exclude": [{"family": "fa3", "arch": "sm_80"}],
        "overrides": [{"when": {"family": "fa3"}, "set": {"schedule": "overlap"}},
                      {"when": {"arch": "sm_80"}, "set": {"blocks_per_sm": 2}}]})
    assert [f"{s.variant}.{s.arch}" for s in specs] == [
        "k_bf16_d64_b2.sm_80", "k_bf16_d64.sm_90a", "k_bf16_d64_fa3_overlap.sm_90a"]


def test_families_are_for_the_targets_that_have_their_feature():
    for family, arch in product(FAMILIES, TARGETS):
        fits, own = FAMILIES[family].feature in TARGETS[arch].features, {"flashmla": MLA, "standard": BASE | STANDARD}
        try:
            Spec(**(own.get(family, BASE) | {"family": family, "arch": arch}))
            assert fits
        except SpecError as error:
            assert error.where == "Spec.arch" and arch not in error.allowed.split(", ") and not fits
