// Variants of the kernels against each other and against a plain read of the same weights.
//
// Call by call by turns, other experts at every call, the L3 flushed before it, 2 MB pages. A
// variant is a folder with the headers of cmoe/custom_ops/cpu; here `before` and `after`:
//
// F="-std=c++20 -O2 -w -ffp-contract=off -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512bf16
//    -mfma -mf16c"
// for v in before after; do g++ $F -DCMOE_ISA=of_$v -DVARIANT=$v -I$v -c variant.cpp -o $v.o; done
// g++ $F -fopenmp '-DVARIANTS=X(before) X(after)' -Iafter variants.cpp before.o after.o -o variants
// ./variants SHAPE T,T,... ROUNDS [rows|packed]
//
// rows: storage [E, K, N], gate and up alternating. packed: the first variant reads the weights as
// rows, every other one as packed.
//
// Prints for each T the read rate, then for each variant the median time, its rate, the median of
// its share of the read's rate, of its speed over the first variant's, both call by call.
#include <immintrin.h>
#include <omp.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "routing_plan.h"

using namespace cmoe;

namespace cmoe {
#define X(name) extern const Kernels name;
VARIANTS
#undef X
}  // namespace cmoe

namespace {

struct Arm {
  const char* name;
  const Kernels* kernels;
};
#define X(name) {#name, &name},
const std::vector<Arm> arms = {VARIANTS};
#undef X

struct Shape {
  const char* name;
  int64_t E, K, H, I;
  bool gpt_oss;
};
const Shape shapes[] = {{"qwen3", 128, 8, 2048, 768, false},  {"olmoe", 64, 8, 2048, 1024, false},
                        {"deepseek", 64, 6, 2048, 1408, false}, {"mixtral", 8, 2, 4096, 7168, false},
                        {"gpt-oss", 32, 4, 2880, 2880, true}};
constexpr int kThreads = 2;
constexpr size_t kFlushBytes = size_t{64} << 20, kScratchBytes = size_t{256} << 20;
volatile int64_t sink;

double now_ms() {
  const auto t = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double, std::milli>(t).count();
}
double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v[v.size() / 2];
}
char* pages(size_t bytes) {
  constexpr size_t kPage = size_t{2} << 20;
  void* p = std::aligned_alloc(kPage, (bytes + kPage - 1) / kPage * kPage);
  if (p == nullptr) std::abort();
  madvise(p, bytes, MADV_HUGEPAGE);
  return static_cast<char*>(p);
}
uint16_t* values(size_t count) {
  uint16_t* v = reinterpret_cast<uint16_t*>(pages(2 * count));
  uint32_t r = 1;
  for (size_t i = 0; i < count; ++i) {
    r = r * 1664525 + 1013904223;
    v[i] = static_cast<uint16_t>(0x3c00 + ((r >> 16) & 0x807f));
  }
  return v;
}
void each_thread(int count, void (*f)(int, void*), void* context) {
#pragma omp parallel num_threads(count)
  f(omp_get_thread_num(), context);
}
int64_t sum_of(const char* p, size_t bytes) {
  __m512i sum[8] = {};
  for (size_t i = 0; i + 512 <= bytes; i += 512)
#pragma GCC unroll 8  // else the sums lie on the stack, and the read is slower than memory
    for (int j = 0; j < 8; ++j)
      sum[j] = _mm512_add_epi64(sum[j], _mm512_loadu_si512(p + i + 64 * j));
  for (int j = 1; j < 8; ++j) sum[0] = _mm512_add_epi64(sum[0], sum[j]);
  return _mm512_reduce_add_epi64(sum[0]);
}
void read_weights(const Problem& p, size_t bytes13, size_t bytes2) {
#pragma omp parallel num_threads(kThreads)
  {
    int64_t sum = 0;
    for (int64_t i = 0; i < p.plan.num_active; ++i) {
      const std::pair<const void*, size_t> both[2] = {{p.w13.data, bytes13}, {p.w2.data, bytes2}};
      for (const auto& [data, bytes] : both) {
        const size_t part = bytes / kThreads;
        sum += sum_of((const char*)data + p.plan.expert[i] * bytes + part * omp_get_thread_num(),
                      part);
      }
    }
    sink = sum;
  }
}

