// The op cmoe_cpu::fused_experts: checks its tensors, makes the plan, runs the kernel set in use.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <array>
#include <limits>

#include "kernel_choice.h"
#include "ops.h"
#include "parallel.h"
#include "scratch.h"

namespace cmoe {
namespace {

struct NamedActivation {
  const char* name;
  Activation activation;
  bool gated;
};
constexpr NamedActivation kActivations[] = {
    {"silu", Activation::kSilu, true},           {"gelu", Activation::kGelu, true},
    {"gelu_tanh", Activation::kGeluTanh, true},  {"relu2", Activation::kRelu2, true},
    {"swigluoai", Activation::kSwigluOai, true}, {"silu_no_mul", Activation::kSilu, false},
    {"gelu_no_mul", Activation::kGelu, false},   {"gelu_tanh_no_mul", Activation::kGeluTanh, false},
    {"relu2_no_mul", Activation::kRelu2, false},
};

const NamedActivation& find_activation(c10::string_view name) {
  for (const auto& row : kActivations)
    if (name == row.name) return row;
  TORCH_CHECK_VALUE(false, "unknown activation '", name, "' for the cpu kernels");
}

DType dtype_of(const at::Tensor& t) {
  switch (t.scalar_type()) {
    case at::kBFloat16:
      return DType::kBF16;
    case at::kHalf:
      return DType::kFP16;
    case at::kFloat:
      return DType::kFP32;
    default:
      TORCH_CHECK_VALUE(false, "the cpu kernels take bfloat16, float16, float32; got ",
                        t.scalar_type());
  }
}

// A packed weight is [E, rows / kStrip, cols / 2, kStrip, 2]; cmoe/custom_ops/packing.py.
bool is_packed(const at::Tensor& w) { return w.dim() == 5; }

void check_packed(const char* name, const at::Tensor& w) {
  TORCH_CHECK_VALUE(w.dim() == 5 && w.size(3) == kStrip && w.size(4) == 2 && w.is_contiguous() &&
                        w.scalar_type() == at::kBFloat16 && w.size(2) % (kStrip / 2) == 0,
                    "a packed ", name, " must be contiguous bfloat16 [E, rows / 32, columns / 2, 32, "
                    "2], columns a multiple of 32; got ", w.scalar_type(), " ", w.sizes(),
                    " with strides ", w.strides());
}

// E, rows, columns of a weight.
using Sizes = std::array<int64_t, 3>;
Sizes sizes_of(const at::Tensor& w) {
  if (is_packed(w)) return {w.size(0), w.size(1) * kStrip, w.size(2) * 2};
  return {w.size(0), w.size(1), w.size(2)};
}

// The tensor itself where its rows or its columns are contiguous, or packed, else a contiguous copy.
at::Tensor as_matrices(const at::Tensor& w) {
  if (is_packed(w)) return w;
  return w.stride(2) == 1 || w.stride(1) == 1 ? w : w.contiguous();
}

Matrices matrices_of(const at::Tensor& w) {
  if (is_packed(w)) return {w.const_data_ptr(), w.stride(0), w.size(2) * 2, 1};
  // A dimension of one element may have any stride: rows of one column are taken as contiguous.
  if (w.stride(2) == 1 || w.size(2) == 1) return {w.const_data_ptr(), w.stride(0), w.stride(1), 1};
  return {w.const_data_ptr(), w.stride(0), w.stride(1), w.stride(2)};
}

// The bias as the kernels read it: rows contiguous, of one of their dtypes.
at::Tensor as_bias(const std::optional<at::Tensor>& bias) {
  if (!bias.has_value()) return {};
  const at::ScalarType dtype = bias->scalar_type();
  const bool known = dtype == at::kBFloat16 || dtype == at::kHalf || dtype == at::kFloat;
  const at::Tensor b = known ? *bias : bias->to(at::kFloat);
  return b.size(1) > 1 && b.stride(1) != 1 ? b.contiguous() : b;
}

Bias bias_of(const at::Tensor& b) {
  if (!b.defined()) return {};
  return {b.const_data_ptr(), b.stride(0), dtype_of(b)};
}

void check_bias(const char* name, const std::optional<at::Tensor>& bias, int64_t E, int64_t N) {
  if (!bias.has_value()) return;
  TORCH_CHECK_VALUE(bias->dim() == 2 && bias->size(0) == E && bias->size(1) == N, name,
                    " must be [", E, ", ", N, "]; got ", bias->sizes());
}

void check(const at::Tensor& x, const at::Tensor& w13, const at::Tensor& w2,
           const at::Tensor& topk_weights, const at::Tensor& topk_ids,
           const std::optional<at::Tensor>& expert_map, const NamedActivation& activation,
           bool weight_on_input) {
  TORCH_CHECK_VALUE(x.dim() == 2 && w13.dim() == w2.dim() && (w2.dim() == 3 || is_packed(w2)),
                    "fused_experts needs x [T, H], w13 [E, N, H], w2 [E, H, I], both as they are or "
                    "both packed; got ",
                    x.sizes(), ", ", w13.sizes(), ", ", w2.sizes());
  if (is_packed(w2)) {
    check_packed("w13", w13);
    check_packed("w2", w2);
  }
  const Sizes of_w13 = sizes_of(w13), of_w2 = sizes_of(w2);
  const int64_t E = of_w2[0], H = of_w2[1], I = of_w2[2], N = activation.gated ? 2 * I : I;
  TORCH_CHECK_VALUE((of_w13 == Sizes{E, N, H}), "w13 must be [", E, ", ", N, ", ", H,
                    "] for w2 [", E, ", ", H, ", ", I, "] with activation '", activation.name,
                    "'; got [", of_w13[0], ", ", of_w13[1], ", ", of_w13[2], "]");
  TORCH_CHECK_VALUE(x.size(1) == H, "x must be [T, ", H, "] for w2 [", E, ", ", H, ", ", I,
                    "]; got ", x.sizes());
  TORCH_CHECK_VALUE(x.scalar_type() == w13.scalar_type() && x.scalar_type() == w2.scalar_type(),
                    "x, w13, w2 must share a dtype; got ", x.scalar_type(), ", ", w13.scalar_type(),
                    ", ", w2.scalar_type());
  TORCH_CHECK_VALUE(topk_ids.dim() == 2 && topk_ids.size(0) == x.size(0),
                    "topk_ids must be [T, K] with a row for each row of x ", x.sizes(), "; got ",
                    topk_ids.sizes());
  TORCH_CHECK_VALUE(topk_ids.scalar_type() == at::kInt || topk_ids.scalar_type() == at::kLong,
                    "topk_ids must be int32 or int64, got ", topk_ids.scalar_type());
  TORCH_CHECK_VALUE(topk_weights.sizes() == topk_ids.sizes(), "topk_weights ", topk_weights.sizes(),
                    " and topk_ids ", topk_ids.sizes(), " must have the same shape");
  TORCH_CHECK_VALUE(!weight_on_input || topk_ids.size(1) == 1,
                    "apply_router_weight_on_input needs top_k = 1, got ", topk_ids.size(1));
  if (expert_map.has_value())
    TORCH_CHECK_VALUE(expert_map->dim() == 1 && expert_map->scalar_type() == at::kInt &&
                          expert_map->is_contiguous(),
                      "expert_map must be a contiguous int32 [P]; got ", expert_map->scalar_type(),
                      " ", expert_map->sizes());
}

template <class Id>
bool build_plan(PlanBuffers& plan, const at::Tensor& topk_weights, const at::Tensor& topk_ids,
                const int32_t* map, int64_t num_ids, int64_t E) {
  return plan.build(topk_ids.const_data_ptr<Id>(), topk_ids.stride(0), topk_ids.stride(1),
                    topk_weights.const_data_ptr<float>(), topk_weights.stride(0),
                    topk_weights.stride(1), topk_ids.size(0), topk_ids.size(1), map, num_ids, E);
}

Slots& slots() {
  static Slots* const all = new Slots;  // never destroyed: a thread may still be in a call at exit
  return *all;
}

}  // namespace

at::Tensor fused_experts(const at::Tensor& x, const at::Tensor& w13_, const at::Tensor& w2_,
                         const at::Tensor& topk_weights_, const at::Tensor& topk_ids,
                         const std::optional<at::Tensor>& w13_bias,
                         const std::optional<at::Tensor>& w2_bias,
                         const std::optional<at::Tensor>& expert_map,
                         c10::string_view activation_name, double alpha,
                         std::optional<double> limit, bool interleaved,
                         bool apply_router_weight_on_input) {
  const NamedActivation& activation = find_activation(activation_name);
  check(x, w13_, w2_, topk_weights_, topk_ids, expert_map, activation, apply_router_weight_on_input);
  const auto [E, H, I] = sizes_of(w2_);
  check_bias("w13_bias", w13_bias, E, sizes_of(w13_)[1]);
  check_bias("w2_bias", w2_bias, E, H);
  const DType dtype = dtype_of(x);

  const at::Tensor topk_weights =
      topk_weights_.scalar_type() == at::kFloat ? topk_weights_ : topk_weights_.to(at::kFloat);
  auto slot = slots().lease();
  const int64_t num_ids = expert_map.has_value() ? expert_map->size(0) : E;
  const int32_t* map = expert_map.has_value() ? expert_map->const_data_ptr<int32_t>() : nullptr;
  const bool in_range =
      topk_ids.scalar_type() == at::kInt
          ? build_plan<int32_t>(slot->plan, topk_weights, topk_ids, map, num_ids, E)
          : build_plan<int64_t>(slot->plan, topk_weights, topk_ids, map, num_ids, E);
  TORCH_CHECK_VALUE(in_range || slot->plan.first_bad < 0, "topk_ids must be in [-1, ", num_ids,
                    "); got ", slot->plan.bad_id);
  TORCH_CHECK_VALUE(in_range, "expert_map must be in [-1, ", E, "); got ", slot->plan.bad_id);

  at::Tensor out = x.new_empty({x.size(0), H});
  if (out.numel() == 0) return out;
  const at::Tensor w13 = as_matrices(w13_), w2 = as_matrices(w2_);
  const at::Tensor b13 = as_bias(w13_bias), b2 = as_bias(w2_bias);

  Problem p;
  p.dtype = dtype;
  p.T = x.size(0);
  p.H = H;
  p.I = I;
  p.x = x.const_data_ptr();
  p.x_stride_row = x.stride(0);
  p.x_stride_col = H > 1 ? x.stride(1) : 1;
  p.w13 = matrices_of(w13);
  p.w2 = matrices_of(w2);
  p.packed = is_packed(w2);
  p.b13 = bias_of(b13);
  p.b2 = bias_of(b2);
  p.gated = activation.gated;
  p.interleaved = interleaved && activation.gated;
  p.activation = activation.activation;
  p.alpha = static_cast<float>(alpha);
  p.limit = limit.has_value() ? static_cast<float>(*limit) : std::numeric_limits<float>::infinity();
  p.weight_on_input = apply_router_weight_on_input;
  p.out = out.mutable_data_ptr();
  p.plan = slot->plan.plan();
  p.threads = torch_threads();
  const Kernels& kernels = current_kernels();
  const int64_t rows = p.plan.offset[p.plan.num_active];
  kernels.run(p, slot->reserve(kernels.scratch(p, rows).total));
  return out;
}

int64_t fused_experts_scratch_bytes(int64_t tokens, int64_t top_k, int64_t hidden,
                                    int64_t intermediate, at::ScalarType dtype, bool as_lies,
                                    bool transposed, int64_t threads) {
  Problem p;
  p.dtype = dtype == at::kBFloat16 ? DType::kBF16
            : dtype == at::kHalf   ? DType::kFP16
                                   : DType::kFP32;
  p.T = tokens;
  p.H = hidden;
  p.I = intermediate;
  p.x_stride_row = hidden;
  p.weight_on_input = !as_lies;
  p.w13.stride_col = transposed ? 2 : 1;
  p.w2.stride_col = 1;
  p.threads.count = static_cast<int>(threads);
  return static_cast<int64_t>(current_kernels().scratch(p, tokens * top_k).total);
}

int64_t release_scratch() { return slots().release(); }

}  // namespace cmoe
