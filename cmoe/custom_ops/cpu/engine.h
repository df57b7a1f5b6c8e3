// The fused experts of one instruction set: two grouped GEMMs along K over a flat work list.
//
// Weights are used as they lie. In checkpoint layout, [rows, K] with K contiguous, an output is a dot
// product along K: each of the kLanes lanes of an accumulator sums its own slice of K, the lanes are folded by one
// fixed tree, and blocks of K are added in order. Every tile shape follows that order, so a token's
// result does not depend on the batch.
//
// Phases, each one run by all threads, the next when it is over: 0 bring x into the kernels' form,
// where it cannot be used as it lies; 1 gate and up, activation -> h [R, I]; 2 down, weighted sum
// over each token's experts -> out [T, H]. An item of phase 1 is some columns of one expert; of
// phase 2 some columns of every expert, so that the sums stay in the thread's own cache and no [R,
// H] buffer exists.
#pragma once

#include "activation.h"
#include "outer.h"
#include "problem.h"
#include "stream.h"

namespace cmoe {
namespace CMOE_ISA {

constexpr size_t kAlign = 64;
// Items are whole units of columns, so that no two threads share a line of h, no strip is divided;
// at least kColumnsPerItem, while there is enough work for all threads.
constexpr int64_t kColumnsPerItem = 32;
// An item with few rows streams its weights once: all of its columns in one go, so that memory sees
// long runs. One with more rows takes kWeightRowsPerBlock rows of weights at a time.
constexpr int kRowsPerBlock = 128, kWeightRowsPerBlock = 192;
constexpr int64_t kColumnsStreamed1 = 192, kColumnsStreamed2 = 512;

// `rows` times some columns handed out to threads: long runs first, short ones at the end to finish
// together. A run is of whole units, within a row.
struct WorkList {
  alignas(64) int64_t next = 0;
  int64_t unit, row, total, most, threads;  // row, total, most: in units

  struct Item {
    int64_t row, first, columns;  // columns = 0: nothing left
  };

  WorkList(int64_t rows, int64_t columns, int64_t columns_a_unit, int64_t most_columns,
           int64_t num_threads)
      : unit(columns_a_unit),
        row(ceil_div(columns, unit)),
        total(rows * row),
        most(most_columns / unit),
        threads(num_threads) {}

