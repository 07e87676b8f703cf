// Infinities and NaNs in V. A hidden key has weight 0, and 0 * NaN would still poison every row of its tile; the
// promise is that a non-finite value reaches exactly the rows that see it. So tiles under a mask are searched, and in
// the rare tile that holds such values they are added by hand to the rows that see them and replaced by zero.
#pragma once
#include "flashgen/mask.cuh"
#include "flashgen/tile.cuh"

// High bit of each half set where the 16-bit element is infinite or NaN: adding one in the last place of the exponent
// carries into the sign bit exactly when all exponent bits are set.
template <class Element>
FG_DEVICE uint32_t nonfinite_bits(uint32_t pair) {
  constexpr uint32_t LAST_PLACE = 0x8000u - Element::EXPONENT;
  return ((pair & 0x7fff7fffu) + (LAST_PLACE << 16 | LAST_PLACE)) & 0x80008000u;
}

// Whether the block's tile holds any; every thread of the block calls it and gets the same answer.
template <class Shape, int THREADS, class Element>
FG_DEVICE bool tile_has_nonfinite(const unsigned char* tile) {
  constexpr int ROWS_PER_PASS = THREADS / Shape::THREADS_PER_ROW;
  uint32_t found = 0;
#pragma unroll
  for (int first = 0; first < Shape::ROWS; first += ROWS_PER_PASS) {
    if (first + ROWS_PER_PASS > Shape::ROWS && first + ThreadCopy<Shape>::row() >= Shape::ROWS) break;
#pragma unroll
    for (int i = 0; i < Shape::CHUNKS / Shape::THREADS_PER_ROW; ++i) {
      const Chunk chunk = *reinterpret_cast<const Chunk*>(tile + ThreadCopy<Shape>::smem_offset() +
                                                          Shape::step(first, i * Shape::THREADS_PER_ROW));
#pragma unroll
      for (int w = 0; w < 4; ++w) found |= nonfinite_bits<Element>(chunk.words[w]);
    }
  }
  return any_in_block(found != 0);
}

// Adds the tile's non-finite values to the rows of `o` that see their key, then zeroes them in the tile.
template <class Shape, int THREADS, class Element, int M, int V, class Visible>
FG_DEVICE void extract_nonfinite(float (&o)[M][V][4], unsigned char* tile, int q_pos, int kv_tile_start,
                                 Visible visible) {
#pragma unroll 1
  for (int i = 0; i < Shape::ROWS * V; ++i) {
    const int key = i / V, chunk = i % V;
    const uint32_t pair = *reinterpret_cast<const uint32_t*>(tile + Shape::offset(key, chunk) + threadIdx.x % 4 * 4);
    const uint32_t bits = nonfinite_bits<Element>(pair);
    if (bits == 0) continue;
    const float even = bits & 0x8000u ? to_float(Element{(uint16_t)pair}) : 0.0f;
    const float odd = bits >> 16 ? to_float(Element{(uint16_t)(pair >> 16)}) : 0.0f;
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const KeyRange keys = visible(q_pos + 16 * m + 8 * h);
        if (keys.first <= kv_tile_start + key && kv_tile_start + key <= keys.last) {
#pragma unroll
          for (int v = 0; v < V; ++v)  // registers have no run-time index
            if (v == chunk) {
              o[m][v][2 * h] += even;
              o[m][v][2 * h + 1] += odd;
            }
        }
      }
  }
  sync_block();  // every warp has read the tile before it changes
  for (int i = threadIdx.x; i < Shape::ROWS * Shape::CHUNKS * 4; i += THREADS) {
    unsigned char* const chunk = tile + Shape::offset(i / 4 / Shape::CHUNKS, i / 4 % Shape::CHUNKS);
    uint32_t& pair = reinterpret_cast<uint32_t*>(chunk)[i % 4];
    const uint32_t bits = nonfinite_bits<Element>(pair);
    pair &= ~((bits >> 15) * 0xffffu);  // each set bit becomes a mask over its half
  }
  sync_block();
}
