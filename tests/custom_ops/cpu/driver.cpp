// Random calls of every kernel set against a plain loop, with every tensor between pages that
// fault.
//
// For builds under a sanitizer, which does not see masked vector loads as the guard pages do, and
// for emulated processors.
#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "kernel_choice.h"
#include "routing_plan.h"

using namespace cmoe;

namespace {

std::mt19937 engine;
int uniform(int low, int high) { return std::uniform_int_distribution<int>(low, high)(engine); }
float normal() { return std::normal_distribution<float>()(engine); }

// `bytes` of memory that ends (or, by turns, begins) exactly at a page that faults when touched.
class Guarded {
 public:
  explicit Guarded(size_t bytes) {
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t inner = (bytes + page - 1) / page * page;
    size_ = inner + 2 * page;
    base_ = static_cast<char*>(mmap(nullptr, size_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (base_ == MAP_FAILED || mprotect(base_ + page, inner, PROT_READ | PROT_WRITE) != 0)
      std::abort();
    data_ = uniform(0, 3) == 0 ? base_ + page : base_ + page + inner - bytes;
  }
  Guarded(const Guarded&) = delete;
  ~Guarded() { munmap(base_, size_); }
  char* data() const { return data_; }

 private:
  char* base_;
  char* data_;
  size_t size_;
};

float get(DType dtype, const char* p, int64_t i) {
  if (dtype == DType::kFP32) return reinterpret_cast<const float*>(p)[i];
  const uint16_t h = reinterpret_cast<const uint16_t*>(p)[i];
  if (dtype == DType::kBF16) {
    const uint32_t u = uint32_t{h} << 16;
    float f;
    std::memcpy(&f, &u, 4);
    return f;
  }
  const int exponent = (h >> 10) & 31, fraction = h & 1023;
  const float f =
      exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
  return h & 0x8000 ? -f : f;
}

// Values that all three formats hold exactly: eighths.
void fill(DType dtype, char* p, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const float f = static_cast<float>(uniform(-7, 7)) / 8;
    if (dtype == DType::kFP32) {
      reinterpret_cast<float*>(p)[i] = f;
      continue;
    }
    uint32_t u;
    std::memcpy(&u, &f, 4);
    uint16_t h = static_cast<uint16_t>(u >> 16);
    if (dtype == DType::kFP16 && f != 0)
      h = static_cast<uint16_t>((u >> 16 & 0x8000) | (((u >> 23 & 255) - 112) << 10) |
                                (u >> 13 & 1023));
    reinterpret_cast<uint16_t*>(p)[i] = h;
  }
}

void on_new_threads(int count, void (*f)(int, void*), void* context) {
  std::vector<std::thread> threads;
  for (int i = 1; i < count; ++i) threads.emplace_back(f, i, context);
  f(0, context);
  for (auto& thread : threads) thread.join();
}

double silu(double g) { return g / (1 + std::exp(-g)); }

bool one_call(const Kernels& kernels, int seed) {
  engine.seed(seed);
  const bool packed = uniform(0, 2) == 0;
  const DType dtype = packed ? DType::kBF16 : static_cast<DType>(uniform(0, 2));
  const int64_t T = uniform(1, 70), E = uniform(1, 7), K = uniform(1, static_cast<int>(E));
  // Long rows, which stream, in one of the two products.
  const int long_rows = uniform(0, 5);
  const int64_t unit = packed ? kStrip : 1;  // packed weights are whole strips
  auto size = [&](bool is_long) {
    const int64_t n = is_long ? uniform(500, 2120) : uniform(1, 130);
    return (n + unit - 1) / unit * unit;
  };
  const int64_t H = size(long_rows == 0), I = size(long_rows == 1);
  const bool gated = uniform(0, 1), interleaved = gated && uniform(0, 1), bias = uniform(0, 1);
  const bool turned = !packed && uniform(0, 1), weight_on_input = K == 1 && uniform(0, 1);
  const int64_t N = gated ? 2 * I : I;
  const size_t b = dtype_bytes(dtype);

  Guarded x(T * H * b), w13(E * N * H * b), w2(E * H * I * b), b13(E * N * b), b2(E * H * b),
      out(T * H * b);
  fill(dtype, x.data(), T * H);
  fill(dtype, w13.data(), E * N * H);
  fill(dtype, w2.data(), E * H * I);
  fill(dtype, b13.data(), E * N);
  fill(dtype, b2.data(), E * H);
  std::memset(out.data(), 0xff, T * H * b);
  std::vector<int32_t> ids(T * K);
  std::vector<float> weights(T * K);
  for (auto& id : ids) id = uniform(-1, static_cast<int>(E) - 1);
  for (auto& weight : weights) weight = std::fabs(normal());

  PlanBuffers plan;
  if (!plan.build(ids.data(), K, 1, weights.data(), K, 1, T, K, nullptr, E, E)) return false;
  Problem p;
  p.dtype = dtype;
  p.T = T;
  p.H = H;
  p.I = I;
  p.x = x.data();
  p.x_stride_row = H;
  p.w13 = turned ? Matrices{w13.data(), N * H, 1, N} : Matrices{w13.data(), N * H, H, 1};
  p.w2 = turned ? Matrices{w2.data(), H * I, 1, H} : Matrices{w2.data(), H * I, I, 1};
  p.packed = packed;
  if (bias) {
    p.b13 = {b13.data(), N, dtype};
    p.b2 = {b2.data(), H, dtype};
  }
  p.gated = gated;
  p.interleaved = interleaved;
  p.limit = INFINITY;
  p.weight_on_input = weight_on_input;
  p.out = out.data();
  p.plan = plan.plan();
  p.threads = Threads{uniform(1, 3), on_new_threads};
  const int64_t rows = p.plan.offset[p.plan.num_active];
  const size_t bytes = (kernels.scratch(p, rows).total + 63) / 64 * 64;
  char* scratch = static_cast<char*>(std::aligned_alloc(64, bytes));
  std::memset(scratch, 0xff, bytes);  // NaN
  kernels.run(p, scratch);
  std::free(scratch);

  auto at = [&](const Matrices& m, int64_t e, int64_t row, int64_t column) {
    const int64_t place = packed ? (row - row % kStrip) * m.stride_row + column / 2 * 2 * kStrip +
                                       row % kStrip * 2 + column % 2
                                 : row * m.stride_row + column * m.stride_col;
    return get(dtype, static_cast<const char*>(m.data), e * m.stride_e + place);
  };
  double worst = 0, largest = 1;
  std::vector<double> h(I), y(H);
  for (int64_t t = 0; t < T; ++t) {
    std::fill(y.begin(), y.end(), 0.0);
    for (int64_t k = 0; k < K; ++k) {
      const int64_t e = ids[t * K + k];
      if (e < 0) continue;
      const double weight = weights[t * K + k];
      for (int64_t i = 0; i < I; ++i) {
        const int64_t row[2] = {interleaved ? 2 * i : i, interleaved ? 2 * i + 1 : I + i};
        double part[2] = {0, 1};
        for (int j = 0; j < (gated ? 2 : 1); ++j) {
          part[j] = bias ? get(dtype, b13.data(), e * N + row[j]) : 0.0;
          for (int64_t c = 0; c < H; ++c)
            part[j] += at(p.w13, e, row[j], c) * get(dtype, x.data(), t * H + c) *
                       (weight_on_input ? weight : 1.0);
        }
        h[i] = silu(part[0]) * part[1];
      }
      for (int64_t c = 0; c < H; ++c) {
        double sum = bias ? get(dtype, b2.data(), e * H + c) : 0.0;
        for (int64_t i = 0; i < I; ++i) sum += at(p.w2, e, c, i) * h[i];
        y[c] += weight_on_input ? sum : weight * sum;
      }
    }
    for (int64_t c = 0; c < H; ++c) {
      const double error = std::fabs(get(dtype, out.data(), t * H + c) - y[c]);
      worst = error > worst || std::isnan(error) ? error : worst;
      largest = std::fmax(largest, std::fabs(y[c]));
    }
  }
  // Two roundings to the format (h, the result), some more where the weight scales x: sixteen
  // steps.
  const double step = dtype == DType::kBF16 ? 0x1p-8 : dtype == DType::kFP16 ? 0x1p-11 : 0x1p-20;
  const bool good = worst <= 16 * step * largest;
  if (!good)
    std::printf("%s seed %d: error %g of %g (dtype %d T %ld E %ld K %ld H %ld I %ld turned %d packed "
                "%d)\n",
                kernels.name, seed, worst, largest, static_cast<int>(dtype), T, E, K, H, I, turned,
                packed);
  return good;
}

// The router's product, its experts divided as threads divide them.
bool one_gate(const Kernels& kernels, int seed) {
  engine.seed(seed);
  const DType dtype = static_cast<DType>(uniform(0, 2));
  const int64_t T = uniform(1, 11), E = uniform(1, 70), H = uniform(1, 300);
  const size_t b = dtype_bytes(dtype);
  Guarded x(T * H * b), w(E * H * b), out(T * E * sizeof(float));
  fill(dtype, x.data(), T * H);
  fill(dtype, w.data(), E * H);
  std::memset(out.data(), 0xff, T * E * sizeof(float));
  GateProblem p;
  p.dtype = dtype;
  p.T = T;
  p.H = H;
  p.E = E;
  p.x = x.data();
  p.x_stride = H;
  p.w = w.data();
  p.w_stride = H;
  p.out = reinterpret_cast<float*>(out.data());
  const int64_t divided = uniform(0, static_cast<int>(E));
  kernels.gate(p, 0, divided);
  kernels.gate(p, divided, E);
  for (int64_t t = 0; t < T; ++t) {
    for (int64_t e = 0; e < E; ++e) {
      double sum = 0;
      for (int64_t c = 0; c < H; ++c)
        sum += get(dtype, x.data(), t * H + c) * get(dtype, w.data(), e * H + c);
      // Products of eighths are whole 64ths, below 2^24 of them: fp32 sums them exactly.
      if (p.out[t * E + e] == sum) continue;
      std::printf("%s gate seed %d: %g, not %g (dtype %d T %ld E %ld H %ld)\n", kernels.name, seed,
                  p.out[t * E + e], sum, static_cast<int>(dtype), T, E, H);
      return false;
    }
  }
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  const int calls = argc > 1 ? std::atoi(argv[1]) : 100;
  int bad = 0;
  for (const Kernels* kernels : runnable_kernels()) {
    for (int seed = 0; seed < calls; ++seed) bad += !one_call(*kernels, seed) + !one_gate(*kernels, seed);
    std::printf("%s: %d calls\n", kernels->name, calls);
  }
  return bad != 0;
}
