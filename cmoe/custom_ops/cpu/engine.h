// The fused experts of one instruction set: two grouped GEMMs along K over a flat work list.
//
// Weights are used as they lie, [rows, K] with K contiguous. An output is a dot product along K: each of the
// kLanes lanes of an accumulator sums its own slice of K, the lanes are folded by one fixed tree, and blocks of
// K are added in order. Every tile shape follows that order, so a token's result does not depend on the batch.
//
// Phases (each one run by all threads, the next when it is over): 0 bring x into kernel form, where x cannot be used as it lies; 1 gate and up,
// activation -> h [R, I]; 2 down, weighted sum over each token's experts -> out [T, H]. A work item of phase 1
// is (expert, column block); of phase 2 a column block of every expert, so that its sums stay in the
// thread's own cache and no [R, H] buffer exists.
#pragma once

#include "activation.h"
#include "dot.h"
#include "problem.h"

namespace cmoe {
namespace CMOE_ISA {

constexpr int kRowsPerBlock = 64;  // routed rows whose x stays in L2 while an item's weights are used
// With fewer tiles a panel is read about as fast as memory gives, and the hardware's own prefetch does better.
constexpr int kPrefetchTiles = 2;
constexpr size_t kAlign = 64;

// K is cut evenly into blocks of at most D::kBlockK, whole chunks each but the last.
template <class D>
struct KBlocks {
  int64_t K, size;
  explicit KBlocks(int64_t k) : K(k) {
    const int64_t n = ceil_div<int64_t>(k, D::kBlockK);
    size = round_up<int64_t>(ceil_div<int64_t>(k, n), D::kChunk);
  }
};

// Per-thread scratch of a work item.
struct Local {
  float* c;       // [kRowsPerBlock, columns] GEMM result
  float* bias;    // [2 * kColumnsPerBlock]
  float* acc;     // [T, kColumnsPerBlock] output sums of phase 2
  char* turned;   // weights of an item turned along K, where they do not lie so
  float* wide;    // [kTileN, kBlockK] a panel widened to fp32
  float* row;     // [H] one row of x
};

struct Layout {
  int64_t x_stride, h_stride;  // in elements of D::X
  int64_t nb, cb;              // columns of an item in phases 1 and 2
  bool convert_x;
  size_t off_c, off_bias, off_acc, off_turned, off_wide, off_row;
  ScratchSizes size;
};

template <class D>
Layout make_layout(const Problem& p, int64_t rows) {
  Layout l;
  l.nb = l.cb = kColumnsPerBlock;
  const int64_t enough = 4 * static_cast<int64_t>(p.threads.count);
  while (l.nb > 16 && ceil_div(p.I, l.nb) * p.plan.num_active < enough) l.nb -= 16;
  while (l.cb > 16 && ceil_div(p.H, l.cb) < enough) l.cb -= 16;
  l.convert_x = D::kConvertX || p.weight_on_input || p.x_stride_col != 1;
  l.x_stride = l.convert_x ? round_up<int64_t>(p.H, D::kChunk) : p.x_stride_row;
  l.h_stride = round_up<int64_t>(p.I, D::kChunk);
  auto area = [](size_t bytes) { return round_up(bytes, kAlign); };
  l.size.x = l.convert_x ? area(p.T * l.x_stride * sizeof(typename D::X)) : 0;
  l.size.h = area(rows * l.h_stride * sizeof(typename D::X));
  size_t at = 0;
  auto take = [&](size_t bytes) { const size_t here = at; at += area(bytes); return here; };
  l.off_c = take(sizeof(float) * kRowsPerBlock * 2 * kColumnsPerBlock);
  l.off_bias = take(sizeof(float) * 2 * kColumnsPerBlock);
  l.off_acc = take(sizeof(float) * p.T * kColumnsPerBlock);
  l.off_turned = take(Rows<typename D::W>::scratch_bytes(p.w13.stride_col != 1 || p.w2.stride_col != 1, D::kBlockK));
  l.off_wide = take(D::kWideRows > 0 ? sizeof(float) * kTileN * (D::kBlockK + D::kChunk) : 0);
  l.off_row = take(l.convert_x ? sizeof(float) * round_up<int64_t>(p.H, D::kChunk) : 0);
  l.size.per_thread = round_up<size_t>(at, 4096);  // threads share no page, hence no cache line
  l.size.total = l.size.x + l.size.h + l.size.per_thread * p.threads.count;
  return l;
}

// c[m, n] (n < N) = dot(x[m], w[n]) over K, for M <= kRowsPerBlock rows. `next` is where the weights that
// this thread reads afterwards begin.
template <class D>
void gemm_block(const typename D::X* const* x, int M, const Matrices& w, const typename D::W* base, int64_t N,
                int64_t K, float* c, int64_t c_stride, bool stream, const typename D::W* next, Local& local) {
  using X = typename D::X;
  using W = typename D::W;
  const KBlocks<D> blocks(K);
  const int tiles = ceil_div(M, kTileM);
  const X* rows[kTileM];
  for (int64_t k0 = 0; k0 < K; k0 += blocks.size) {
    const int64_t kn = least(blocks.size, K - k0);
    const typename D::Source source(Rows<W>(w, base, N, k0, kn, local.turned), kn, M, local.wide);
    for (int64_t n = 0; n < N;) {
      const int nt = panel_rows(N - n);
      const auto panel = source.panel(n, nt);
      const W* following = n + nt < N ? base + (n + nt) * w.stride_row + k0 * w.stride_col
                           : k0 + kn < K ? base + (k0 + kn) * w.stride_col : next;
      int m = 0;
      for (int t = 0; t < tiles; ++t) {
        const int mt = (M - m + tiles - t - 1) / (tiles - t);
        for (int i = 0; i < mt; ++i) rows[i] = x[m + i] + k0;
        Ahead ahead{nullptr, 0, 0};
        if (stream && t < kTileN && tiles >= kPrefetchTiles && w.stride_col == 1) {
          const int a = t * kTileN / least(tiles, kTileN), b = (t + 1) * kTileN / least(tiles, kTileN);
          ahead = Ahead{(const char*)(following + a * w.stride_row), w.stride_row * (int64_t)sizeof(W), b - a};
        }
        D::tile(mt, nt, rows, panel, static_cast<int>(kn), c + m * c_stride + n, c_stride, k0 > 0, ahead);
        m += mt;
      }
      n += nt;
    }
  }
}

template <class D>
void load_bias(const void* bias, DType dtype, int64_t at, int64_t n, float* to) {
  for (int64_t i = 0; i < n; i += kLanes) {
    const int m = static_cast<int>(least<int64_t>(kLanes, n - i));
    vstore(to + i, bias ? load_any(dtype, bias, at + i, m) : vset(0.0f));
  }
}

template <class D>
struct Run {
  using X = typename D::X;
  using W = typename D::W;
  const Problem& p;
  const Layout l;
  X* const x_scratch;
  X* const h;
  char* const threads_scratch;
  // One line each: the threads draw items from these.
  alignas(64) int64_t next1 = 0;
  alignas(64) int64_t next2 = 0;

