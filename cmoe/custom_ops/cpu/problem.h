// The plain-C++ statement of one fused_experts call: what the op hands to a kernel set.
//
// Nothing here knows torch, so that the kernels also build into a bare driver (sanitizers,
// disassembly). Shapes: T tokens, K experts per token, R = T*K routed rows, H hidden, I
// intermediate, E local experts.
#pragma once

#include <cstddef>
#include <cstdint>

// A register tile is only fast if its accumulators never get an address.
#define CMOE_LAMBDA __attribute__((always_inline))
#define CMOE_INLINE inline __attribute__((always_inline))

namespace cmoe {

enum class DType : int { kBF16 = 0, kFP16 = 1, kFP32 = 2 };

// Order is that of kActivationNames in fused_experts.cpp.
enum class Activation : int { kSilu = 0, kGelu, kGeluTanh, kRelu2, kSwigluOai };

constexpr int kStrip = 32;  // rows of a packed weight that lie together

inline size_t dtype_bytes(DType t) { return t == DType::kFP32 ? 4 : 2; }

// A stack of matrices [E, rows, cols]; strides in elements. Either stride_col == 1 (checkpoint
// layout) or stride_row == 1 (the transposed view of [E, cols, rows] storage). Packed ones are bf16,
// rows and cols multiples of kStrip: [E, rows / kStrip, cols / 2, kStrip, 2], where row r begins at r
// * stride_row = r * cols only if it is the first of a strip.
struct Matrices {
  const void* data = nullptr;
  int64_t stride_e = 0, stride_row = 0, stride_col = 0;
};

// A stack of vectors [E, n], n contiguous; the stride in elements. Null data: none.
struct Bias {
  const void* data = nullptr;
  int64_t stride_e = 0;
  DType dtype = DType::kFP32;
};

// Which rows go to which expert. Experts ascend, so that a token's contributions are summed in an
// order that only its own ids decide, never the rest of the batch.
struct Plan {
  int64_t num_active = 0;  // experts with at least one row
  const int32_t* expert;   // [num_active] local expert, ascending
  const int64_t* offset;   // [num_active + 1] first row of each in the arrays below
  const int32_t* by_size;  // [num_active] positions in `expert`, most rows first
  const int32_t* token;    // [rows] token of each routed row
  const float* weight;     // [rows] router weight of each routed row
};

// The caller's threads: `each` calls f(thread, context) once for every thread in [0, count) and
// returns when all are done. Calls may follow each other on one thread: no call waits for another.
struct Threads {
  int count = 1;
  void (*each)(int count, void (*f)(int thread, void* context), void* context) = nullptr;
};

struct Problem {
  DType dtype = DType::kBF16;
  int64_t T = 0, H = 0, I = 0;
  const void* x = nullptr;  // [T, H]
  int64_t x_stride_row = 0, x_stride_col = 1;
  Matrices w13, w2;           // [E, N13, H], [E, H, I]
  bool packed = false;        // both are
  Bias b13, b2;               // [E, N13], [E, H]
  bool gated = true;
  bool interleaved = false;  // gate and up rows alternate, gate first; only if gated
  Activation activation = Activation::kSilu;
  float alpha = 1.0f;
  float limit = 0.0f;  // +inf: none
  bool weight_on_input = false;
  void* out = nullptr;  // [T, H], contiguous
  Plan plan;
  Threads threads;
};

// The router's product: out = x w^T.
struct GateProblem {
  DType dtype;  // of x and w
  int64_t T, H, E;
  const void* x;  // [T, H], columns contiguous
  int64_t x_stride;
  const void* w;  // [E, H], columns contiguous
  int64_t w_stride;
  float* out;  // [T, E]
};

// Bytes of each scratch area of a call; `total` is the formula that docs/performance.md states.
struct ScratchSizes {
  size_t x = 0;           // activations in the kernel's own form, shared
  size_t h = 0;           // intermediate rows, shared
  size_t per_thread = 0;  // tiles, output accumulators, transposed weight panels
  size_t total = 0;
};

// One instruction set's kernels.
struct Kernels {
  const char* name;
  ScratchSizes (*scratch)(const Problem&, int64_t rows);
  void (*run)(const Problem&, char* scratch);
  void (*probe)(int64_t multiply_adds);  // that much work of bf16 tiles
  void (*gate)(const GateProblem&, int64_t first, int64_t last) = nullptr;  // experts [first, last)
};

}  // namespace cmoe
