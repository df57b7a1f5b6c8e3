// What an instruction set without masks does for the last few lanes, and its plain lane sum.
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

}  // namespace CMOE_ISA
}  // namespace cmoe
