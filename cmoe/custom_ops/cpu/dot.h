// How a weight format meets x in a register tile.
//
// A dot D names the element types W (weights in memory) and X (activations in scratch), the chunk
// of K that one step takes, the tile shape, tile(), stream() for weights that pass once, pair() with
// outer() for packed ones. A weight format is a struct with half<h>(p) and half<h>(p, n): one chunk of
// K as two vectors of fp32, in an order that x is brought into as well. That is all a new format
// writes.
#pragma once

#include <cstring>
#include <type_traits>

#include "problem.h"

namespace cmoe {
namespace CMOE_ISA {

template <class A>
constexpr A round_up(A a, A b) {
  return (a + b - 1) / b * b;
}
template <class A>
constexpr A ceil_div(A a, A b) {
  return (a + b - 1) / b;
}
template <class A>
constexpr A least(A a, A b) {
  return a < b ? a : b;
}

// The size of the even parts, whole units each but the last, that K is cut into.
template <class D>
int64_t even_parts(int64_t K, int64_t most, int64_t unit = D::kChunk) {
  return round_up<int64_t>(ceil_div(K, ceil_div(K, most)), unit);
}

// Columns of h or of the output whose weights, turned, stay in L2 while rows of x pass.
constexpr int kColumnsTurned = 96;

inline V load_any(DType t, const void* p, int64_t at, int n) {
  if (t == DType::kFP32) return vload((const float*)p + at, n);
  return t == DType::kBF16 ? load_bf16((const uint16_t*)p + at, n)
                           : load_fp16((const uint16_t*)p + at, n);
}
inline void store_any(DType t, void* p, int64_t at, V v, int n) {
  if (t == DType::kFP32) return vstore((float*)p + at, v, n);
  return t == DType::kBF16 ? store_bf16((uint16_t*)p + at, v, n)
                           : store_fp16((uint16_t*)p + at, v, n);
}

// What a tile prefetches while it computes.
struct Ahead {
  // Of some weight rows of the panel that comes next the first `bytes`, into L1, since a prefetch
  // into L2 is dropped as soon as a few are under way; or, with no bytes, at once their beginnings,
  // into L2, to where the hardware brings the rest.
  const char* p;
  int64_t stride_bytes;
  int rows;
  int64_t bytes;
  const char* x[kTileM];  // the rows that the next tile begins with

  CMOE_INLINE void fetch(int64_t at_bytes) const {
    if (at_bytes >= bytes) return;
    const char* q = p + at_bytes;
    for (int i = 0; i < rows; ++i, q += stride_bytes) __builtin_prefetch(q, 0, 3);
  }
  CMOE_INLINE void begin() const {
    if (bytes > 0) return;
    for (int i = 0; i < rows; ++i) __builtin_prefetch(p + i * stride_bytes, 0, 2);
  }
};

template <int kBytes>
CMOE_INLINE void fetch_lines(const char* p) {
#pragma GCC unroll 4
  for (int i = 0; i < kBytes; i += 64) __builtin_prefetch(p + i, 0, 3);
}

// How far ahead a tile fetches x, which comes from L2 or L3: so much of a new row is over before
// the hardware runs ahead in it.
constexpr int kBytesAheadX = 384;

// step(k) for each whole chunk of [0, n) with the prefetches beside it: rows of x ahead in the tile
// itself, at its end those of the next one. Returns where the rest begins.
template <int kChunk, int kPlaceBytes, class X, int MT, class F>
CMOE_INLINE int each_chunk(const X* const (&x)[MT], int n, const Ahead& ahead, F&& step) {
  constexpr int kBytes = kChunk * sizeof(X), kAhead = kBytesAheadX / kBytes * kChunk;
  int k = 0;
  ahead.begin();
  for (; k + kChunk + kAhead <= n; k += kChunk) {
    ahead.fetch(k * kPlaceBytes);
#pragma GCC unroll 4
    for (int i = 0; i < MT; ++i) fetch_lines<kBytes>((const char*)(x[i] + k + kAhead));
    step(k);
  }
  for (int bytes = 0; k + kChunk <= n; k += kChunk, bytes += kBytes) {
    ahead.fetch(k * kPlaceBytes);
#pragma GCC unroll 4
    for (int i = 0; i < kTileM; ++i) fetch_lines<kBytes>(ahead.x[i] + bytes);
    step(k);
  }
  return k;
}

// What streamed weights bring into L1 while they are at work: for each of their rows the weights
// that come next, line after line, which the hardware then runs ahead in.
struct Fetch {
  const char* p;
  int64_t apart, a_line;  // bytes from row to row; for each 64 of a row at work
  // Bytes from a row at work to one that was fetched long before: its lines are asked for once more,
  // lest one was lost on the way. 0: none.
  int64_t again;

