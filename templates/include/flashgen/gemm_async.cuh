// The two products of attention on wgmma, for one warpgroup. Tiles are TileShapes, which TMA fills: what it
// swizzles at 128 or 64 bytes is TileShape's own swizzle. Fragments are those of mma.sync with M = 1: s[0][n][2 * h + i]
// is row lane / 4 + 8 * h of the warp's 16, column 8 * n + 2 * (lane % 4) + i.
#pragma once
#include "flashgen/ptx/convert.cuh"
#include "flashgen/ptx/stmatrix.cuh"
#include "flashgen/ptx/wgmma_shapes.cuh"
#include "flashgen/tile.cuh"

constexpr int K_STEP = 16;  // elements of the contracted dimension that one wgmma takes

// Descriptors and steps of a tile as an operand whose contracted dimension runs along its columns (queries, keys)...
template <class Tile>
struct AlongColumns {
  static constexpr Swizzle SWIZZLE = Tile::PANEL_CHUNKS == 8 ? SWIZZLE_128B : SWIZZLE_64B;
  static constexpr int PANEL_COLS = Tile::PANEL_CHUNKS * ELEMENTS_PER_CHUNK;
  FG_DEVICE static uint64_t descriptor(const void* tile) {
    return wgmma_descriptor(tile, SWIZZLE, CHUNK_BYTES, 8 * Tile::ROW_BYTES);
  }
  FG_DEVICE static uint64_t step(uint64_t descriptor, int k) {
    return wgmma_descriptor_advance(
        descriptor, K_STEP * k / PANEL_COLS * Tile::PANEL_BYTES + K_STEP * k % PANEL_COLS * (Tile::ROW_BYTES / PANEL_COLS));
  }
};

// ... or along its rows (values).
template <class Tile>
struct AlongRows {
  FG_DEVICE static uint64_t descriptor(const void* tile) {
    return wgmma_descriptor(tile, AlongColumns<Tile>::SWIZZLE, Tile::PANEL_BYTES, 8 * Tile::ROW_BYTES);
  }
  FG_DEVICE static uint64_t step(uint64_t descriptor, int k) {
    return wgmma_descriptor_advance(descriptor, K_STEP * k * Tile::ROW_BYTES);
  }
};

// The descriptors of the steps from `first` on; Along: one of the above.
template <class Along, int STEPS>
FG_DEVICE void fill_steps(uint64_t (&steps)[STEPS], uint64_t descriptor, int first = 0) {
#pragma unroll
  for (int i = 0; i < STEPS; ++i) steps[i] = Along::step(descriptor, first + i);
}

// The fragments as the flat list of registers that wgmma takes.
template <int N>
FG_DEVICE float (&registers_of(float (&fragments)[1][N][4]))[4 * N] {
  return reinterpret_cast<float(&)[4 * N]>(fragments);
}

template <int N>
FG_DEVICE void fill_zero(float (&fragments)[1][N][4]) {
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) fragments[0][n][i] = 0.0f;
}

template <int N>
FG_DEVICE void fill_zero(uint32_t (&operand)[N][4]) {
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      operand[n][i] = 0;
      pin_registers(operand[n][i]);  // here: a constant would be set where products already run
    }
}

// Products over many steps come in statements of a few: of each, all descriptors take registers at once.
constexpr int STATEMENT_STEPS = 4;
FG_DEVICE constexpr int statement_steps(int left) { return left < STATEMENT_STEPS ? left : STATEMENT_STEPS; }

// ADDED: to what s holds, in place of it.
template <class QueryTile, class KeyTile, int FIRST, int K_STEPS, class Element, bool ADDED = false, int N>
FG_DEVICE void qk_steps(float (&s)[1][N][4], uint64_t q, uint64_t k) {
  if constexpr (FIRST < K_STEPS) {
    uint64_t q_steps[statement_steps(K_STEPS - FIRST)], k_steps[statement_steps(K_STEPS - FIRST)];
    fill_steps<AlongColumns<QueryTile>>(q_steps, q, FIRST);
    fill_steps<AlongColumns<KeyTile>>(k_steps, k, FIRST);
    wgmma_ss<8 * N, K_MAJOR, K_MAJOR>(Element{}, registers_of(s), q_steps, k_steps, ADDED || FIRST > 0);
    qk_steps<QueryTile, KeyTile, FIRST + STATEMENT_STEPS, K_STEPS, Element, ADDED>(s, q, k);
  }
}

