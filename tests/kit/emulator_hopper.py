"""Two kernels in the manner of FlashAttention-3 and FlashMLA, small enough to read: what the emulator's Hopper half is
tried on. Warp-specialised; tensor copies into rings of stages, mbarriers, wgmma from shared memory and registers.
"""
from __future__ import annotations

import drawer_model as ptx
import numpy as np
from drawer_case import Arrays, Case, TensorMapSpec

from flashgen.codegen.wgmma import WgmmaShape

HEADERS = ("convert", "fence", "math", "mbarrier", "named_barrier", "setmaxnreg", "stmatrix", "tma", "warp", "wgmma")
K, MN = "K_MAJOR", "MN_MAJOR"
PANEL = 64  # elements of a row of 128 bytes


def random_bf16(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return ptx.float_to_bf16(rng.standard_normal(shape).astype(np.float32))


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """softmax(q k^T / sqrt(d)) v in fp64 of bf16 bits."""
    q, k, v = (ptx.bf16_to_float(x).astype(np.float64) for x in (q, k, v))
    scores = q @ k.T / np.sqrt(q.shape[1])
    weights = np.exp(scores - scores.max(1, keepdims=True))
    return weights / weights.sum(1, keepdims=True) @ v


def rows_map(buffer: str, columns: int, rows: int, box_rows: int) -> TensorMapSpec:
    """Panels of 64 columns of a matrix of bf16."""
    return TensorMapSpec(buffer, "bf16", (columns, rows), (2 * columns,), (PANEL, box_rows), 128)


# One block: 128 queries in two warpgroups that take turns at the tensor cores; a producer warp fills two stages.
FA3_QUERIES, FA3_KEYS = 200, 400
FA3 = """
  constexpr int BLOCK_M = 128, BLOCK_N = 64, D = 64, STAGES = 2, KEYS = 400;
  constexpr int TILES = (KEYS + BLOCK_N - 1) / BLOCK_N;
  constexpr int TILE_BYTES = BLOCK_N * D * 2;
  constexpr float SCALE_LOG2 = 0.125f * 1.44269504f;
  unsigned char* const q_tile = dyn_smem();
  unsigned char* const k_tiles = q_tile + BLOCK_M * D * 2;
  unsigned char* const v_tiles = k_tiles + STAGES * TILE_BYTES;
  uint64_t* const full_q = (uint64_t*)(v_tiles + STAGES * TILE_BYTES);
  uint64_t* const full_k = full_q + 1;
  uint64_t* const full_v = full_k + STAGES;
  uint64_t* const empty_k = full_v + STAGES;
  uint64_t* const empty_v = empty_k + STAGES;
  const int warpgroup = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const int first_row = blockIdx.x * BLOCK_M;
  if (threadIdx.x == 0) {
    mbarrier_init(full_q, 1);
    for (int i = 0; i < STAGES; ++i) {
      mbarrier_init(full_k + i, 1);
      mbarrier_init(full_v + i, 1);
      mbarrier_init(empty_k + i, 2);
      mbarrier_init(empty_v + i, 2);
    }
    fence_mbarrier_init();
  }
  sync_block();

  if (warpgroup == 0) {  // producer
    setmaxnreg_dec<24>();
    if (threadIdx.x == 0) {
      mbarrier_arrive_expect_tx(full_q, BLOCK_M * D * 2);
      tma_load_2d(q_tile, &p.q_map, full_q, 0, first_row);
      for (int j = 0; j < TILES; ++j) {
        const int stage = j % STAGES;
        const int parity = j / STAGES % 2 ^ 1;
        mbarrier_wait_parity(empty_k + stage, parity);
        mbarrier_arrive_expect_tx(full_k + stage, TILE_BYTES);
        tma_load_2d(k_tiles + stage * TILE_BYTES, &p.k_map, full_k + stage, 0, j * BLOCK_N);
        mbarrier_wait_parity(empty_v + stage, parity);
        mbarrier_arrive_expect_tx(full_v + stage, TILE_BYTES);
        tma_load_2d(v_tiles + stage * TILE_BYTES, &p.v_map, full_v + stage, 0, j * BLOCK_N);
      }
    }
    return;
  }

  setmaxnreg_inc<240>();
  const int me = warpgroup - 1;
  unsigned char* const my_rows = q_tile + me * 64 * 128;
  float s[BLOCK_N / 2], o[D / 2], row_max[2] = {-INFINITY, -INFINITY}, row_sum[2] = {0.0f, 0.0f}, rescale[2];
  uint32_t weights[BLOCK_N / 16][4];
  for (int i = 0; i < D / 2; ++i) o[i] = 0.0f;

  const auto scores = [&](int stage) {
    wgmma_fence(s);
    for (int k = 0; k < D / 16; ++k)
      wgmma_ss<BLOCK_N, K_MAJOR, K_MAJOR>(
          bf16{}, s, wgmma_descriptor(my_rows + 32 * k, SWIZZLE_128B, 16, 1024),
          wgmma_descriptor(k_tiles + stage * TILE_BYTES + 32 * k, SWIZZLE_128B, 16, 1024), k > 0);
    wgmma_commit();
  };
  const auto values = [&](int stage) {
    wgmma_fence(o, weights);
    for (int k = 0; k < BLOCK_N / 16; ++k)
      wgmma_rs<D, MN_MAJOR>(
          bf16{}, o, weights[k],
          wgmma_descriptor(v_tiles + stage * TILE_BYTES + 16 * 128 * k, SWIZZLE_128B, 1024, 1024), 1);
    wgmma_commit();
  };
  const auto softmax = [&](int first_key) {
    for (int h = 0; h < 2; ++h) {
      float highest = row_max[h];
      for (int i = 0; i < BLOCK_N / 2; ++i) {
        if (i / 2 % 2 != h) continue;
        const int key = first_key + i / 4 * 8 + lane % 4 * 2 + i % 2;
        s[i] = key < KEYS ? s[i] * SCALE_LOG2 : -INFINITY;
        highest = fmaxf(highest, s[i]);
      }
      highest = fmaxf(highest, shfl_xor(highest, 1));
      highest = fmaxf(highest, shfl_xor(highest, 2));
      rescale[h] = exp2_approx(row_max[h] - highest);
      row_max[h] = highest;
      row_sum[h] *= rescale[h];
      for (int i = 0; i < BLOCK_N / 2; ++i) {
        if (i / 2 % 2 != h) continue;
        s[i] = exp2_approx(s[i] - highest);
        row_sum[h] += s[i];
      }
    }
  };
  const auto pack = [&] {
    for (int k = 0; k < BLOCK_N / 16; ++k)
      for (int r = 0; r < 4; ++r) weights[k][r] = pack2(bf16{}, s[8 * k + 2 * r], s[8 * k + 2 * r + 1]);
  };
  const auto release = [&](uint64_t* barrier) {  // one arrival per warpgroup, after all its threads
    bar_sync_at<128>(3 + me);
    if (threadIdx.x % 128 == 0) mbarrier_arrive(barrier);
  };

  if (me == 1) bar_arrive<1, 256>();  // the other warpgroup goes first
  mbarrier_wait_parity(full_q, 0);
  mbarrier_wait_parity(full_k, 0);
  bar_sync_at<256>(1 + me);
  scores(0);
  bar_arrive_of(2 - me, 256);
  wgmma_wait<0>(s);
  release(empty_k);
  softmax(0);
  pack();
  for (int j = 1; j < TILES; ++j) {
    const int stage = j % STAGES, before = (j - 1) % STAGES;
    mbarrier_wait_parity(full_k + stage, j / STAGES % 2);
    bar_sync_at<256>(1 + me);
    scores(stage);
    mbarrier_wait_parity(full_v + before, (j - 1) / STAGES % 2);
    values(before);
    bar_arrive_of(2 - me, 256);
    wgmma_wait<1>(s);
    release(empty_k + stage);
    softmax(j * BLOCK_N);
    wgmma_wait<0>(o, weights);
    release(empty_v + before);
    for (int i = 0; i < D / 2; ++i) o[i] *= rescale[i / 2 % 2];
    pack();
  }
  if (me == 0) bar_sync<1, 256>();
  mbarrier_wait_parity(full_v + (TILES - 1) % STAGES, (TILES - 1) / STAGES % 2);
  values((TILES - 1) % STAGES);
  wgmma_wait<0>(o, weights);

  for (int h = 0; h < 2; ++h) {
    row_sum[h] += shfl_xor(row_sum[h], 1);
    row_sum[h] += shfl_xor(row_sum[h], 2);
  }
  for (int n = 0; n < D / 16; ++n) {  // over this warpgroup's queries
    uint32_t r[4];
    for (int i = 0; i < 4; ++i)
      r[i] = pack2(bf16{}, o[8 * n + 2 * i] / row_sum[i % 2], o[8 * n + 2 * i + 1] / row_sum[i % 2]);
    const int row = 16 * warp + lane % 16, chunk = 2 * n + lane / 16;
    stmatrix_x4(my_rows + row * 128 + (chunk ^ row % 8) * 16, r);
  }
  fence_proxy_async_shared();
  bar_sync_at<128>(3 + me);
  if (threadIdx.x % 128 == 0) {
    tma_store_2d(&p.o_map, my_rows, 0, first_row + 64 * me);
    bulk_commit();
    bulk_wait_read<0>();
  }
"""


def fa3_case(body: str = FA3) -> Case:
    def inputs(rng: np.random.Generator) -> Arrays:
        return {"q": random_bf16(rng, FA3_QUERIES, 64), "k": random_bf16(rng, FA3_KEYS, 64),
                "v": random_bf16(rng, FA3_KEYS, 64), "out": np.zeros((FA3_QUERIES, 64), np.uint16)}

    pointers = {"q": "const uint16_t", "k": "const uint16_t", "v": "const uint16_t", "out": "uint16_t"}
    return Case("fa3", HEADERS, pointers, body, inputs, lambda x: {"out": attention(x["q"], x["k"], x["v"])},
                maps={"q_map": rows_map("q", 64, FA3_QUERIES, 128), "k_map": rows_map("k", 64, FA3_KEYS, 64),
                      "v_map": rows_map("v", 64, FA3_KEYS, 64), "o_map": rows_map("out", 64, FA3_QUERIES, 64)},
                shapes=(WgmmaShape("bf16", 64, "shared", K, K), WgmmaShape("bf16", 64, "registers", K, MN)),
                threads=384, blocks=2, smem=128 * 128 + 4 * 8192 + 128, absolute=0.02)


# 64 queries of 576 columns; values are the first 512 of the keys. Warpgroup 1 makes the weights and shares them
# through shared memory; warpgroups 1 and 2 own 256 columns of the output each.
MLA_KEYS = 400
MLA = """
  constexpr int BLOCK_N = 64, PANELS = 9, STAGES = 2, KEYS = 400, TILES = (KEYS + BLOCK_N - 1) / BLOCK_N;
  constexpr int PANEL_BYTES = 64 * 128;
  constexpr float SCALE_LOG2 = 1.44269504f / 24.0f;
  unsigned char* const q_tile = dyn_smem();
  unsigned char* const kv_tiles = q_tile + PANELS * PANEL_BYTES;
  unsigned char* const weights = kv_tiles + STAGES * PANELS * PANEL_BYTES;
  float* const rescales = (float*)(weights + PANEL_BYTES);
  float* const sums = rescales + 64;
  uint64_t* const full_q = (uint64_t*)(sums + 64);
  uint64_t* const full = full_q + 1;
  uint64_t* const empty = full + STAGES;
  const int warpgroup = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    mbarrier_init(full_q, 1);
    for (int i = 0; i < STAGES; ++i) {
      mbarrier_init(full + i, 1);
      mbarrier_init(empty + i, 256);
    }
    fence_mbarrier_init();
  }
  sync_block();

  if (warpgroup == 0) {  // producer
    setmaxnreg_dec<40>();
    if (threadIdx.x == 0) {
      mbarrier_arrive_expect_tx(full_q, PANELS * PANEL_BYTES);
      for (int c = 0; c < PANELS; ++c) tma_load_2d(q_tile + c * PANEL_BYTES, &p.q_map, full_q, 64 * c, 0);
      for (int j = 0; j < TILES; ++j) {
        const int stage = j % STAGES;
        mbarrier_wait_parity(empty + stage, j / STAGES % 2 ^ 1);
        mbarrier_arrive_expect_tx(full + stage, PANELS * PANEL_BYTES);
        for (int c = 0; c < PANELS; ++c)
          tma_load_2d(kv_tiles + (stage * PANELS + c) * PANEL_BYTES, &p.kv_map, full + stage, 64 * c, BLOCK_N * j);
      }
    }
    return;
  }

  setmaxnreg_inc<232>();
  const int half = warpgroup - 1, row = 16 * warp + lane / 4;
  float o[128], row_max[2] = {-INFINITY, -INFINITY}, row_sum[2] = {0.0f, 0.0f}, rescale[2];
  for (int i = 0; i < 128; ++i) o[i] = 0.0f;
  mbarrier_wait_parity(full_q, 0);
  for (int j = 0; j < TILES; ++j) {
    const int stage = j % STAGES;
    unsigned char* const kv = kv_tiles + stage * PANELS * PANEL_BYTES;
    mbarrier_wait_parity(full + stage, j / STAGES % 2);
    if (warpgroup == 1) {
      float s[32];
      wgmma_fence(s);
      for (int k = 0; k < 36; ++k) {
        const int at = k / 4 * PANEL_BYTES + k % 4 * 32;
        wgmma_ss<64, K_MAJOR, K_MAJOR>(bf16{}, s, wgmma_descriptor(q_tile + at, SWIZZLE_128B, 16, 1024),
                                       wgmma_descriptor(kv + at, SWIZZLE_128B, 16, 1024), k > 0);
      }
      wgmma_commit();
      wgmma_wait<0>(s);
      for (int h = 0; h < 2; ++h) {
        float highest = row_max[h];
        for (int i = 0; i < 32; ++i) {
          if (i / 2 % 2 != h) continue;
          const int key = BLOCK_N * j + i / 4 * 8 + lane % 4 * 2 + i % 2;
          s[i] = key < KEYS ? s[i] * SCALE_LOG2 : -INFINITY;
          highest = fmaxf(highest, s[i]);
        }
        highest = fmaxf(highest, shfl_xor(highest, 1));
        highest = fmaxf(highest, shfl_xor(highest, 2));
        rescale[h] = exp2_approx(row_max[h] - highest);
        row_max[h] = highest;
        row_sum[h] *= rescale[h];
        for (int i = 0; i < 32; ++i) {
          if (i / 2 % 2 != h) continue;
          s[i] = exp2_approx(s[i] - highest);
          row_sum[h] += s[i];
        }
      }
      bar_sync<2, 256>();  // the other warpgroup is done with the last weights
      for (int n = 0; n < 4; ++n) {
        uint32_t r[4];
        for (int i = 0; i < 4; ++i) r[i] = pack2(bf16{}, s[8 * n + 2 * i], s[8 * n + 2 * i + 1]);
        const int to = 16 * warp + lane % 16, chunk = 2 * n + lane / 16;
        stmatrix_x4(weights + to * 128 + (chunk ^ to % 8) * 16, r);
      }
      if (lane % 4 == 0) {
        rescales[row] = rescale[0];
        rescales[row + 8] = rescale[1];
      }
      fence_proxy_async_shared();
      bar_sync<1, 256>();  // weights and rescales are there
    } else {
      bar_arrive<2, 256>();
      bar_sync<1, 256>();
      rescale[0] = rescales[row];
      rescale[1] = rescales[row + 8];
    }
    for (int i = 0; i < 128; ++i) o[i] *= rescale[i / 2 % 2];
    wgmma_fence(o);
    for (int k = 0; k < 4; ++k)
      wgmma_ss<256, K_MAJOR, MN_MAJOR>(
          bf16{}, o, wgmma_descriptor(weights + 32 * k, SWIZZLE_128B, 16, 1024),
          wgmma_descriptor(kv + half * 4 * PANEL_BYTES + 16 * 128 * k, SWIZZLE_128B, PANEL_BYTES, 1024), 1);
    wgmma_commit();
    wgmma_wait<0>(o);
    mbarrier_arrive(empty + stage);
  }
  if (warpgroup == 1) {
    for (int h = 0; h < 2; ++h) {
      row_sum[h] += shfl_xor(row_sum[h], 1);
      row_sum[h] += shfl_xor(row_sum[h], 2);
      if (lane % 4 == 0) sums[row + 8 * h] = row_sum[h];
    }
  }
  bar_sync<1, 256>();  // the sums are there, and the queries' memory is free
  row_sum[0] = sums[row];
  row_sum[1] = sums[row + 8];
  for (int n = 0; n < 16; ++n) {
    uint32_t r[4];
    for (int i = 0; i < 4; ++i)
      r[i] = pack2(bf16{}, o[8 * n + 2 * i] / row_sum[i % 2], o[8 * n + 2 * i + 1] / row_sum[i % 2]);
    const int to = 16 * warp + lane % 16, chunk = n % 4 * 2 + lane / 16;
    stmatrix_x4(q_tile + (half * 4 + n / 4) * PANEL_BYTES + to * 128 + (chunk ^ to % 8) * 16, r);
  }
  fence_proxy_async_shared();
  bar_sync_at<128>(3 + half);
  if (threadIdx.x % 128 == 0) {
    for (int c = 4 * half; c < 4 * half + 4; ++c) tma_store_2d(&p.o_map, q_tile + c * PANEL_BYTES, 64 * c, 0);
    bulk_commit();
    bulk_wait_read<0>();
  }
"""


def mla_case(body: str = MLA) -> Case:
    def inputs(rng: np.random.Generator) -> Arrays:
        return {"q": random_bf16(rng, 64, 576), "kv": random_bf16(rng, MLA_KEYS, 576),
                "out": np.zeros((64, 512), np.uint16)}

    return Case("mla", HEADERS, {"q": "const uint16_t", "kv": "const uint16_t", "out": "uint16_t"}, body, inputs,
                lambda x: {"out": attention(x["q"], x["kv"], x["kv"][:, :512])},
                maps={"q_map": rows_map("q", 576, 64, 64), "kv_map": rows_map("kv", 576, MLA_KEYS, 64),
                      "o_map": rows_map("out", 512, 64, 64)},
                shapes=(WgmmaShape("bf16", 64, "shared", K, K), WgmmaShape("bf16", 256, "shared", K, MN)),
                threads=384, smem=(9 + 18 + 1) * 8192 + 2 * 256 + 128, absolute=0.02)


CASES = {"fa3": (fa3_case, FA3), "mla": (mla_case, MLA)}


def distance(case: Case, inputs: Arrays, found: Arrays) -> float:
    """Largest error of `out`; infinite where it is not a number."""
    error = np.abs(ptx.bf16_to_float(found["out"]) - case.model(inputs)["out"])
    return float(np.where(np.isfinite(error), error, np.inf).max())