  template <int NT, int64_t kBytes>
  CMOE_INLINE void beside() {
    constexpr int64_t kStep = kBytes < 64 ? kBytes : 64;
#pragma GCC unroll 8
    for (int64_t i = 0; i < kBytes; i += kStep, p += a_line * kStep / 64) {
#pragma GCC unroll 8
      for (int j = 0; j < NT; ++j) __builtin_prefetch(p + j * apart, 0, 3);
    }
  }
  template <int NT, class W>
  CMOE_INLINE void once_more(const W* w, int64_t stride) const {
    if (again == 0) return;
#pragma GCC unroll 8
    for (int j = 0; j < NT; ++j) __builtin_prefetch((const char*)(w + j * stride) + again, 0, 3);
  }
};

template <int MT, int NT>
CMOE_INLINE void clear_tile(V (&acc)[MT][NT]) {
#pragma GCC unroll 8
  for (int i = 0; i < MT; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < NT; ++j) acc[i][j] = vset(0.0f);
}

// Calls f.operator()<MT, N>() for m in [1, kM], n 1 or kN; n is 1 where m exceeds kMostByN.
template <int kM, int kN, int kMostByN = kM, int MT = 1, class F>
CMOE_INLINE void dispatch_beside(int m, int n, F&& f) {
  if constexpr (MT < kM) {
    if (m > MT) return dispatch_beside<kM, kN, kMostByN, MT + 1>(m, n, f);
  }
  if constexpr (kN > 1 && MT <= kMostByN) {
    if (n > 1) return f.template operator()<MT, kN>();
  }
  f.template operator()<MT, 1>();
}

// Some weight rows, `stride` apart, K contiguous.
template <class W>
struct Panel {
  const W* w;
  int64_t stride;
};

// Work is handed out in whole units of columns, which panels of kTileN weight rows cover, then of
// kTileRest; single rows are for matrices that are no whole units.
constexpr int kUnit = 16, kTileRest = kUnit % kTileN == 0 ? 1 : 2;
static_assert(kUnit % kTileN % kTileRest == 0);
inline int panel_rows(int64_t n) { return n >= kTileN ? kTileN : n >= kTileRest ? kTileRest : 1; }

// Calls f.operator()<MT, NT>() for run-time mt in [kLeastM, kTileM] and nt of panel_rows.
template <int kLeastM, int MT = kTileM, class F>
CMOE_INLINE void dispatch_tile(int mt, int nt, F&& f) {
  if constexpr (MT > kLeastM) {
    if (mt < MT) return dispatch_tile<kLeastM, MT - 1>(mt, nt, f);
  }
  if (nt == kTileN) return f.template operator()<MT, kTileN>();
  if constexpr (kTileRest > 1) {
    if (nt == kTileRest) return f.template operator()<MT, kTileRest>();
  }
  f.template operator()<MT, 1>();
}

// The weight rows of one item and one block of K: where they lie, or turned along K in the thread's
// scratch.
template <class W>
struct Rows {
  const W* w;
  int64_t stride;

  Rows(const Matrices& m, const W* at, int64_t n, int64_t k0, int64_t kn, char* scratch) {
    if (m.stride_col == 1) {
      w = at + k0;
      stride = m.stride_row;
    } else {
      stride = round_up<int64_t>(kn, 64 / sizeof(W));
      w = (const W*)scratch;
      transpose_block(at + k0 * m.stride_col, m.stride_col, n, kn, (W*)scratch, stride);
    }
  }
  static size_t scratch_bytes(bool transposed, int64_t block_k) {
    return transposed ? 2 * kColumnsTurned * (block_k + 64) * sizeof(W) : 0;
  }
};

// Some consecutive weight rows of one matrix with where their products go.
template <class W>
struct RowGroup {
  const W* base;
  int64_t n;
  float* c;
};
// What passes in one go: a group, or the gate rows and the up rows, as many of each.
template <class W>
struct RowGroups {
  int count;
  RowGroup<W> group[2];

