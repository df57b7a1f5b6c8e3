// Scratch memory that outlives a call: one slot for each call in flight, kept at its largest size.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "routing_plan.h"

namespace cmoe {

constexpr size_t kHugePage = size_t{2} << 20;

struct Slot {
  PlanBuffers plan;
  char* data = nullptr;
  size_t bytes = 0;

  Slot() = default;
  Slot(const Slot&) = delete;
  ~Slot() { std::free(data); }

  // At least `need` bytes, with no promise about what they hold.
  char* reserve(size_t need) {
    if (need <= bytes) return data;
    std::free(data);
    const size_t unit = need >= kHugePage ? kHugePage : 4096;
    bytes = (need + unit - 1) / unit * unit;
    data = static_cast<char*>(std::aligned_alloc(unit, bytes));
    if (data == nullptr) {
      bytes = 0;
      throw std::bad_alloc();
    }
#if defined(__linux__)
    if (unit == kHugePage) madvise(data, bytes, MADV_HUGEPAGE);  // rows of h are read far apart
#endif
    return data;
  }
};

class Slots {
 public:
  // A slot of one's own until the lease ends.
  class Lease {
   public:
    Lease(Slots& from, std::unique_ptr<Slot> slot) : from_(from), slot_(std::move(slot)) {}
    Lease(const Lease&) = delete;
    ~Lease() { from_.give_back(std::move(slot_)); }
    Slot* operator->() { return slot_.get(); }

   private:
    Slots& from_;
    std::unique_ptr<Slot> slot_;
  };

  Lease lease() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (free_.empty()) return Lease(*this, std::make_unique<Slot>());
    std::unique_ptr<Slot> slot = std::move(free_.back());
    free_.pop_back();
    return Lease(*this, std::move(slot));
  }

  // Frees what no call uses; returns how many bytes that were.
  int64_t release() {
    std::lock_guard<std::mutex> lock(mutex_);
    int64_t bytes = 0;
    for (const auto& slot : free_) bytes += static_cast<int64_t>(slot->bytes);
    free_.clear();
    return bytes;
  }

 private:
  void give_back(std::unique_ptr<Slot> slot) {
    std::lock_guard<std::mutex> lock(mutex_);
    free_.push_back(std::move(slot));
  }

  std::mutex mutex_;
  std::vector<std::unique_ptr<Slot>> free_;
};

}  // namespace cmoe
