"""`flashgen tune` on a real device: a few candidates of one variant. Needs a CUDA device."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import runs_here
from typer.testing import CliRunner

from flashgen.cli.app import app
from flashgen.codegen.explain.candidates import candidates
from flashgen.codegen.explain.counts import Shape
from flashgen.codegen.families.registry import FAMILIES
from flashgen.codegen.spec.spec import load_specs, shipped_spec_paths
from flashgen.errors import VerifyError
from flashgen.runtime.measure import tune as runner
from flashgen.runtime.ops.attention import op
from flashgen.runtime.verify import verify

pytestmark = [pytest.mark.gpu, pytest.mark.time_limit(600)]
SHAPE = Shape(2, 1024, 1024, 8, 8)
PROBLEM = "batch=2 seqlen_q=1024 num_heads_q=8"
HERE = [spec for path in shipped_spec_paths() for spec in load_specs(path).specs
        if runs_here(spec) and spec.dtype == "bf16" and spec.kv_layout == "dense" and spec.head_dim_qk == 64
        and spec.pass_ == "fwd"]


def families() -> list[str]:
    return sorted({spec.family for spec in HERE if FAMILIES[spec.family].tiles})


@pytest.mark.parametrize("family", families())
def test_the_winner_is_written_verified_and_no_slower(family: str, cuda: str, tmp_path: Path) -> None:
    spec = next(one for one in HERE if one.family == family and one.causal)
    path = tmp_path / "tuned.yaml"
    result = CliRunner().invoke(app, ["tune", f"{family}_fwd", "--variant", f"{spec.variant}.{spec.arch}", "--max", "6",
                                      "--rounds", "5", "--problem", PROBLEM, "--write", "spec", str(path), "--json"])
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    rows = data["rows"]
    assert len(rows) + len(data["unbuilt"]) == 6 and not data["wrong"]
    assert sum(row["present"] for row in rows) == 1 and rows[0]["ratio"] >= 1.0
    peak = 2500.0  # TFLOP/s: above any card's here, so a kernel that does nothing shows
    assert all(0 < x < peak for row in rows for x in row["tflops"])
    assert all(found.ok for found in verify.verify_spec(load_specs(path).specs, path=str(path)))


def test_a_kernel_that_computes_something_else_is_caught(cuda: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = HERE[0]
    found = candidates(spec, (SHAPE,), 1)
    (result,) = runner.build([found.kept[0].spec], None, lambda done, what: None)
    assert result.error is None
    runner.check(found.kept[0])
    plain: Any = op.run

    def doubled(*arguments: Any) -> dict[str, torch.Tensor]:
        return {name: x * (2 if name == "out" else 1) for name, x in plain(*arguments).items()}

    monkeypatch.setattr(op, "run", doubled)
    with pytest.raises(VerifyError):
        runner.check(found.kept[0])
