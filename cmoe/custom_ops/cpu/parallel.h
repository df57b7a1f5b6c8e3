// The kernels' threads: those of torch, through its own entry point, so that no second pool
// appears.
#pragma once

#include <ATen/Parallel.h>
#include <torch/csrc/stable/c/shim.h>

#include "problem.h"

namespace cmoe {

inline void each_torch_thread(int count, void (*f)(int thread, void* context), void* context) {
  struct Call {
    void (*f)(int, void*);
    void* context;
  } call{f, context};
  auto range = [](int64_t begin, int64_t end, void* c) {
    const Call* call = static_cast<const Call*>(c);
    for (int64_t i = begin; i < end; ++i) call->f(static_cast<int>(i), call->context);
  };
  TORCH_CHECK(torch_parallel_for(0, count, 1, range, &call) == 0, "torch_parallel_for failed");
}

inline Threads torch_threads() {
  return {at::in_parallel_region() ? 1 : at::get_num_threads(), each_torch_thread};
}

}  // namespace cmoe
