// AVX2 vectors of eight fp32 lanes, for the kernels of engine.h.
#pragma once

#include <immintrin.h>

#include "problem.h"

namespace cmoe {
namespace CMOE_ISA {

constexpr int kLanes = 8;
constexpr int kTileM = 3, kTileN = 4;  // 12 accumulators of 16 registers
typedef float V __attribute__((vector_size(32)));
typedef int32_t VI __attribute__((vector_size(32)));
typedef uint32_t VU __attribute__((vector_size(32)));

inline V vset(float a) { return (V)_mm256_set1_ps(a); }
inline V vload(const float* p) { return (V)_mm256_loadu_ps(p); }
inline void vstore(float* p, V a) { _mm256_storeu_ps(p, (__m256)a); }
inline V vfma(V a, V b, V c) { return (V)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
inline VI vround(V a) { return (VI)_mm256_cvtps_epi32((__m256)a); }
inline V vfloat(VI a) { return (V)_mm256_cvtepi32_ps((__m256i)a); }

inline __m256i load_pairs(const uint16_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline V bf16_even(__m256i a) { return (V)_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)); }
inline V bf16_odd(__m256i a) {
  return (V)_mm256_castsi256_ps(
      _mm256_and_si256(a, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
}
inline V load_bf16(const uint16_t* p) {
  return (V)_mm256_castsi256_ps(
      _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
inline void store_bf16(uint16_t* p, V a) {
  const __m256i u = _mm256_castps_si256((__m256)a);
  const __m256i lsb = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), lsb);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps((__m256)a, (__m256)a, _CMP_UNORD_Q));
  const __m256i quiet = _mm256_or_si256(u, _mm256_set1_epi32(0x00400000));
  const __m256i top = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
  const __m256i packed =
      _mm256_permute4x64_epi64(_mm256_packus_epi32(top, top), _MM_SHUFFLE(3, 1, 2, 0));
  _mm_storeu_si128((__m128i*)p, _mm256_castsi256_si128(packed));
}
inline V load_fp16(const uint16_t* p) {
  return (V)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
}
inline void store_fp16(uint16_t* p, V a) {
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)a, _MM_FROUND_TO_NEAREST_INT));
}

}  // namespace CMOE_ISA
}  // namespace cmoe

#include "vec_partial.h"
