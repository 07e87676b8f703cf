"""Conformance cases of instructions between registers: conversions, arithmetic, shuffles, votes, descriptors."""
from __future__ import annotations

import drawer_model as ptx
import numpy as np
from drawer_case import Arrays, Case

WORD = "uint32_t"


def words(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.integers(0, 2**32, shape, dtype=np.uint32)


def zeros(*shape: int, dtype: type = np.uint32) -> np.ndarray:
    return np.zeros(shape, dtype)


def special_floats(rng: np.random.Generator, count: int) -> np.ndarray:
    """Random bit patterns, and what rounding stumbles over: ties, subnormals, the largest, infinities, NaN."""
    ties = (np.arange(64, dtype=np.uint32) << 15) + np.uint32(0x3f800000)   # bf16
    finer = (np.arange(64, dtype=np.uint32) << 12) + np.uint32(0x3f800000)  # fp16
    edges = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 65504, 65519.99, 65520, 3.3895e38, 3.4028235e38, 2.0**-14,
                      2.0**-24, 2.0**-25, 2.0**-25 * 1.001, 6.1e-5, 1e-40, -1e-45], np.float32).view(np.uint32)
    nans = np.array([0x7f800001, 0xffc00000, 0xffffffff], np.uint32)
    chosen = np.concatenate([ties, ties + np.uint32(1), ties - np.uint32(1), finer, finer + np.uint32(1), edges, nans])
    ranged = rng.standard_normal(count // 2).astype(np.float32).view(np.uint32)
    rest = words(rng, count - chosen.size - ranged.size)
    return np.concatenate([chosen, ranged, rest]).view(np.float32)


def _pack2(element: str) -> Case:
    rounded = {"bf16": ptx.float_to_bf16, "fp16": ptx.float_to_fp16}[element]

    def model(inputs: Arrays) -> Arrays:
        low, high = rounded(inputs["x"]), rounded(inputs["x"][::-1])
        return {"out": low.astype(np.uint32) | high.astype(np.uint32) << 16}

    return Case(f"pack2_{element}", ("convert",), {"x": "const float", "out": WORD}, f"""
  for (int i = threadIdx.x; i < 2048; i += 32) p.out[i] = pack2({element}{{}}, p.x[i], p.x[2047 - i]);
""", lambda rng: {"x": special_floats(rng, 2048), "out": zeros(2048)}, model, hopper=False)


def _to_float(element: str) -> Case:
    return Case(f"to_float_{element}", ("convert",), {"x": f"const {element}", "out": "float"}, """
  for (int i = threadIdx.x; i < 65536; i += 256) p.out[i] = to_float(p.x[i]);
""", lambda rng: {"x": ptx.all_bits(element), "out": zeros(65536, dtype=np.float32)},
        lambda inputs: {"out": ptx.TO_FLOAT[element](inputs["x"])}, threads=256, hopper=False)


def _fma2(element: str) -> Case:
    """Exact in fp64 for the finite values here, which lie close together; then rounded once, to nearest even."""
    def inputs(rng: np.random.Generator) -> Arrays:
        x = rng.standard_normal((3, 2048)) * np.exp2(rng.integers(-6, 7, (3, 2048)))
        bits = {"bf16": ptx.float_to_bf16, "fp16": ptx.float_to_fp16}[element](x.astype(np.float32))
        bits[0, :64], bits[2, :64] = bits[1, 64:128], 0          # products alone
        infinity, nan = (0x7f80, 0x7fff) if element == "bf16" else (0x7c00, 0x7fff)
        bits[:, -6:] = np.array([[infinity, infinity, infinity, nan, bits[0, 0], infinity + 0x8000],
                                 [0, bits[1, 0], 0x8000, 0, 0, 0], [0, infinity, nan, 0, nan, 0]], np.uint16)
        pairs = bits.reshape(3, 2, 1024).astype(np.uint32)
        return {"x": pairs[:, 0] | pairs[:, 1] << 16, "out": zeros(1024)}

    def model(arrays: Arrays) -> Arrays:
        a, b, c = (ptx.TO_FLOAT[element](half.astype(np.uint16)).astype(np.float64) for half in ptx.halves(arrays["x"]))
        with np.errstate(invalid="ignore"):
            low, high = ptx.rounded_once(element, a * b + c).T.astype(np.uint32)
        return {"out": low | high << 16}

    return Case(f"fma2_{element}", ("convert",), {"x": f"const {WORD}", "out": WORD}, f"""
  for (int i = threadIdx.x; i < 1024; i += 32) p.out[i] = fma2({element}{{}}, p.x[i], p.x[1024 + i], p.x[2048 + i]);
""", inputs, model, hopper=False)


def _function(name: str, exact, x, *, relative: float, absolute: float = 0.0) -> Case:
    """A function of one float, against fp64 rounded once; .ftz on both sides."""
    def model(inputs: Arrays) -> Arrays:
        with np.errstate(all="ignore"):
            return {"out": ptx.flush(exact(ptx.flush(inputs["x"]).astype(np.float64)).astype(np.float32))}

    return Case(name, ("math",), {"x": "const float", "out": "float"}, f"""
  for (int i = threadIdx.x; i < 4096; i += 32) p.out[i] = {name}(p.x[i]);
""", lambda rng: {"x": x(rng), "out": zeros(4096, dtype=np.float32)}, model, hopper=False, relative=relative,
        absolute=absolute)


def register_cases() -> list[Case]:
    def near_scores(rng: np.random.Generator) -> np.ndarray:
        x = special_floats(rng, 4096)
        x[2048:] = rng.uniform(-130, 20, 2048)
        return x

    def positive(rng: np.random.Generator) -> np.ndarray:
        x = special_floats(rng, 4096)
        x[2048:3072] = rng.uniform(0.5, 2, 1024)
        x[3072:] = np.exp(rng.uniform(-80, 80, 1024))
        return x

    shuffled = Case("shfl_xor", ("warp",), {"x": "const float", "out": "float"}, """
  for (int mask = 0; mask < 32; ++mask) p.out[32 * mask + threadIdx.x] = shfl_xor(p.x[threadIdx.x], mask);
""", lambda rng: {"x": rng.standard_normal(32).astype(np.float32), "out": zeros(32, 32, dtype=np.float32)},
        lambda inputs: {"out": inputs["x"][np.arange(32)[:, None] ^ np.arange(32)]}, hopper=False)

    swapped = Case("shfl_xor_words", ("warp",), {"x": f"const {WORD}", "out": WORD}, """
  for (int mask = 0; mask < 32; ++mask) p.out[32 * mask + threadIdx.x] = shfl_xor(p.x[threadIdx.x], mask);
""", lambda rng: {"x": words(rng, 32), "out": zeros(32, 32)},
        lambda inputs: {"out": inputs["x"][np.arange(32)[:, None] ^ np.arange(32)]}, hopper=False)

    spread = Case("first_lane", ("warp",), {"n": "const int", "first": "int"}, """
  p.first[threadIdx.x] = first_lane(p.n[threadIdx.x]);
""", lambda rng: {"n": words(rng, 64).view(np.int32), "first": zeros(64, dtype=np.int32)},
        lambda inputs: {"first": np.repeat(inputs["n"][::32], 32)}, threads=64, hopper=False)

    passed = Case("sync_warp", ("warp", "smem"), {"x": f"const {WORD}", "out": WORD}, """
  uint32_t* const slot = reinterpret_cast<uint32_t*>(dyn_smem()) + threadIdx.x / 32 * 32;
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 8; ++i) {
    slot[lane] = p.x[64 * i + threadIdx.x];
    sync_warp();
    p.out[64 * i + threadIdx.x] = slot[(lane + 1 + i) % 32];
    sync_warp();
  }
""", lambda rng: {"x": words(rng, 8, 2, 32), "out": zeros(8, 2, 32)},
        lambda inputs: {"out": np.stack([np.roll(row, -1 - i, 1) for i, row in enumerate(inputs["x"])])},
        threads=64, smem=256, hopper=False)

    def votes(inputs: Arrays) -> Arrays:
        warps = inputs["x"].reshape(-1, 2, 32) != 0
        count = np.repeat(warps.sum(2), 32, 1).astype(np.int32).reshape(-1, 64)
        return {"any": np.repeat(warps.any(2), 32, 1).astype(np.int32).reshape(-1, 64), "count": count, "bits": count,
                "lanes": np.repeat(packed := (warps << np.arange(32)).sum(2), 32, 1).astype(np.uint32).reshape(-1, 64),
                "highest": np.repeat(np.vectorize(lambda x: int(x).bit_length() - 1)(packed), 32, 1)
                .astype(np.int32).reshape(-1, 64),
                "block": np.repeat(warps.any((1, 2)), 64).astype(np.int32).reshape(-1, 64)}

    def ballots(rng: np.random.Generator) -> Arrays:
        x = rng.integers(0, 2, (8, 64), dtype=np.int32)
        x[1], x[2, :32], x[3], x[3, 63] = 0, 0, 0, 1
        return {"x": x, "lanes": zeros(8, 64, dtype=np.uint32),
                **{name: zeros(8, 64, dtype=np.int32) for name in ("any", "count", "block", "highest", "bits")}}

    voted = Case("votes", ("warp",), {"x": "const int", "any": "int", "count": "int", "block": "int",
                                      "lanes": "uint32_t", "highest": "int", "bits": "int"}, """
  for (int i = threadIdx.x; i < 8 * 64; i += 64) {
    const bool x = p.x[i] != 0;
    p.any[i] = any_in_warp(x);
    p.count[i] = count_in_warp(x);
    p.lanes[i] = lanes_in_warp(x);
    p.highest[i] = highest_bit(p.lanes[i]);
    p.bits[i] = count_bits(p.lanes[i]);
    p.block[i] = any_in_block(x);
  }
""", ballots, votes, threads=64, hopper=False)

    elected = Case("elect_one", ("elect", "warp"), {"out": "int"}, """
  const bool first = elect_one();
  sync_block();
  const bool second = elect_one();
  const int leaders = count_in_warp(first);
  const int same = count_in_warp(first == second);
  if (threadIdx.x % 32 == 7) {
    p.out[threadIdx.x / 32 * 2] = leaders;
    p.out[threadIdx.x / 32 * 2 + 1] = same;
  }
""", lambda rng: {"out": zeros(4, 2, dtype=np.int32)},
        lambda inputs: {"out": np.tile(np.array([1, 32], np.int32), (4, 1))}, threads=128)

    moved = Case("setmaxnreg", ("setmaxnreg",), {"x": "const int", "out": "int"}, """
  if (threadIdx.x < 128) {
    setmaxnreg_dec<24>();
    p.out[threadIdx.x] = p.x[threadIdx.x] + 1;
  } else {
    setmaxnreg_inc<240>();
    p.out[threadIdx.x] = p.x[threadIdx.x] + 2;
  }
""", lambda rng: {"x": rng.integers(0, 1000, 384, dtype=np.int32), "out": zeros(384, dtype=np.int32)},
        lambda inputs: {"out": inputs["x"] + np.where(np.arange(384) < 128, 1, 2).astype(np.int32)}, threads=384)

    # Fields of the descriptor, read bit by bit; the start address relative to that of the shared memory.
    fields = np.array([0, 48, 0x1000 >> 4, 512 >> 4, 2048, 2 << 30, 3], np.uint32)
    described = Case("wgmma_descriptor", ("wgmma",), {"out": WORD}, """
  unsigned char* smem = dyn_smem();
  const uint64_t d = wgmma_descriptor(smem + 2048, SWIZZLE_64B, 0x1000, 512);
  p.out[0] = smem_addr(smem) % 1024;
  p.out[1] = smem_addr(smem + 48) - smem_addr(smem);
  p.out[2] = (uint32_t)(d >> 16) & 0xffff;
  p.out[3] = (uint32_t)(d >> 32) & 0xffff;
  p.out[4] = (uint32_t)(d & 0xffff) * 16 - smem_addr(smem);
  p.out[5] = (uint32_t)(d >> 32) & 0xffff0000;
  p.out[6] = (uint32_t)(wgmma_descriptor_advance(d, 48) - d);
""", lambda rng: {"out": zeros(7)}, lambda inputs: {"out": fields}, threads=1, smem=4096)

    return [
        _pack2("bf16"), _pack2("fp16"), _to_float("bf16"), _to_float("fp16"), _fma2("bf16"), _fma2("fp16"),
        Case("float_bits", ("convert",), {"x": "const float", "out": "int"}, """
  for (int i = threadIdx.x; i < 2048; i += 32) p.out[i] = float_bits(p.x[i]);
""", lambda rng: {"x": special_floats(rng, 2048), "out": zeros(2048, dtype=np.int32)},
             lambda inputs: {"out": inputs["x"].view(np.int32)}, hopper=False),
        _function("exp2_approx", np.exp2, near_scores, relative=2.0**-22),
        _function("log2_approx", np.log2, positive, relative=2.0**-22, absolute=2.0**-22),
        _function("rcp_approx", np.reciprocal, positive, relative=2.0**-22),
        shuffled, swapped, spread, passed, voted, elected, moved, described,
    ]
