// From top-k ids to the plan: rows grouped by expert with one stable counting sort.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "problem.h"

namespace cmoe {

// Buffers of a plan, kept between calls.
struct PlanBuffers {
  std::vector<int64_t> count, offset, cursor;
  std::vector<int32_t> expert, by_size, local, token;
  std::vector<float> weight;
  int64_t first_bad = 0, bad_id = 0;

  // ids [rows] with -1 for "none"; an id is a local expert, or an index into `map` [num_ids] where
  // given. Returns false, with first_bad and bad_id set, where an id is outside [-1, num_ids).
  template <class Id>
  bool build(const Id* ids, int64_t ids_stride_t, int64_t ids_stride_k, const float* weights,
             int64_t w_stride_t, int64_t w_stride_k, int64_t T, int64_t K, const int32_t* map,
             int64_t num_ids, int64_t E) {
    count.assign(E, 0);
    local.resize(T * K);
    for (int64_t t = 0, r = 0; t < T; ++t) {
      for (int64_t k = 0; k < K; ++k, ++r) {
        int64_t id = ids[t * ids_stride_t + k * ids_stride_k];
        if (id < -1 || id >= num_ids) {
          first_bad = r;
          bad_id = id;
          return false;
        }
        if (id >= 0 && map != nullptr) id = map[id];
        if (id < -1 || id >= E) {
          first_bad = -1;
          bad_id = id;
          return false;
        }
        local[r] = static_cast<int32_t>(id);
        if (id >= 0) ++count[id];
      }
    }
    expert.clear();
    offset.assign(1, 0);
    for (int64_t e = 0; e < E; ++e) {
      if (count[e] == 0) continue;
      expert.push_back(static_cast<int32_t>(e));
      offset.push_back(offset.back() + count[e]);
      count[e] = offset[offset.size() - 2];  // from here on: where the next row of e goes
    }
    token.resize(offset.back());
    weight.resize(offset.back());
    for (int64_t t = 0, r = 0; t < T; ++t) {
      for (int64_t k = 0; k < K; ++k, ++r) {
        if (local[r] < 0) continue;
        const int64_t at = count[local[r]]++;
        token[at] = static_cast<int32_t>(t);
        weight[at] = weights[t * w_stride_t + k * w_stride_k];
      }
    }
    by_size.resize(expert.size());
    for (size_t i = 0; i < by_size.size(); ++i) by_size[i] = static_cast<int32_t>(i);
    std::stable_sort(by_size.begin(), by_size.end(), [&](int32_t a, int32_t b) {
      return offset[a + 1] - offset[a] > offset[b + 1] - offset[b];
    });
    return true;
  }

  Plan plan() const {
    Plan p;
    p.num_active = static_cast<int64_t>(expert.size());
    p.expert = expert.data();
    p.offset = offset.data();
    p.by_size = by_size.data();
    p.token = token.data();
    p.weight = weight.data();
    return p;
  }
};

}  // namespace cmoe
