// The kernel set for any machine.
#define CMOE_ISA generic
#include "vec_generic.h"
#include "engine.h"  // after the vectors that it is written in
#include "gate.h"

namespace cmoe {
extern const Kernels kGeneric;
const Kernels kGeneric = generic::with_gate(generic::kernels<generic::Fma<generic::Bf16>>("generic"));
}  // namespace cmoe
