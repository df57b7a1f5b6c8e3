// What an instruction set without masks does: for the last few lanes, the lane sum, turned blocks.
#pragma once

#include "problem.h"

namespace cmoe {
namespace CMOE_ISA {

template <class E, int kCount>
struct Padded {
  E e[kCount] = {};
  Padded() = default;
  Padded(const E* p, int n) {
    for (int i = 0; i < n && i < kCount; ++i) e[i] = p[i];
  }
  void copy(E* p, int n) const {
    for (int i = 0; i < n && i < kCount; ++i) p[i] = e[i];
  }
};

inline V vload(const float* p, int n) {
  return n >= kLanes ? vload(p) : vload(Padded<float, kLanes>(p, n).e);
}
inline void vstore(float* p, V a, int n) {
  if (n >= kLanes) return vstore(p, a);
  Padded<float, kLanes> t;
  vstore(t.e, a);
  t.copy(p, n);
}
inline auto load_pairs(const uint16_t* p, int n) {
  return load_pairs(Padded<uint16_t, 2 * kLanes>(p, n).e);
}
inline V load_bf16(const uint16_t* p, int n) {
  return n >= kLanes ? load_bf16(p) : load_bf16(Padded<uint16_t, kLanes>(p, n).e);
}
inline V load_fp16(const uint16_t* p, int n) {
  return n >= kLanes ? load_fp16(p) : load_fp16(Padded<uint16_t, kLanes>(p, n).e);
}
inline void store_bf16(uint16_t* p, V a, int n) {
  if (n >= kLanes) return store_bf16(p, a);
  Padded<uint16_t, kLanes> t;
  store_bf16(t.e, a);
  t.copy(p, n);
}
inline void store_fp16(uint16_t* p, V a, int n) {
  if (n >= kLanes) return store_fp16(p, a);
  Padded<uint16_t, kLanes> t;
  store_fp16(t.e, a);
  t.copy(p, n);
}

// Lane i and i + kLanes/2, then i + kLanes/4, ...
CMOE_INLINE float lane_sum(V a) {
  float s[kLanes];
  vstore(s, a);
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) s[i] += s[i + half];
  return s[0];
}
template <int MT, int NT>
CMOE_INLINE void reduce_tile(const V (&acc)[MT][NT], float* c, int64_t stride, bool add) {
#pragma GCC unroll 4
  for (int i = 0; i < MT; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < NT; ++j) {
      const float s = lane_sum(acc[i][j]);
      c[i * stride + j] = add ? c[i * stride + j] + s : s;
    }
  }
}

// to[n, k] = from[n + k * stride_col] for a [rows, kn] block: weights whose rows are contiguous,
// brought along K.
constexpr int kTurnAhead = 32;  // places along K that are fetched ahead
template <class W>
void transpose_block(const W* from, int64_t stride_col, int64_t rows, int64_t kn, W* to,
                     int64_t to_stride) {
  constexpr int kSide = 16 / sizeof(W);
  typedef W Q __attribute__((vector_size(16)));
  int64_t k = 0;
  for (; k + kSide <= kn; k += kSide) {
    // Each row lies in a page of its own, which the hardware does not run ahead into.
    for (int i = 0; i < kSide; ++i)
      for (int64_t at = 0; at < rows; at += 64 / sizeof(W))
        __builtin_prefetch(from + (k + kTurnAhead + i) * stride_col + at, 0, 3);
    int64_t n = 0;
    for (; n + kSide <= rows; n += kSide) {
      Q a[kSide], b[kSide];
#pragma GCC unroll 8
      for (int i = 0; i < kSide; ++i) __builtin_memcpy(&a[i], from + (k + i) * stride_col + n, 16);
      // log2(kSide) perfect shuffles of the rows transpose the square.
#pragma GCC unroll 3
      for (int step = 1; step < kSide; step *= 2) {
#pragma GCC unroll 4
        for (int i = 0; i < kSide / 2; ++i) {
          const Q x = a[i], y = a[i + kSide / 2];
          if constexpr (kSide == 8) {
            b[2 * i] = __builtin_shufflevector(x, y, 0, 8, 1, 9, 2, 10, 3, 11);
            b[2 * i + 1] = __builtin_shufflevector(x, y, 4, 12, 5, 13, 6, 14, 7, 15);
          } else {
            b[2 * i] = __builtin_shufflevector(x, y, 0, 4, 1, 5);
            b[2 * i + 1] = __builtin_shufflevector(x, y, 2, 6, 3, 7);
          }
        }
#pragma GCC unroll 8
        for (int i = 0; i < kSide; ++i) a[i] = b[i];
      }
#pragma GCC unroll 8
      for (int i = 0; i < kSide; ++i) __builtin_memcpy(to + (n + i) * to_stride + k, &a[i], 16);
    }
    for (; n < rows; ++n)
      for (int i = 0; i < kSide; ++i) to[n * to_stride + k + i] = from[(k + i) * stride_col + n];
  }
  for (; k < kn; ++k)
    for (int64_t n = 0; n < rows; ++n) to[n * to_stride + k] = from[k * stride_col + n];
}

}  // namespace CMOE_ISA
}  // namespace cmoe