  Run(const Problem& problem, char* scratch)
      : p(problem),
        l(make_layout<D>(problem, problem.plan.num_active ? problem.plan.offset[problem.plan.num_active] : 0)),
        x_scratch((X*)scratch),
        h((X*)(scratch + l.size.x)),
        threads_scratch(scratch + l.size.x + l.size.h) {}

  static int64_t draw(int64_t& counter) { return __atomic_fetch_add(&counter, 1, __ATOMIC_RELAXED); }

  const X* x_row(int64_t token) const {
    return (l.convert_x ? x_scratch : (const X*)p.x) + token * l.x_stride;
  }

  void convert_x(int64_t token, float scale, float* row) const {
    const int64_t padded = round_up<int64_t>(p.H, D::kChunk);
    const size_t bytes = dtype_bytes(p.dtype);
    const char* from = (const char*)p.x + token * p.x_stride_row * (int64_t)bytes;
    for (int64_t i = 0; i < p.H; i += kLanes) {
      const int n = static_cast<int>(least<int64_t>(kLanes, p.H - i));
      V v;
      if (p.x_stride_col == 1) {
        v = load_any(p.dtype, from, i, n);
      } else {
        for (int j = 0; j < n; ++j) row[i + j] = load_any(p.dtype, from, (i + j) * p.x_stride_col, 1)[0];
        v = vload(row + i, n);
      }
      vstore(row + i, v * vset(scale), n);
    }
    D::store(x_scratch + token * l.x_stride, 0, row, p.H, padded);
  }