  Item draw() {
    int64_t at = __atomic_load_n(&next, __ATOMIC_RELAXED);
    for (;;) {
      if (at >= total) return {0, 0, 0};
      const int64_t few = least(kColumnsPerItem / unit, round_up(total, threads) / threads);
      const int64_t left = row - at % row;
      int64_t units = ceil_div(total - at, 2 * threads);
      units = units < few ? few : least(units, most);
      if (units > left || left - units < few) units = left < units + few ? left : units;
      if (__atomic_compare_exchange_n(&next, &at, at + units, true, __ATOMIC_RELAXED,
                                      __ATOMIC_RELAXED))
        return {at / row, at % row * unit, units * unit};
    }
  }
};

// Per-thread scratch of a work item.
struct Local {
  float* c;      // GEMM result: rows of an item by its columns
  float* bias;   // of the item's columns, gate then up
  float* acc;    // [T, columns] output sums of phase 2
  char* turned;  // weights of a block turned along K, where they do not lie so
  float* wide;   // [kTileN, kBlockK] a panel widened to fp32
  float* row;    // [H] one row of x
  char* packed;  // kPackedBytes of x beside a stream of weights
};

struct Layout {
  int64_t x_stride, h_stride;  // in elements of D::X
  bool convert_x;
  size_t off_c, off_bias, off_acc, off_turned, off_wide, off_row, off_packed;
  ScratchSizes size;
};

constexpr int64_t kColumns1 = kColumnsStreamed1 + kColumnsPerItem;  // the longest items
constexpr int64_t kColumns2 = kColumnsStreamed2 + kColumnsPerItem;

template <class D>
Layout make_layout(const Problem& p, int64_t rows) {
  Layout l;
  l.convert_x = D::kConvertX || p.weight_on_input || p.x_stride_col != 1;
  l.x_stride = l.convert_x ? round_up<int64_t>(p.H, D::kChunk) : p.x_stride_row;
  l.h_stride = round_up<int64_t>(p.I, D::kChunk);
  // Rows a whole number of pages apart would compete for the same sets of the caches.
  if (l.h_stride * sizeof(typename D::X) % 2048 == 0) l.h_stride += D::kChunk;
  auto area = [](size_t bytes) { return round_up(bytes, kAlign); };
  l.size.x = l.convert_x ? area(p.T * l.x_stride * sizeof(typename D::X)) : 0;
  l.size.h = area(rows * l.h_stride * sizeof(typename D::X));
  size_t at = 0;
  auto take = [&](size_t bytes) {
    const size_t here = at;
    at += area(bytes);
    return here;
  };
  constexpr int64_t kBlock = (kRowsPerBlock + kTileM) * kWeightRowsPerBlock;
  static_assert(kWeightRowsPerBlock >= 2 * kColumnsTurned);
  constexpr int64_t kStreamed =
      D::kRowsStreamed * (2 * kColumns1 > kColumns2 ? 2 * kColumns1 : kColumns2);
  const bool turn = p.w13.stride_col != 1 || p.w2.stride_col != 1;
  l.off_c = take(sizeof(float) * (kBlock > kStreamed ? kBlock : kStreamed));
  l.off_bias = take(sizeof(float) * (2 * kColumns1 > kColumns2 ? 2 * kColumns1 : kColumns2));
  l.off_acc = take(sizeof(float) * p.T * kColumns2);
  l.off_turned = take(Rows<typename D::W>::scratch_bytes(turn, D::kBlockK));
  l.off_wide = take(D::kWideRows > 0 ? sizeof(float) * kTileN * (D::kBlockK + D::kChunk) : 0);
  l.off_row = take(l.convert_x ? sizeof(float) * round_up<int64_t>(p.H, D::kChunk) : 0);
  l.off_packed = take(kPackedBytes);
  l.size.per_thread = round_up<size_t>(at, 4096);  // threads share no page, hence no cache line
  l.size.total = l.size.x + l.size.h + l.size.per_thread * p.threads.count;
  return l;
}

// What the t-th of the tiles over a panel prefetches of weights: of several its share of the next
// panel, which memory would otherwise wait for while the panel at work is read from the cache. One
// tile on short rows: their beginnings alone, since the hardware streams a row better than
// instructions do once it has begun.
template <class W>
Ahead ahead_of(const W* following, int64_t stride, int64_t kn, int t, int tiles) {
  if (t >= kTileN) return {};
  const int shares = least(tiles, kTileN), first = t * kTileN / shares,
            last = (t + 1) * kTileN / shares;
  return {(const char*)(following + first * stride), stride * (int64_t)sizeof(W), last - first,
          tiles > 1 ? kn * (int64_t)sizeof(W) : 0, {}};
}

// group.c[m, n] = dot(x[m], group.base[n]) over K for M rows of x, in one pass over x for all
// groups. `stream`: these weights come from memory now; `next` is where the ones that this thread
// reads afterwards begin.
template <class D>
void gemm_block(const typename D::X* const* x, int M, const Matrices& w,
                const RowGroups<typename D::W>& groups, int64_t K, int64_t c_stride,
                bool packed, bool stream, const typename D::W* next, Local& local) {
  using X = typename D::X;
  using W = typename D::W;
  if constexpr (D::kPacked) {
    if (packed) return outer_rows<D>(x, M, groups, K, c_stride, next);
  }
  const int64_t block = even_parts<D>(K, D::kBlockK);
  const int tiles = ceil_div(M, kTileM);
  const bool in_place = w.stride_col == 1;
  const X* rows[kTileM];

  // All tiles over one panel: rows [n, n + nt) of the group, places [k, k + kn) of K.
  auto panel = [&](const typename D::Source& source, float* c, int64_t n, int nt, int64_t k,
                   int64_t kn, bool add, const W* following) CMOE_LAMBDA {
    const auto weights = source.panel(n, nt);
    int m = 0;
    for (int t = 0; t < tiles; ++t) {
      const int mt = (M - m + tiles - t - 1) / (tiles - t);
      for (int i = 0; i < mt; ++i) rows[i] = x[m + i] + k;
      Ahead ahead = stream && in_place ? ahead_of(following, w.stride_row, kn, t, tiles) : Ahead{};
      const int then = m + mt < M ? m + mt : 0;
      for (int i = 0; i < kTileM; ++i) ahead.x[i] = (const char*)(x[least(then + i, M - 1)] + k);
      D::tile(mt, nt, rows, weights, static_cast<int>(kn), c + m * c_stride + n, c_stride, add,
              ahead);
      m += mt;
    }
  };

  if (in_place && M <= D::kRowsStreamed && K * (int64_t)sizeof(W) >= kLongRowBytes)
    return stream_rows<D>(x, M, w, groups, K, c_stride, next, (X*)local.packed);
  for (int64_t k = 0; k < K; k += block) {
    const int64_t kn = least(block, K - k);
    const W* after_block = k + kn < K ? groups[0].base + k + kn : next;
    for (int g = 0; g < groups.count; ++g) {
      const W* base = groups[g].base;
      const W* after = g + 1 < groups.count ? groups[g + 1].base + k : after_block;
      const typename D::Source source(Rows<W>(w, base, groups[g].n, k, kn, local.turned), kn, M,
                                      local.wide);
      for (int64_t n = 0, nt = 0; n < groups[g].n; n += nt) {
        nt = panel_rows(groups[g].n - n);
        panel(source, groups[g].c, n, static_cast<int>(nt), k, kn, k > 0,
              n + nt < groups[g].n ? base + (n + nt) * w.stride_row + k : after);
      }
    }
  }
}

// Columns [at, at + n) of an expert's bias, or zeros.
inline void load_bias(const Bias& bias, int64_t expert, int64_t at, int64_t n, float* to) {
  at += expert * bias.stride_e;
  for (int64_t i = 0; i < n; i += kLanes) {
    const int m = static_cast<int>(least<int64_t>(kLanes, n - i));
    vstore(to + i, bias.data ? load_any(bias.dtype, bias.data, at + i, m) : vset(0.0f), m);
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
  WorkList work1, work2;

  Run(const Problem& problem, char* scratch)
      : p(problem),
        l(make_layout<D>(problem, problem.plan.offset[problem.plan.num_active])),
        x_scratch((X*)scratch),
        h((X*)(scratch + l.size.x)),
        threads_scratch(scratch + l.size.x + l.size.h),
        work1(p.plan.num_active, p.I, unit(), kColumnsStreamed1, p.threads.count),
        work2(1, p.H, unit(), kColumnsStreamed2, p.threads.count) {}

  int64_t unit() const { return p.packed ? kStrip : kUnit; }

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
        for (int j = 0; j < n; ++j)
          row[i + j] = load_any(p.dtype, from, (i + j) * p.x_stride_col, 1)[0];
        v = vload(row + i, n);
      }
      vstore(row + i, v * vset(scale), n);
    }
    D::store(x_scratch + token * l.x_stride, 0, row, p.H, padded);
  }

