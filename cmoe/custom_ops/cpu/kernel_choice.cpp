// Which kernel set runs: by what the processor says it has, then by what it turns out to be fast
// at.
#include "kernel_choice.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <utility>

namespace cmoe {

extern const Kernels kGeneric;
#if defined(CMOE_HAVE_AVX512)
extern const Kernels kAvx2, kAvx512, kAvx512Bf16;
#endif

std::vector<const Kernels*> runnable_kernels() {
  std::vector<const Kernels*> sets;
#if defined(CMOE_HAVE_AVX512)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512dq");
  if (avx512 && __builtin_cpu_supports("avx512bf16")) sets.push_back(&kAvx512Bf16);
  if (avx512) sets.push_back(&kAvx512);
  if (avx2) sets.push_back(&kAvx2);  // every processor with AVX2 has F16C
#endif
  sets.push_back(&kGeneric);
  return sets;
}

// Seconds for a fixed amount of tile work by each of two sets: the best of several by turns, since
// others may use the processor too and its clock may move.
static std::pair<double, double> probe_seconds(const Kernels& a, const Kernels& b) {
  constexpr int64_t kMultiplyAdds = 2 << 20;
  auto seconds = [](const Kernels& kernels) {
    const auto start = std::chrono::steady_clock::now();
    kernels.probe(kMultiplyAdds);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  std::pair<double, double> best(1.0, 1.0);
  for (int i = 0; i < 8; ++i) {
    best.first = std::min(best.first, seconds(a));
    best.second = std::min(best.second, seconds(b));
  }
  return best;
}

// Only the two AVX-512 sets can be in doubt: vdpbf16ps takes two products an instruction but runs
// at full rate on some processors, at a quarter of it on others, so that one of the sets takes about
// twice as long as the other. The margin lies between, so that a disturbed probe does not change the
// choice, with it the last bits of every result, from run to run.
constexpr double kMargin = 1.3;

const Kernels& best_kernels() {
  static const Kernels* const best = [] {
    const auto sets = runnable_kernels();
    if (sets.size() < 2 || std::string(sets[0]->name) != "avx512_bf16") return sets[0];
    const auto [native, widened] = probe_seconds(*sets[0], *sets[1]);
    return native < kMargin * widened ? sets[0] : sets[1];
  }();
  return *best;
}

static std::atomic<const Kernels*> forced{nullptr};

const Kernels& current_kernels() {
  const Kernels* set = forced.load(std::memory_order_relaxed);
  return set != nullptr ? *set : best_kernels();
}

bool use_kernels(const std::string& name) {
  if (name == "auto") {
    forced = nullptr;
    return true;
  }
  for (const Kernels* set : runnable_kernels()) {
    if (name == set->name) {
      forced = set;
      return true;
    }
  }
  return false;
}

}  // namespace cmoe
