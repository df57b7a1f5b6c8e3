// The ops of the namespace cmoe_cpu, among them the one that is made of two others.
#include <torch/library.h>

#include "kernel_choice.h"
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

std::vector<std::string> kernel_sets() {
  std::vector<std::string> names;
  for (const Kernels* set : runnable_kernels()) names.emplace_back(set->name);
  return names;
}

std::string use_kernel_set(c10::string_view name) {
  const std::string before = current_kernels().name;
  TORCH_CHECK_VALUE(use_kernels(std::string(name)), "no kernel set '", name,
                    "' runs here; choose auto or one of ", kernel_sets());
  return before;
}

}  // namespace

TORCH_LIBRARY(cmoe_cpu, m) {
  m.def(
      "fused_experts(Tensor x, Tensor w13, Tensor w2, Tensor topk_weights, Tensor topk_ids,"
      " Tensor? w13_bias, Tensor? w2_bias, Tensor? expert_map,"
      " str activation, float alpha, float? limit, bool interleaved,"
      " bool apply_router_weight_on_input) -> Tensor",
      {at::Tag::needs_exact_strides});
  m.def(
      "route(Tensor logits, Tensor? bias, int top_k, str scoring_func, bool softmax_after_topk,"
      " bool renormalize, float renormalize_epsilon, int num_expert_group, int topk_group,"
      " float scaling) -> (Tensor, Tensor)",
      {at::Tag::needs_exact_strides});
  m.def(
      "fused_moe(Tensor x, Tensor logits, Tensor? bias, int top_k, str scoring_func,"
      " bool softmax_after_topk, bool renormalize, float renormalize_epsilon,"
      " int num_expert_group, int topk_group, float scaling, Tensor w13, Tensor w2,"
      " Tensor? w13_bias, Tensor? w2_bias, Tensor? expert_map, str activation, float alpha,"
      " float? limit, bool interleaved, bool apply_router_weight_on_input) -> Tensor",
      {at::Tag::needs_exact_strides});
  m.def("gate(Tensor x, Tensor weight, Tensor? bias) -> Tensor", {at::Tag::needs_exact_strides});
  // For the tests, the benchmarks and `cmoe env`; not for graphs.
  m.def("scratch_bytes", fused_experts_scratch_bytes);
  m.def("release_scratch", release_scratch);
  m.def("kernel_sets", kernel_sets);
  m.def("use_kernel_set", use_kernel_set);
}

TORCH_LIBRARY_IMPL(cmoe_cpu, CPU, m) {
  m.impl("fused_experts", TORCH_FN(fused_experts));
  m.impl("route", TORCH_FN(route));
  m.impl("fused_moe", TORCH_FN(fused_moe));
  m.impl("gate", TORCH_FN(gate));
}

}  // namespace cmoe