  const RowGroup<W>& operator[](int i) const { return group[i]; }
  const RowGroup<W>& last() const { return group[count - 1]; }
};

#ifdef CMOE_NATIVE_BF16
// vdpbf16ps: two bf16 products a lane and step; x is used as it lies.
struct NativeBf16 {
  using W = uint16_t;
  using X = uint16_t;
  static constexpr int kChunk = 2 * kLanes;
  static constexpr int64_t kBlockK = 2048;  // a panel of six rows and the x of a tile fit L1
  static constexpr bool kConvertX = false;
  static constexpr int kWideRows = 0;
  // Of x, at most: from there on arithmetic takes longer than memory does.
  static constexpr int kRowsStreamed = 24;
  static constexpr int kStreamM = 8, kTurnN = 2;  // 16 sums hide the latency of the product
  static constexpr int kRowsByTwo = 8;  // of x, at most, where two weight rows pass at once
  static constexpr int kRowsInL2 = 4;   // of x, at most, that come from L2 while the weights stream

  struct Source {
    Rows<W> rows;
    Source(const Rows<W>& r, int64_t, int, float*) : rows(r) {}
    Panel<W> panel(int64_t n, int) const { return {rows.w + n * rows.stride, rows.stride}; }
    static Panel<W> narrow(const W* w, int64_t stride) { return {w, stride}; }
  };

  template <int MT, int NT>
  static void tile_of(const X* const* rows, Panel<W> w, int n, float* c, int64_t stride, bool add,
                      Ahead ahead) {
    V acc[MT][NT];
    const X* x[MT];
    clear_tile(acc);
#pragma GCC unroll 8
    for (int i = 0; i < MT; ++i) x[i] = rows[i];
    auto step = [&](auto load, int k) CMOE_LAMBDA {
      __m512bh xv[MT];
#pragma GCC unroll 8
      for (int i = 0; i < MT; ++i) xv[i] = (__m512bh)load(x[i] + k);
#pragma GCC unroll 8
      for (int j = 0; j < NT; ++j) {
        const __m512bh wv = (__m512bh)load(w.w + j * w.stride + k);
#pragma GCC unroll 8
        for (int i = 0; i < MT; ++i) acc[i][j] = (V)_mm512_dpbf16_ps((__m512)acc[i][j], wv, xv[i]);
      }
    };
    const int k = each_chunk<kChunk, sizeof(W)>(x, n, ahead, [&](int at) CMOE_LAMBDA {
      step([](const uint16_t* p) CMOE_LAMBDA { return load_pairs(p); }, at);
    });
    if (k < n) {
      const int rest = n - k;
      step([rest](const uint16_t* p) CMOE_LAMBDA { return load_pairs(p, rest); }, k);
    }
    reduce_tile(acc, c, stride, add);
  }

  static void tile(int mt, int nt, const X* const* rows, Panel<W> w, int n, float* c,
                   int64_t stride, bool add, Ahead ahead) {
    dispatch_tile<1>(mt, nt, [&]<int MT, int NT>() CMOE_LAMBDA {
      tile_of<MT, NT>(rows, w, n, c, stride, add, ahead);
    });
  }

  // acc[m][j] += dot(x[m], row j of w) over n places; chunk k of row m at x[(k * MT + m) * kChunk].
  template <int MT, int NT>
  static CMOE_INLINE void stream(V (&acc)[MT][NT], const X* x, Panel<W> w, int n, Fetch& fetch) {
    auto step = [&](auto load, int k) CMOE_LAMBDA {
      __m512bh wv[NT];
#pragma GCC unroll 8
      for (int j = 0; j < NT; ++j) wv[j] = (__m512bh)load(w.w + j * w.stride + k);
#pragma GCC unroll 8
      for (int i = 0; i < MT; ++i) {
        const __m512bh xv = (__m512bh)load_pairs(x + k * MT + i * kChunk);
#pragma GCC unroll 8
        for (int j = 0; j < NT; ++j)
          acc[i][j] = (V)_mm512_dpbf16_ps((__m512)acc[i][j], wv[j], xv);
      }
    };
    int k = 0;
#pragma GCC unroll 2
    for (; k + kChunk <= n; k += kChunk) {
      fetch.template beside<NT, kChunk * sizeof(W)>();
      fetch.template once_more<NT>(w.w + k, w.stride);
      step([](const uint16_t* p) CMOE_LAMBDA { return load_pairs(p); }, k);
    }
    if (k < n) {
      const int rest = n - k;
      step([rest](const uint16_t* p) CMOE_LAMBDA { return load_pairs(p, rest); }, k);
    }
  }

  static constexpr bool kPacked = true;
  // Places k, k + 1 of a row of x in every lane; their products with those of kLanes columns.
  static CMOE_INLINE __m512bh pair(const X* x, int64_t k) {
    int32_t both;
    std::memcpy(&both, x + k, sizeof both);
    return (__m512bh)_mm512_set1_epi32(both);
  }
  static CMOE_INLINE V outer(V acc, __m512i w, __m512bh x) {
    return (V)_mm512_dpbf16_ps((__m512)acc, (__m512bh)w, x);
  }