  void phase0(int thread, Local& local) {
    const int threads = p.threads.count;
    if (p.weight_on_input) {  // K == 1: a routed row is a token; tokens without an expert are never read
      const int64_t rows = p.plan.offset[p.plan.num_active];
      for (int64_t r = rows * thread / threads; r < rows * (thread + 1) / threads; ++r)
        convert_x(p.plan.token[r], p.plan.weight[r], local.row);
    } else {
      for (int64_t t = p.T * thread / threads; t < p.T * (thread + 1) / threads; ++t)
        convert_x(t, 1.0f, local.row);
    }
  }

  const W* w13_at(int64_t position, int64_t column) const {
    return (const W*)p.w13.data + p.plan.expert[position] * p.w13.stride_e + column * p.w13.stride_row;
  }

  void phase1(int, Local& local) {
    const int64_t blocks = ceil_div(p.I, l.nb);
    const int64_t items = blocks * p.plan.num_active;
    const X* rows[kRowsPerBlock];
    for (int64_t item = draw(next1), then; item < items; item = then) {
      then = draw(next1);
      const int64_t position = p.plan.by_size[item / blocks];
      const int64_t column = item % blocks * l.nb, n = least(l.nb, p.I - column);
      const int64_t expert = p.plan.expert[position];
      const int64_t up = p.I + column;  // where the up rows begin, if they do not alternate with the gates
      const W* w = w13_at(position, parts_in_row() * column);
      const W* w_up = p.gated ? w13_at(position, up) : nullptr;
      const W* after = then < items ? w13_at(p.plan.by_size[then / blocks], parts_in_row() * (then % blocks * l.nb)) : w;
      const int64_t bias = expert * p.b13_stride_e;
      load_bias<D>(p.b13, p.dtype, bias + parts_in_row() * column, parts_in_row() * n, local.bias);
      if (has_up_rows()) load_bias<D>(p.b13, p.dtype, bias + up, n, local.bias + l.nb);
      const int64_t first = p.plan.offset[position], last = p.plan.offset[position + 1];
      for (int64_t r = first; r < last; r += kRowsPerBlock) {
        const int M = static_cast<int>(least<int64_t>(kRowsPerBlock, last - r));
        for (int m = 0; m < M; ++m) rows[m] = x_row(p.plan.token[r + m]);
        const int64_t stride = 2 * kColumnsPerBlock;
        gemm_block<D>(rows, M, p.w13, w, parts_in_row() * n, p.H, local.c, stride, r == first,
                      has_up_rows() ? w_up : after, local);
        if (has_up_rows())
          gemm_block<D>(rows, M, p.w13, w_up, n, p.H, local.c + l.nb, stride, r == first, after, local);
        for (int m = 0; m < M; ++m) activate(local, local.c + m * stride, column, n, h + (r + m) * l.h_stride);
      }
    }
  }

  bool has_up_rows() const { return p.gated && !p.interleaved; }
  int64_t parts_in_row() const { return p.interleaved ? 2 : 1; }

  // g (and u) -> h, in place in c, then into the row in the form that phase 2 reads.
  void activate(const Local& local, float* c, int64_t column, int64_t n, X* to) const {
    float pair[2 * kLanes];
    // The vector of a part (0 gate, 1 up) at column i.
    auto part = [&](const float* from, int64_t i, int m, int which) {
      if (!p.interleaved) return vload(from + which * l.nb + i, m);
      for (int j = 0; j < m; ++j) pair[j] = from[2 * (i + j) + which];
      return vload(pair, m);
    };
    for (int64_t i = 0; i < n; i += kLanes) {
      const int m = static_cast<int>(least<int64_t>(kLanes, n - i));
      const V g = part(c, i, m, 0) + part(local.bias, i, m, 0);
      const V u = p.gated ? part(c, i, m, 1) + part(local.bias, i, m, 1) : vset(1.0f);
      vstore(c + i, apply_activation(p.activation, g, u, p.alpha, p.limit, p.gated), m);
    }
    D::store(to, column, c, n, column + n == p.I ? l.h_stride : column + n);
  }

