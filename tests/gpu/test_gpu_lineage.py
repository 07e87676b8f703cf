"""`flashgen lineage` on a GPU: every generation that runs here, and where standard attention's memory ends."""
from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from flashgen.cli.app import app
from flashgen.errors import EnvironmentError_
from flashgen.runtime.measure import ncu
from flashgen.runtime.measure.device import CudaDevice
from flashgen.runtime.measure.lineage import measure
from flashgen.runtime.ops.attention.lineage import LINEAGE as ATTENTION
from flashgen.runtime.ops.mla_decode.lineage import LINEAGE as DECODE

pytestmark = pytest.mark.gpu
ERROR = 1e-2  # of a few roundings to bf16


def test_attention(cuda: str, tmp_path: Path) -> None:
    found = CliRunner().invoke(app, ["lineage", "--problem", "batch=2 heads=4 heads_kv=2 head_dim=128 causal=true",
                                     "--seqlens", "512,1024", "--backward", "--rounds", "2", "-o", str(tmp_path)])
    assert found.exit_code == 0, found.output
    [path] = tmp_path.glob("*/lineage.json")
    rows = json.loads(path.read_text())["rows"]
    ran = [row for row in rows if row["status"] == "ok"]
    assert {"standard", "fa2"} <= {row["generation"] for row in ran}, rows
    assert {"fwd", "fwd+bwd"} == {row["passes"] for row in ran}
    for row in ran:
        assert 0 < row["measured"]["error"] < ERROR and row["measured"]["ms"] > 0, row
        assert row["measured"]["ms"] > 0.9 * row["predicted"]["ms"], row  # nothing beats the datasheet
        assert row["measured"]["peak_bytes"] >= row["predicted"]["scratch_bytes"], row


def test_decodes(cuda: str) -> None:
    cases = DECODE.cases({"batch": 4, "cached": 1000, "heads": 16})
    rows = measure(CudaDevice(), DECODE, cases, rounds=2)["rows"]  # type: ignore[arg-type]
    ran = {row["generation"]: row["measured"] for row in rows if row["status"] == "ok"}
    assert {"naive", "absorbed"} <= {*ran}, rows
    assert all(0 < found["error"] < ERROR for found in ran.values()), ran
    assert ran["naive"]["peak_bytes"] > ran["absorbed"]["peak_bytes"]


def test_out_of_memory_is_a_row_and_the_others_go_on(cuda: str) -> None:
    """A score matrix of more than this process may have."""
    allowed = 2 << 30  # so that tests beside this one have memory
    cases = ATTENTION.cases({"batch": 1, "seqlen": 8192, "heads": 1 + allowed // (6 * 8192**2), "head_dim": 64})
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(allowed / torch.cuda.get_device_properties(0).total_memory)
    try:
        rows = {row["generation"]: row for row in measure(CudaDevice(), ATTENTION, cases, rounds=1)["rows"]}  # type: ignore[arg-type]
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert (rows["standard"]["status"], rows["standard"]["why"]) == ("out of memory", "")
    assert rows["standard"]["measured"] == {}
    assert rows["fa2"]["status"] == "ok"


def test_counters(cuda: str) -> None:
    """Standard attention's bytes are those of its scores, within what L2 keeps from memory."""
    if shutil.which("ncu") is None:
        pytest.skip("needs ncu")
    device = CudaDevice()
    cases = ATTENTION.cases({"batch": 1, "seqlen": 4096, "heads": 16, "head_dim": 64})
    options: dict[str, Any] = {"rounds": 1, "counters": ncu.counter(ncu.find_ncu(), ATTENTION)}
    try:
        rows = {row["generation"]: row for row in measure(device, ATTENTION, cases, **options)["rows"]}
    except EnvironmentError_ as err:
        pytest.skip(err.what)  # the user may not read counters
    found, said = rows["standard"]["measured"], rows["standard"]["predicted"]
    assert found["read"] + found["written"] == pytest.approx(said["bytes"], rel=0.15)