  // One fp32 row of n values, the first at column `at`; up to `end` the row is filled with zeros.
  static void store(X* to, int64_t at, const float* from, int64_t n, int64_t end) {
    for (int64_t i = 0; i < n; i += kLanes) {
      const int m = static_cast<int>(least<int64_t>(kLanes, n - i));
      store_bf16(to + at + i, vload(from + i, m), m);
    }
    for (int64_t i = at + n; i < end; ++i) to[i] = 0;
  }
};
#endif

// Weight formats: a chunk of 2 * kLanes weights as two fp32 vectors.
struct Bf16 {
  using W = uint16_t;
  static constexpr bool kPairs = true;  // half<0> holds the even places
  template <int h, class... N>
  static CMOE_INLINE V half(const W* p, N... n) {
    return h == 0 ? bf16_even(load_pairs(p, n...)) : bf16_odd(load_pairs(p, n...));
  }
};
struct Fp16 {
  using W = uint16_t;
  static constexpr bool kPairs = false;  // half<0> holds the first kLanes places
  template <int h>
  static CMOE_INLINE V half(const W* p) {
    return load_fp16(p + h * kLanes);
  }
  template <int h>
  static CMOE_INLINE V half(const W* p, int n) {
    const int m = n - h * kLanes;
    return m > 0 ? load_fp16(p + h * kLanes, least(m, kLanes)) : vset(0.0f);
  }
};
struct Fp32 {
  using W = float;
  static constexpr bool kPairs = false;
  template <int h>
  static CMOE_INLINE V half(const W* p) {
    return vload(p + h * kLanes);
  }
  template <int h>
  static CMOE_INLINE V half(const W* p, int n) {
    const int m = n - h * kLanes;
    return m > 0 ? vload(p + h * kLanes, least(m, kLanes)) : vset(0.0f);
  }
};

// c[m, n] (+)= dot(row m of x, row n of w): x in fp32, in the order of the format F. A place of K
// takes kPlaceBytes in the weights that come next, of which w may be a widened copy.
template <class F, int kPlaceBytes, int MT, int NT>
void fma_tile(const float* const* rows, Panel<typename F::W> w, int n, float* c, int64_t stride,
              bool add, Ahead ahead) {
  V acc[MT][NT];
  const float* x[MT];
  clear_tile(acc);
#pragma GCC unroll 8
  for (int i = 0; i < MT; ++i) x[i] = rows[i];
  auto half_step = [&]<int h>(int k, auto... rest) CMOE_LAMBDA {
    V xv[MT];
#pragma GCC unroll 8
    for (int i = 0; i < MT; ++i) xv[i] = vload(x[i] + k + h * kLanes);
#pragma GCC unroll 8
    for (int j = 0; j < NT; ++j) {
      const V wv = F::template half<h>(w.w + j * w.stride + k, rest...);
#pragma GCC unroll 8
      for (int i = 0; i < MT; ++i) acc[i][j] = vfma(wv, xv[i], acc[i][j]);
    }
  };
  const int k = each_chunk<2 * kLanes, kPlaceBytes>(x, n, ahead, [&](int at) CMOE_LAMBDA {
    half_step.template operator()<0>(at);
    half_step.template operator()<1>(at);
  });
  if constexpr (kPlaceBytes == sizeof(typename F::W)) {  // a widened copy is whole chunks
    if (k < n) {
      half_step.template operator()<0>(k, n - k);
      half_step.template operator()<1>(k, n - k);
    }
  }
  reduce_tile(acc, c, stride, add);
}

// Widen to fp32 in registers and multiply with fp32 FMA; x is kept in fp32, in the format's order.
template <class Format>
struct Fma {
  using W = typename Format::W;
  using X = float;
  static constexpr int kChunk = 2 * kLanes;
  static constexpr int64_t kBlockK = 1024;  // a panel and the x of a tile fit L1
  static constexpr bool kConvertX = true;
  // From this many rows on a panel is widened once into L1 instead of once a tile.
  static constexpr int kWideRows = sizeof(W) < 4 ? 24 : 0;
  // More rows: a large tile, which widens a weight for all of them, gains more than streaming does.
  static constexpr int kRowsStreamed = 4;
  static constexpr int kStreamM = 4, kTurnN = kLanes < 16 ? 2 : 1, kRowsByTwo = 2, kRowsInL2 = 0;

  struct AnyPanel {
    Panel<W> narrow;
    Panel<float> wide;  // null: read `narrow`
  };

