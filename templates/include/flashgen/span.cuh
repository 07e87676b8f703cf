// Intervals of ints and what conditions on them can be: a mask's expression over all positions of a tile at once
// (codegen/expr/tiles.py). Never too small: what a position can give lies in the interval, and more may.
#pragma once
#include "flashgen/expression.cuh"

// What a condition is for the positions of a tile: for some true, for some false; both bits where that is not known.
constexpr int VISIBLE = 1, MASKED = 2;

struct Span {
  int low, high;  // inclusive
};

constexpr int LEAST_INT = -2147483647 - 1, MOST_INT = 2147483647;
constexpr int SCAN_LIMIT = 1024;  // elements of a tensor that one tile may look at

FG_DEVICE int truth_of(bool x) { return x ? VISIBLE : MASKED; }
FG_DEVICE int truth_not(int a) { return (a & VISIBLE) << 1 | a >> 1; }
FG_DEVICE int truth_and(int a, int b) { return (a & b & VISIBLE) | ((a | b) & MASKED); }
FG_DEVICE int truth_or(int a, int b) { return ((a | b) & VISIBLE) | (a & b & MASKED); }
FG_DEVICE int truth_select(int c, int a, int b) { return ((c & VISIBLE) != 0 ? a : 0) | ((c & MASKED) != 0 ? b : 0); }
FG_DEVICE int truth_eq(int a, int b) { return truth_select(a, b, truth_not(b)); }

FG_DEVICE Span span_of(int x) { return {x, x}; }
// Sums and products of ints wrap: an interval that leaves the ints becomes all of them.
FG_DEVICE Span span_wrapped(int64_t low, int64_t high) {
  return low < LEAST_INT || high > MOST_INT ? Span{LEAST_INT, MOST_INT} : Span{(int)low, (int)high};
}
FG_DEVICE Span span_add(Span a, Span b) { return span_wrapped((int64_t)a.low + b.low, (int64_t)a.high + b.high); }
FG_DEVICE Span span_neg(Span a) { return span_wrapped(-(int64_t)a.high, -(int64_t)a.low); }
FG_DEVICE Span span_mul(Span a, Span b) {
  const int64_t x = (int64_t)a.low * b.low, y = (int64_t)a.low * b.high;
  const int64_t z = (int64_t)a.high * b.low, w = (int64_t)a.high * b.high;
  return span_wrapped(min_long(min_long(x, y), min_long(z, w)), max_long(max_long(x, y), max_long(z, w)));
}
FG_DEVICE Span span_min(Span a, Span b) { return {min_int(a.low, b.low), min_int(a.high, b.high)}; }
FG_DEVICE Span span_max(Span a, Span b) { return {max_int(a.low, b.low), max_int(a.high, b.high)}; }
FG_DEVICE Span span_join(Span a, Span b) { return {min_int(a.low, b.low), max_int(a.high, b.high)}; }
FG_DEVICE Span span_abs(Span a) {
  const Span n = span_neg(a);
  if (a.low == LEAST_INT) return {LEAST_INT, MOST_INT};  // whose negation wraps
  return a.low >= 0 ? a : a.high <= 0 ? n : Span{0, max_int(n.high, a.high)};
}
FG_DEVICE Span span_select(int c, Span a, Span b) {
  return c == VISIBLE ? a : c == MASKED ? b : span_join(a, b);
}
// Of divisors above zero the quotient rises or falls with either side, so corners bound it.
FG_DEVICE Span span_floordiv(Span a, Span b) {
  if (b.low == b.high && b.low <= 0) {
    if (b.low == 0) return span_of(0);
    if (b.low == -1) return span_neg(a);
    return {floor_div(a.high, b.low), floor_div(a.low, b.low)};
  }
  if (b.low <= 0) return {LEAST_INT, MOST_INT};
  return {min_int(floor_div(a.low, b.low), floor_div(a.low, b.high)),
          max_int(floor_div(a.high, b.low), floor_div(a.high, b.high))};
}
FG_DEVICE Span span_mod(Span a, Span b) {
  if (b.low == b.high && floor_div(a.low, b.low) == floor_div(a.high, b.low) && b.low != -1)
    return {min_int(floor_mod(a.low, b.low), floor_mod(a.high, b.low)),
            max_int(floor_mod(a.low, b.low), floor_mod(a.high, b.low))};
  return {b.low < 0 ? b.low + 1 : 0, b.high > 0 ? b.high - 1 : 0};
}

FG_DEVICE int span_lt(Span a, Span b) {
  return (a.low < b.high ? VISIBLE : 0) | (a.high >= b.low ? MASKED : 0);
}
FG_DEVICE int span_le(Span a, Span b) { return truth_not(span_lt(b, a)); }
FG_DEVICE int span_eq(Span a, Span b) {
  const bool same = a.low == a.high && b.low == b.high && a.low == b.low;
  return (a.low <= b.high && b.low <= a.high ? VISIBLE : 0) | (same ? 0 : MASKED);
}

// The places that an index in `a` reads of a dimension: the nearest inside.
FG_DEVICE Span span_in(Span a, int size) { return {clamp_index(a.low, size), clamp_index(a.high, size)}; }

// Whether a tile may look at all of these elements.
FG_DEVICE bool can_scan(Span rows, Span cols) {
  return (int64_t)(rows.high - rows.low + 1) * (cols.high - cols.low + 1) <= SCAN_LIMIT;
}

FG_DEVICE Span span_of_elements(const int32_t* tensor, Span rows, Span cols, int width) {
  if (!can_scan(rows, cols)) return {LEAST_INT, MOST_INT};
  Span found = {MOST_INT, LEAST_INT};
  for (int row = rows.low; row <= rows.high; ++row)
    for (int col = cols.low; col <= cols.high; ++col) {
      const int x = tensor[(int64_t)row * width + col];
      found = {min_int(found.low, x), max_int(found.high, x)};
    }
  return found;
}

// Of a tensor whose rows never fall.
FG_DEVICE Span span_of_sorted(const int32_t* tensor, Span rows, Span cols, int width) {
  if (!can_scan(rows, span_of(0))) return {LEAST_INT, MOST_INT};
  Span found = {MOST_INT, LEAST_INT};
  for (int row = rows.low; row <= rows.high; ++row) {
    const int32_t* const first = tensor + (int64_t)row * width;
    found = span_join(found, Span{first[cols.low], first[cols.high]});
  }
  return found;
}

FG_DEVICE int truth_of_elements(const bool* tensor, Span rows, Span cols, int width) {
  if (!can_scan(rows, cols)) return VISIBLE | MASKED;
  int found = 0;
  for (int row = rows.low; row <= rows.high; ++row)
    for (int col = cols.low; col <= cols.high; ++col) found |= truth_of(tensor[(int64_t)row * width + col]);
  return found;
}
