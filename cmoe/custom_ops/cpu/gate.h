// The router's product of one instruction set: logits = x w^T in fp32, a dot product along K for
// each.
//
// Every logit has one accumulator, which goes through K in whole vectors, whatever the tile's shape
// is: a token's logits do not depend on the batch.
#pragma once

#include "dot.h"
#include "problem.h"

namespace cmoe {
namespace CMOE_ISA {

template <DType kType>
CMOE_INLINE V load_as(const void* p, int64_t at) {
  if constexpr (kType == DType::kFP32) return vload((const float*)p + at);
  if constexpr (kType == DType::kBF16) return load_bf16((const uint16_t*)p + at);
  return load_fp16((const uint16_t*)p + at);
}

template <DType kType, int MT, int NT>
void gate_tile(const GateProblem& p, int64_t t, int64_t e) {
  const size_t bytes = dtype_bytes(kType);
  const char* const x = (const char*)p.x + t * p.x_stride * bytes;
  const char* const w = (const char*)p.w + e * p.w_stride * bytes;
  V acc[MT][NT] = {};
  auto step = [&](auto&& load) CMOE_LAMBDA {
    V a[MT];
#pragma GCC unroll 4
    for (int i = 0; i < MT; ++i) a[i] = load(x + i * p.x_stride * bytes);
#pragma GCC unroll 4
    for (int j = 0; j < NT; ++j) {
      const V b = load(w + j * p.w_stride * bytes);
#pragma GCC unroll 4
      for (int i = 0; i < MT; ++i) acc[i][j] = vfma(a[i], b, acc[i][j]);
    }
  };
  int64_t k = 0;
  for (; k + kLanes <= p.H; k += kLanes)
    step([&](const char* row) CMOE_LAMBDA { return load_as<kType>(row, k); });
  if (k < p.H)
    step([&](const char* row) CMOE_LAMBDA {
      return load_any(kType, row, k, static_cast<int>(p.H - k));
    });
  reduce_tile(acc, p.out + t * p.E + e, p.E, false);
}

constexpr int kGateTokens = 4, kGateExperts = 4;

template <DType kType>
void gate_columns(const GateProblem& p, int64_t first, int64_t last) {
  for (int64_t e = first; e < last;) {
    const bool wide = e + kGateExperts <= last;
    for (int64_t t = 0; t < p.T;) {
      if (t + kGateTokens <= p.T) {
        wide ? gate_tile<kType, kGateTokens, kGateExperts>(p, t, e)
             : gate_tile<kType, kGateTokens, 1>(p, t, e);
        t += kGateTokens;
      } else {
        wide ? gate_tile<kType, 1, kGateExperts>(p, t, e) : gate_tile<kType, 1, 1>(p, t, e);
        ++t;
      }
    }
    e += wide ? kGateExperts : 1;
  }
}

// A kernel set with this product.
constexpr Kernels with_gate(Kernels kernels) {
  kernels.gate = [](const GateProblem& p, int64_t first, int64_t last) {
    switch (p.dtype) {
      case DType::kBF16:
        return gate_columns<DType::kBF16>(p, first, last);
      case DType::kFP16:
        return gate_columns<DType::kFP16>(p, first, last);
      case DType::kFP32:
        return gate_columns<DType::kFP32>(p, first, last);
    }
  };
  return kernels;
}

}  // namespace CMOE_ISA
}  // namespace cmoe
