"""Calls under torch.compile: no graph break, and one graph for all numbers. Emulated, in tiny shapes."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from mla_kit import mla_by_reference
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import flashgen
from flashgen.codegen.spec.spec import Spec
from flashgen.errors import UnsupportedError
from flashgen.runtime.ops import front, torch_ops
from flashgen.runtime.ops.mla_decode.call import OPERATION
from flashgen.runtime.ops.signature import Signature
from flashgen.runtime.select.lookup import registry

Q = torch.randn(1, 20, 2, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
SINGLE = Spec(**{"name": "single", "family": "fa2", "pass": "fwd", "arch": "sm_90", "dtype": "bf16", "head_dim_qk": 64})
FILE = "name: ed\nfamily: fa2\npass: fwd\narch: sm_90\ndtype: bf16\nhead_dim_qk: 64\n"
FLOAT = {"c": {"type": "float", "default": 1.0}}
SLOPE = {"slope": {"type": "tensor", "dtype": "float32", "shape": ["num_heads_q"]}}
scaled = flashgen.variant("c * score", params=FLOAT)
sloped = flashgen.variant("c * score - slope[head_q]", params={**FLOAT, **SLOPE})
near = flashgen.variant(mask="abs(q_pos - kv_pos) <= reach and shown", params={
    "reach": {"type": "int", "default": 4}, "shown": {"type": "bool", "default": True}})


def graphs_of(function: Callable[..., Any], calls: Sequence[tuple[Any, ...]], backend: str = "aot_eager") -> int:
    """How many graphs fullgraph=True makes for the calls, each of which must give what the eager call gives."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(function, backend=counter, fullgraph=True)
    found = [compiled(*call) for call in calls]  # first, so that no eager call prepares the way
    for call, result in zip(calls, found, strict=True):
        assert torch.equal(result, function(*call))
    return counter.frame_count


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_b117_variants_that_were_never_called(backend: str) -> None:
    outside, from_spec = flashgen.variant("score * 1.5"), SINGLE.with_(score="score * 1.75")
    made = {"outside": lambda q: flashgen.attention(q, q, q, spec=outside),
            "inside": lambda q: flashgen.attention(q, q, q, spec=flashgen.variant("score * 2.5")),
            "inside, with params": lambda q: flashgen.attention(
                q, q, q, spec=flashgen.variant("c * score + 0.5", params={"c": {"type": "float"}}), params={"c": 2.0}),
            "a Spec": lambda q: flashgen.attention(q, q, q, spec=from_spec)}
    for name, function in made.items():
        assert graphs_of(function, [(Q,)], backend) == 1, name


