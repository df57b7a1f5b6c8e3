// Which kernel set runs: by what the processor says it has, then by what it turns out to be fast
// at.
#pragma once

#include <string>
#include <vector>

#include "problem.h"

namespace cmoe {

// The sets that this processor can run, of those in this build.
std::vector<const Kernels*> runnable_kernels();

// The fastest of them for bf16 weights, measured at the first call (a few milliseconds).
const Kernels& best_kernels();

// The set in use: best_kernels(), unless use_kernels named another.
const Kernels& current_kernels();
bool use_kernels(const std::string& name);  // "auto" undoes; false: no such runnable set

}  // namespace cmoe
