// AVX-512 vectors of sixteen fp32 lanes, for the kernels of engine.h.
#pragma once

#include <immintrin.h>

#include "problem.h"

namespace cmoe {
namespace CMOE_ISA {

constexpr int kLanes = 16;
constexpr int kTileM = 4, kTileN = 6;  // 24 accumulators of 32 registers
typedef float V __attribute__((vector_size(64)));
typedef int32_t VI __attribute__((vector_size(64)));

inline __mmask16 lanes_mask(int n) { return static_cast<__mmask16>((1u << n) - 1u); }
inline __mmask32 pairs_mask(int n) { return static_cast<__mmask32>((uint64_t{1} << n) - 1u); }

inline V vset(float a) { return (V)_mm512_set1_ps(a); }
inline V vload(const float* p) { return (V)_mm512_loadu_ps(p); }
inline V vload(const float* p, int n) { return (V)_mm512_maskz_loadu_ps(lanes_mask(n), p); }
inline void vstore(float* p, V a) { _mm512_storeu_ps(p, (__m512)a); }
inline void vstore(float* p, V a, int n) { _mm512_mask_storeu_ps(p, lanes_mask(n), (__m512)a); }
inline V vfma(V a, V b, V c) { return (V)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
inline VI vround(V a) { return (VI)_mm512_cvtps_epi32((__m512)a); }
inline V vfloat(VI a) { return (V)_mm512_cvtepi32_ps((__m512i)a); }

// 2 * kLanes values of 16 bits; half<0> and half<1> of bf16 are the even and the odd ones, of fp16
// the first and the second kLanes.
inline __m512i load_pairs(const uint16_t* p) { return _mm512_loadu_si512(p); }
inline __m512i load_pairs(const uint16_t* p, int n) {
  return _mm512_maskz_loadu_epi16(pairs_mask(n), p);
}
inline V bf16_even(__m512i a) { return (V)_mm512_castsi512_ps(_mm512_slli_epi32(a, 16)); }
inline V bf16_odd(__m512i a) {
  return (V)_mm512_castsi512_ps(
      _mm512_and_si512(a, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}

inline V widen_bf16(__m256i a) {
  return (V)_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(a), 16));
}
inline V load_bf16(const uint16_t* p) { return widen_bf16(_mm256_loadu_si256((const __m256i*)p)); }
inline V load_bf16(const uint16_t* p, int n) {
  return widen_bf16(_mm256_maskz_loadu_epi16(lanes_mask(n), p));
}
inline __m256i to_bf16(V a) {  // to nearest even; a NaN stays one
  const __m512i u = _mm512_castps_si512((__m512)a);
  const __m512i lsb = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), lsb);
  const __mmask16 nan = _mm512_cmp_ps_mask((__m512)a, (__m512)a, _CMP_UNORD_Q);
  const __m512i quiet = _mm512_or_si512(u, _mm512_set1_epi32(0x00400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_mov_epi32(rounded, nan, quiet), 16));
}
inline void store_bf16(uint16_t* p, V a, int n) {
  _mm256_mask_storeu_epi16(p, lanes_mask(n), to_bf16(a));
}

inline V load_fp16(const uint16_t* p) {
  return (V)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
}
inline V load_fp16(const uint16_t* p, int n) {
  return (V)_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(lanes_mask(n), p));
}
inline void store_fp16(uint16_t* p, V a, int n) {
  _mm256_mask_storeu_epi16(
      p, lanes_mask(n), _mm512_cvtps_ph((__m512)a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

// The lanes of an accumulator are summed by one tree: lane i and i+8, then i+4, i+2, i+1.
inline __m512 fold8(__m512 a, __m512 b) {
  return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, _MM_SHUFFLE(1, 0, 1, 0)),
                       _mm512_shuffle_f32x4(a, b, _MM_SHUFFLE(3, 2, 3, 2)));
}
inline __m512 fold4(__m512 a, __m512 b) {
  return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, _MM_SHUFFLE(2, 0, 2, 0)),
                       _mm512_shuffle_f32x4(a, b, _MM_SHUFFLE(3, 1, 3, 1)));
}
inline __m512 fold2(__m512 a, __m512 b) {
  const __m512d x = _mm512_castps_pd(a), y = _mm512_castps_pd(b);
  return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)),
                       _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
}
inline __m512 fold1(__m512 a, __m512 b) {
  return _mm512_add_ps(_mm512_shuffle_ps(a, b, _MM_SHUFFLE(2, 0, 2, 0)),
                       _mm512_shuffle_ps(a, b, _MM_SHUFFLE(3, 1, 3, 1)));
}

// c[i * stride + j] (+)= sum of the lanes of acc[i][j]: four rows by four columns pass through one
// transposing tree. A missing row or column repeats its neighbour, which the compiler folds away.
template <int J, int MT, int NT>
CMOE_INLINE void reduce_columns(const V (&acc)[MT][NT], float* c, int64_t stride, bool add) {
  static_assert(MT <= 4, "the tree folds four rows");
  constexpr int kCols = NT - J < 4 ? NT - J : 4;
  auto at = [&](int i, int j) CMOE_LAMBDA {
    return (__m512)acc[i < MT ? i : MT - 1][J + (j < kCols ? j : kCols - 1)];
  };
  auto column = [&](int j) CMOE_LAMBDA {
    return fold4(fold8(at(0, j), at(1, j)), fold8(at(2, j), at(3, j)));
  };
  const __m512 sum = fold1(fold2(column(0), column(1)), fold2(column(2), column(3)));
  const __m128 row[4] = {_mm512_castps512_ps128(sum), _mm512_extractf32x4_ps(sum, 1),
                         _mm512_extractf32x4_ps(sum, 2), _mm512_extractf32x4_ps(sum, 3)};
  constexpr __mmask8 kMask = (1 << kCols) - 1;
#pragma GCC unroll 4
  for (int i = 0; i < MT; ++i) {
    float* p = c + i * stride + J;
    const __m128 v = add ? _mm_add_ps(_mm_maskz_loadu_ps(kMask, p), row[i]) : row[i];
    if (kCols == 4) {
      _mm_storeu_ps(p, v);
    } else {
      _mm_mask_storeu_ps(p, kMask, v);
    }
  }
  if constexpr (NT - J > 4) reduce_columns<J + 4>(acc, c, stride, add);
}
template <int MT, int NT>
CMOE_INLINE void reduce_tile(const V (&acc)[MT][NT], float* c, int64_t stride, bool add) {
  reduce_columns<0>(acc, c, stride, add);
}

}  // namespace CMOE_ISA
}  // namespace cmoe
