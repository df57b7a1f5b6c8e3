// The kernel set for AVX2 with FMA and F16C.
#define CMOE_ISA avx2
#include "vec_avx2.h"
#include "engine.h"  // after the vectors that it is written in
#include "gate.h"

namespace cmoe {
extern const Kernels kAvx2;
const Kernels kAvx2 = avx2::with_gate(avx2::kernels<avx2::Fma<avx2::Bf16>>("avx2"));
}  // namespace cmoe
