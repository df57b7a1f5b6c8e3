// Few rows of x: the weights stream from memory once, in long runs.
#pragma once

#include <cstring>

#include "dot.h"

namespace cmoe {
namespace CMOE_ISA {

constexpr int64_t kLongRowBytes = 1024;  // shorter weight rows are too little for a tile
// Of x, where one tile has all of it: in L1 beside the weights; in L2, which serves few rows as
// fast as memory serves the weights. Where tiles take turns: in L1.
constexpr int64_t kPackedInL1 = 32 << 10, kPackedBytes = 64 << 10, kTurnBytes = 16 << 10;
// How far ahead weights are read, likewise: over all streams; a chunk of rows in L2.
constexpr int64_t kAheadBytes = 4 << 10, kChunkBytes = 256 << 10, kChunkRows = 32;
// How far ahead one line of each stream is, once a row, so that its page is known in time.
constexpr int64_t kPageAheadBytes = 64 << 10;

constexpr int kBeside = 2;  // weight rows at a time

// x[m][k, k + kn) of M rows, chunk beside chunk: one run of memory, which no other row displaces
// from L1. The last chunks end with zeros. One row of whole chunks lies so already.
template <class D>
const typename D::X* pack_rows(const typename D::X* const* x, int M, int64_t k, int64_t kn,
                               typename D::X* packed) {
  if (M == 1 && kn % D::kChunk == 0) return x[0] + k;
  typename D::X* to = packed;
  for (int64_t at = 0; at < kn; at += D::kChunk) {
    // Converted rows are whole chunks.
    const int64_t n = D::kConvertX ? D::kChunk : least<int64_t>(D::kChunk, kn - at);
    for (int m = 0; m < M; ++m, to += D::kChunk) {
      if (n == D::kChunk) {
        std::memcpy(to, x[m] + k + at, D::kChunk * sizeof(*to));
      } else {
        std::memset(to, 0, D::kChunk * sizeof(*to));
        std::memcpy(to, x[m] + k + at, n * sizeof(*to));
      }
    }
  }
  return packed;
}

// Weight rows that pass side by side: row r of stream j is w + r * row + j * apart, K long. Its
// products go to c[m * c_row + r + j * c_apart].
template <class D>
struct Streams {
  const typename D::W* w;
  int64_t row, apart;
  float* c;
  int64_t c_row, c_apart;

  Streams from(int64_t r) const { return {w + r * row, row, apart, c + r, c_row, c_apart}; }

