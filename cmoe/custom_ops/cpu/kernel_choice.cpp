// Which kernel set runs: by what the processor says it has, then by what it turns out to be fast
// at.
#include "kernel_choice.h"

#include <algorithm>
#include <atomic>
#include <chrono>

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

// Seconds for a fixed amount of tile work: the best of several, since others may use the processor
// too.
static double probe_seconds(const Kernels& kernels) {
  constexpr int64_t kMultiplyAdds = 2 << 20;
  double best = 1.0;
  for (int i = 0; i < 8; ++i) {
    const auto start = std::chrono::steady_clock::now();
    kernels.probe(kMultiplyAdds);
    best = std::min(
        best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  return best;
}

// Only the two AVX-512 sets can be in doubt: vdpbf16ps takes two products an instruction but runs
// at full rate on some processors, at a quarter on others. The margin keeps the choice the same
// from run to run.
const Kernels& best_kernels() {
  static const Kernels* const best = [] {
    const auto sets = runnable_kernels();
    if (sets.size() < 2 || std::string(sets[0]->name) != "avx512_bf16") return sets[0];
    return probe_seconds(*sets[0]) < probe_seconds(*sets[1]) ? sets[0] : sets[1];
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
