// The op cmoe_cpu::route: router logits to the weights and ids of each token's experts.
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "ops.h"
#include "parallel.h"

namespace cmoe {
namespace {

constexpr int64_t kLogitsWorthAThread = 1 << 13;  // about ten microseconds of work

enum class Scoring { kSoftmax, kSigmoid, kSqrtSoftplus };

// All is computed in Real: float, or double for double logits.
template <class Real>
struct Router {
  int64_t E, top_k, groups, topk_group;
  Scoring scoring;
  bool softmax_after_topk, renormalize;
  double renormalize_epsilon, scaling;
  const Real* bias;  // [E] or null
};

// Working rows of one thread, kept between calls.
template <class Real>
struct Rows {
  std::vector<Real> x, scores, choice, marks;
  std::vector<int32_t> best;
};

// NaN becomes the lowest finite number, infinities the outermost ones.
template <class Real>
Real cleaned(Real v) {
  using Limits = std::numeric_limits<Real>;
  return std::isnan(v) ? Limits::lowest() : std::min(std::max(v, Limits::lowest()), Limits::max());
}

// Indices of the `count` largest of n values, the lower index first among equals.
template <class Real>
void first_largest(const Real* values, int64_t n, int64_t count, int32_t* best) {
  int64_t have = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (have == count && !(values[i] > values[best[count - 1]])) continue;
    int64_t at = have < count ? have++ : count - 1;
    for (; at > 0 && values[i] > values[best[at - 1]]; --at) best[at] = best[at - 1];
    best[at] = static_cast<int32_t>(i);
  }
}

template <class Real>
void softmax(const Real* x, int64_t n, Real* p) {
  const Real top = *std::max_element(x, x + n);
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += p[i] = std::exp(x[i] - top);
  for (int64_t i = 0; i < n; ++i) p[i] = static_cast<Real>(p[i] / sum);
}

template <class Real>
void score(const Router<Real>& r, const Real* x, Real* scores) {
  switch (r.scoring) {
    case Scoring::kSoftmax:
      return softmax(x, r.E, scores);
    case Scoring::kSigmoid:
      for (int64_t e = 0; e < r.E; ++e) scores[e] = 1 / (1 + std::exp(-x[e]));
      return;
    case Scoring::kSqrtSoftplus:
      for (int64_t e = 0; e < r.E; ++e)
        scores[e] = std::sqrt(x[e] > 20 ? x[e] : std::log1p(std::exp(x[e])));
      return;
  }
}

// -inf outside the best groups, so that no negative choice loses to the mask.
template <class Real>
void keep_best_groups(const Router<Real>& r, Rows<Real>& rows) {
  const int64_t size = r.E / r.groups;
  const int64_t num_best = std::min<int64_t>(r.bias != nullptr ? 2 : 1, size);
  rows.marks.resize(r.groups);
  for (int64_t g = 0; g < r.groups; ++g) {
    int32_t best[2];
    const Real* group = rows.choice.data() + g * size;
    first_largest(group, size, num_best, best);
    rows.marks[g] = num_best == 2 ? group[best[0]] + group[best[1]] : group[best[0]];
  }
  rows.best.resize(r.topk_group);
  first_largest(rows.marks.data(), r.groups, r.topk_group, rows.best.data());
  for (int64_t g = 0; g < r.groups; ++g)
    if (std::find(rows.best.begin(), rows.best.end(), g) == rows.best.end())
      std::fill_n(rows.choice.begin() + g * size, size, -std::numeric_limits<Real>::infinity());
}

template <class Real, class Logit>
void route_row(const Router<Real>& r, const Logit* logits, Rows<Real>& rows, Real* weights,
               int32_t* ids) {
  rows.x.resize(r.E);
  rows.scores.resize(r.E);
  for (int64_t e = 0; e < r.E; ++e) rows.x[e] = cleaned(static_cast<Real>(logits[e]));
  const Real* scores = rows.x.data();
  if (!r.softmax_after_topk) {
    score(r, rows.x.data(), rows.scores.data());
    scores = rows.scores.data();
  }
  const Real* choice = rows.x.data();
  if (r.bias != nullptr || r.groups > 1) {
    rows.choice.resize(r.E);
    for (int64_t e = 0; e < r.E; ++e)
      rows.choice[e] = r.bias != nullptr ? cleaned(scores[e] + r.bias[e]) : rows.x[e];
    if (r.groups > 1) keep_best_groups(r, rows);
    choice = rows.choice.data();
  }
  first_largest(choice, r.E, r.top_k, ids);
  for (int64_t k = 0; k < r.top_k; ++k) weights[k] = scores[ids[k]];
  if (r.softmax_after_topk) {
    softmax(weights, r.top_k, weights);
  } else if (r.renormalize) {
    Real sum = 0;
    for (int64_t k = 0; k < r.top_k; ++k) sum += weights[k];
    sum += static_cast<Real>(r.renormalize_epsilon);
    for (int64_t k = 0; k < r.top_k; ++k) weights[k] /= sum;
  }
  for (int64_t k = 0; k < r.top_k; ++k) weights[k] *= static_cast<Real>(r.scaling);
}

struct Routing {
  at::Tensor weights, ids;  // [T, K]
};

template <class Real, class Logit>
Routing route_all(const at::Tensor& logits, const std::optional<at::Tensor>& bias_,
                  Router<Real> r) {
  constexpr at::ScalarType kReal = c10::CppTypeToScalarType<Real>::value;
  const int64_t T = logits.size(0);
  const Routing out{logits.new_empty({T, r.top_k}, kReal),
                    logits.new_empty({T, r.top_k}, at::kInt)};
  at::Tensor bias;
  if (bias_.has_value()) {
    bias = bias_->to(kReal).contiguous();
    r.bias = bias.const_data_ptr<Real>();
  }
  struct Call {
    const Router<Real>& r;
    const Logit* logits;
    int64_t T, stride;
    int count;
    Real* weights;
    int32_t* ids;
  };
  Threads threads = torch_threads();
  const int64_t worth = std::max<int64_t>(1, logits.numel() / kLogitsWorthAThread);
  threads.count = static_cast<int>(std::min<int64_t>(threads.count, worth));
  Call call{r,
            logits.const_data_ptr<Logit>(),
            T,
            logits.stride(0),
            threads.count,
            out.weights.mutable_data_ptr<Real>(),
            out.ids.mutable_data_ptr<int32_t>()};
  auto part = [](int thread, void* context) {
    const Call& c = *static_cast<const Call*>(context);
    static thread_local Rows<Real> rows;
    for (int64_t t = c.T * thread / c.count; t < c.T * (thread + 1) / c.count; ++t)
      route_row(c.r, c.logits + t * c.stride, rows, c.weights + t * c.r.top_k,
                c.ids + t * c.r.top_k);
  };
  if (threads.count == 1) {
    part(0, &call);
  } else {
    threads.each(threads.count, part, &call);
  }
  return out;
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

}  // namespace

std::tuple<at::Tensor, at::Tensor> route(const at::Tensor& logits_,
                                         const std::optional<at::Tensor>& bias, int64_t top_k,
                                         c10::string_view scoring_func, bool softmax_after_topk,
                                         bool renormalize, double renormalize_epsilon,
                                         int64_t num_expert_group, int64_t topk_group,
                                         double scaling) {
  const Scoring scoring = find_scoring(scoring_func);
  check(logits_, bias, top_k, num_expert_group, topk_group);
  TORCH_CHECK_VALUE(!softmax_after_topk || !bias.has_value(),
                    "softmax_after_topk weighs by the logits alone; give no bias");
  const at::Tensor logits =
      logits_.size(1) > 1 && logits_.stride(1) != 1 ? logits_.contiguous() : logits_;
  auto run = [&]<class Real, class Logit>() -> std::tuple<at::Tensor, at::Tensor> {
    const Routing routing = route_all<Real, Logit>(
        logits, bias,
        Router<Real>{logits.size(1), top_k, num_expert_group, topk_group, scoring,
                     softmax_after_topk, renormalize, renormalize_epsilon, scaling, nullptr});
    return {routing.weights, routing.ids};
  };
  switch (logits.scalar_type()) {
    case at::kFloat:
      return run.template operator()<float, float>();
    case at::kBFloat16:
      return run.template operator()<float, c10::BFloat16>();
    case at::kHalf:
      return run.template operator()<float, c10::Half>();
    case at::kDouble:
      return run.template operator()<double, double>();
    default:
      TORCH_CHECK_VALUE(false, "logits must be a float tensor [T, E]; got ", logits.scalar_type(),
                        " ", logits.sizes());
  }
}

}  // namespace cmoe
