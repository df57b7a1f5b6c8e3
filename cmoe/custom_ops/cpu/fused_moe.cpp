// The op cmoe_cpu::fused_moe: route, then fused_experts, in one call from Python.
#include <torch/library.h>

#include "ops.h"

namespace cmoe {
namespace {

at::Tensor fused_moe(const at::Tensor& x, const at::Tensor& logits,
                     const std::optional<at::Tensor>& bias, int64_t top_k,
                     c10::string_view scoring_func, bool softmax_after_topk, bool renormalize,
                     double renormalize_epsilon, int64_t num_expert_group, int64_t topk_group,
                     double scaling,
                     const at::Tensor& w13, const at::Tensor& w2,
                     const std::optional<at::Tensor>& w13_bias,
                     const std::optional<at::Tensor>& w2_bias,
                     const std::optional<at::Tensor>& expert_map, c10::string_view activation,
                     double alpha, std::optional<double> limit, bool interleaved,
                     bool apply_router_weight_on_input) {
  const auto [weights, ids] = route(logits, bias, top_k, scoring_func, softmax_after_topk,
                                    renormalize, renormalize_epsilon, num_expert_group, topk_group,
                                    scaling);
  return fused_experts(x, w13, w2, weights, ids, w13_bias, w2_bias, expert_map, activation, alpha,
                       limit, interleaved, apply_router_weight_on_input);
}

}  // namespace

TORCH_LIBRARY_IMPL(cmoe_cpu, CPU, m) { m.impl("fused_moe", TORCH_FN(fused_moe)); }

}  // namespace cmoe
