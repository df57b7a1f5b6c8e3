// The activations of an expert, on vectors of fp32.
#pragma once

#include "problem.h"

namespace cmoe {
namespace CMOE_ISA {

// Comparisons are written so that a NaN operand `a` passes through, as torch.clamp has it.
inline V vmin(V a, V b) { return a > b ? b : a; }
inline V vmax(V a, V b) { return a < b ? b : a; }

// e^x to about one ulp: x = n ln2 + r, |r| <= ln2 / 2, a degree-6 polynomial, n into the exponent.
inline V vexp(V x) {
  x = vmax(vmin(x, vset(88.0f)), vset(-87.0f));
  const VI n = vround(x * vset(1.44269504088896341f));
  const V nf = vfloat(n);
  V r = vfma(nf, vset(-0.693359375f), x);
  r = vfma(nf, vset(2.12194440e-4f), r);
  V y = vset(1.9875691500e-4f);
  y = vfma(y, r, vset(1.3981999507e-3f));
  y = vfma(y, r, vset(8.3334519073e-3f));
  y = vfma(y, r, vset(4.1665795894e-2f));
  y = vfma(y, r, vset(1.6666665459e-1f));
  y = vfma(y, r, vset(5.0000001201e-1f));
  y = vfma(y, r * r, r + vset(1.0f));
  const V scaled = (V)((VI)y + (n << 23));
  return x == x ? scaled : x;
}

inline V sigmoid_times(V x, V y) { return y / (vset(1.0f) + vexp(-x)); }

// erf by the rational minimax form that XLA and Eigen use, |error| < 4 ulp.
inline V verf(V a) {
  const V x = vmax(vmin(a, vset(4.0f)), vset(-4.0f));
  const V s = x * x;
  V p = vset(-2.72614225801306e-10f);
  p = vfma(p, s, vset(2.77068142495902e-08f));
  p = vfma(p, s, vset(-2.10102402082508e-06f));
  p = vfma(p, s, vset(-5.69250639462346e-05f));
  p = vfma(p, s, vset(-7.34990630326855e-04f));
  p = vfma(p, s, vset(-2.95459980854025e-03f));
  p = vfma(p, s, vset(-1.60960333262415e-02f));
  V q = vset(-1.45660718464996e-05f);
  q = vfma(q, s, vset(-2.13374055278905e-04f));
  q = vfma(q, s, vset(-1.68282697438203e-03f));
  q = vfma(q, s, vset(-7.37332916720468e-03f));
  q = vfma(q, s, vset(-1.42647390514189e-02f));
  return x * p / q;
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
      return vset(0.5f) * g * (vset(1.0f) + verf(g * vset(0.70710678118654752f))) * u;
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