// Starts s = q k^T over K_STEPS * 16 columns, as one group.
template <class QueryTile, class KeyTile, int K_STEPS, class Element, int N>
FG_DEVICE void issue_qk(float (&s)[1][N][4], uint64_t q, uint64_t k) {
  wgmma_fence(registers_of(s));
  qk_steps<QueryTile, KeyTile, 0, K_STEPS, Element>(s, q, k);
  wgmma_commit();
}

template <class ValueTile, int FIRST, class Element, int V, int K_STEPS>
FG_DEVICE void pv_steps(float (&o)[1][V][4], const uint32_t (&p)[K_STEPS][4], uint64_t v) {
  if constexpr (FIRST < K_STEPS) {
    constexpr int STEPS = statement_steps(K_STEPS - FIRST);
    uint64_t v_steps[STEPS];
    fill_steps<AlongRows<ValueTile>>(v_steps, v, FIRST);
    wgmma_rs<8 * V, MN_MAJOR>(Element{}, registers_of(o), reinterpret_cast<const uint32_t(&)[STEPS][4]>(p[FIRST]), v_steps, 1);
    pv_steps<ValueTile, FIRST + STATEMENT_STEPS, Element>(o, p, v);
  }
}

// Starts o += p v, as one group.
template <class ValueTile, class Element, int V, int K_STEPS>
FG_DEVICE void issue_pv(float (&o)[1][V][4], uint32_t (&p)[K_STEPS][4], uint64_t v) {
  wgmma_fence(registers_of(o), p);
  pv_steps<ValueTile, 0, Element>(o, p, v);
  wgmma_commit();
}

template <class PTile, class ValueTile, int FIRST, class Element, bool ADDED = true, int V>
FG_DEVICE void pv_steps(float (&o)[1][V][4], uint64_t p, uint64_t v) {
  constexpr int K_STEPS = PTile::COLS / K_STEP;
  if constexpr (FIRST < K_STEPS) {
    uint64_t p_steps[statement_steps(K_STEPS - FIRST)], v_steps[statement_steps(K_STEPS - FIRST)];
    fill_steps<AlongColumns<PTile>>(p_steps, p, FIRST);
    fill_steps<AlongRows<ValueTile>>(v_steps, v, FIRST);
    wgmma_ss<8 * V, K_MAJOR, MN_MAJOR>(Element{}, registers_of(o), p_steps, v_steps, ADDED || FIRST > 0);
    pv_steps<PTile, ValueTile, FIRST + STATEMENT_STEPS, Element, ADDED>(o, p, v);
  }
}

// Starts o += p v, as one group, with p in shared memory.
template <class PTile, class ValueTile, class Element, int V>
FG_DEVICE void issue_pv(float (&o)[1][V][4], uint64_t p, uint64_t v) {
  wgmma_fence(registers_of(o));
  pv_steps<PTile, ValueTile, 0, Element>(o, p, v);
  wgmma_commit();
}

// Rounds P to elements: the accumulator fragments of 16 keys are the operand fragment of one k-step.
template <class Element, int N>
FG_DEVICE void pack_p(uint32_t (&p)[N / 2][4], const float (&s)[1][N][4]) {
#pragma unroll
  for (int k = 0; k < N / 2; ++k)
#pragma unroll
    for (int r = 0; r < 4; ++r) p[k][r] = pack2(Element{}, s[0][2 * k + r / 2][2 * (r % 2)], s[0][2 * k + r / 2][2 * (r % 2) + 1]);
}

// Stores packed P in the warp's 16 rows of a tile.
template <class Tile, int K_STEPS>
FG_DEVICE void store_p_tile(unsigned char* tile, const uint32_t (&p)[K_STEPS][4]) {
  const int lane = threadIdx.x % WARP_SIZE, row = threadIdx.x % 128 / WARP_SIZE * 16 + lane % 16;
  uint32_t offset = Tile::offset(row, lane / 16);
  pin_registers(offset);  // the steps of a panel differ by an XOR; each would get a register of its own
#pragma unroll
  for (int k = 0; k < K_STEPS; ++k)
    stmatrix_x4(tile + Tile::step(0, 2 * k) + (offset ^ (uint32_t)(2 * k % Tile::PANEL_CHUNKS * CHUNK_BYTES)), p[k]);
}
