// The fused experts of one instruction set: two grouped GEMMs along K over a flat work list.
//
// Weights are used as they lie, [rows, K] with K contiguous. An output is a dot product along K: each of the
// kLanes lanes of an accumulator sums its own slice of K, the lanes are folded by one fixed tree, and blocks of
// K are added in order. Every tile shape follows that order, so a token's result does not depend on the batch.
//
// Phases (a barrier between them): 0 bring x into kernel form, where x cannot be used as it lies; 1 gate and up,
// activation -> h [R, I]; 2 down, weighted sum over each token's experts -> out [T, H]. A work item of phase 1
// is (expert, column block); of phase 2 a column block of every expert, so that its sums stay in the
// thread's own cache and no [R, H] buffer exists.
#pragma once

#include <omp.h>

#include "activation.h"
#include "problem.h"

namespace cmoe {
namespace CMOE_ISA {

constexpr int kRowsPerBlock = 128;   // routed rows whose x stays in L2 while a weight block is used
constexpr int kColumnsPerBlock = 48;  // weight rows of a work item, per gate / up / down
constexpr size_t kAlign = 64;

template <class A>
constexpr A round_up(A a, A b) { return (a + b - 1) / b * b; }
template <class A>
constexpr A ceil_div(A a, A b) { return (a + b - 1) / b; }
template <class A>
constexpr A least(A a, A b) { return a < b ? a : b; }

// What a tile prefetches while it computes: some rows of the panel that comes next.
struct Ahead {
  const char* p;
  int64_t stride_bytes;
  int rows;
};

#include "dot.h"

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
  char* panel;    // weights brought into the form the tile reads, where they do not lie in it
  float* row;     // [H] one row of x
};

struct Layout {
  int64_t x_stride, h_stride;  // in elements of D::X
  int64_t nb, cb;              // columns of an item in phases 1 and 2
  bool convert_x;
  size_t off_c, off_bias, off_acc, off_panel, off_row;
  ScratchSizes size;
};

template <class D>
Layout make_layout(const Problem& p, int64_t rows) {
  Layout l;
  l.nb = l.cb = kColumnsPerBlock;
  const int64_t enough = 4 * static_cast<int64_t>(p.threads);
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
  l.off_panel = take(D::panel_bytes(p));
  l.off_row = take(l.convert_x ? sizeof(float) * round_up<int64_t>(p.H, D::kChunk) : 0);
  l.size.per_thread = round_up<size_t>(at, 4096);  // threads share no page, hence no cache line
  l.size.total = l.size.x + l.size.h + l.size.per_thread * p.threads;
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
  const int tiles = ceil_div(M, D::kMT);
  const X* rows[D::kMT];
  for (int64_t k0 = 0; k0 < K; k0 += blocks.size) {
    const int64_t kn = least(blocks.size, K - k0);
    typename D::Source source(w, base, N, k0, kn, M, local.panel);
    for (int64_t n = 0; n < N;) {
      const int nt = D::panel_rows(N - n);
      const auto panel = source.panel(n, nt);
      const W* following = n + nt < N ? base + (n + nt) * w.stride_row + k0 : k0 + kn < K ? base + k0 + kn : next;
      int m = 0;
      for (int t = 0; t < tiles; ++t) {
        const int mt = (M - m + tiles - t - 1) / (tiles - t);
        for (int i = 0; i < mt; ++i) rows[i] = x[m + i] + k0;
        Ahead ahead{nullptr, 0, 0};
        if (stream && t < D::kNT && tiles >= CMOE_PFMIN) {
          const int a = t * D::kNT / least(tiles, D::kNT), b = (t + 1) * D::kNT / least(tiles, D::kNT);
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
    for (int64_t i = p.H; i < padded; ++i) row[i] = 0.0f;
    D::store_row(x_scratch + token * l.x_stride, row, padded);
  }

  void phase0(int thread, int threads, Local& local) const {
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

  void phase1(Local& local) {
    const int64_t blocks = ceil_div(p.I, l.nb);
    const int64_t items = blocks * p.plan.num_active;
    const X* rows[kRowsPerBlock];
    for (int64_t item = draw(next1), then; item < items; item = then) {
      then = draw(next1);
      const int64_t position = p.plan.by_size[item / blocks];
      const int64_t column = item % blocks * l.nb, n = least(l.nb, p.I - column);
      const int64_t expert = p.plan.expert[position];
      const W* gate = w13_at(position, column);
      const W* up = p.gated ? w13_at(position, p.I + column) : nullptr;
      const W* after = then < items ? w13_at(p.plan.by_size[then / blocks], then % blocks * l.nb) : gate;
      load_bias<D>(p.b13, p.dtype, expert * p.b13_stride_e + column, n, local.bias);
      if (p.gated) load_bias<D>(p.b13, p.dtype, expert * p.b13_stride_e + p.I + column, n, local.bias + l.nb);
      const int64_t first = p.plan.offset[position], last = p.plan.offset[position + 1];
      for (int64_t r = first; r < last; r += kRowsPerBlock) {
        const int M = static_cast<int>(least<int64_t>(kRowsPerBlock, last - r));
        for (int m = 0; m < M; ++m) rows[m] = x_row(p.plan.token[r + m]);
        const int64_t stride = 2 * kColumnsPerBlock;
        gemm_block<D>(rows, M, p.w13, gate, n, p.H, local.c, stride, r == first, p.gated ? up : after, local);
        if (p.gated)
          gemm_block<D>(rows, M, p.w13, up, n, p.H, local.c + l.nb, stride, r == first, after, local);
        for (int m = 0; m < M; ++m) activate(local, local.c + m * stride, column, n, h + (r + m) * l.h_stride);
      }
    }
  }

  // g (and u) -> h, in place in c, then into the row in the form that phase 2 reads.
  void activate(const Local& local, float* g, int64_t column, int64_t n, X* to) const {
    const float* u = g + l.nb;
    for (int64_t i = 0; i < n; i += kLanes) {
      const int m = static_cast<int>(least<int64_t>(kLanes, n - i));
      const V gate = vload(g + i, m) + vload(local.bias + i, m);
      const V up = p.gated ? vload(u + i, m) + vload(local.bias + l.nb + i, m) : vset(1.0f);
      vstore(g + i, apply_activation(p.activation, gate, up, p.alpha, p.limit, p.gated), m);
    }
    D::store_columns(to, column, g, n, column + n == p.I ? l.h_stride : column + n);
  }

  void phase2(Local& local) {
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

  void body(int thread, int threads) {
    char* mine = threads_scratch + thread * l.size.per_thread;
    Local local{(float*)(mine + l.off_c), (float*)(mine + l.off_bias), (float*)(mine + l.off_acc),
                mine + l.off_panel, (float*)(mine + l.off_row)};
    if (l.convert_x) {
      phase0(thread, threads, local);
#pragma omp barrier
    }
    phase1(local);
#pragma omp barrier
    phase2(local);
  }

  void operator()() {
    if (p.threads == 1) {
      body(0, 1);
      return;
    }
#pragma omp parallel num_threads(p.threads)
    body(omp_get_thread_num(), omp_get_num_threads());
  }
};

template <class D>
ScratchSizes scratch_of(const Problem& p, int64_t rows) {
  return make_layout<D>(p, rows).size;
}

template <class D>
void run_of(const Problem& p, char* scratch) {
  Run<D> run(p, scratch);
  run();
}

}  // namespace CMOE_ISA
}  // namespace cmoe