  void phase2(int, Local& local) {
    const int64_t blocks = ceil_div(p.H, l.cb);
    const X* rows[kRowsPerBlock];
    const Plan& plan = p.plan;
    auto w2_at = [&](int64_t position, int64_t column) {
      return (const W*)p.w2.data + plan.expert[position] * p.w2.stride_e + column * p.w2.stride_row;
    };
    for (int64_t item = draw(next2), then; item < blocks; item = then) {
      then = draw(next2);
      const int64_t column = item * l.cb, n = least(l.cb, p.H - column);
      for (int64_t i = 0; i < p.T * kColumnsPerBlock; i += kLanes) vstore(local.acc + i, vset(0.0f));
      for (int64_t e = 0; e < plan.num_active; ++e) {
        const W* w = w2_at(e, column);
        const W* after = e + 1 < plan.num_active ? w2_at(e + 1, column) : then < blocks ? w2_at(0, then * l.cb) : w;
        load_bias<D>(p.b2, p.dtype, plan.expert[e] * p.b2_stride_e + column, n, local.bias);
        for (int64_t r = plan.offset[e]; r < plan.offset[e + 1]; r += kRowsPerBlock) {
          const int M = static_cast<int>(least<int64_t>(kRowsPerBlock, plan.offset[e + 1] - r));
          for (int m = 0; m < M; ++m) rows[m] = h + (r + m) * l.h_stride;
          gemm_block<D>(rows, M, p.w2, w, n, p.I, local.c, kColumnsPerBlock, r == plan.offset[e], after, local);
          for (int m = 0; m < M; ++m) {
            const V weight = vset(p.weight_on_input ? 1.0f : plan.weight[r + m]);
            float* acc = local.acc + (int64_t)plan.token[r + m] * kColumnsPerBlock;
            const float* c = local.c + m * kColumnsPerBlock;
            for (int64_t i = 0; i < n; i += kLanes)
              vstore(acc + i, vfma(weight, vload(c + i) + vload(local.bias + i), vload(acc + i)));
          }
        }
      }
      for (int64_t t = 0; t < p.T; ++t) {
        for (int64_t i = 0; i < n; i += kLanes) {
          const int m = static_cast<int>(least<int64_t>(kLanes, n - i));
          store_any(p.dtype, p.out, t * p.H + column + i, vload(local.acc + t * kColumnsPerBlock + i), m);
        }
      }
    }
  }

  Local local_of(int thread) const {
    char* mine = threads_scratch + thread * l.size.per_thread;
    return Local{(float*)(mine + l.off_c),  (float*)(mine + l.off_bias), (float*)(mine + l.off_acc),
                 mine + l.off_turned, (float*)(mine + l.off_wide), (float*)(mine + l.off_row)};
  }

  template <void (Run::*phase)(int, Local&)>
  void on_threads() {
    auto one = [](int thread, void* self) {
      Run* run = (Run*)self;
      Local local = run->local_of(thread);
      (run->*phase)(thread, local);
    };
    if (p.threads.count == 1) return one(0, this);
    p.threads.each(p.threads.count, one, this);
  }

  void operator()() {
    if (l.convert_x) on_threads<&Run::phase0>();
    on_threads<&Run::phase1>();
    on_threads<&Run::phase2>();
  }
};

// The dots of a kernel set, by dtype.
template <class OfBf16, class F>
auto with_dot(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kBF16: return f.template operator()<OfBf16>();
    case DType::kFP16: return f.template operator()<Fma<Fp16>>();
    case DType::kFP32: return f.template operator()<Fma<Fp32>>();
  }
  __builtin_unreachable();
}

// Work for the start-up probe: one register tile of bf16 weights on data in L1, widening included.
template <class D>
void probe_tile(int64_t n, int repeats) {
  alignas(64) static const typename D::X x[kTileM][512] = {};
  alignas(64) static const typename D::W w[kTileN][512] = {};
  float c[kTileM * kTileN];
  const typename D::X* rows[kTileM];
  for (int i = 0; i < kTileM; ++i) rows[i] = x[i];
  for (int r = 0; r < repeats; ++r)
    D::tile(kTileM, kTileN, rows, D::Source::narrow(&w[0][0], 512), static_cast<int>(n), c, kTileN, false, Ahead{nullptr, 0, 0});
}

template <class OfBf16>
constexpr Kernels kernels(const char* name) {
  return Kernels{name,
                 [](const Problem& p, int64_t rows) {
                   return with_dot<OfBf16>(p.dtype, [&]<class D>() { return make_layout<D>(p, rows).size; });
                 },
                 [](const Problem& p, char* scratch) {
                   with_dot<OfBf16>(p.dtype, [&]<class D>() { Run<D>(p, scratch)(); });
                 },
                 [](int64_t multiply_adds) {
                   probe_tile<OfBf16>(512, static_cast<int>(multiply_adds / (kTileM * kTileN * 512)));
                 }};
}

}  // namespace CMOE_ISA
}  // namespace cmoe
