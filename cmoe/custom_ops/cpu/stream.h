// Few rows of x: the weights stream from memory once, in long runs.
#pragma once

#include <cstring>

#include "dot.h"

namespace cmoe {
namespace CMOE_ISA {

constexpr int64_t kLongRowBytes = 1024;  // shorter weight rows are too little for a tile
// Of x beside the weights in L1: where one tile has all of it; where tiles take turns.
constexpr int64_t kPackedBytes = 32 << 10, kTurnBytes = 24 << 10;
// How far ahead weights are read, likewise: in each of two streams; a chunk of rows in L2.
constexpr int64_t kAheadBytes = 2 << 10, kLongestAhead = 4 << 10;
constexpr int64_t kChunkBytes = 256 << 10, kChunkRows = 32;

constexpr int kBeside = 2;  // weight rows at a time

// Calls f.operator()<MT, NT>() for mt in [1, kM], nt 1 or kBeside.
template <int kM, int MT = 1, class F>
CMOE_INLINE void dispatch_stream(int mt, int nt, F&& f) {
  if constexpr (MT < kM) {
    if (mt > MT) return dispatch_stream<kM, MT + 1>(mt, nt, f);
  }
  if (nt > 1) return f.template operator()<MT, kBeside>();
  f.template operator()<MT, 1>();
}

// x[m][k, k + kn) of M rows, chunk beside chunk: one run of memory, which no other row displaces
// from L1. The last chunks end with zeros.
template <class D>
void pack_rows(const typename D::X* const* x, int M, int64_t k, int64_t kn, typename D::X* to) {
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
      Fetch fetch{(const char*)(then + r * row), apart * (int64_t)sizeof(*w), 64};
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

// All rows of x stay in L1, so a weight row is done with when it has passed. Two streams through
// memory, far apart, are faster than one: the groups side by side, or the halves of one.
template <class D, int kGroups>
void stream_once(const typename D::X* const* x, int M, const Matrices& w,
                 const RowGroup<typename D::W> (&groups)[kGroups], int64_t K, int64_t c_stride,
                 const typename D::W* next, typename D::X* packed) {
  using W = typename D::W;
  const RowGroup<W>&first = groups[0], &last = groups[kGroups - 1];
  const int64_t rows = kGroups == 2 ? first.n : first.n / kBeside, row = w.stride_row;
  const Streams<D> both{first.base,
                        row,
                        kGroups == 2 ? last.base - first.base : rows * row,
                        first.c,
                        c_stride,
                        kGroups == 2 ? last.c - first.c : rows};
  auto pass = [&](int streams, int64_t from, int64_t count, const W* then) {
    dispatch_stream<D::kStreamM>(M, streams, [&]<int MT, int NT>() CMOE_LAMBDA {
      both.from(from).template multiply<MT, NT>(packed, count, K, then);
    });
  };
  pack_rows<D>(x, M, 0, K, packed);
  const int64_t bytes = K * (int64_t)sizeof(W);
  // Whole rows ahead, so that the last ones bring what follows; in long rows that would be too far.
  const int64_t ahead = bytes > kLongestAhead ? 0 : least(rows, ceil_div(kAheadBytes, bytes));
  pass(kBeside, 0, rows - ahead, first.base + (ahead > 0 ? ahead * row : kAheadBytes / sizeof(W)));
  pass(kBeside, rows - ahead, ahead, next);
  if (kGroups == 1 && first.n % kBeside > 0) pass(1, first.n - 1, 1, next);
}

template <class D, int MT, int NT>
void stream_tile(const typename D::X* x, Panel<typename D::W> w, int n, float* c, int64_t stride,
                 bool add, Fetch fetch) {
  V acc[MT][NT];
  clear_tile(acc);
  D::stream(acc, x, w, n, fetch);
  reduce_tile(acc, c, stride, add);
}

// Tiles of rows of x take turns over a chunk of weight rows in L2, while all the turns together
// fetch the next one, in the order of memory.
template <class D, int kGroups>
void stream_in_turns(const typename D::X* const* x, int M, const Matrices& w,
                     const RowGroup<typename D::W> (&groups)[kGroups], int64_t K, int64_t c_stride,
                     const typename D::W* next, int64_t most, typename D::X* packed) {
  using W = typename D::W;
  const int64_t block = even_parts<D>(K, D::kBlockK), row = w.stride_row;
  const int tiles = static_cast<int>(ceil_div<int64_t>(M, most));
  const int64_t chunk_rows =
      least<int64_t>(kChunkRows, ceil_div<int64_t>(kChunkBytes, K * sizeof(W)));
  for (int g = 0; g < kGroups; ++g) {
    const int64_t rows = groups[g].n;
    const int64_t chunk =
        round_up<int64_t>(ceil_div(rows, ceil_div(rows, chunk_rows)), kBeside);
    const W* after = g + 1 < kGroups ? groups[g + 1].base : next;
    for (int64_t first = 0; first < rows; first += chunk) {
      const int64_t here = least(chunk, rows - first);
      const W* base = groups[g].base + first * row;
      const char* fetch = (const char*)(first + here < rows ? base + here * row : after);
      for (int64_t k = 0; k < K; k += block) {
        const int64_t kn = least(block, K - k);
        for (int t = 0, m = 0, mt = 0; t < tiles; ++t, m += mt) {
          mt = (M - m + tiles - t - 1) / (tiles - t);
          pack_rows<D>(x + m, mt, k, kn, packed);
          for (int64_t n = 0, nt = 0; n < here; n += nt) {
            nt = here - n >= kBeside ? kBeside : 1;
            dispatch_stream<D::kStreamM>(
                mt, static_cast<int>(nt), [&]<int MT, int NT>() CMOE_LAMBDA {
                  stream_tile<D, MT, NT>(packed, {base + n * row + k, row}, static_cast<int>(kn),
                                         groups[g].c + m * c_stride + first + n, c_stride, k > 0,
                                         {fetch, 64 / tiles, NT * 64 / tiles});
                });
            fetch += nt * kn * (int64_t)sizeof(W) / tiles;
          }
        }
      }
    }
  }
}

// gemm_block for so few rows of x that memory decides: the weights are read in long runs, and each
// tile brings its share of those that come next.
template <class D, int kGroups>
void stream_rows(const typename D::X* const* x, int M, const Matrices& w,
                 const RowGroup<typename D::W> (&groups)[kGroups], int64_t K, int64_t c_stride,
                 const typename D::W* next, typename D::X* packed) {
  auto packed_bytes = [](int64_t places) {
    return round_up<int64_t>(places, D::kChunk) * (int64_t)sizeof(typename D::X);
  };
  if (M <= D::kStreamM && M * packed_bytes(K) <= kPackedBytes)
    return stream_once<D>(x, M, w, groups, K, c_stride, next, packed);
  const int64_t block = even_parts<D>(K, D::kBlockK);
  const int64_t most = least<int64_t>(D::kStreamM, kTurnBytes / packed_bytes(block));
  stream_in_turns<D>(x, M, w, groups, K, c_stride, next, most, packed);
}

}  // namespace CMOE_ISA
}  // namespace cmoe
