// Read bandwidth, float32 FMA rate, bfloat16 dot-product rate of this machine.
//
// Each function runs `threads` threads at once and returns the best of `repeats` whole passes:
// GB/s or TFLOP/s. Vector width follows the compiler's target (-march=native).

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>
#if defined(__linux__)
#include <sys/mman.h>
#endif
#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace {

// Named accumulators, since an array of them may end up on the stack. Enough of them to cover
// latency times throughput (4 cycles, 2 a cycle), few enough to leave registers for the operands.
#define TWELVE(M) M(0) M(1) M(2) M(3) M(4) M(5) M(6) M(7) M(8) M(9) M(10) M(11)
#define TWENTY(M) TWELVE(M) M(12) M(13) M(14) M(15) M(16) M(17) M(18) M(19)

#if defined(__AVX512F__)
constexpr int kBytes = 64, kAccumulators = 20;
#define EACH(M) TWENTY(M)
#elif defined(__AVX__)
constexpr int kBytes = 32, kAccumulators = 12;
#define EACH(M) TWELVE(M)
#else
constexpr int kBytes = 16, kAccumulators = 20;
#define EACH(M) TWENTY(M)
#endif

// Keeps the value in a register, unknown to the optimiser.
#if defined(__x86_64__)
#define HOLD(value) asm volatile("" : "+v"(value))
#else
#define HOLD(value) asm volatile("" : "+w"(value))
#endif
typedef float Vector __attribute__((vector_size(kBytes)));
typedef int64_t Words __attribute__((vector_size(kBytes)));
constexpr int kLanes = kBytes / 4;

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Best seconds of one pass in which every thread runs work(thread) after a common start.
template <class Work>
double best_seconds(int threads, int repeats, Work work) {
  double best = 1e30;
  for (int repeat = 0; repeat < repeats; ++repeat) {
    std::atomic<int> ready{0};
    std::vector<double> first(threads), last(threads);
    std::vector<std::thread> pool;
    for (int t = 0; t < threads; ++t) {
      pool.emplace_back([&, t] {
        ready.fetch_add(1);
        while (ready.load() < threads) {
        }
        first[t] = now();
        work(t);
        last[t] = now();
      });
    }
    for (auto& thread : pool) thread.join();
    double begin = first[0], end = last[0];
    for (int t = 1; t < threads; ++t) {
      begin = first[t] < begin ? first[t] : begin;
      end = last[t] > end ? last[t] : end;
    }
    best = end - begin < best ? end - begin : best;
  }
  return best;
}

volatile int64_t sink;

}  // namespace

namespace {

struct Stream {
  char* buffer;
  size_t per_thread;
  int threads;
};

}  // namespace

// A buffer to read from, on pages of 2 MB where the system gives them; null when memory is short.
extern "C" void* read_open(size_t bytes, int threads) {
  const size_t page = 2u << 20, per_thread = bytes / threads / 4096 * 4096;
  const size_t total = (per_thread * threads + page) & ~(page - 1);
  char* buffer = static_cast<char*>(std::aligned_alloc(page, total));
  if (buffer == nullptr) return nullptr;
#if defined(__linux__)
  madvise(buffer, total, MADV_HUGEPAGE);
#endif
  std::vector<std::thread> pool;
  for (int t = 0; t < threads; ++t)
    pool.emplace_back([=] { std::memset(buffer + t * per_thread, t + 1, per_thread); });
  for (auto& thread : pool) thread.join();
  return new Stream{buffer, per_thread, threads};
}

extern "C" double read_gbps(void* opened, int repeats) {
  const Stream stream = *static_cast<Stream*>(opened);
  double seconds = best_seconds(stream.threads, repeats, [=](int t) {
    const char* p = stream.buffer + t * stream.per_thread;
    Words sum[8] = {};
    for (size_t i = 0; i + 8 * kBytes <= stream.per_thread; i += 8 * kBytes) {
      __builtin_prefetch(p + i + 4096);
      for (int j = 0; j < 8; ++j) sum[j] += *reinterpret_cast<const Words*>(p + i + j * kBytes);
    }
    for (int j = 1; j < 8; ++j) sum[0] += sum[j];
    sink = sum[0][0];
  });
  return stream.per_thread * stream.threads / seconds / 1e9;
}

extern "C" void read_close(void* opened) {
  Stream* stream = static_cast<Stream*>(opened);
  std::free(stream->buffer);
  delete stream;
}

extern "C" double fma_fp32_tflops(double seconds_wanted, int threads, int repeats) {
  const int64_t loops = static_cast<int64_t>(seconds_wanted * 4e9 / kAccumulators) + 1;
  double seconds = best_seconds(threads, repeats, [=](int t) {
    Vector x = {}, y = {};
    x += 0.999f;
    y += 1e-3f + t;
    HOLD(x);
    HOLD(y);
#define DECLARE(j) Vector a##j = x + float(j);
#define STEP(j) a##j = a##j * x + y; HOLD(a##j);
#define ADD(j) total += a##j[0];
    EACH(DECLARE)
    for (int64_t i = 0; i < loops; ++i) {
      EACH(STEP)
    }
    float total = 0;
    EACH(ADD)
#undef DECLARE
#undef STEP
#undef ADD
    sink = static_cast<int64_t>(total);
  });
  return 2.0 * kLanes * kAccumulators * loops * threads / seconds / 1e12;
}

// 0 where the compiler's target has no such instruction.
extern "C" double dot_bf16_tflops(double seconds_wanted, int threads, int repeats) {
#if defined(__AVX512BF16__)
  const int64_t loops = static_cast<int64_t>(seconds_wanted * 4e9 / kAccumulators) + 1;
  double seconds = best_seconds(threads, repeats, [=](int t) {
    __m512bh x = (__m512bh)_mm512_set1_epi32(0x3c003c00 + t);
    HOLD(x);
#define DECLARE(j) __m512 a##j = _mm512_set1_ps(float(j));
#define STEP(j) a##j = _mm512_dpbf16_ps(a##j, x, x); HOLD(a##j);
#define ADD(j) total += _mm512_cvtss_f32(a##j);
    EACH(DECLARE)
    for (int64_t i = 0; i < loops; ++i) {
      EACH(STEP)
    }
    float total = 0;
    EACH(ADD)
#undef DECLARE
#undef STEP
#undef ADD
    sink = static_cast<int64_t>(total);
  });
  return 4.0 * 16 * kAccumulators * loops * threads / seconds / 1e12;
#else
  (void)seconds_wanted, (void)threads, (void)repeats;
  return 0;
#endif
}
