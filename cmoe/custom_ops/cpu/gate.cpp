// The op cmoe_cpu::gate: the router's logits in fp32, from weights in the dtype that they have.
#include <ATen/core/Tensor.h>

#include <algorithm>

#include "kernel_choice.h"
#include "ops.h"
#include "parallel.h"

namespace cmoe {
namespace {

constexpr int64_t kProductsWorthAThread = 1 << 15;  // a few microseconds of work

at::Tensor rows_contiguous(const at::Tensor& t) {
  return t.size(1) > 1 && t.stride(1) != 1 ? t.contiguous() : t;
}

}  // namespace

at::Tensor gate(const at::Tensor& x_, const at::Tensor& weight,
                const std::optional<at::Tensor>& bias) {
  TORCH_CHECK_VALUE(x_.dim() == 2 && weight.dim() == 2 && x_.size(1) == weight.size(1),
                    "gate needs x [T, H], weight [E, H]; got ", x_.sizes(), ", ", weight.sizes());
  const int64_t T = x_.size(0), E = weight.size(0), H = x_.size(1);
  TORCH_CHECK_VALUE(!bias.has_value() || (bias->dim() == 1 && bias->size(0) == E),
                    "the gate's bias must be [", E, "]; got ", bias->sizes());
  const at::ScalarType dtype = x_.scalar_type(), wide = c10::promoteTypes(dtype, at::kFloat);
  if (wide != at::kFloat) {
    const at::Tensor to = weight.to(wide).t();
    return bias.has_value() ? bias->to(wide).addmm(x_.to(wide), to) : x_.to(wide).matmul(to);
  }
  // The kernels know pairs of one dtype.
  const bool is_pair =
      dtype == weight.scalar_type() && (dtype == at::kBFloat16 || dtype == at::kHalf);
  const at::ScalarType type = is_pair ? dtype : at::kFloat;
  const at::Tensor x = rows_contiguous(x_.to(type)), w = rows_contiguous(weight.to(type));
  at::Tensor out = x.new_empty({T, E}, at::kFloat);
  if (out.numel() == 0) return out;
  struct Call {
    GateProblem p;
    const Kernels& kernels;
    int count;
  } call{{type == at::kBFloat16 ? DType::kBF16
          : type == at::kHalf   ? DType::kFP16
                                : DType::kFP32,
          T, H, E, x.const_data_ptr(), x.stride(0), w.const_data_ptr(), w.stride(0),
          out.mutable_data_ptr<float>()},
         current_kernels(),
         1};
  const Threads threads = torch_threads();
  call.count = static_cast<int>(std::min<int64_t>(
      threads.count, std::max<int64_t>(1, T * E * H / kProductsWorthAThread)));
  auto part = [](int thread, void* context) {
    const Call& c = *static_cast<const Call*>(context);
    const int64_t groups = (c.p.E + 3) / 4;  // of whole tiles
    auto at = [&](int i) { return std::min(groups * i / c.count * 4, c.p.E); };
    c.kernels.gate(c.p, at(thread), at(thread + 1));
  };
  if (call.count == 1) {
    part(0, &call);
  } else {
    threads.each(call.count, part, &call);
  }
  return bias.has_value() ? out.add_(bias->to(at::kFloat)) : out;
}

}  // namespace cmoe