  // `then`: the row that is read ahead of row 0, and so on.
  template <int MT, int NT>
  void multiply(const typename D::X* x, int64_t rows, int64_t K, const typename D::W* then) const {
    const int64_t block = even_parts<D>(K, D::kBlockK);
    for (int64_t r = 0; r < rows; ++r) {
      float sums[MT * NT];
      Fetch fetch{(const char*)(then + r * row), apart * (int64_t)sizeof(*w), 64, 0};
#pragma GCC unroll 2
      for (int j = 0; j < NT; ++j)
        __builtin_prefetch(fetch.p + kPageAheadBytes + j * fetch.apart, 0, 2);
      for (int64_t k = 0; k < K; k += block) {
        V acc[MT][NT];
        clear_tile(acc);
        D::stream(acc, x + k * MT, {w + r * row + k, apart},
                  static_cast<int>(least(block, K - k)), fetch);
        reduce_tile(acc, sums, NT, k > 0);
      }
#pragma GCC unroll 8
      for (int i = 0; i < MT; ++i)
#pragma GCC unroll 8
        for (int j = 0; j < NT; ++j) c[i * c_row + r + j * c_apart] = sums[i * NT + j];
    }
  }
};

// One tile has all rows of x, so a weight row is done with when it has passed. Two streams through
// memory, far apart, are faster than one: the groups side by side, or the halves of one.
template <class D>
void stream_once(const typename D::X* const* x, int M, const Matrices& w,
                 const RowGroups<typename D::W>& groups, int64_t K, int64_t c_stride,
                 const typename D::W* next, typename D::X* packed) {
  using W = typename D::W;
  const int64_t row = w.stride_row, bytes = K * (int64_t)sizeof(W);
  const typename D::X* tile = pack_rows<D>(x, M, 0, K, packed);
  auto pass = [&](const Streams<D>& s, int count, int64_t rows, const W* after) {
    // Whole rows ahead, so that the last ones bring what follows; of long rows that is too much.
    const int64_t far = kAheadBytes / count;
    const int64_t ahead = bytes > kAheadBytes ? 0 : least(rows, ceil_div(far, bytes));
    dispatch_beside<D::kStreamM, kBeside, D::kRowsByTwo>(M, count, [&]<int MT, int NT>() CMOE_LAMBDA {
      s.template multiply<MT, NT>(tile, rows - ahead, K,
                                  s.w + (ahead > 0 ? ahead * row : far / (int64_t)sizeof(W)));
      s.from(rows - ahead).template multiply<MT, NT>(tile, ahead, K, after);
    });
  };
  auto alone = [&](const RowGroup<W>& g, int64_t first, const W* after) {
    pass({g.base + first * row, row, 0, g.c + first, c_stride, 0}, 1, g.n - first, after);
  };
  const RowGroup<W>&here = groups[0], &last = groups.last();
  if (M > D::kRowsByTwo) {
    if (groups.count == 2) alone(here, 0, last.base);
    alone(last, 0, next);
  } else if (groups.count == 2) {
    pass({here.base, row, last.base - here.base, here.c, c_stride, last.c - here.c}, kBeside,
         here.n, next);
  } else {
    const int64_t half = here.n / kBeside;
    pass({here.base, row, half * row, here.c, c_stride, half}, kBeside, half, next);
    if (here.n % kBeside > 0) alone(here, here.n - 1, next);
  }
}

// A part of a block of K: the first one begins a tile's sums, the last one folds them into c; they
// are kept between the two.
struct Part {
  V* sums;  // [rows, MT]
  bool first, last;
};

// `rows` weight rows, NT at a time, by one tile of x.
template <class D, int MT, int NT>
void stream_tile(const typename D::X* x, Panel<typename D::W> w, int64_t rows, int n, float* c,
                 int64_t stride, bool add, Part part, Fetch fetch) {
  for (int64_t r = 0; r < rows; r += NT) {
    V acc[MT][NT];
    V* const sums = part.sums + r * MT;
    if (part.first) {
      clear_tile(acc);
    } else {
#pragma GCC unroll 8
      for (int i = 0; i < MT; ++i)
#pragma GCC unroll 8
        for (int j = 0; j < NT; ++j) acc[i][j] = sums[i * NT + j];
    }
    D::stream(acc, x, {w.w + r * w.stride, w.stride}, n, fetch);
    if (part.last) {
      reduce_tile(acc, c + r, stride, add);
    } else {
#pragma GCC unroll 8
      for (int i = 0; i < MT; ++i)
#pragma GCC unroll 8
        for (int j = 0; j < NT; ++j) sums[i * NT + j] = acc[i][j];
    }
  }
}

// Tiles of rows of x take turns over a chunk of weight rows in L2, while all the turns together
// fetch the next one, in the order of memory. A tile passes in parts of K that stay in L1.
template <class D>
void stream_in_turns(const typename D::X* const* x, int M, const Matrices& w,
                     const RowGroups<typename D::W>& groups, int64_t K, int64_t c_stride,
                     const typename D::W* next, typename D::X* packed) {
  using W = typename D::W;
  using X = typename D::X;
  static_assert(kTurnBytes + kChunkRows * D::kStreamM * sizeof(V) <= kPackedBytes);
  V* const sums = (V*)((char*)packed + kTurnBytes);
  const int64_t block = even_parts<D>(K, D::kBlockK), row = w.stride_row;
  const int tiles = ceil_div(M, D::kStreamM), share = 64 / tiles;
  const int64_t places = kTurnBytes / (int64_t)sizeof(X) / ceil_div(M, tiles);
  const int64_t most = places - places % D::kChunk;
  const int64_t chunk_rows =
      least<int64_t>(kChunkRows, ceil_div<int64_t>(kChunkBytes, K * sizeof(W)));
  for (int g = 0; g < groups.count; ++g) {
    const int64_t rows = groups[g].n;
    const int64_t chunk =
        round_up<int64_t>(ceil_div(rows, ceil_div(rows, chunk_rows)), D::kTurnN);
    const W* after = g + 1 < groups.count ? groups[g + 1].base : next;
    for (int64_t first = 0; first < rows; first += chunk) {
      const int64_t here = least(chunk, rows - first);
      const W* base = groups[g].base + first * row;
      const char* fetch = (const char*)(first + here < rows ? base + here * row : after);
      // Rows [m, m + mt) of x by the chunk, over places [k, k + kn).
      auto turn = [&](int m, int mt, int64_t k, int kn, bool add, bool begin, bool end) {
        const X* tile = pack_rows<D>(x + m, mt, k, kn, packed);
        auto pass = [&](int beside, int64_t from, int64_t count) {
          dispatch_beside<D::kStreamM, D::kTurnN>(mt, beside, [&]<int MT, int NT>() CMOE_LAMBDA {
            stream_tile<D, MT, NT>(tile, {base + from * row + k, row}, count, kn,
                                   groups[g].c + m * c_stride + first + from, c_stride, add,
                                   {sums + from * mt, begin, end},
                                   {fetch, share, NT * share,
                                    m == 0 ? NT * row * (int64_t)sizeof(W) : 0});
          });
          fetch += count * kn * (int64_t)sizeof(W) / tiles;
        };
        // Memory decides: no gap from row to row. Arithmetic does, with more tiles: faster apart.
        const int64_t even = here - here % D::kTurnN, at_once = tiles > 2 ? D::kTurnN : even;
        for (int64_t n = 0; n < even; n += at_once) pass(D::kTurnN, n, at_once);
        if (here % D::kTurnN > 0) pass(1, here - 1, 1);
      };
      for (int64_t k = 0; k < K; k += block) {
        const int64_t end = least(k + block, K), part = even_parts<D>(end - k, most);
        for (int t = 0, m = 0, mt = 0; t < tiles; ++t, m += mt) {
          mt = (M - m + tiles - t - 1) / (tiles - t);
          for (int64_t at = k; at < end; at += part)
            turn(m, mt, at, static_cast<int>(least(part, end - at)), k > 0, at == k,
                 at + part >= end);
        }
      }
    }
  }
}

// gemm_block for so few rows of x that memory decides: the weights are read in long runs, and each
// tile brings its share of those that come next.
template <class D>
void stream_rows(const typename D::X* const* x, int M, const Matrices& w,
                 const RowGroups<typename D::W>& groups, int64_t K, int64_t c_stride,
                 const typename D::W* next, typename D::X* packed) {
  const int64_t bytes = round_up<int64_t>(K, D::kChunk) * (int64_t)sizeof(typename D::X);
  if (M <= D::kStreamM && M * bytes <= (M <= D::kRowsInL2 ? kPackedBytes : kPackedInL1))
    return stream_once<D>(x, M, w, groups, K, c_stride, next, packed);
  stream_in_turns<D>(x, M, w, groups, K, c_stride, next, packed);
}

}  // namespace CMOE_ISA
}  // namespace cmoe
