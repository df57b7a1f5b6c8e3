// Few rows of x: the weights stream from memory once, in one run.
#pragma once

#include <cstring>

#include "dot.h"

namespace cmoe {
namespace CMOE_ISA {

constexpr int64_t kLongRowBytes = 1024;  // shorter weight rows are too little for a tile
// Of x beside the stream in L1: where one tile has all of it; where tiles take turns.
constexpr int64_t kPackedBytes = 32 << 10, kTurnBytes = 24 << 10;
// How far ahead weights are read, likewise: a run for each row at work; a chunk of rows in L2.
constexpr int64_t kAheadBytes = 4 << 10, kChunkBytes = 256 << 10, kChunkRows = 32;

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

// gemm_block for so few rows of x that memory decides. Memory is read in one run; to that end each
// tile brings its share of the next weights. All rows of x that stay in L1 beside the weights make
// one tile, and a weight row is done with when it has passed. More of them take turns over a chunk
// of weight rows in L2 that are fetched one chunk ahead.
template <class D, int kGroups>
void stream_rows(const typename D::X* const* x, int M, const Matrices& w,
                 const RowGroup<typename D::W> (&groups)[kGroups], int64_t K, int64_t c_stride,
                 const typename D::W* next, typename D::X* packed) {
  using X = typename D::X;
  using W = typename D::W;
  auto packed_bytes = [](int64_t places) {
    return round_up<int64_t>(places, D::kChunk) * (int64_t)sizeof(X);
  };
  const int64_t block = even_parts<D>(K, D::kBlockK), row_bytes = K * (int64_t)sizeof(W);
  const bool once = M <= D::kStreamM && M * packed_bytes(K) <= kPackedBytes;
  const int64_t together = once ? M : least<int64_t>(D::kStreamM, kTurnBytes / packed_bytes(block));
  const int tiles = static_cast<int>(ceil_div<int64_t>(M, together));
  // Two rows of several blocks would be left, then come back to.
  const int beside = once && block < K ? 1 : D::kStreamN;
  const int64_t most = once ? ceil_div(beside * kAheadBytes, row_bytes)
                            : least(kChunkRows, ceil_div(kChunkBytes, row_bytes));
  if (once) pack_rows<D>(x, M, 0, K, packed);
  for (int g = 0; g < kGroups; ++g) {
    const int64_t rows = groups[g].n;
    const int64_t chunk = round_up<int64_t>(ceil_div(rows, ceil_div(rows, most)), beside);
    const W* after = g + 1 < kGroups ? groups[g + 1].base : next;
    for (int64_t first = 0; first < rows; first += chunk) {
      const int64_t here = least(chunk, rows - first);
      const W* base = groups[g].base + first * w.stride_row;
      const char* fetch = (const char*)(first + here < rows ? base + here * w.stride_row : after);
      for (int64_t k = 0; k < K; k += block) {
        const int64_t kn = least(block, K - k);
        for (int t = 0, m = 0, mt = 0; t < tiles; ++t, m += mt) {
          mt = (M - m + tiles - t - 1) / (tiles - t);
          if (!once) pack_rows<D>(x + m, mt, k, kn, packed);
          for (int64_t n = 0, nt = 0; n < here; n += nt) {
            nt = here - n >= beside ? beside : 1;
            D::stream(mt, static_cast<int>(nt), once ? packed + k * M : packed,
                      {base + n * w.stride_row + k, w.stride_row}, static_cast<int>(kn),
                      groups[g].c + m * c_stride + first + n, c_stride, k > 0,
                      {fetch, 64 / tiles});
            fetch += nt * kn * (int64_t)sizeof(W) / tiles;
          }
        }
      }
    }
  }
}

}  // namespace CMOE_ISA
}  // namespace cmoe