def test_strings_in_graphs_have_one_line() -> None:
    """Inductor writes the arguments of a call into comments of the code that it makes: a second line would be code."""
    strings: list[str] = []

    def collect(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        strings.extend(arg for node in graph.graph.nodes for arg in node.args if isinstance(arg, str))
        return graph.forward

    torch._dynamo.reset()
    torch.compile(lambda q: flashgen.attention(q, q, q, spec=scaled, params={"c": 2.0}, dropout_p=0.5),
                  backend=collect, fullgraph=True)(Q)
    assert any("dropout" in text and "c: float" in text for text in strings)
    assert all(len(text.splitlines()) == 1 for text in strings)


def test_b118_names_paths_and_defaults(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"{FILE}score: score * 3.0\n")
    registry.reload()  # so that nothing of softcap is known
    for options in ({"spec": "softcap", "causal": True}, {"spec": str(path)}, {"spec": path}, {"spec": scaled},
                    {"spec": near}, {"spec": scaled, "params": {"c": 2.0}}, {"spec": scaled, "params": {"c": 2}},
                    {"spec": near, "params": {"reach": 2, "shown": True}}):
        assert graphs_of(lambda q, options=options: flashgen.attention(q, q, q, **options), [(Q,)]) == 1, options


@pytest.mark.parametrize("name, function, numbers", [
    ("float", lambda q, x: flashgen.attention(q, q, q, spec=scaled, params={"c": x}), (0.25, 0.5, 0.75, 1.25)),
    ("int", lambda q, x: flashgen.attention(q, q, q, spec=near, params={"reach": x}), (2, 3, 5, 7)),
    ("float and tensor", lambda q, x: flashgen.attention(
        q, q, q, spec=sloped, params={"c": x, "slope": torch.full((2,), 0.5)}), (0.25, 0.5, 0.75, 1.25)),
    ("window", lambda q, x: flashgen.attention(q, q, q, window=(x, 0)), (2, 3, 5, 7)),
    ("scale", lambda q, x: flashgen.attention(q, q, q, softmax_scale=x), (0.25, 0.5, 0.75, 1.25)),
    ("whole scale", lambda q, x: flashgen.attention(q, q, q, softmax_scale=x), (2, 3, 4, 5)),
    ("lse", lambda q, x: flashgen.attention(q, q, q, softmax_scale=x, return_lse=True)[1], (0.25, 0.5, 0.75, 1.25)),
    ("out", lambda q, x: flashgen.attention(q, q, q, softmax_scale=x, out=torch.empty_like(q)), (0.25, 0.5, 0.75)),
])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_b118_one_graph_for_all_numbers(name: str, function: Callable[..., Tensor], numbers: Sequence[float],
                                        backend: str) -> None:
    """The first number is a constant of its graph; the second makes torch.compile keep it open."""
    assert graphs_of(function, [(Q, number) for number in numbers], backend) == 2


def test_constants_stay_constants() -> None:
    """Graphs with the `_dynamic` ops cannot become CUDA graphs, so a scale that never changes must not bring them."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    torch.compile(lambda q: flashgen.attention(q, q, q, softmax_scale=0.3, spec=scaled, params={"c": 2.0}),
                  backend=counter, fullgraph=True)(Q)
    targets = [node.target for node in counter.graphs[0].graph.nodes]
    assert torch_ops.OPS["attention"].plain in targets and torch_ops.DYNAMIC["attention"].plain not in targets


def test_mla_serves_all_scales_by_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """The op's kernel is played by the reference: that of Hopper takes minutes here."""
    def run(signature: Signature, x: tuple[Any, ...], *_: object) -> tuple[Tensor, Tensor]:
        (q, kv, seqlens, *_), (causal, scale, *_), _ = signature.split(x)
        scale = scale.item() if isinstance(scale, Tensor) else scale
        return mla_by_reference(q, kv, seqlens, causal=causal, softmax_scale=scale, return_lse=True)

    monkeypatch.setattr(front, "run_op", run)
    monkeypatch.setattr(OPERATION, "read_key", lambda *_: ([], ()))  # eager calls pass by the dispatcher as well
    monkeypatch.setattr(OPERATION, "all_plain", lambda tensors: False)
    cache, lengths = torch.randn(1, 9, 576).bfloat16(), torch.tensor([9], dtype=torch.int32)
    q = torch.randn(1, 1, 2, 576).bfloat16()
    scales = [(q, scale) for scale in (0.25, 0.5, 0.75, 1.25)]
    assert graphs_of(lambda q, x: flashgen.mla_decode(q, cache, lengths, softmax_scale=x), scales) == 2
    assert graphs_of(lambda q, x: flashgen.mla_decode(q, cache, lengths, spec="mla_h100"), scales[:1]) == 1


def test_numbers_are_checked_when_they_are_known() -> None:
    torch._dynamo.reset()
    by_scale = torch.compile(lambda q, x: flashgen.attention(q, q, q, softmax_scale=x), backend="aot_eager")
    by_param = torch.compile(lambda q, x: flashgen.attention(q, q, q, spec=scaled, params={"c": x}),
                             backend="aot_eager")
    for compiled, refused in ((by_scale, -1.0), (by_param, float("inf"))):
        compiled(Q, 0.25), compiled(Q, 0.5)
        with pytest.raises(UnsupportedError, match="finite"):
            compiled(Q, refused)


def test_opcheck() -> None:
    text = registry.form(sloped.handle).text
    rest = (Q, Q, None, None, 0, 3, -1)
    torch.library.opcheck(torch_ops.OPS["attention"].lse, (Q, *rest, 0.3, ""))
    torch.library.opcheck(torch_ops.OPS["attention"].out, (Q, *rest, 0.3, ""), {"out": torch.zeros_like(Q)})
    values = ([], [2.0], [torch.ones(2)])
    torch.library.opcheck(torch_ops.OPS["attention"].plain, (Q, Q, Q, None, None, 0, -1, -1, 0.3, text, *values))
    numbers = torch_ops.as_numbers(0.3, 2.0)
    torch.library.opcheck(torch_ops.DYNAMIC["attention"].plain,
                          (Q, Q, Q, None, None, 0, -1, -1, numbers, text, [], [], [torch.ones(2)]))


def test_b124_a_graph_keeps_its_file_and_reads_it_anew_after_reload(tmp_path: Path,
                                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, factor in (("a", 1.0), ("b", 5.0)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "ed.yaml").write_text(f"{FILE}score: score * {factor}\n")
    torch._dynamo.reset()
    compiled = torch.compile(lambda q: flashgen.attention(q, q, q, spec="ed.yaml"), backend="aot_eager", fullgraph=True)
    monkeypatch.chdir(tmp_path / "a")
    first = compiled(Q)
    monkeypatch.chdir(tmp_path / "b")
    assert torch.equal(compiled(Q), first)
    (tmp_path / "a/ed.yaml").write_text(f"{FILE}score: score * 5.0\n")
    flashgen.reload()
    assert torch.equal(compiled(Q), flashgen.attention(Q, Q, Q, spec="ed.yaml"))
    (tmp_path / "a/ed.yaml").write_text(FILE + "score: score * factor\nparams: {factor: {type: float, default: 2.0}}\n")
    flashgen.reload()
    with pytest.raises(UnsupportedError, match=r"(?s)factor: float.*torch\.compiler\.reset"):
        compiled(Q)

