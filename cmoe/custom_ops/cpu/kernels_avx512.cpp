// The kernel set for AVX-512 with fp32 FMA.
#define CMOE_ISA avx512
#include "vec_avx512.h"
#include "engine.h"  // after the vectors that it is written in
#include "gate.h"

namespace cmoe {
extern const Kernels kAvx512;
const Kernels kAvx512 = avx512::with_gate(avx512::kernels<avx512::Fma<avx512::Bf16>>("avx512"));
}  // namespace cmoe
