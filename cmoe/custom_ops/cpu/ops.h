// The kernels of the ops as functions.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

namespace cmoe {

std::tuple<at::Tensor, at::Tensor> route(const at::Tensor& logits,
                                         const std::optional<at::Tensor>& bias, int64_t top_k,
                                         c10::string_view scoring_func, bool softmax_after_topk,
                                         bool renormalize, double renormalize_epsilon,
                                         int64_t num_expert_group, int64_t topk_group,
                                         double scaling);

at::Tensor fused_experts(const at::Tensor& x, const at::Tensor& w13, const at::Tensor& w2,
                         const at::Tensor& topk_weights, const at::Tensor& topk_ids,
                         const std::optional<at::Tensor>& w13_bias,
                         const std::optional<at::Tensor>& w2_bias,
                         const std::optional<at::Tensor>& expert_map, c10::string_view activation,
                         double alpha, std::optional<double> limit, bool interleaved,
                         bool apply_router_weight_on_input);

at::Tensor gate(const at::Tensor& x, const at::Tensor& weight,
                const std::optional<at::Tensor>& bias);

// The formula for the scratch of a call of fused_experts, in bytes, when every row has an expert.
int64_t fused_experts_scratch_bytes(int64_t tokens, int64_t top_k, int64_t hidden,
                                    int64_t intermediate, at::ScalarType dtype, bool as_lies,
                                    bool transposed, int64_t threads);
int64_t release_scratch();  // frees what is idle, returns the bytes

}  // namespace cmoe
