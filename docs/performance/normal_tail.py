"""The polynomial of the upper tail of the normal distribution that the kernels' gelu uses.

p(t) = Q(z) e^(z^2 / 2) with t = 1 / (1 + c z), fitted for the least largest relative error over
0 <= z <= 14 by Lawson's reweighted least squares. Prints the coefficients, constant first, then
that error in exact arithmetic.
"""

import mpmath as mp
import numpy as np

SCALE, DEGREE, LARGEST, NODES = 0.3, 8, 14, 400

low = 1 / (1 + SCALE * LARGEST)
chebyshev = np.cos(np.pi * (np.arange(NODES) + 0.5) / NODES)
t = (low + 1) / 2 + (1 - low) / 2 * chebyshev
exact = np.array(
    [float(mp.erfc(z / mp.sqrt(2)) * mp.exp(z * z / 2) / 2) for z in (1 / t - 1) / SCALE]
)
powers = np.vander(t, DEGREE + 1, increasing=True) / exact[:, None]
weights = np.ones(NODES)
for _ in range(40):
    root = np.sqrt(weights)
    coefficients = np.linalg.lstsq(powers * root[:, None], root, rcond=None)[0]
    error = np.abs(powers @ coefficients - 1)
    weights *= error + 1e-30
    weights /= weights.sum()
print("\n".join(f"{c:.9e}" for c in coefficients))
print(f"relative error {error.max():.1e}")
