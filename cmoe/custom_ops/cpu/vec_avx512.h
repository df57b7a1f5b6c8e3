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
typedef uint32_t VU __attribute__((vector_size(64)));

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

// c[i * stride + j] (+)= sum of the lanes of acc[i][j]: four rows by four columns, from row I and
// column J on, pass through one transposing tree. A missing row or column repeats its neighbour,
// which the compiler folds away.
template <int I, int J, int MT, int NT>
CMOE_INLINE void reduce_square(const V (&acc)[MT][NT], float* c, int64_t stride, bool add) {
  constexpr int kRows = MT - I < 4 ? MT - I : 4, kCols = NT - J < 4 ? NT - J : 4;
  auto at = [&](int i, int j) CMOE_LAMBDA {
    return (__m512)acc[I + (i < kRows ? i : kRows - 1)][J + (j < kCols ? j : kCols - 1)];
  };
  auto column = [&](int j) CMOE_LAMBDA {
    return fold4(fold8(at(0, j), at(1, j)), fold8(at(2, j), at(3, j)));
  };
  const __m512 sum = fold1(fold2(column(0), column(1)), fold2(column(2), column(3)));
  const __m128 row[4] = {_mm512_castps512_ps128(sum), _mm512_extractf32x4_ps(sum, 1),
                         _mm512_extractf32x4_ps(sum, 2), _mm512_extractf32x4_ps(sum, 3)};
  constexpr __mmask8 kMask = (1 << kCols) - 1;
#pragma GCC unroll 4
  for (int i = 0; i < kRows; ++i) {
    float* p = c + (I + i) * stride + J;
    const __m128 v = add ? _mm_add_ps(_mm_maskz_loadu_ps(kMask, p), row[i]) : row[i];
    // No masked store: g++ joins one to the extraction before it, in an instruction that faults
    // where the lanes that it leaves out lie in no page.
    __builtin_memcpy(p, &v, kCols * sizeof(float));
  }
  if constexpr (NT - J > 4) reduce_square<I, J + 4>(acc, c, stride, add);
}
template <int I = 0, int MT, int NT>
CMOE_INLINE void reduce_tile(const V (&acc)[MT][NT], float* c, int64_t stride, bool add) {
  reduce_square<I, 0>(acc, c, stride, add);
  if constexpr (MT - I > 4) reduce_tile<I + 4>(acc, c, stride, add);
}

// Rows of sixteen 32-bit values to columns.
CMOE_INLINE void transpose16(__m512i (&r)[16]) {
  __m512i t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  // Quarter q of r[4 i + c] is now column 4 q + c of the rows 4 i to 4 i + 3.
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    const __m512i even0 = _mm512_shuffle_i32x4(r[c], r[4 + c], 0x88),
                  odd0 = _mm512_shuffle_i32x4(r[c], r[4 + c], 0xdd),
                  even1 = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0x88),
                  odd1 = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0xdd);
    t[c] = _mm512_shuffle_i32x4(even0, even1, 0x88);
    t[4 + c] = _mm512_shuffle_i32x4(odd0, odd1, 0x88);
    t[8 + c] = _mm512_shuffle_i32x4(even0, even1, 0xdd);
    t[12 + c] = _mm512_shuffle_i32x4(odd0, odd1, 0xdd);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) r[i] = t[i];
}

// to[n, k] = from[n + k * stride_col] for a square of one line a side, or `rows` by `places` of it;
// places up to the line's end become zero.
template <bool kWhole>
void turn_square(const uint16_t* from, int64_t stride_col, int rows, int places, uint16_t* to,
                 int64_t to_stride) {
  const __mmask32 mask = pairs_mask(rows);
  auto place = [&](int k) CMOE_LAMBDA {
    if (kWhole) return _mm512_loadu_si512(from + k * stride_col);
    return k < places ? _mm512_maskz_loadu_epi16(mask, from + k * stride_col)
                      : _mm512_setzero_si512();
  };
  // Two places make a row of 32-bit values: of the columns 8 q to 8 q + 3, then of the others.
  for (int half = 0; half < 2; ++half) {
    __m512i r[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      const __m512i a = place(2 * i), b = place(2 * i + 1);
      r[i] = half == 0 ? _mm512_unpacklo_epi16(a, b) : _mm512_unpackhi_epi16(a, b);
    }
    transpose16(r);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      const int n = i / 4 * 8 + half * 4 + i % 4;
      if (kWhole || n < rows) _mm512_storeu_si512(to + n * to_stride, r[i]);
    }
  }
}
template <bool kWhole>
void turn_square(const float* from, int64_t stride_col, int rows, int places, float* to,
                 int64_t to_stride) {
  const __mmask16 mask = lanes_mask(rows);
  __m512i r[16];
#pragma GCC unroll 16
  for (int k = 0; k < 16; ++k) {
    const float* p = from + k * stride_col;
    r[k] = kWhole       ? _mm512_loadu_si512(p)
           : k < places ? _mm512_castps_si512(_mm512_maskz_loadu_ps(mask, p))
                        : _mm512_setzero_si512();
  }
  transpose16(r);
#pragma GCC unroll 16
  for (int n = 0; n < 16; ++n)
    if (kWhole || n < rows) _mm512_storeu_si512(to + n * to_stride, r[n]);
}

// to[n, k] = from[n + k * stride_col] for a [rows, kn] block: weights whose rows are contiguous,
// brought along K. Rows of `to` are whole lines.
template <class W>
void transpose_block(const W* from, int64_t stride_col, int64_t rows, int64_t kn, W* to,
                     int64_t to_stride) {
  constexpr int kSide = 64 / sizeof(W);
  for (int64_t k = 0; k < kn; k += kSide) {
    for (int64_t n = 0; n < rows; n += kSide) {
      const W* at = from + n + k * stride_col;
      // Each place lies in a page of its own, which the hardware does not run ahead into: the
      // square two further along K.
      for (int i = 2 * kSide; i < 3 * kSide; ++i) __builtin_prefetch(at + i * stride_col, 0, 3);
      W* target = to + n * to_stride + k;
      if (n + kSide <= rows && k + kSide <= kn) {
        turn_square<true>(at, stride_col, kSide, kSide, target, to_stride);
      } else {
        const int64_t most_rows = rows - n, most_places = kn - k;
        turn_square<false>(at, stride_col, most_rows < kSide ? most_rows : kSide,
                           most_places < kSide ? most_places : kSide, target, to_stride);
      }
    }
  }
}

}  // namespace CMOE_ISA
}  // namespace cmoe
