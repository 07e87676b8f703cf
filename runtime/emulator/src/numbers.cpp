#include "numbers.h"

#include <cmath>
#include <cstring>

#include "memory.h"

namespace emu {

namespace {

uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}

float from_bits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

// Shifts right, rounding to nearest, ties to even.
uint32_t round_off(uint32_t value, uint32_t shift) {
  const uint32_t half = 1u << (shift - 1);
  return (value + half - 1 + (value >> shift & 1)) >> shift;
}

float flush(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x; }

// a * b + c of 16-bit elements, rounded to odd: the next rounding, to fewer bits, is then that of the exact sum.
float fma_to_odd(float a, float b, float c) {
  const double product = static_cast<double>(a) * b;  // exact
  double sum = product + c;
  if (!std::isfinite(sum)) return static_cast<float>(sum);
  const double added = sum - product, lost = (product - (sum - added)) + (c - added);
  uint64_t bits;
  memcpy(&bits, &sum, 8);
  if (lost != 0 && bits % 2 == 0) sum = std::nextafter(sum, lost > 0 ? INFINITY : -INFINITY);
  const float nearest = static_cast<float>(sum);
  if (static_cast<double>(nearest) == sum) return nearest;
  const bool beyond = std::fabs(static_cast<double>(nearest)) > std::fabs(sum);
  return from_bits((beyond ? bits_of(nearest) - 1 : bits_of(nearest)) | 1);
}

constexpr uint16_t CANONICAL_NAN = 0x7fff;

}  // namespace

float to_float(Type type, uint16_t bits) {
  if (type == Type::BF16) return from_bits(static_cast<uint32_t>(bits) << 16);
  if (type == Type::E5M2) return to_float(Type::FP16, static_cast<uint16_t>(bits << 8));  // its upper byte
  if (type == Type::E4M3) {  // no infinities, one NaN
    const int exponent = bits >> 3 & 15, mantissa = bits & 7;
    if ((bits & 0x7f) == 0x7f) return from_bits(0x7fffffff);
    const float size = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                                     : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
    return (bits & 0x80) != 0 ? -size : size;
  }
  const uint32_t sign = static_cast<uint32_t>(bits >> 15) << 31, exponent = bits >> 10 & 31, mantissa = bits & 0x3ff;
  if (exponent == 31) return from_bits(sign | 0x7f800000u | mantissa << 13);
  if (exponent == 0) return std::copysign(std::ldexp(static_cast<float>(mantissa), -24), from_bits(sign));
  return from_bits(sign | (exponent + 112) << 23 | mantissa << 13);
}

uint16_t from_float(Type type, float x) {
  if (std::isnan(x)) return CANONICAL_NAN;
  const uint32_t bits = bits_of(x);
  if (type == Type::BF16) return static_cast<uint16_t>(round_off(bits, 16));
  const uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00);  // rounds past 65504
  const int exponent = static_cast<int>(magnitude >> 23) - 112;
  if (exponent > 0) return static_cast<uint16_t>(sign | round_off(magnitude - (112u << 23), 13));
  if (exponent < -10) return static_cast<uint16_t>(sign);
  const auto shift = static_cast<uint32_t>(14 - exponent);
  return static_cast<uint16_t>(sign | round_off((magnitude & 0x7fffff) | 0x800000, shift));
}

uint32_t pack2(Type type, float lo, float hi) {
  return from_float(type, lo) | static_cast<uint32_t>(from_float(type, hi)) << 16;
}

uint32_t fma2(Type type, uint32_t a, uint32_t b, uint32_t c) {
  const auto half = [=](uint32_t pair, int shift) { return to_float(type, static_cast<uint16_t>(pair >> shift)); };
  return pack2(type, fma_to_odd(half(a, 0), half(b, 0), half(c, 0)), fma_to_odd(half(a, 16), half(b, 16), half(c, 16)));
}

float exp2_ftz(float x) {
  if (current != nullptr) {
    if (Trace* const trace = traced(*current)) {
      trace->work(*current->warp, Kind::EXP, code_offset(__builtin_return_address(0)), trace->costs().exp);
    }
  }
  return flush(std::exp2(flush(x)));
}

float rcp_ftz(float x) { return flush(1.0f / flush(x)); }

float log2_ftz(float x) { return flush(std::log2(flush(x))); }

}  // namespace emu
