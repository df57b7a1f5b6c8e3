// One variant of the kernels, in a namespace and under a name of its own; variants.cpp says how.
#define CMOE_NATIVE_BF16
#include "vec_avx512.h"
#include "engine.h"  // after the vectors that it is written in

namespace cmoe {
extern const Kernels VARIANT;
const Kernels VARIANT = CMOE_ISA::kernels<CMOE_ISA::NativeBf16>("");
}  // namespace cmoe
