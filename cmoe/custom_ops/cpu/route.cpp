// The op cmoe_cpu::route: router logits to the weights and ids of each token's experts.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "parallel.h"

namespace cmoe {
namespace {

constexpr float kLowest = std::numeric_limits<float>::lowest();
constexpr float kHighest = std::numeric_limits<float>::max();
constexpr float kMasked = -std::numeric_limits<float>::infinity();
constexpr float kRenormalizeEpsilon = 1e-20f;     // RENORMALIZE_EPSILON of route.py
constexpr int64_t kLogitsWorthAThread = 1 << 13;  // about ten microseconds of work

enum class Scoring { kSoftmax, kSigmoid, kSqrtSoftplus };

struct Router {
  int64_t E, top_k, groups, topk_group;
  Scoring scoring;
  bool softmax_after_topk, renormalize;
  float scaling;
  const float* bias;  // [E] or null
};

// Working rows of one thread, kept between calls.
struct Rows {
  std::vector<float> x, scores, choice, marks;
  std::vector<int32_t> best;
};

// Indices of the `count` largest of n values, the lower index first among equals.
void first_largest(const float* values, int64_t n, int64_t count, int32_t* best) {
  int64_t have = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (have == count && !(values[i] > values[best[count - 1]])) continue;
    int64_t at = have < count ? have++ : count - 1;
    for (; at > 0 && values[i] > values[best[at - 1]]; --at) best[at] = best[at - 1];
    best[at] = static_cast<int32_t>(i);
  }
}

void softmax(const float* x, int64_t n, float* p) {
  const float top = *std::max_element(x, x + n);
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += p[i] = std::exp(x[i] - top);
  for (int64_t i = 0; i < n; ++i) p[i] = static_cast<float>(p[i] / sum);
}

void score(const Router& r, const float* x, float* scores) {
  switch (r.scoring) {
    case Scoring::kSoftmax:
      return softmax(x, r.E, scores);
    case Scoring::kSigmoid:
      for (int64_t e = 0; e < r.E; ++e) scores[e] = 1.0f / (1.0f + std::exp(-x[e]));
      return;
    case Scoring::kSqrtSoftplus:
      for (int64_t e = 0; e < r.E; ++e)
        scores[e] = std::sqrt(x[e] > 20.0f ? x[e] : std::log1p(std::exp(x[e])));
      return;
  }
}

// -inf outside the best groups, so that no negative choice loses to the mask.
void keep_best_groups(const Router& r, Rows& rows) {
  const int64_t size = r.E / r.groups;
  const int64_t num_best = std::min<int64_t>(r.bias != nullptr ? 2 : 1, size);
  rows.marks.resize(r.groups);
  for (int64_t g = 0; g < r.groups; ++g) {
    int32_t best[2];
    const float* group = rows.choice.data() + g * size;
    first_largest(group, size, num_best, best);
    rows.marks[g] = num_best == 2 ? group[best[0]] + group[best[1]] : group[best[0]];
  }
  rows.best.resize(r.topk_group);
  first_largest(rows.marks.data(), r.groups, r.topk_group, rows.best.data());
  for (int64_t g = 0; g < r.groups; ++g)
    if (std::find(rows.best.begin(), rows.best.end(), g) == rows.best.end())
      std::fill_n(rows.choice.begin() + g * size, size, kMasked);
}

template <class Logit>
void route_row(const Router& r, const Logit* logits, Rows& rows, float* weights, int32_t* ids) {
  rows.x.resize(r.E);
  rows.scores.resize(r.E);
  for (int64_t e = 0; e < r.E; ++e) {
    const float v = static_cast<float>(logits[e]);
    rows.x[e] = std::isnan(v) ? kLowest : std::min(std::max(v, kLowest), kHighest);
  }
  const float* scores = rows.x.data();
  if (!r.softmax_after_topk) {
    score(r, rows.x.data(), rows.scores.data());
    scores = rows.scores.data();
  }
  const float* choice = rows.x.data();
  if (r.bias != nullptr || r.groups > 1) {
    rows.choice.resize(r.E);
    for (int64_t e = 0; e < r.E; ++e)
      rows.choice[e] = r.bias != nullptr ? scores[e] + r.bias[e] : rows.x[e];
    if (r.groups > 1) keep_best_groups(r, rows);
    choice = rows.choice.data();
  }
  first_largest(choice, r.E, r.top_k, ids);
  for (int64_t k = 0; k < r.top_k; ++k) weights[k] = scores[ids[k]];
  if (r.softmax_after_topk) {
    softmax(weights, r.top_k, weights);
  } else if (r.renormalize) {
    float sum = 0;
    for (int64_t k = 0; k < r.top_k; ++k) sum += weights[k];
    for (int64_t k = 0; k < r.top_k; ++k) weights[k] /= sum + kRenormalizeEpsilon;
  }
  for (int64_t k = 0; k < r.top_k; ++k) weights[k] *= r.scaling;
}

template <class Logit>
void route_all(const Router& r, const at::Tensor& logits, float* weights, int32_t* ids) {
  struct Call {
    const Router& r;
    const Logit* logits;
    int64_t T, stride;
    int count;
    float* weights;
    int32_t* ids;
  };
  Threads threads = torch_threads();
  const int64_t worth = std::max<int64_t>(1, logits.numel() / kLogitsWorthAThread);
  threads.count = static_cast<int>(std::min<int64_t>(threads.count, worth));
  Call call{
      r,  logits.const_data_ptr<Logit>(), logits.size(0), logits.stride(0), threads.count, weights,
      ids};
  auto part = [](int thread, void* context) {
    const Call& c = *static_cast<const Call*>(context);
    static thread_local Rows rows;
    for (int64_t t = c.T * thread / c.count; t < c.T * (thread + 1) / c.count; ++t)
      route_row(c.r, c.logits + t * c.stride, rows, c.weights + t * c.r.top_k,
                c.ids + t * c.r.top_k);
  };
  if (threads.count == 1) return part(0, &call);
  threads.each(threads.count, part, &call);
}

Scoring find_scoring(c10::string_view name) {
  if (name == "softmax") return Scoring::kSoftmax;
  if (name == "sigmoid") return Scoring::kSigmoid;
  if (name == "sqrtsoftplus") return Scoring::kSqrtSoftplus;
  TORCH_CHECK_VALUE(false, "unknown scoring_func '", name,
                    "'; choose one of softmax, sigmoid, sqrtsoftplus");
}

void check(const at::Tensor& logits, const std::optional<at::Tensor>& bias, int64_t top_k,
           int64_t groups, int64_t topk_group) {
  TORCH_CHECK_VALUE(logits.dim() == 2, "logits must be a float tensor [T, E]; got ",
                    logits.scalar_type(), " ", logits.sizes());
  const int64_t E = logits.size(1);
  TORCH_CHECK_VALUE(1 <= top_k && top_k <= E, "top_k (", top_k, ") must be between 1 and the ", E,
                    " experts");
  TORCH_CHECK_VALUE(!bias.has_value() || (bias->dim() == 1 && bias->size(0) == E), "bias must be [",
                    E, "], got ", bias->sizes());
  TORCH_CHECK_VALUE(1 <= topk_group && topk_group <= groups && E % groups == 0,
                    "num_expert_group (", groups, ") must divide the ", E,
                    " experts and topk_group (", topk_group,
                    ") must be between 1 and num_expert_group");
  TORCH_CHECK_VALUE(top_k <= topk_group * (E / groups), "top_k (", top_k, ") exceeds the ",
                    topk_group * (E / groups), " experts of topk_group (", topk_group, ") groups");
}

std::tuple<at::Tensor, at::Tensor> route(const at::Tensor& logits_,
                                         const std::optional<at::Tensor>& bias_, int64_t top_k,
                                         c10::string_view scoring_func, bool softmax_after_topk,
                                         bool renormalize, int64_t num_expert_group,
                                         int64_t topk_group, double scaling) {
  const Scoring scoring = find_scoring(scoring_func);
  check(logits_, bias_, top_k, num_expert_group, topk_group);
  const at::Tensor logits =
      logits_.size(1) > 1 && logits_.stride(1) != 1 ? logits_.contiguous() : logits_;
  at::Tensor bias;
  if (bias_.has_value()) bias = bias_->to(at::kFloat).contiguous();
  const int64_t T = logits.size(0);
  at::Tensor weights = at::empty({T, top_k}, logits.options().dtype(at::kFloat));
  at::Tensor ids = at::empty({T, top_k}, logits.options().dtype(at::kInt));
  const Router r{logits.size(1),
                 top_k,
                 num_expert_group,
                 topk_group,
                 scoring,
                 softmax_after_topk,
                 renormalize,
                 static_cast<float>(scaling),
                 bias.defined() ? bias.const_data_ptr<float>() : nullptr};
  float* w = weights.mutable_data_ptr<float>();
  int32_t* i = ids.mutable_data_ptr<int32_t>();
  switch (logits.scalar_type()) {
    case at::kFloat:
      route_all<float>(r, logits, w, i);
      break;
    case at::kBFloat16:
      route_all<c10::BFloat16>(r, logits, w, i);
      break;
    case at::kHalf:
      route_all<c10::Half>(r, logits, w, i);
      break;
    default:
      TORCH_CHECK_VALUE(false, "the cpu kernels route bfloat16, float16, float32 logits; got ",
                        logits.scalar_type());
  }
  return {weights, ids};
}

}  // namespace

TORCH_LIBRARY_IMPL(cmoe_cpu, CPU, m) { m.impl("route", TORCH_FN(route)); }

}  // namespace cmoe