  struct Source {
    Rows<W> rows;
    int64_t kn;
    float* buffer;  // null: not widened
    Source(const Rows<W>& r, int64_t k, int M, float* b)
        : rows(r), kn(k), buffer(kWideRows > 0 && M >= kWideRows ? b : nullptr) {}
    static AnyPanel narrow(const W* w, int64_t stride) { return {{w, stride}, {nullptr, 0}}; }
    AnyPanel panel(int64_t n, int nt) const {
      const Panel<W> narrow{rows.w + n * rows.stride, rows.stride};
      if (buffer == nullptr) return {narrow, {nullptr, 0}};
      const int64_t stride = round_up<int64_t>(kn, kChunk);
      for (int j = 0; j < nt; ++j) {
        const W* from = narrow.w + j * narrow.stride;
        float* to = buffer + j * stride;
        int64_t k = 0;
        for (; k + kChunk <= kn; k += kChunk) {
          vstore(to + k, Format::template half<0>(from + k));
          vstore(to + k + kLanes, Format::template half<1>(from + k));
        }
        if (k < kn) {
          vstore(to + k, Format::template half<0>(from + k, static_cast<int>(kn - k)));
          vstore(to + k + kLanes, Format::template half<1>(from + k, static_cast<int>(kn - k)));
        }
      }
      return {narrow, {buffer, stride}};
    }
  };

  static void tile(int mt, int nt, const X* const* rows, const AnyPanel& w, int n,
                   float* c, int64_t stride, bool add, Ahead ahead) {
    if constexpr (kWideRows > 0) {
      // So many rows, cut evenly, leave no tile with fewer than kTileM - 1 of them.
      static_assert(kWideRows > kTileM * (kTileM - 2));
      if (w.wide.w != nullptr)
        return dispatch_tile<kTileM - 1>(mt, nt, [&]<int MT, int NT>() CMOE_LAMBDA {
          fma_tile<Fp32, sizeof(W), MT, NT>(rows, w.wide, round_up(n, kChunk), c, stride, add,
                                            ahead);
        });
    }
    dispatch_tile<1>(mt, nt, [&]<int MT, int NT>() CMOE_LAMBDA {
      fma_tile<Format, sizeof(W), MT, NT>(rows, w.narrow, n, c, stride, add, ahead);
    });
  }

  template <int MT, int NT>
  static CMOE_INLINE void stream(V (&acc)[MT][NT], const X* x, Panel<W> w, int n, Fetch& fetch) {
    auto half_step = [&]<int h>(int k, auto... rest) CMOE_LAMBDA {
      V wv[NT];
#pragma GCC unroll 8
      for (int j = 0; j < NT; ++j)
        wv[j] = Format::template half<h>(w.w + j * w.stride + k, rest...);
#pragma GCC unroll 8
      for (int i = 0; i < MT; ++i) {
        const V xv = vload(x + k * MT + i * kChunk + h * kLanes);
#pragma GCC unroll 8
        for (int j = 0; j < NT; ++j) acc[i][j] = vfma(wv[j], xv, acc[i][j]);
      }
    };
    int k = 0;
    for (; k + kChunk <= n; k += kChunk) {
      fetch.template beside<NT, kChunk * sizeof(W)>();
      fetch.template once_more<NT>(w.w + k, w.stride);
      half_step.template operator()<0>(k);
      half_step.template operator()<1>(k);
    }
    if (k < n) {
      half_step.template operator()<0>(k, n - k);
      half_step.template operator()<1>(k, n - k);
    }
  }

  static constexpr bool kPacked = std::is_same_v<Format, Bf16>;
  struct Pair {
    V even, odd;
  };
  static CMOE_INLINE Pair pair(const X* x, int64_t k) {
    const X* at = x + k - k % kChunk + k % kChunk / 2;
    return {vset(at[0]), vset(at[kLanes])};
  }
  template <class Columns>
  static CMOE_INLINE V outer(V acc, Columns w, Pair x) {
    return vfma(bf16_odd(w), x.odd, vfma(bf16_even(w), x.even, acc));
  }

  static void store(X* to, int64_t at, const float* from, int64_t n, int64_t end) {
    auto place = [](int64_t i) {
      const int64_t in = i % kChunk;
      return Format::kPairs ? i - in + in % 2 * kLanes + in / 2 : i;
    };
    for (int64_t i = 0; i < n; ++i) to[place(at + i)] = from[i];
    for (int64_t i = at + n; i < end; ++i) to[place(i)] = 0.0f;
  }
};

}  // namespace CMOE_ISA
}  // namespace cmoe
