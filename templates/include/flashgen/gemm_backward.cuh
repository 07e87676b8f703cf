// What the backward of attention adds to gemm_async.cuh: products of a warpgroup whose scores are transposed. Row
// lane / 4 + 8 * h of s is a key, column 8 * n + 2 * (lane % 4) + i a query: element s[0][n][2 * h + i].
#pragma once
#include "flashgen/gemm_async.cuh"
#include "flashgen/ptx/math.cuh"
#include "flashgen/ptx/wgmma_shapes.cuh"
#include "flashgen/query_range.cuh"

// Starts s = term + a b^T over K_STEPS * 16 columns, as one group. `ones` selects the term of a column (row_terms.cuh).
template <class ATile, class BTile, int K_STEPS, class Element, int N>
FG_DEVICE void issue_qk(float (&s)[1][N][4], uint64_t ones, uint64_t terms, uint64_t a, uint64_t b) {
  wgmma_fence(registers_of(s));
  wgmma_ss<8 * N, K_MAJOR, K_MAJOR>(bf16{}, registers_of(s), ones, terms, 0);
  qk_steps<ATile, BTile, 0, K_STEPS, Element, true>(s, a, b);
  wgmma_commit();
}

// P from scores that have -lse in them.
template <int N>
FG_DEVICE void exponentiate_shifted(float (&s)[1][N][4], float scale_log2) {
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) s[0][n][i] = exp2_approx(s[0][n][i] * scale_log2);
}

// Starts dq = ds k, as one group: ds [queries][keys] and k in shared memory.
template <class DsTile, class KeyTile, class Element, int N>
FG_DEVICE void issue_dq(float (&dq)[1][N][4], uint64_t ds, uint64_t k) {
  wgmma_fence(registers_of(dq));
  pv_steps<DsTile, KeyTile, 0, Element, false>(dq, ds, k);
  wgmma_commit();
}

// P of masked elements becomes 0, whatever it was. `q_pos` is that of s[0][0][0]; `seeing(h)` the queries that see the
// key of row half h.
template <int N, class Seeing>
FG_DEVICE void zero_masked(float (&s)[1][N][4], int q_pos, Seeing seeing) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const QueryRange seen = seeing(h);
    const int begin = seen.begin - q_pos;
    const uint32_t count = max_int(seen.end - seen.begin, 0);
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i)  // in one comparison: before the first, the difference wraps
        if ((uint32_t)(8 * n + i - begin) >= count) s[0][n][2 * h + i] = 0.0f;
  }
}

// One element of a packed pair, as bits.
FG_DEVICE uint16_t half_of(uint32_t pair, int half) { return (uint16_t)(half == 0 ? pair : pair >> 16); }

// Rows of an A operand that do not count become 0. `live`: all bits, or none, for each row half.
template <int K>
FG_DEVICE void keep_rows(uint32_t (&x)[K][4], const uint32_t (&live)[2]) {
#pragma unroll
  for (int k = 0; k < K; ++k)
#pragma unroll
    for (int r = 0; r < 4; ++r) x[k][r] &= live[r % 2];
}
