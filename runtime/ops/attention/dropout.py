"""Dropout of attention weights as calls see it: the seed of a call, and the mask that kernels make of it.

templates/include/flashgen/dropout.cuh has the same rules in CUDA. A weight is kept where 16 bits of Philox4x32-10 lie
below a bound. Their place in its counter hangs on query head, query and key alone, so no tile of a kernel shows.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from flashgen.codegen.families.shared.launch import kept_of_65536
from flashgen.errors import UnsupportedError
from flashgen.runtime.ops.arguments import check_tensor, number, shown, whole
from flashgen.runtime.ops.tensors import MAX_LENGTH
from flashgen.runtime.select.handles import SEPARATOR

if TYPE_CHECKING:
    from flashgen.runtime.select.params import Bound

ALLOWED = "a number, from 0 to below 1"
_WORD = 0xFFFFFFFF
_ROUNDS = 10
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85
KEEPS_ALL = 2.0**-40  # a dropout_p at which all 16-bit numbers keep their weight
_SEEDS = 2**62  # torch.randint counts in 63 bits


# The end of the text that names the spec of a call with dropout. The probability is then the first of the call's floats
# and the seed the first of the extra tensors, so that the torch ops need no arguments of their own for it.
MARK = f"{SEPARATOR}dropout"
Named = tuple[str, tuple[int, ...], tuple[float, ...], tuple[Tensor, ...]]  # as parameters.bound_to gives it


def with_dropout(named: Named, dropout_p: Any, seed: Tensor | None, device: torch.device) -> Named:
    """The text and the parameters of a call with dropout. Without a seed, one is drawn. Unchanged for a probability
    of 0. UnsupportedError for what is none."""
    text, ints, floats, extra = named
    p = probability(dropout_p)
    if p == 0:
        return named
    if seed is None:
        seed = draw_seed(device)
    else:
        check_tensor("dropout_seed", seed)
    return text + MARK, ints, (p, *floats), (seed, *extra)


def taken_off(text: str, bound: Bound, device: torch.device) -> tuple[str, Bound, float]:
    """What with_dropout was given: the text and the parameters of the spec, and the probability; 0 without dropout."""
    if not text.endswith(MARK):
        return text, bound, 0.0
    ints, floats, extra = bound
    check_seed(extra[0], device)
    return text.removesuffix(MARK), (ints, floats[1:], extra[1:]), checked(floats[0])


def without_seed(text: str, extra: Sequence[Tensor]) -> tuple[str, Sequence[Tensor], Sequence[Tensor]]:
    """The text of the spec, the seed, if the call has dropout, and the tensors of parameters."""
    own = text.removesuffix(MARK)
    return own, extra[:own != text], extra[own != text:]


def spec_arguments(spec: Any, device: torch.device) -> dict[str, Any]:
    """The arguments that let the kernels of a spec serve a call, or None, whose result is that without dropout: those
    with dropout then keep every weight."""
    if not getattr(spec, "dropout", False):
        return {"spec": spec}
    return {"spec": spec, "dropout_p": KEEPS_ALL, "dropout_seed": torch.zeros(2, dtype=torch.int64, device=device)}


def probability(value: Any) -> Any:
    """dropout_p as a number; UnsupportedError for what is none, or outside of [0, 1)."""
    found = number("dropout_p", value, ALLOWED)
    return float(found if is_dynamo_compiling() else checked(found))  # a look at a traced number makes it a constant


def checked(p: float) -> float:
    if not 0 <= p < 1:
        raise UnsupportedError(f"dropout_p is {shown(p)}", where="dropout_p", allowed=ALLOWED)
    return p


def draw_seed(device: torch.device) -> Tensor:
    """The seed of one call, from torch's default generator of the device. No wait for it, also in a CUDA graph, each
    replay of which draws anew."""
    return torch.randint(_SEEDS, (2,), dtype=torch.int64, device=device)


def check_seed(seed: Any, device: torch.device) -> None:
    check_tensor("dropout_seed", seed, "a tensor, or None")
    if seed.dtype != torch.int64 or tuple(seed.shape) != (2,) or seed.device != device or not seed.is_contiguous():
        raise UnsupportedError(f"dropout_seed is {seed.dtype} {tuple(seed.shape)} on {seed.device}",
                               where="dropout_seed", allowed=f"contiguous int64 (2,) on {device}",
                               next="leave it out: each call then draws its own")


def dropout_mask(seed: Tensor, dropout_p: float, *, num_heads: int, seqlen_q: int, seqlen_kv: int, batch: int = 1,
                 cu_seqlens_q: Tensor | None = None) -> Tensor:
    """Which attention weights flashgen.attention keeps with this seed and probability: bool, True where it keeps one.

    Args:
        seed: [2] int64, the dropout_seed of the call. A call without one draws it as
            `torch.randint(2**62, (2,), dtype=torch.int64, device=q.device)` does: after torch.manual_seed, that gives
            the seed of the next call.
        dropout_p: as the call has it; it counts in steps of 2^-16.
        num_heads: query heads.
        seqlen_q, seqlen_kv: of each sequence; with cu_seqlens_q, the total of queries and the longest keys.
        batch: sequences.
        cu_seqlens_q: [batch + 1], as the call has it.

    [batch, num_heads, seqlen_q, seqlen_kv], or [num_heads, total_q, seqlen_kv] with cu_seqlens_q. It takes the memory
    that attention without it saves, so it is for tests and for debugging.
    """
    check_tensor("seed", seed)
    check_seed(seed, seed.device)
    kept = kept_of_65536(probability(dropout_p))
    num_heads, seqlen_q, seqlen_kv, batch = (whole(name, value, 0, MAX_LENGTH) for name, value in (
        ("num_heads", num_heads), ("seqlen_q", seqlen_q), ("seqlen_kv", seqlen_kv), ("batch", batch)))
    if cu_seqlens_q is not None:
        check_tensor("cu_seqlens_q", cu_seqlens_q)
        if cu_seqlens_q.dtype != torch.int32 or cu_seqlens_q.dim() != 1 or not len(cu_seqlens_q) or (
                cu_seqlens_q.device != seed.device):
            raise UnsupportedError(f"cu_seqlens_q is {cu_seqlens_q.dtype} of {cu_seqlens_q.dim()} dimensions on "
                                   f"{cu_seqlens_q.device}", where="cu_seqlens_q",
                                   allowed=f"int32 [batch + 1] on {seed.device}, or None")
    rows = torch.arange(batch * seqlen_q if cu_seqlens_q is None else seqlen_q, device=seed.device)
    if cu_seqlens_q is None:
        places = rows % max(seqlen_q, 1)
    else:  # of a query in its sequence
        starts = cu_seqlens_q.long()
        places = rows - starts[torch.searchsorted(starts, rows, right=True) - 1]
    keys = torch.arange(seqlen_kv, device=seed.device)
    bits = _bits(seed, num_heads, rows, places, keys)
    found = bits < kept
    return found.unflatten(1, (batch, seqlen_q)).transpose(0, 1).contiguous() if cu_seqlens_q is None else found


def _bits(seed: Tensor, num_heads: int, rows: Tensor, places: Tensor, keys: Tensor) -> Tensor:
    """The 16 bits of each weight, [num_heads, rows, keys]: dropout.cuh says where they come from."""
    upper = places % 16 // 8
    groups = torch.arange(-(-len(keys) // 16) * 4, device=seed.device)  # of four keys each
    heads = torch.arange(num_heads, device=seed.device)
    counter = torch.broadcast_tensors(groups, (rows - 8 * upper)[:, None] & _WORD, heads[:, None, None],
                                      seed[1] & _WORD)
    words = philox(counter, (seed[0] & _WORD, seed[0] >> 32 & _WORD))
    by_key = [torch.where(upper[:, None] == 1, words[2 * odd + 1], words[2 * odd]) for odd in (0, 1)]
    of_pairs = torch.stack(by_key, -1).flatten(-2)  # the even and the odd keys of each group
    place = keys // 16 * 8 + keys % 8  # twice the group, and whether the key is odd
    return of_pairs[..., place] >> 16 * (keys // 8 % 2) & 0xFFFF


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Philox4x32-10 of counters and a key, words of 32 bits in int64."""
    a, b, c, d = counter
    for turn in range(_ROUNDS):
        first, second = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]  # modulo 2^64: the 32 bits above are right as well
        key0, key1 = (word + turn * step for word, step in zip(key, _KEY_STEPS, strict=True))
        a, b, c, d = ((second >> 32 ^ b ^ key0) & _WORD, second & _WORD, (first >> 32 ^ d ^ key1) & _WORD,
                      first & _WORD)
    return a, b, c, d
