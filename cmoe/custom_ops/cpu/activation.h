// The activations of an expert, on vectors of fp32.
#pragma once

#include "problem.h"

namespace cmoe {
namespace CMOE_ISA {

// Comparisons are written so that a NaN operand `a` passes through, as torch.clamp has it.
inline V vmin(V a, V b) { return a > b ? b : a; }
inline V vmax(V a, V b) { return a < b ? b : a; }

// e^(x + low) to about one ulp; low is what rounding x left behind. With n ln2 + r = x + low, |r| <=
// ln2 / 2: a degree-6 polynomial in r, n into the exponent. Infinity and zero where fp32 has no
// normal number left.
inline V vexp(V x, V low) {
  const V sum = x + low;
  const VI n = vround(vmax(vmin(sum, vset(89.0f)), vset(-88.0f)) * vset(1.44269504088896341f));
  const V nf = vfloat(n);
  V r = vfma(nf, vset(-0.693359375f), x) + low;
  r = vfma(nf, vset(2.12194440e-4f), r);
  V y = vset(1.9875691500e-4f);
  y = vfma(y, r, vset(1.3981999507e-3f));
  y = vfma(y, r, vset(8.3334519073e-3f));
  y = vfma(y, r, vset(4.1665795894e-2f));
  y = vfma(y, r, vset(1.6666665459e-1f));
  y = vfma(y, r, vset(5.0000001201e-1f));
  y = vfma(y, r * r, r + vset(1.0f));
  y = (V)((VU)y + ((VU)n << 23));
  y = sum > vset(88.7228f) ? vset(__builtin_inff()) : y;  // 128 ln2
  y = sum < vset(-87.3365f) ? vset(0.0f) : y;             // -126 ln2
  return sum == sum ? y : sum;
}

inline V sigmoid_times(V x, V y) { return y / (vset(1.0f) + vexp(-x, vset(0.0f))); }

// g times the normal distribution function of g. Of its two sides the smaller one, Q, is computed:
// 1 + erf(g) would leave no digit of it. Q(z) = e^(-z^2/2) p(t), t = 1 / (1 + 0.3 z); the exponent's
// rounding, which would cost z^2/2 ulps, is avoided by squaring the leading half of z's digits alone.
// docs/performance/normal_tail.py prints p and its error.
inline V gelu(V g) {
  const V z = vmin(g < vset(0.0f) ? -g : g, vset(16.0f));  // beyond, Q is zero
  const V t = vset(1.0f) / vfma(vset(0.3f), z, vset(1.0f));
  V p = vset(3.837855888e-02f);
  p = vfma(p, t, vset(-1.691673508e-01f));
  p = vfma(p, t, vset(2.286624844e-01f));
  p = vfma(p, t, vset(-7.650903267e-02f));
  p = vfma(p, t, vset(1.425371462e-01f));
  p = vfma(p, t, vset(9.468289657e-02f));
  p = vfma(p, t, vset(1.219204854e-01f));
  p = vfma(p, t, vset(1.194876713e-01f));
  p = vfma(p, t, vset(7.169771904e-06f));
  const V half = vset(-0.5f), lead = (V)((VI)z & ~0xfff);
  const V q = p * vexp(half * lead * lead, half * (z - lead) * (z + lead));
  return g * (g < vset(0.0f) ? q : vset(1.0f) - q);
}

// act(g) * u with the family's clamps; non-gated callers pass u = 1 and ignore the product.
inline V apply_activation(Activation activation, V g, V u, float alpha, float limit, bool gated) {
  const V top = vset(limit);
  if (limit < __builtin_inff()) {
    g = vmin(g, top);
    u = gated ? vmax(vmin(u, top), -top) : u;
  }
  switch (activation) {
    case Activation::kSilu:
      return sigmoid_times(g, g) * u;
    case Activation::kGelu:
      return gelu(g) * u;
    case Activation::kGeluTanh:  // 0.5 (1 + tanh z) = sigmoid(2 z)
      return sigmoid_times(vset(1.5957691216057308f) * vfma(vset(0.044715f) * g * g, g, g), g) * u;
    case Activation::kRelu2: {
      const V r = vmax(g, vset(0.0f));
      return r * r * u;
    }
    case Activation::kSwigluOai:
      return sigmoid_times(vset(alpha) * g, g) * (u + vset(1.0f));
  }
  __builtin_unreachable();
}

}  // namespace CMOE_ISA
}  // namespace cmoe
