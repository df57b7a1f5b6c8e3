// Vectors of four fp32 lanes in the compiler's own vector types: NEON, SSE2, anything else.
#pragma once

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "problem.h"

namespace cmoe {
namespace CMOE_ISA {

constexpr int kLanes = 4;
#if defined(__aarch64__)
constexpr int kTileM = 4, kTileN = 6;  // 24 accumulators of 32 registers
#else
constexpr int kTileM = 3, kTileN = 4;
#endif
typedef float V __attribute__((vector_size(16)));
typedef int32_t VI __attribute__((vector_size(16)));
typedef uint32_t VU __attribute__((vector_size(16)));
typedef uint16_t VH __attribute__((vector_size(8)));

inline V vset(float a) { return V{a, a, a, a}; }
inline V vload(const float* p) {
  V v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
inline void vstore(float* p, V a) { __builtin_memcpy(p, &a, sizeof a); }
inline V vfma(V a, V b, V c) {
#if defined(__aarch64__)
  return (V)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;  // built with -ffp-contract=off, so that every tile shape rounds alike
#endif
}
inline V vfloat(VI a) { return __builtin_convertvector(a, V); }
inline VI vround(V a) {  // to nearest even, |a| < 2^22
  const V magic = vset(12582912.0f);
  return (VI)(a + magic) - (VI)magic;
}

inline VU load_pairs(const uint16_t* p) {
  VU v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "pairs of bf16 are taken apart as little-endian words"
#endif
inline V bf16_even(VU a) { return (V)(a << 16); }
inline V bf16_odd(VU a) { return (V)(a & 0xffff0000u); }

inline VU load_u16(const uint16_t* p) {
  VH v;
  __builtin_memcpy(&v, p, sizeof v);
  return __builtin_convertvector(v, VU);
}
inline void store_u16(uint16_t* p, VU a) {
  const VH v = __builtin_convertvector(a, VH);
  __builtin_memcpy(p, &v, sizeof v);
}
inline V load_bf16(const uint16_t* p) { return (V)(load_u16(p) << 16); }
inline void store_bf16(uint16_t* p, V a) {
  const VU u = (VU)a;
  const VU rounded = u + 0x7fffu + ((u >> 16) & 1u);
  store_u16(p, (a == a ? rounded : (u | 0x00400000u)) >> 16);
}
// Scaling by 2^112 turns the exponent of a half, moved into place, into that of a float, subnormals
// included.
inline V load_fp16(const uint16_t* p) {
  const VU u = load_u16(p);
  const V scaled = (V)((u & 0x7fffu) << 13) * vset(0x1p112f);
  const VU special = (VU)((u & 0x7c00u) == 0x7c00u) & 0x7f800000u;
  return (V)((VU)scaled | special | ((u & 0x8000u) << 16));
}
// The addition rounds at the place of a half's last bit (M. Dukhan's FP16 library).
inline void store_fp16(uint16_t* p, V a) {
  const VU w = (VU)a, twice = w + w;
  const V magnitude = (V)(w & 0x7fffffffu);
  VU bias = twice & 0xff000000u;
  bias = bias < 0x71000000u ? VU{} + 0x71000000u : bias;
  const VU bits =
      (VU)((V)((bias >> 1) + 0x07800000u) + magnitude * vset(0x1p112f) * vset(0x1p-110f));
  const VU finite = ((bits >> 13) & 0x7c00u) + (bits & 0x0fffu);
  store_u16(p, ((w >> 16) & 0x8000u) | (twice > 0xff000000u ? VU{} + 0x7e00u : finite));
}

}  // namespace CMOE_ISA
}  // namespace cmoe

#include "vec_partial.h"