  void phase0(int thread, Local& local) {
    const int threads = p.threads.count;
    if (p.weight_on_input) {  // K == 1: a routed row is a token; tokens without an expert are never
                              // read
      const int64_t rows = p.plan.offset[p.plan.num_active];
      for (int64_t r = rows * thread / threads; r < rows * (thread + 1) / threads; ++r)
        convert_x(p.plan.token[r], p.plan.weight[r], local.row);
    } else {
      for (int64_t t = p.T * thread / threads; t < p.T * (thread + 1) / threads; ++t)
        convert_x(t, 1.0f, local.row);
    }
  }

  // Even blocks of whole tiles.
  static int64_t rows_per_block(int64_t rows) {
    const int64_t blocks = ceil_div<int64_t>(rows, kRowsPerBlock);
    return round_up<int64_t>(ceil_div(rows, blocks), kTileM);
  }

  static int64_t columns_at_once(const Matrices& w, int64_t rows, int64_t item,
                                 int64_t rows_a_column) {
    if (w.stride_col != 1) return kColumnsTurned;
    return rows <= D::kRowsStreamed ? item : kWeightRowsPerBlock / rows_a_column;
  }

  // How many rows of w13 a column of h has in one run: gate and up alternate, or the up rows are
  // apart.
  int64_t parts() const { return p.interleaved ? 2 : 1; }
  bool up_apart() const { return p.gated && !p.interleaved; }
  int64_t rows_a_column() const { return p.gated ? 2 : 1; }

