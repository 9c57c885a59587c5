// The sizes and blocks of torch's caching allocator of one CUDA device. It takes segments of the device, cuts them into blocks,
// each for one stream, and joins free neighbours. Addresses are numbers here: no memory is behind them.
//
// Of c10/cuda/CUDACachingAllocator.cpp with its default settings. A block that another stream has recorded is free at once
// here, where CUDA waits for that stream's event: the peak is a lower bound by such blocks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <tuple>

class Allocator {
 public:
  int64_t limit = 0;  // bytes that the device has; 0 for no limit
  int64_t allocated = 0, allocated_peak = 0, reserved = 0, reserved_peak = 0;
  int kernels = 0;  // that run: what comes and goes within one is in registers, and in no peak

  // Returns the address of a block; 0 for no bytes, -1 if the device has no room.
  int64_t allocate(int stream, int64_t bytes) {
    if (bytes == 0) return 0;
    const int64_t size = rounded(bytes, kLeast);
    const bool small = size <= kSmall;
    auto it = fitting(small, stream, size);
    if (it == free_.end()) {
      const int64_t segment = small ? kSmallSegment : size < kLarge ? kLargeSegment : rounded(size, kStep);
      if (limit && reserved + segment > limit) release();
      if (limit && reserved + segment > limit) return -1;
      take(small, stream, segment);
      it = fitting(small, stream, size);
    }
    const int64_t at = std::get<3>(*it);
    free_.erase(it);
    auto& block = blocks_.at(at);
    block.free = false;
    const int64_t left = block.size - size;
    if (small ? left >= kLeast : left > kSmall) {
      block.size = size;
      put({block.segment, left, stream, small, true}, at + size);
    }
    allocated += block.size;
    note();
    return at;
  }

  void free(int64_t at) {
    if (at <= 0) return;
    auto it = blocks_.find(at);
    allocated -= it->second.size;
    it->second.free = true;
    auto next = std::next(it);
    if (next != blocks_.end()) join(it, next);
    if (it != blocks_.begin()) {
      auto previous = std::prev(it);
      if (previous->second.free && previous->second.segment == it->second.segment) {
        forget(previous);
        previous->second.size += it->second.size;
        blocks_.erase(it);
        it = previous;
      }
    }
    remember(it);
  }

  void begin() { ++kernels; }
  void end() {
    --kernels;
    note();
  }

  int64_t blocks() const {
    return std::count_if(blocks_.begin(), blocks_.end(), [](const auto& block) { return !block.second.free; });
  }

  // Gives segments without a used block back to the device, as empty_cache does.
  void release() {
    for (auto it = blocks_.begin(); it != blocks_.end();) {
      auto& block = it->second;
      if (block.free && it->first == block.segment && block.size == segments_.at(block.segment)) {
        reserved -= block.size;
        forget(it);
        segments_.erase(block.segment);
        it = blocks_.erase(it);
      } else {
        ++it;
      }
    }
  }

 private:
  static constexpr int64_t kLeast = 512, kSmall = 1 << 20, kStep = 2 << 20, kSmallSegment = 2 << 20;
  static constexpr int64_t kLarge = 10 << 20, kLargeSegment = 20 << 20;

  struct Block {
    int64_t segment, size;
    int stream;
    bool small, free;
  };
  using Blocks = std::map<int64_t, Block>;
  using Free = std::set<std::tuple<bool, int, int64_t, int64_t>>;  // small, stream, size, address: the best fit is the next one

  void note() {
    if (kernels == 0) allocated_peak = std::max(allocated_peak, allocated);
  }

  static int64_t rounded(int64_t bytes, int64_t to) { return (bytes + to - 1) / to * to; }

  Free::iterator fitting(bool small, int stream, int64_t size) {
    auto it = free_.lower_bound({small, stream, size, 0});
    const bool fits = it != free_.end() && std::get<0>(*it) == small && std::get<1>(*it) == stream;
    return fits ? it : free_.end();
  }

  void remember(Blocks::iterator it) {
    free_.insert({it->second.small, it->second.stream, it->second.size, it->first});
  }
  void forget(Blocks::iterator it) { free_.erase({it->second.small, it->second.stream, it->second.size, it->first}); }

  void put(Block block, int64_t at) { remember(blocks_.insert_or_assign(at, block).first); }

  void take(bool small, int stream, int64_t size) {
    put({next_, size, stream, small, true}, next_);
    segments_[next_] = size;
    next_ += size;
    reserved += size;
    reserved_peak = std::max(reserved_peak, reserved);
  }

  void join(Blocks::iterator it, Blocks::iterator next) {
    if (!next->second.free || next->second.segment != it->second.segment) return;
    forget(next);
    it->second.size += next->second.size;
    blocks_.erase(next);
  }

  Blocks blocks_;
  Free free_;
  std::map<int64_t, int64_t> segments_;
  int64_t next_ = kStep;
};
