// The kernel set for AVX-512 with vdpbf16ps.
#define CMOE_ISA avx512_bf16
#define CMOE_NATIVE_BF16
#include "vec_avx512.h"
#include "engine.h"  // after the vectors that it is written in
#include "gate.h"

namespace cmoe {
extern const Kernels kAvx512Bf16;
const Kernels kAvx512Bf16 = avx512_bf16::with_gate(avx512_bf16::kernels<avx512_bf16::NativeBf16>("avx512_bf16"));
}  // namespace cmoe
