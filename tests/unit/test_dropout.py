"""Which weights dropout keeps, and which kernels calls with it get."""
from __future__ import annotations

import pytest
import torch

import flashgen
from flashgen.codegen.families.registry import lower
from flashgen.codegen.families.shared.launch import Sizes, kept_of_65536, tiled_values
from flashgen.codegen.render import render
from flashgen.errors import SpecError, UnsupportedError
from flashgen.runtime.ops.attention.dropout import draw_seed, philox
from flashgen.runtime.select.lookup import choose
from flashgen.runtime.select.selector import Wanted

SEED = torch.tensor([-(2**62) + 12345, 2**40 + 678])
SPEC = flashgen.Spec(name="t", family="fa2", pass_="fwd", arch="sm_90", dtype="bf16", head_dim_qk=64, causal=True)


@pytest.mark.parametrize("counter, key, words", [  # the known answers that come with the paper's own library, Random123
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
     (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
])
def test_philox(counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]) -> None:
    a, b, c, d = map(torch.tensor, counter)
    assert tuple(map(int, philox((a, b, c, d), (torch.tensor(key[0]), torch.tensor(key[1]))))) == words


@pytest.mark.parametrize("p", [0.1, 0.5, 0.93, 1 / 3])
def test_as_many_are_kept_as_asked_for(p: float) -> None:
    """Within five standard deviations: over all, in each of 16 x 16 places of a fragment, and of neighbours at once."""
    kept = flashgen.dropout_mask(SEED, p, num_heads=3, seqlen_q=512, seqlen_kv=512, batch=2).double()

    def check(found: torch.Tensor, rate: float, count: int) -> None:
        assert (found - rate).abs().max() < 5 * (rate * (1 - rate) / count) ** 0.5

    check(kept.mean(), 1 - p, kept.numel())
    check(kept.unflatten(-1, (-1, 16)).unflatten(2, (-1, 16)).mean((0, 1, 2, 4)), 1 - p, kept.numel() // 256)
    for shifted in (kept.roll(1, 0), kept.roll(1, 1), *(kept.roll(n, dim) for dim in (2, 3) for n in (1, 2, 8, 16))):
        check((kept * shifted).mean(), (1 - p) ** 2, kept.numel() // 2)


def test_a_mask_hangs_on_seed_and_place() -> None:
    whole = flashgen.dropout_mask(SEED, 0.4, num_heads=2, seqlen_q=40, seqlen_kv=50, batch=2)
    assert whole.shape == (2, 2, 40, 50)
    part = flashgen.dropout_mask(SEED, 0.4, num_heads=1, seqlen_q=33, seqlen_kv=7)
    assert torch.equal(part[0, 0], whole[0, 0, :33, :7])
    for other in (SEED + torch.tensor([1, 0]), SEED + torch.tensor([0, 1]), SEED + torch.tensor([2**32, 0])):
        assert not torch.equal(flashgen.dropout_mask(other, 0.4, num_heads=1, seqlen_q=33, seqlen_kv=7), part)
    packed = flashgen.dropout_mask(SEED, 0.4, num_heads=2, seqlen_q=80, seqlen_kv=50,
                                   cu_seqlens_q=torch.tensor([0, 40, 80], dtype=torch.int32))
    assert torch.equal(packed.unflatten(1, (2, 40)).transpose(0, 1), whole)


def test_probabilities_count_in_steps() -> None:
    assert [kept_of_65536(p) for p in (0.0, 1e-9, 0.5, 0.1, 1 - 1e-9)] == [65536, 65536, 32768, 58982, 1]
    assert all(abs(1 - kept_of_65536(p) / 65536 - p) <= 2**-17 for p in torch.rand(1000).tolist())
    plan = lower(SPEC.with_(dropout=True))
    values = tiled_values(plan, 64, Sizes(1, 1, 1, 1, 1, dropout_p=0.75))
    assert (values["keep_last"], values["keep_scale"]) == (16383, 4.0)
    assert flashgen.dropout_mask(SEED, 0.0, num_heads=1, seqlen_q=99, seqlen_kv=99).all()


def test_a_seed_comes_from_torchs_generator() -> None:
    torch.manual_seed(3)
    first, second = draw_seed(torch.device("cpu")), draw_seed(torch.device("cpu"))
    torch.manual_seed(3)
    assert torch.equal(torch.randint(2**62, (2,), dtype=torch.int64), first) and not torch.equal(first, second)


@pytest.mark.parametrize("op, traits", [("attention", ()), ("attention_backward", (("kernel", "preprocess"),))])
def test_only_calls_with_dropout_get_its_kernels(op: str, traits: tuple[tuple[str, str], ...]) -> None:
    plain = Wanted("bf16", 128, 128, True, False, "dense", True, op=op, traits=traits)
    for archs, family in ((["sm_90a", "sm_90"], "fa3"), (["sm_80"], "fa2")):
        found = choose(plain, archs).spec
        assert found.family == family and not found.dropout
        dropping = choose(Wanted(**{**vars(plain), "dropout": True}), archs)
        assert dropping.spec.family == "fa2" and dropping.spec.dropout and "dropout" in dropping.spec.variant


def test_variants_with_a_softmax_may_have_dropout() -> None:
    assert "dropout" not in dict(SPEC.fields()) and "dropout" not in render(lower(SPEC)).text
    assert SPEC.with_(causal=False, dropout=True, mask="kv_pos // 7 == q_pos // 7", score="2 * score",
                      sink="per_head").dropout
    for field in ({"normalize": "none", "lse": False}, {"family": "fa3", "arch": "sm_90a"}):
        with pytest.raises(SpecError, match="dropout is true"):
            SPEC.with_(**{"causal": False, "dropout": True, **field})


@pytest.mark.parametrize("arguments, where", [
    ({"dropout_p": 1.0}, "dropout_p"), ({"dropout_p": -0.1}, "dropout_p"), ({"dropout_p": float("nan")}, "dropout_p"),
    ({"dropout_p": 0.5, "dropout_seed": torch.zeros(2)}, "dropout_seed"),
    ({"dropout_p": 0.5, "dropout_seed": torch.zeros(3, dtype=torch.int64)}, "dropout_seed"),
])
def test_refusals(arguments: dict[str, object], where: str) -> None:
    q, k, v = (torch.zeros(1, 4, 1, 64).bfloat16() for _ in range(3))
    with pytest.raises(UnsupportedError) as caught:
        flashgen.attention(q, k, v, **arguments)  # type: ignore[arg-type]
    assert caught.value.where == where
    lse = torch.zeros(1, 1, 4)
    with pytest.raises(UnsupportedError, match="without the seed"):
        flashgen.attention_backward(q, q, k, v, q, lse, dropout_p=0.5)