  const W* w13_at(int64_t position, int64_t row) const {
    return (const W*)p.w13.data + p.plan.expert[position] * p.w13.stride_e + row * p.w13.stride_row;
  }
  const W* w2_at(int64_t position, int64_t row) const {
    return (const W*)p.w2.data + p.plan.expert[position] * p.w2.stride_e + row * p.w2.stride_row;
  }

  void phase1(int, Local& local) {
    for (WorkList::Item item = work1.draw(), then; item.columns > 0; item = then) {
      then = work1.draw();
      const int64_t position = p.plan.by_size[item.row];
      const int64_t rows = p.plan.offset[position + 1] - p.plan.offset[position];
      const int64_t begin = item.first, end = least(begin + item.columns, p.I);
      const int64_t step = columns_at_once(p.w13, rows, end - begin, rows_a_column());
      const W* after = then.columns > 0
                           ? w13_at(p.plan.by_size[then.row], parts() * then.first)
                           : w13_at(position, 0);
      for (int64_t column = begin; column < end; column += step) {
        const int64_t n = least(step, end - column);
        gate_up(position, column, n,
                column + n < end ? w13_at(position, parts() * (column + n)) : after, local);
      }
    }
  }

  // Columns [column, column + n) of h for every row of the expert.
  void gate_up(int64_t position, int64_t column, int64_t n, const W* after, Local& local) {
    const X* rows[kRowsPerBlock + kTileM];
    const int64_t up = p.I + column, stride = rows_a_column() * n, expert = p.plan.expert[position];
    const W* w = w13_at(position, parts() * column);
    const RowGroups<W> groups =
        up_apart() ? RowGroups<W>{2, {{w, n, local.c}, {w13_at(position, up), n, local.c + n}}}
                   : RowGroups<W>{1, {{w, parts() * n, local.c}}};
    load_bias(p.b13, expert, parts() * column, parts() * n, local.bias);
    if (up_apart()) load_bias(p.b13, expert, up, n, local.bias + n);
    const int64_t first = p.plan.offset[position], last = p.plan.offset[position + 1];
    const int64_t block = rows_per_block(last - first);
    for (int64_t r = first; r < last; r += block) {
      const int M = static_cast<int>(least(block, last - r));
      for (int m = 0; m < M; ++m) rows[m] = x_row(p.plan.token[r + m]);
      gemm_block<D>(rows, M, p.w13, groups, p.H, stride, p.packed, r == first, after, local);
      for (int m = 0; m < M; ++m)
        activate(local, local.c + m * stride, column, n, h + (r + m) * l.h_stride);
    }
  }

