"""Bad specs: the exact place and text of each error, and that nothing but SpecError escapes, whatever comes."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from counted import python_calls
from hypothesis import given, settings
from hypothesis import strategies as st

from flashgen.codegen.spec.fields import rows
from flashgen.codegen.spec.spec import MAX_VARIANTS, Spec, load_specs, specs_from_mapping
from flashgen.codegen.target import TARGETS
from flashgen.errors import SpecError

BASE: dict[str, Any] = {
    "name": "k", "family": "fa2", "pass": "fwd", "arch": "sm_80", "dtype": "bf16", "head_dim_qk": 64}
HEAD = "name: k\nfamily: fa2\npass: fwd\narch: sm_80\ndtype: bf16\n"  # lines 1 to 5
FULL = HEAD + "head_dim_qk: 64\n"                                       # the next line is 7
FA3 = FULL.replace("fa2", "fa3").replace("sm_80", "sm_90a")
BWD = FULL.replace("fwd", "bwd") + "kernel: [preprocess, gradients, postprocess]\n"  # the next line is 8
MLA = ("name: k\nfamily: flashmla\npass: decode\narch: sm_90a\ndtype: bf16\nhead_dim_qk: 576\nhead_dim_v: 512\n"
       "kv_layout: paged\npage_size: 64\n")  # the next line is 10
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


# ---- errors of a file: (text, place, parts of the message)

CASES = {
    "number": (HEAD + "head_dim_qk: 65\n", "6:14", ["is 65", "multiples of 8 from 8 to 576", "nearest: 64"]),
    "in a list": (HEAD + "head_dim_qk: [64, 300]\n", "6:19", ["is 300", "nearest: 296"]),
    "huge": (HEAD + f"head_dim_qk: {'9' * 400}\n", "6:14", ["nearest: 576"]),
    "too huge": (HEAD + f"head_dim_qk: {'9' * 9999}\n", "6:14", ["a number too long"]),
    "inf": (HEAD + "head_dim_qk: -.inf\n", "6:14", ["nearest: 8"]),
    "nan": (HEAD + "head_dim_qk: .nan\n", "6:14", ["head_dim_qk is nan", "allowed"]),
    "float": (HEAD + "head_dim_qk: 64.0\n", "6:14", ["is 64.0", "nearest: 64"]),
    "quoted number": (HEAD + "head_dim_qk: '64'\n", "6:14", ["quoted text", "nearest: 64"]),
    "bool for number": (HEAD + "head_dim_qk: true\n", "6:14", ["head_dim_qk is true"]),
    "exponent": (HEAD + "head_dim_qk: 1e2\n", "6:14", ["YAML 1.1 reads as text", "nearest: 96"]),
    "sexagesimal": (HEAD + "head_dim_qk: 1:30\n", "6:14", ["1:30", "YAML 1.1 reads as 90", "nearest: 88"]),
    "octal": (HEAD + "head_dim_qk: 0100\n", "6:14", ["0100", "YAML 1.1 reads as 64", "nearest: 64"]),
    "hex": (HEAD + "head_dim_qk: 0x40\n", "6:14", ["YAML 1.1 reads as 64"]),
    "underscore": (HEAD + "head_dim_qk: 1_28\n", "6:14", ["YAML 1.1 reads as 128"]),
    "nothing": (HEAD + "head_dim_qk:\n", "6:13", ["head_dim_qk is null", "nothing is written"]),
    "date": (HEAD + "head_dim_qk: 2001-99-99\n", "6:14", ["2001-99-99", "a date"]),
    "tag": (HEAD + "head_dim_qk: !mine 64\n", "6:14", ["!mine"]),
    "string": (FULL.replace("sm_80", "sm_91"), "4:7", ["arch is sm_91", "sm_90, sm_90a", "nearest: sm_90"]),
    "number for string": (FULL.replace("sm_80", "90"), "4:7", ["arch is 90", "nearest: sm_90"]),
    "bool for string": (FULL.replace("name: k", "name: on"), "1:7", ["name is on", "YAML 1.1 reads as true", "quote"]),
    "name": (FULL.replace("name: k", "name: My--Kernel"), "1:7", ["'My--Kernel'", "nearest: my_kernel"]),
    "names": (FULL.replace("name: k", "name: [k, l]"), "1:7", ["name is a list"]),
    "yes": (FULL + "causal: yes\n", "7:9", ["causal is yes", "YAML 1.1 reads as true", "nearest: true"]),
    "off": (FULL + "lse: Off\n", "7:6", ["lse is Off", "nearest: false"]),
    "quoted bool": (FULL + "causal: 'true'\n", "7:9", ["causal is true, which is quoted text", "nearest: true"]),
    "0": (FULL + "causal: 0\n", "7:9", ["causal is 0", "nearest: false"]),
    "unknown key": (FULL + "head_dim_kq: 64\n", "7:1", ["unknown key head_dim_kq", "nearest: head_dim_qk"]),
    "unknown part": (FULL + "tile: {m: 64, n: 64, k: 1}\n", "7:22", ["unknown key k", "allowed: m, n"]),
    "missing part": (FULL + "tile: {m: 64}\n", "7:7", ["tile.n is missing"]),
    "bad part": (FULL + "tile: {m: 64, n: 40}\n", "7:18", ["tile.n is 40", "multiples of 16", "nearest: 32"]),
    "not a mapping": (FULL + "tile: 64\n", "7:7", ["tile is 64", "{m: multiples of 16"]),
    "list in a list": (FULL + "stages: [[2]]\n", "7:10", ["stages is a list", "from 2 to 5, or null"]),
    "missing": (HEAD, "1:1", ["head_dim_qk is missing"]),
    "empty list": (HEAD + "head_dim_qk: []\n", "6:14", ["empty list"]),
    "twice in a list": (HEAD + "head_dim_qk: [64, 32, 64]\n", "6:23", ["head_dim_qk lists 64 twice"]),
    "twice a key": (FULL + "name: k\n", "7:1", ["key 'name' is there twice"]),
    "twice a variant": (FULL + "head_dim_v: [null, 64]\n", "7:20", ["k_bf16_d64.sm_80 is there twice"]),
    "twice after set": (FULL + "stages: [2, 3]\noverrides: [{when: {stages: 2}, set: {stages: 3}}]\n", "8:47",
                        ["k_bf16_d64_s3.sm_80 is there twice"]),
    "causal and window": (FULL + "causal: [true]\nwindow: [false, true]\n", "8:17",
                          ["window is true together with causal", "right = 0", "exclude"]),
    "dead exclude": (FULL + "exclude:\n  - {head_dim_qk: 128, dtype: bf16}\n", "8:5",
                     ["exclude matches no variant", "nearest: {head_dim_qk: 64, dtype: bf16}"]),
    "dead value": (HEAD + "head_dim_qk: [64, 128]\nexclude:\n  - {head_dim_qk: [64, 32]}\n", "8:24",
                   ["head_dim_qk 32 in this entry of exclude matches no variant"]),
    "all excluded": (FULL + "exclude: [{dtype: bf16}]\n", "7:1", ["leaves no variant"]),
    "empty exclude": (FULL + "exclude: []\n", "7:10", ["exclude is empty"]),
    "empty entry": (FULL + "exclude: [{}]\n", "7:11", ["exclude is empty"]),
    "exclude null": (FULL + "exclude:\n", "7:9", ["exclude is null"]),
    "bad exclude": (FULL + "exclude: [{dtype: bf17}]\n", "7:19", ["dtype is bf17", "nearest: bf16"]),
    "dead override": (FULL + "overrides: [{when: {head_dim_qk: 128}, set: {stages: 2}}]\n", "7:20",
                      ["overrides matches no variant"]),
    "no set": (FULL + "overrides: [{when: {dtype: bf16}}]\n", "7:13", ["not {when: ..., set: ...}"]),
    "set a choice": (FULL + "overrides: [{when: {dtype: bf16}, set: {causal: true}}]\n", "7:41",
                     ["unknown key causal", "allowed: tile, stages, roles, blocks_per_sm, q_operand, q_stages, p_op"]),
    "head dim of another family": (HEAD + "head_dim_qk: [64, 320]\n", "6:19", [
        "head_dim_qk is 320 with family fa2", "allowed: multiples of 8 from 8 to 256", "nearest: 256",
        "{family: fa2, head_dim_qk: 320}"]),
    "pass of another family": (FULL.replace("pass: fwd", "pass: decode"), "3:7", [
        "pass is decode with family fa2", "allowed: fwd"]),
    "a cache for fa2": (FULL + "kv_layout: paged\n", "7:12", ["paged with family fa2", "dense, varlen", "flashmla's"]),
    "pages for fa2": (FULL + "page_size: 64\n", "7:12", ["page_size is 64 with family fa2", "a field of flashmla"]),
    "mla's mask": (MLA + "causal: true\n", "10:9", ["causal is true with family flashmla", "with each call"]),
    "mla's tile": (MLA + "tile: {m: 64, n: 64}\n", "10:7", ["tile is {m: 64, n: 64} with family flashmla"]),
    "mla's values": (MLA.replace("head_dim_v: 512", "head_dim_v: 256"), "7:13", ["nearest: 512", "first 512 columns"]),
    "mla's keys": (MLA.replace("576", "192"), "6:14", ["192 with family flashmla", "allowed: 512, 576"]),
    "no page size": (MLA.replace("page_size: 64\n", ""), "1:1", ["page_size is null with kv_layout paged", "1, 64"]),
    "odd page size": (MLA.replace("page_size: 64", "page_size: 60"), "9:12", ["is 60", "1, 64", "nearest: 64"]),
    "pages of a dense cache": (MLA.replace("paged", "dense"), "9:12", ["page_size is 64 with kv_layout dense"]),
    "schedules of two": (MLA.replace("pass: decode", "pass: schedule").replace("bf16", "fp16"), "5:8", [
        "dtype is fp16 with pass schedule", "allowed: bf16", "{pass: schedule, dtype: fp16}"]),
    "fa3 elsewhere": (FA3.replace("sm_90a", "[sm_90a, sm_80]"), "4:16", [
        "arch is sm_80 with family fa3, which needs wgmma", "allowed: sm_90a", "nearest: family fa2 for sm_80",
        "{family: fa3, arch: sm_80}"]),
    "fa3 on sm_90": (FA3.replace("sm_90a", "sm_90"), "4:7", ["arch is sm_90 with", "nearest: sm_90a"]),
    "fa2's field": (FA3 + "blocks_per_sm: 2\n", "7:16", [
        "blocks_per_sm is 2 with family fa3, which has no such field",
        "allowed: null; blocks_per_sm is a field of fa2", "nearest: null", "when: {family: fa2}"]),
    "fa2's operand": (FA3 + "q_operand: [null, shared]\n", "7:19", ["q_operand is shared", "a field of fa2"]),
    "fa3's schedule": (FULL + "schedule: overlap\n", "7:11", ["schedule is overlap with family fa2", "a field of fa3"]),
    "fa3's split": (FULL + "split: [false, true]\n", "7:16", [
        "split is true with family fa2", "a field of fa3", "nearest: false",
        "`- {family: fa2, split: true}` to exclude"]),
    "fa3's q_stages": (FULL + "overrides: [{when: {dtype: bf16}, set: {q_stages: 2}}]\n", "7:51", [
        "q_stages is 2 with family fa2", "when: {family: fa3}"]),
    "schedules": (FA3 + "schedule: ping-pong\n", "7:11", ["overlap, pingpong, or null", "nearest: pingpong"]),
    "half a warpgroup": (FA3 + "roles: {mma: 6}\n", "7:14", [
        "roles.mma is 6 with family fa3", "groups of 4", "allowed: 4, 8, 12, 16", "nearest: 4"]),
    "warpgroups": (FA3 + "roles: {mma: 15}\n", "7:14", ["roles.mma is 15", "nearest: 16"]),
    "rows of warpgroups": (FA3 + "tile: {n: 64, m: 240}\n", "7:18", [
        "tile.m is 240 with family fa3", "allowed: 64, 128, 192, 256: 64 rows", "nearest: 256"]),
    "rows against warps": (FA3 + "roles: {mma: 12}\ntile: {m: 128, n: 64}\n", "8:11", [
        "tile.m is 128 with family fa3 and roles.mma 12", "allowed: 192", "nearest: 192"]),
    "turns alone": (FA3 + "schedule: pingpong\nroles: {mma: 4}\n", "7:11", ["none to take turns", "nearest: overlap"]),
    "split and invariant": (FA3 + "batch_invariant: true\nsplit: [false, true]\n", "8:16", [
        "split is true together with batch_invariant", "nearest: split: false", "exclude"]),
    "neighbours and any order": (BWD + "batch_invariant: [false, true]\n", "8:26", [
        "batch_invariant is true with pass bwd", "together with deterministic: true", "nearest: deterministic: true"]),
    "turns by expression": (BWD + "deterministic: true\nmask: kv_pos <= q_pos\n", "8:16", [
        "deterministic is true with a mask by expression", "or causal, window, or no mask"]),
    "deterministic forward": (FULL + "deterministic: true\n", "7:16", [
        "deterministic is true", "always have the same bits", "nearest: false"]),
    "split and window": (FA3 + "window: [false, true]\nsplit: true\n", "8:8", [
        "split is true together with window: its tiles see few keys", "`- {window: true, split: true}` to exclude"]),
    "split and varlen": (FA3 + "kv_layout: varlen\nsplit: true\n", "8:8", [
        "split is true together with kv_layout: how many", "`- {kv_layout: varlen, split: true}` to exclude"]),
    "packed and varlen": (FA3 + "kv_layout: varlen\npack_gqa: true\n", "8:11", [
        "pack_gqa is true together with kv_layout varlen", "`- {kv_layout: varlen, pack_gqa: true}` to exclude"]),
    "set a list": (FULL + "overrides: [{when: {dtype: bf16}, set: {stages: [2, 3]}}]\n", "7:49", ["stages is a list"]),
    "too many": (HEAD.replace("sm_80", f"[{', '.join(TARGETS)}]") + f"head_dim_qk: {list(range(8, 257, 8))}\n"
                 f"head_dim_v: {list(range(8, 257, 8))}\n", "6:1", ["8 (arch) * 32", "= 8192 variants", "4096"]),
    "empty": ("", "1:1", ["empty"]),
    "only a comment": ("# hello\n", "1:1", ["empty"]),
    "a list": ("- 1\n", "1:1", ["holds a list"]),
    "two documents": (FULL + "---\n" + FULL, "7:1", ["second YAML document"]),
    "tab": (FULL + "tile:\n\tm: 64\n", "8:1", ["not YAML", "spaces, not tabs"]),
    "syntax": (FULL + "tile: {m: 64\n", "8:1", ["not YAML"]),
    "undefined alias": (FULL + "tile: *t\n", "7:7", ["undefined alias"]),
    "key is a list": (FULL + "? [a]\n: 1\n", "7:3", ["a key is a list or a mapping"]),
    "merge a scalar": (FULL + "<<: 1\n", "7:5", ["<< needs another mapping"]),
    "contains itself": (FULL + "exclude: &a [*a]\n", "7:10", ["contains itself"]),
    "merges itself": (FULL + "tile: &t {<<: *t, m: 64, n: 64}\n", "7:7", ["<< needs another mapping"]),
    "not UTF-8": (FULL.encode() + b"# caf\xe9\n", "7:6", ["0xe9 is not UTF-8"]),
    "control": (FULL + "# \x07\n", "7:3", ["'\\x07'"]),
    "deep": ("[" * 99999, "1:1001", ["not YAML"]),
    "deep value": (FULL + f"exclude: {'[' * 900}{']' * 900}\n", "7:11", ["exclude is a list"]),
    "large": (FULL + "#" * 300000, "", ["too large"]),
}


@pytest.mark.parametrize("case", CASES)
def test_error_says_where_what_and_what_is_nearest(load, case):
    text, place, parts = CASES[case]
    error = refused(load, text)
    assert error.where == ("s.yaml:" + place).rstrip(":")
    assert error.allowed
    for part in parts:
        assert part in str(error)


def test_all_errors_of_a_file_are_reported_at_once(load):
    error = refused(load, FULL + "tile: {m: 65, n: 3}\nlse: off\nexclude: [{kv: dense}]\n")
    for part in ("s.yaml:7:11: tile.m is 65", "s.yaml:7:18: tile.n is 3", "s.yaml:8:6: lse is off",
                 "s.yaml:9:12: unknown key kv"):
        assert part in str(error)
    assert "and 3 more" in error.details


def test_missing_and_unreadable_files(tmp_path):
    (tmp_path / "my_kernel.yaml").write_text(FULL)
    error = refused(load_specs, tmp_path / "my_kernl.yaml")
    assert error.nearest == str(tmp_path / "my_kernel.yaml")
    assert refused(load_specs, "nowhere/fa2_fwd.yml").nearest == "fa2_fwd.yaml"
    for path in (tmp_path, "\0", tmp_path / "my_kernel.yaml" / "x", "x" * 5000):
        assert refused(load_specs, path).where


def test_byte_order_mark_and_crlf_keep_positions(load):
    assert load(b"\xef\xbb\xbf" + FULL.replace("\n", "\r\n").encode()) == load(FULL)
    assert refused(load, b"\xef\xbb\xbf" + (HEAD + "head_dim_qk: 65\n").replace("\n", "\r\n").encode()).where \
        == "s.yaml:6:14"
    assert refused(load, b"\xef\xbb\xbfname: on\n").where == "s.yaml:1:7"


def test_aliases_of_aliases_cost_nothing(load):
    laughs = "x0: &x0 [1]\n" + "".join(f"x{i}: &x{i} [{', '.join([f'*x{i - 1}'] * 9)}]\n" for i in range(1, 30))

    def both() -> None:
        assert "unknown key x0" in str(refused(load, FULL + laughs))
        assert "stages is a list" in str(refused(load, laughs + FULL + "stages: *x29\n"))

    assert python_calls(both) < 200_000  # walked through, they would be 9^29 nodes


def test_python_mappings_get_paths():
    assert refused(specs_from_mapping, BASE | {"dtype": ["bf16", "half"]}, "mine").where == "mine.dtype[1]"
    assert refused(specs_from_mapping, BASE | {"tile": {"m": 64, "n": 65}}).where == "spec.tile.n"
    assert "object of type object" in str(refused(specs_from_mapping, BASE | {"tile": object()}))
    assert refused(specs_from_mapping, [1]).allowed
    huge = 10**5000  # more digits than Python prints
    assert refused(specs_from_mapping, BASE | {"stages": huge, "name": huge}).allowed
    assert refused(specs_from_mapping, BASE | {huge: huge}).what.startswith("unknown key")


# ---- nothing but SpecError, whatever comes

FIELDS = [row.name for row in rows()]
KEYS = [*FIELDS, "exclude", "overrides", "when", "set", "m", "n", "mma", "<<", "pass_"]
SCALARS = (st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.dates()
           | st.sampled_from(["bf16", "sm_80", "fwd", "fa2", "fa3", "sm_90a", "dense", 64, 128, 2, "yes", "1:30",
                                 "1e-3", 10**300]))
TREES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
    st.sampled_from(KEYS) | st.text(max_size=3), inner, max_size=4), max_leaves=12)
CHANGES = st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=3), TREES, max_size=4)
WORDS = st.sampled_from([*KEYS, ":", ": ", "\n", "\n  ", "- ", "[", "]", "{", "}", ",", "&a ", "*a", "<<: *a", "!t ",
                         "|", "'", '"', "#", "---\n", "\t", "? ", "64", "on", "0o7", "\x85", "\u2028", "%YAML 1.2\n"])


def load_or_refuse(call, *args: object) -> None:
    try:
        specs = call(*args)
    except SpecError as error:
        assert error.where and str(error) and error.allowed
    else:
        assert 0 < len(specs) <= MAX_VARIANTS and all(type(one) is Spec for one in specs)


@quick
@given(CHANGES)
def test_any_mapping_gives_specs_or_a_spec_error(changes):
    load_or_refuse(specs_from_mapping, changes)
    load_or_refuse(specs_from_mapping, BASE | changes)


@quick
@given(TREES, CHANGES)
def test_any_yaml_tree_gives_specs_or_a_spec_error(tmp_path_factory, tree, changes):
    path = tmp_path_factory.getbasetemp() / "tree.yaml"
    for value in (tree, changes, BASE | changes):
        path.write_bytes(yaml.safe_dump(value, allow_unicode=True).encode("utf-8", "surrogatepass"))
        load_or_refuse(lambda: load_specs(path).specs)


@quick
@given(st.binary(max_size=40) | st.text(max_size=40).map(lambda s: s.encode("utf-8", "surrogatepass")),
       st.lists(WORDS, max_size=12), st.integers(0, len(FULL)))
def test_any_bytes_give_specs_or_a_spec_error(tmp_path_factory, noise, words, cut):
    path = tmp_path_factory.getbasetemp() / "noise.yaml"
    text = "".join(words).encode()
    for content in (noise, text, FULL.encode() + text, FULL.encode()[:cut] + noise + text + FULL.encode()[cut:]):
        path.write_bytes(content)
        load_or_refuse(lambda: load_specs(path).specs)


@quick
@given(st.dictionaries(st.sampled_from(FIELDS), SCALARS | st.just(object()), max_size=4))
def test_the_constructor_raises_only_spec_errors(changes):
    try:
        Spec(**(BASE | changes))
        Spec(**BASE).with_(**changes)
    except SpecError as error:
        assert error.where.startswith("Spec")
