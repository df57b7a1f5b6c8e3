// Packed weights: outer products over strips of 32 columns, each strip one run of memory.
//
// A strip holds 32 rows of a matrix [N, K] as [K / 2, 32, 2]: two places of K of each row, then the
// next two. An output is a sum along K in one lane, two places a step, whatever the tile's shape: a
// token's result does not depend on the batch. x is broadcast, so what a tile touches of it is no
// more than its own places, however long K is.
#pragma once

#include "dot.h"

namespace cmoe {
namespace CMOE_ISA {

constexpr int kStripVectors = kStrip / kLanes;
constexpr int kStripsBeside = kLanes < 16 ? 1 : 2;  // at a time: two streams through memory
constexpr int kOuterM = kTileM * kTileN / (kStripsBeside * kStripVectors);
constexpr int64_t kStripBytesAPlace = kStrip * 2;
// How far ahead weights are fetched where one tile has all rows of x: over all streams. Places of K
// that stay in L1 while several tiles pass.
constexpr int64_t kAheadOuter = 6 << 10, kPlacesInL1 = 256;

// Strips that pass side by side: strip s of stream j is w + s * kStrip * K + j * apart; its products
// go to c[m * c_row + s * kStrip + j * c_apart].
template <class W>
struct Strips {
  const W* w;
  int64_t apart;
  float* c;
  int64_t c_row, c_apart;
};

// n places of MT rows by a strip of each of NS streams, with what `fetch` brings beside them.
template <class D, int MT, int NS, bool kFetch>
void outer_tile(const typename D::X* const* rows, const Strips<typename D::W>& at, int64_t k, int n,
                bool add, Fetch fetch) {
  constexpr int NT = NS * kStripVectors;
  V acc[MT][NT];
  const typename D::X* x[MT];
#pragma GCC unroll 8
  for (int i = 0; i < MT; ++i) x[i] = rows[i];
  auto sums = [&](int i, int j) CMOE_LAMBDA {
    return at.c + i * at.c_row + j / kStripVectors * at.c_apart + j % kStripVectors * kLanes;
  };
  if (add) {
#pragma GCC unroll 8
    for (int i = 0; i < MT; ++i)
#pragma GCC unroll 8
      for (int j = 0; j < NT; ++j) acc[i][j] = vload(sums(i, j));
  } else {
    clear_tile(acc);
  }
#pragma GCC unroll 2
  for (int64_t p = k; p < k + n; p += 2) {
    const typename D::W* w = at.w + p * kStrip;
    if (kFetch) fetch.template beside<NS, 2 * kStripBytesAPlace>();
    decltype(load_pairs(w)) wv[NT];
#pragma GCC unroll 8
    for (int j = 0; j < NT; ++j)
      wv[j] = load_pairs(w + j / kStripVectors * at.apart + j % kStripVectors * 2 * kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < MT; ++i) {
      const auto xv = D::pair(x[i], p);
#pragma GCC unroll 8
      for (int j = 0; j < NT; ++j) acc[i][j] = D::outer(acc[i][j], wv[j], xv);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < MT; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < NT; ++j) vstore(sums(i, j), acc[i][j]);
}

// `count` strips of each of `ns` streams by M rows of x; `after`: the weights that come next.
template <class D>
void outer_strips(const typename D::X* const* x, int M, Strips<typename D::W> at, int ns,
                  int64_t count, int64_t K, const typename D::W* after) {
  const int tiles = ceil_div(M, kOuterM);
  const int64_t ahead = least(kAheadOuter / kStripBytesAPlace / ns, K);  // even, as K is
  const int64_t part = tiles > 1 ? even_parts<D>(K, kPlacesInL1, 2) : K;
  for (int64_t s = 0; s < count; ++s, at.w += kStrip * K, at.c += kStrip) {
    auto pass = [&](int64_t k, int64_t n, const typename D::W* then) {
      for (int t = 0, m = 0, mt = 0; t < tiles; ++t, m += mt) {
        mt = (M - m + tiles - t - 1) / (tiles - t);
        Strips<typename D::W> here = at;
        here.c += m * at.c_row;
        const Fetch fetch{(const char*)then + t * n * kStripBytesAPlace / tiles,
                          at.apart * (int64_t)sizeof(*at.w), 64 / tiles, 0};
        dispatch_beside<kOuterM, kStripsBeside>(mt, ns, [&]<int MT, int NS>() CMOE_LAMBDA {
          // Beside one row of x nothing is in the way of the hardware's own streams, which are
          // faster once they have begun.
          constexpr bool kAlone = MT == 1 && kOuterM > 1;
          if (kAlone && then != after)
            return outer_tile<D, MT, NS, !kAlone>(x + m, here, k, static_cast<int>(n), k > 0, fetch);
          outer_tile<D, MT, NS, true>(x + m, here, k, static_cast<int>(n), k > 0, fetch);
        });
      }
    };
    const bool last = s + 1 == count;
    if (tiles > 1) {
      for (int64_t k = 0; k < K; k += part) {
        const int64_t n = least(part, K - k);
        pass(k, n, last && k + n == K ? after : at.w + (k + n) * kStrip);
      }
    } else {
      const int64_t rest = last ? ahead : 0;
      if (K > rest) pass(0, K - rest, at.w + ahead * kStrip);
      if (rest > 0) pass(K - rest, rest, after);
    }
  }
}

// gemm_block for packed weights.
template <class D>
void outer_rows(const typename D::X* const* x, int M,
                const RowGroups<typename D::W>& groups, int64_t K, int64_t c_stride,
                const typename D::W* next) {
  using W = typename D::W;
  const RowGroup<W>& here = groups[0];
  const RowGroup<W>& last = groups.last();
  const int64_t strips = here.n / kStrip;
  auto alone = [&](const RowGroup<W>& g, int64_t first, const W* after) {
    outer_strips<D>(x, M, {g.base + first * kStrip * K, 0, g.c + first * kStrip, c_stride, 0}, 1,
                    strips - first, K, after);
  };
  if (kStripsBeside == 1) {
    if (groups.count == 2) alone(here, 0, last.base);
    alone(last, 0, next);
  } else if (groups.count == 2) {
    outer_strips<D>(x, M, {here.base, last.base - here.base, here.c, c_stride, last.c - here.c},
                    kStripsBeside, strips, K, next);
  } else {
    const int64_t half = strips / 2;
    if (half > 0)
      outer_strips<D>(x, M, {here.base, half * kStrip * K, here.c, c_stride, half * kStrip},
                      kStripsBeside, half, K, next);
    if (strips % 2 > 0) alone(here, strips - 1, next);
  }
}

}  // namespace CMOE_ISA
}  // namespace cmoe