  // g (and u) -> h, in place in c, then into the row in the form that phase 2 reads.
  void activate(const Local& local, float* c, int64_t column, int64_t n, X* to) const {
    // The vector of a part (0 gate, 1 up) at column i.
    auto part = [&](const float* from, int64_t i, int m, int which) CMOE_LAMBDA {
      if (!p.interleaved) return vload(from + which * n + i, m);
      float of_part[kLanes];
      for (int j = 0; j < m; ++j) of_part[j] = from[2 * (i + j) + which];
      return vload(of_part, m);
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
    for (WorkList::Item item = work2.draw(), then; item.columns > 0; item = then) {
      then = work2.draw();
      const int64_t begin = item.first, end = least(begin + item.columns, p.H);
      const int64_t acc_stride = item.columns;
      for (int64_t i = 0; i < p.T * acc_stride; i += kLanes) vstore(local.acc + i, vset(0.0f));
      for (int64_t e = 0; e < p.plan.num_active; ++e) {
        const int64_t rows = p.plan.offset[e + 1] - p.plan.offset[e];
        const int64_t step = columns_at_once(p.w2, rows, end - begin, 1);
        const W* after =
            e + 1 < p.plan.num_active ? w2_at(e + 1, begin) : w2_at(0, then.first);
        for (int64_t column = begin; column < end; column += step) {
          const int64_t n = least(step, end - column);
          down(e, column, n, local.acc + (column - begin), acc_stride,
               column + n < end ? w2_at(e, column + n) : after, local);
        }
      }
      for (int64_t t = 0; t < p.T; ++t) {
        for (int64_t i = 0; i < end - begin; i += kLanes) {
          const int m = static_cast<int>(least<int64_t>(kLanes, end - begin - i));
          store_any(p.dtype, p.out, t * p.H + begin + i, vload(local.acc + t * acc_stride + i), m);
        }
      }
    }
  }

  // Adds an expert's columns [column, column + n), weighted, to the sums of its tokens.
  void down(int64_t position, int64_t column, int64_t n, float* acc, int64_t acc_stride,
            const W* after, Local& local) {
    const X* rows[kRowsPerBlock + kTileM];
    load_bias(p.b2, p.plan.expert[position], column, n, local.bias);
    const int64_t first = p.plan.offset[position], last = p.plan.offset[position + 1];
    const int64_t block = rows_per_block(last - first);
    const RowGroups<W> groups{1, {{w2_at(position, column), n, local.c}}};
    for (int64_t r = first; r < last; r += block) {
      const int M = static_cast<int>(least(block, last - r));
      for (int m = 0; m < M; ++m) rows[m] = h + (r + m) * l.h_stride;
      gemm_block<D>(rows, M, p.w2, groups, p.I, n, p.packed, r == first, after, local);
      for (int m = 0; m < M; ++m) {
        const V weight = vset(p.weight_on_input ? 1.0f : p.plan.weight[r + m]);
        float* sums = acc + (int64_t)p.plan.token[r + m] * acc_stride;
        const float* c = local.c + m * n;
        for (int64_t i = 0; i < n; i += kLanes) {
          const int k = static_cast<int>(least<int64_t>(kLanes, n - i));
          vstore(sums + i,
                 vfma(weight, vload(c + i, k) + vload(local.bias + i, k), vload(sums + i, k)), k);
        }
      }
    }
  }

  Local local_of(int thread) const {
    char* mine = threads_scratch + thread * l.size.per_thread;
    return Local{(float*)(mine + l.off_c), (float*)(mine + l.off_bias), (float*)(mine + l.off_acc),
                 mine + l.off_turned,      (float*)(mine + l.off_wide), (float*)(mine + l.off_row),
                 mine + l.off_packed};
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
    case DType::kBF16:
      return f.template operator()<OfBf16>();
    case DType::kFP16:
      return f.template operator()<Fma<Fp16>>();
    case DType::kFP32:
      return f.template operator()<Fma<Fp32>>();
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
  Ahead ahead{};
  for (int i = 0; i < kTileM; ++i) {
    rows[i] = x[i];
    ahead.x[i] = (const char*)x[i];
  }
  for (int r = 0; r < repeats; ++r)
    D::tile(kTileM, kTileN, rows, D::Source::narrow(&w[0][0], 512), static_cast<int>(n), c, kTileN,
            false, ahead);
}

template <class OfBf16>
constexpr Kernels kernels(const char* name) {
  return Kernels{
      name,
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
