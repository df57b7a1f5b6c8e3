// How a weight format meets x in a register tile. Included by engine.h inside its namespace.
//
// A dot D names the element types W (weights in memory) and X (activations in scratch), the chunk of K that one
// step takes, the tile shape, and tile(). A new weight format is a struct Format with load(p) / load(p, n): one
// chunk of K as kHalves vectors of fp32 in an order that x is stored in too.

inline V load_any(DType t, const void* p, int64_t at, int n) {
  if (t == DType::kFP32) return vload((const float*)p + at, n);
  return t == DType::kBF16 ? load_bf16((const uint16_t*)p + at, n) : load_fp16((const uint16_t*)p + at, n);
}

inline void store_any(DType t, void* p, int64_t at, V v, int n) {
  if (t == DType::kFP32) return vstore((float*)p + at, v, n);
  return t == DType::kBF16 ? store_bf16((uint16_t*)p + at, v, n) : store_fp16((uint16_t*)p + at, v, n);
}

inline void fetch(const Ahead& ahead, int64_t at_bytes) {
  const char* q = ahead.p + at_bytes;
  for (int i = 0; i < ahead.rows; ++i, q += ahead.stride_bytes) __builtin_prefetch(q, 0, 2);
}

// Calls f.template operator()<MT, NT>() for run-time mt in [1, MaxM], nt in {6, 4, 2, 1} up to MaxN.
template <int MaxM, int MaxN, class F>
inline void dispatch_tile(int mt, int nt, F&& f) {
  auto row = [&]<int MT>() {
    if constexpr (MaxN >= 6) {
      if (nt == 6) return f.template operator()<MT, 6>();
    }
    if (nt == 4) return f.template operator()<MT, 4>();
    if (nt == 2) return f.template operator()<MT, 2>();
    return f.template operator()<MT, 1>();
  };
  if constexpr (MaxM >= 4) {
    if (mt == 4) return row.template operator()<4>();
  }
  if (mt == 3) return row.template operator()<3>();
  if (mt == 2) return row.template operator()<2>();
  return row.template operator()<1>();
}

template <class W>
struct Panel {
  const W* w;
  int64_t stride;
};

// Weights as they lie.
template <class W_>
struct InPlace {
  const W_* base;
  int64_t stride;
  InPlace(const Matrices& w, const W_* b, int64_t, int64_t k0, int64_t, int, char*)
      : base(b + k0), stride(w.stride_row) {}
  Panel<W_> panel(int64_t n, int) const { return {base + n * stride, stride}; }
};

#ifdef CMOE_NATIVE_BF16
// vdpbf16ps: two bf16 products a lane and step, x used as it lies.
struct NativeBf16 {
  using W = uint16_t;
  using X = uint16_t;
  using Source = InPlace<W>;
  static constexpr int kChunk = 2 * kLanes, kMT = 4, kNT = 6;
  static constexpr int64_t kBlockK = 2048;  // a panel of six rows and a tile of four fit L1
  static constexpr bool kConvertX = false;

  static size_t panel_bytes(const Problem&) { return 0; }
  static int panel_rows(int64_t n) { return n >= 6 ? 6 : n >= 4 ? 4 : n >= 2 ? 2 : 1; }

  template <int MT, int NT>
  static void tile_of(const X* const* rows, Panel<W> w, int n, float* c, int64_t stride, bool add, Ahead ahead) {
    V acc[MT][NT];
    const X* x[MT];
#pragma GCC unroll 8
    for (int i = 0; i < MT; ++i) {
      x[i] = rows[i];
#pragma GCC unroll 8
      for (int j = 0; j < NT; ++j) acc[i][j] = vset(0.0f);
    }
    auto step = [&](auto load, int k) CMOE_LAMBDA {
      __m512bh xv[MT];
#pragma GCC unroll 8
      for (int i = 0; i < MT; ++i) xv[i] = (__m512bh)load(x[i] + k);
#pragma GCC unroll 8
      for (int j = 0; j < NT; ++j) {
        const __m512bh wv = (__m512bh)load(w.w + j * w.stride + k);
#pragma GCC unroll 8
        for (int i = 0; i < MT; ++i) acc[i][j] = (V)_mm512_dpbf16_ps((__m512)acc[i][j], wv, xv[i]);
      }
    };
    int k = 0;
    for (; k + kChunk <= n; k += kChunk) {
      fetch(ahead, k * sizeof(W));
      step([](const uint16_t* p) CMOE_LAMBDA { return load_pairs(p); }, k);
    }
    if (k < n) {
      const int rest = n - k;
      step([rest](const uint16_t* p) CMOE_LAMBDA { return load_pairs(p, rest); }, k);
    }
    reduce_tile<MT, NT>(acc, c, stride, add);
  }

  static void tile(int mt, int nt, const X* const* rows, Panel<W> w, int n, float* c, int64_t stride, bool add,
                   Ahead ahead) {
    dispatch_tile<kMT, kNT>(mt, nt, [&]<int MT, int NT>() { tile_of<MT, NT>(rows, w, n, c, stride, add, ahead); });
  }

  static void store_row(X* to, const float* row, int64_t n) {
    for (int64_t i = 0; i < n; i += kLanes) store_bf16(to + i, vload(row + i));
  }
  static void store_columns(X* to, int64_t at, const float* from, int64_t n, int64_t end) {
    for (int64_t i = 0; i < n; i += kLanes) {
      const int m = static_cast<int>(least<int64_t>(kLanes, n - i));
      store_bf16(to + at + i, vload(from + i, m), m);
    }
    for (int64_t i = at + n; i < end; ++i) to[i] = 0;
  }
};
#endif
