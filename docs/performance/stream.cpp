// How close the streamed tiles come to a plain read: rows of x by length of a weight row.
//
// F="-std=c++20 -O2 -w -ffp-contract=off -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512bf16 -mfma -mf16c"
// g++ $F -fopenmp -DCMOE_ISA=test -I../../cmoe/custom_ops/cpu stream.cpp -o stream && ./stream
//
// Two threads, each with its own half of 512 MB of weights on 2 MB pages. A cell: GB/s of the best
// of three passes, its share of the best plain read among them. First, streams of a plain read.
#include <omp.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#define CMOE_NATIVE_BF16
#include "vec_avx512.h"
#include "stream.h"  // after the vectors that it is written in

using namespace cmoe;
using namespace cmoe::test;

namespace {

constexpr size_t kBytes = size_t{256} << 20;  // of weights, a thread
constexpr int64_t kColumns = 192;             // weight rows a call, as in phase 1

double seconds() {
  const auto t = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double>(t).count();
}
char* pages(size_t bytes) {
  void* p = std::aligned_alloc(size_t{2} << 20, bytes);
  if (p == nullptr) std::abort();
  madvise(p, bytes, MADV_HUGEPAGE);
  std::memset(p, 0, bytes);
  return static_cast<char*>(p);
}
volatile int64_t sink;

// One run of memory, or several side by side, `kStreams` parts of the whole.
template <int kStreams>
void read(const char* p) {
  constexpr size_t kPart = kBytes / kStreams;
  __m512i sum[8] = {};
  // Unrolled, else the sums lie on the stack, and the read is slower than memory.
  for (size_t i = 0; i < kPart; i += 512 / kStreams)
#pragma GCC unroll 4
    for (int s = 0; s < kStreams; ++s)
#pragma GCC unroll 8
      for (int j = 0; j < 8 / kStreams; ++j) {
        __m512i& to = sum[s * (8 / kStreams) + j];
        to = _mm512_add_epi64(to, _mm512_loadu_si512(p + s * kPart + i + 64 * j));
      }
  for (int j = 1; j < 8; ++j) sum[0] = _mm512_add_epi64(sum[0], sum[j]);
  sink = _mm512_reduce_add_epi64(sum[0]);
}
void multiply(const uint16_t* w, int M, int64_t K, const uint16_t* x, float* c, uint16_t* packed) {
  const uint16_t* rows[NativeBf16::kRowsStreamed];
  for (int m = 0; m < M; ++m) rows[m] = x + m * K;
  for (const uint16_t* end = w + kBytes / 2; w + kColumns * K <= end; w += kColumns * K)
    stream_rows<NativeBf16, 1>(rows, M, Matrices{nullptr, 0, K, 1}, {{w, kColumns, c}}, K,
                               kColumns, w + kColumns * K, packed);
}

}  // namespace

int main() {
  char* weights = pages(2 * kBytes);
  std::printf("| streams of a plain read | GB/s |\n");
  void (*const reads[3])(const char*) = {read<1>, read<2>, read<4>};
  double least[3] = {1e9, 1e9, 1e9};
  for (int pass = 0; pass < 15; ++pass) {
    const double start = seconds();
#pragma omp parallel num_threads(2)
    reads[pass % 3](weights + kBytes * omp_get_thread_num());
    least[pass % 3] = std::min(least[pass % 3], seconds() - start);
  }
  for (int i = 0; i < 3; ++i)
    std::printf("| %d | %.1f |\n", 1 << i, 2 * kBytes / least[i] / 1e9);
  std::printf("| K | M | GB/s | of a read |\n");
  for (int64_t K : {1024, 1408, 2048, 2880, 4096}) {
    for (int M : {1, 4, 6, 8, 12, 16, 24}) {
      double best[2] = {1e9, 1e9};
      for (int pass = 0; pass < 6; ++pass) {
        const double start = seconds();
#pragma omp parallel num_threads(2)
        {
          const char* mine = weights + kBytes * omp_get_thread_num();
          static thread_local char* scratch = pages(size_t{2} << 20);
          if (pass % 2 == 0) {
            read<1>(mine);
          } else {
            multiply((const uint16_t*)mine, M, K, (const uint16_t*)scratch,
                     (float*)(scratch + (1 << 20)), (uint16_t*)(scratch + (3 << 19)));
          }
        }
        best[pass % 2] = std::min(best[pass % 2], seconds() - start);
      }
      std::printf("| %ld | %d | %.1f | %.0f %% |\n", K, M, 2 * kBytes / best[1] / 1e9,
                  100 * best[0] / best[1]);
    }
  }
}
