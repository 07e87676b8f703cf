// Packed sequences: which of them a tile of rows belongs to. Sequence b owns rows cu_seqlens[b] .. cu_seqlens[b + 1] - 1;
// one more owns the rows after the last, so that every row has a tile. Offsets are clamped to the tensor: wrong ones give
// wrong rows, never a stray access.
#pragma once
#include "flashgen/ptx/warp.cuh"

struct SequenceRows {
  int sequence;    // `batch` for the rows after the last
  int begin, end;  // rows of the packed tensor
  int first_tile;  // of those set aside for it
};

// First of the tiles of `block_rows` set aside for sequence b. Floor plus one per sequence leaves each at least as many
// as it needs, and makes the tiles of all sequences countable on the host without reading cu_seqlens.
FG_DEVICE int first_tile_of(const int32_t* cu_seqlens, int b, int total, int block_rows) {
  return clamp_int(cu_seqlens[b], 0, total) / block_rows + b;
}

// The last sequence whose first tile is not after `tile`: a search in which the lanes of a warp probe 32 places at once,
// so that thousands of sequences take three rounds.
FG_DEVICE SequenceRows find_rows(const int32_t* cu_seqlens, int batch, int total, int block_rows, int tile) {
  int low = 0, count = batch + 1;  // the answer is in [low, low + count)
  while (count > 1) {
    const int step = (count + WARP_SIZE - 1) / WARP_SIZE;
    const int probe = low + (int)(threadIdx.x % WARP_SIZE) * step;
    const bool reached = probe < low + count && first_tile_of(cu_seqlens, probe, total, block_rows) <= tile;
    const int lanes = max_int(count_in_warp(reached), 1);  // lane 0 always holds
    const int next = low + (lanes - 1) * step;
    count = min_int(step, low + count - next);
    low = next;
  }
  SequenceRows rows;
  rows.sequence = low;
  rows.begin = clamp_int(cu_seqlens[low], 0, total);
  rows.end = low == batch ? total : max_int(clamp_int(cu_seqlens[low + 1], 0, total), rows.begin);
  rows.first_tile = first_tile_of(cu_seqlens, low, total, block_rows);
  return rows;
}