void compare(const Shape& s, int T, int rounds, const char* layout, const uint16_t* w13,
             const uint16_t* w2, const char* flush, char* scratch) {
  const bool rows_contiguous = std::strcmp(layout, "rows") == 0;
  const bool packed = std::strcmp(layout, "packed") == 0;
  const int64_t N = 2 * s.I;
  std::mt19937 random(T);
  const std::vector<uint16_t> b13(s.E * N, 0x3c00), b2(s.E * s.H, 0x3c00);
  std::vector<uint16_t> x(T * s.H), out(T * s.H);
  for (auto& v : x) v = static_cast<uint16_t>(0x3f00 + (random() & 0x807f));
  std::vector<std::vector<double>> ms(arms.size() + 1);  // the last one: the read
  std::vector<double> bytes;
  for (int round = 0; round <= rounds; ++round) {
    std::vector<int32_t> ids, all(s.E);
    for (int64_t e = 0; e < s.E; ++e) all[e] = static_cast<int32_t>(e);
    for (int t = 0; t < T; ++t) {
      std::shuffle(all.begin(), all.end(), random);
      ids.insert(ids.end(), all.begin(), all.begin() + s.K);
    }
    const std::vector<float> weights(T * s.K, 0.3f);
    PlanBuffers plan;
    plan.build(ids.data(), s.K, 1, weights.data(), s.K, 1, T, s.K, nullptr, s.E, s.E);
    Problem p;
    p.T = T;
    p.H = s.H;
    p.I = s.I;
    p.x = x.data();
    p.x_stride_row = s.H;
    p.w13 = rows_contiguous ? Matrices{w13, N * s.H, 1, N} : Matrices{w13, N * s.H, s.H, 1};
    p.w2 = rows_contiguous ? Matrices{w2, s.H * s.I, 1, s.H} : Matrices{w2, s.H * s.I, s.I, 1};
    p.interleaved = rows_contiguous;
    p.limit = INFINITY;
    if (s.gpt_oss) {
      p.b13 = {b13.data(), N, DType::kBF16};
      p.b2 = {b2.data(), s.H, DType::kBF16};
      p.activation = Activation::kSwigluOai;
      p.limit = 7;
    }
    p.out = out.data();
    p.plan = plan.plan();
    p.threads = {kThreads, each_thread};
    bytes.push_back(6.0 * p.plan.num_active * s.H * s.I);
    const size_t shift = random() % ms.size();
    for (size_t i = 0; i < ms.size(); ++i) {
      const size_t arm = (i + shift) % ms.size();
#pragma omp parallel num_threads(kThreads)
      sink = sum_of(flush + kFlushBytes / kThreads * omp_get_thread_num(), kFlushBytes / kThreads);
      const double start = now_ms();
      if (arm == arms.size()) {
        read_weights(p, 2 * N * s.H, 2 * s.H * s.I);
      } else {
        p.packed = packed && arm > 0;
        arms[arm].kernels->run(p, scratch);
      }
      if (round > 0) ms[arm].push_back(now_ms() - start);  // the first round warms up
    }
  }
  const double mb = median(bytes) / 1e6;
  std::printf("%s T=%d read %.1f GB/s", s.name, T, mb / median(ms.back()));
  for (size_t a = 0; a < arms.size(); ++a) {
    std::vector<double> of_read, of_first;
    for (size_t i = 0; i < ms[a].size(); ++i) {
      of_read.push_back(ms.back()[i] / ms[a][i]);
      of_first.push_back(ms[0][i] / ms[a][i]);
    }
    std::printf(" | %s %.3f ms %.1f GB/s %.0f %% x%.3f", arms[a].name, median(ms[a]),
                mb / median(ms[a]), 100 * median(of_read), median(of_first));
  }
  std::printf("\n");
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) return 1;
  for (const Shape& s : shapes) {
    if (std::strcmp(s.name, argv[1]) != 0) continue;
    const uint16_t *w13 = values(s.E * 2 * s.I * s.H), *w2 = values(s.E * s.H * s.I);
    char *flush = pages(kFlushBytes), *scratch = pages(kScratchBytes);
    std::memset(flush, 1, kFlushBytes);
    for (char* t = std::strtok(argv[2], ","); t != nullptr; t = std::strtok(nullptr, ","))
      compare(s, std::atoi(t), std::atoi(argv[3]), argc > 4 ? argv[4] : "", w13, w2, flush, scratch);
  }
}
