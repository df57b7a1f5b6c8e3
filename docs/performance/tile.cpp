// How fast one thread's register tile goes over weights in memory, by tokens and by what it
// prefetches.
//
// g++ -std=c++20 -O2 -w -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512bf16 -mfma -mf16c
//     -Icmoe/custom_ops/cpu docs/performance/tile.cpp -o tile && ./tile
#define CMOE_ISA avx512_bf16
#define CMOE_NATIVE_BF16
#include "vec_avx512.h"
#include "engine.h"  // after the vectors that it is written in

#include <sys/mman.h>
#include <time.h>

#include <cstdio>
#include <cstdlib>
#include <initializer_list>

using namespace cmoe;
using namespace cmoe::avx512_bf16;

static double seconds() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return t.tv_sec + 1e-9 * t.tv_nsec;
}

static uint16_t* values(size_t count) {
  void* p = mmap(nullptr, 2 * count, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) std::abort();
  uint16_t* v = static_cast<uint16_t*>(p);
  for (size_t i = 0; i < count; ++i) v[i] = 0x3c00 + (i & 127);
  return v;
}

int main() {
  struct Case {
    int K, row;  // places of a row that are used, places from one row to the next
  } cases[] = {{2048, 2048}, {768, 768},   {1024, 1024}, {1408, 1408},
               {1440, 2880}, {2048, 4096}, {1792, 7168}};
  const size_t weights = size_t{256} << 20;
  const uint16_t *w = values(weights), *x = values(size_t{16} << 20);
  static float c[512 * 192];
  std::printf("| K | row | M | none | all | head | TFLOP/s, one thread\n");
  for (const Case& q : cases) {
    for (int M : {4, 8, 16, 32, 64}) {
      double rate[3];
      for (int policy = 0; policy < 3; ++policy) {
        const int panels = static_cast<int>(weights / (6 * q.row)) - 2, tiles = M / 4;
        const int share = tiles < 6 ? tiles : 6;
        double best = 1e9;
        for (int r = 0; r < 3; ++r) {
          const double start = seconds();
          for (int p = 0; p < panels; ++p) {
            for (int t = 0; t < tiles; ++t) {
              const uint16_t* rows[4];
              for (int i = 0; i < 4; ++i) rows[i] = x + size_t(4 * t + i) * q.row;
              Ahead ahead{nullptr, 0, 0, 0};
              if (policy > 0 && t < 6) {
                const int a = t * 6 / share, b = (t + 1) * 6 / share;
                ahead = Ahead{(const char*)(w + size_t(6 * (p + 1) + a) * q.row), q.row * 2, b - a,
                              policy == 1 ? q.K * 2 : 0};
              }
              NativeBf16::tile(4, 6, rows, Panel<uint16_t>{w + size_t(6 * p) * q.row, q.row}, q.K,
                               c + t * 4 * 192 + p % 32 * 6, 192, false, ahead);
            }
          }
          const double time = seconds() - start;
          best = time < best ? time : best;
        }
        rate[policy] = 2.0 * 6 * panels * M * q.K / best / 1e12;
      }
      std::printf("| %d | %d | %d | %.3f | %.3f | %.3f |\n", q.K, q.row, M, rate[0], rate[1],
                  rate[2]);
    }
  }
}
