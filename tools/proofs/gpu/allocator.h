// The sizes and blocks of torch's caching allocator of one CUDA device. It takes segments of the device, cuts them into blocks,
// each for one stream, and joins free neighbours. Addresses are numbers here: no memory is behind them.
//
// Of c10/cuda/CUDACachingAllocator.cpp with its default settings, or with expandable_segments:True where
// PYTORCH_CUDA_ALLOC_CONF says so, as megapipe sets it: then each stream has one segment of small and one of large blocks,
// which grows, and every rest of a block is cut off. A block that another stream has recorded is free at once here, where CUDA
// waits for that stream's event: the peak is a lower bound by such blocks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <utility>

class Allocator {
 public:
  int64_t limit = 0;  // bytes that the device has; 0 for no limit
  int64_t allocated = 0, allocated_peak = 0, reserved = 0, reserved_peak = 0;
  int kernels = 0;  // that run: what comes and goes within one is in registers, and in no peak
  bool names = false;  // each new peak is noted block by block
  std::map<std::string, std::pair<int64_t, int64_t>> held;  // at the peak, by name: bytes and number of blocks

  // Returns the address of a block; 0 for no bytes, -1 if the device has no room. name: of what it is for.
  int64_t allocate(int stream, int64_t bytes, const std::string& name = "") {
    if (bytes == 0) return 0;
    if (expands < 0) expands = set_to_expand();
    const int64_t size = rounded(bytes, kLeast);
    const bool small = size <= kSmall;
    auto it = fitting(small, stream, size);
    if (it == free_.end()) {
      const int64_t segment = wanted(small, stream, size);
      if (limit && reserved + segment > limit) release();
      if (limit && reserved + segment > limit) return -1;
      expands ? grow(small, stream, segment) : take(small, stream, segment);
      it = fitting(small, stream, size);
    }
    const int64_t at = std::get<3>(*it);
    free_.erase(it);
    auto& block = blocks_.at(at);
    block.free = false;
    block.name = name;
    const int64_t left = block.size - size;
    if (small || expands ? left >= kLeast : left > kSmall) {
      block.size = size;
      put({block.segment, left, stream, small, true, ""}, at + size);
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
    it->second.name.clear();
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

  std::string name_of(int64_t at) const {
    const auto it = blocks_.find(at);
    return it == blocks_.end() ? "" : it->second.name;
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
    std::string name;
  };
  using Blocks = std::map<int64_t, Block>;
  using Free = std::set<std::tuple<bool, int, int64_t, int64_t>>;  // small, stream, size, address: the best fit is the next one

  // torch reads its settings at the first allocation.
  static int set_to_expand() {
    const char* settings = std::getenv("PYTORCH_CUDA_ALLOC_CONF");
    return settings && std::string(settings).find("expandable_segments:True") != std::string::npos;
  }

  void note() {
    if (kernels || allocated <= allocated_peak) return;
    allocated_peak = allocated;
    if (!names) return;
    held.clear();
    for (const auto& [at, block] : blocks_) {
      if (block.free) continue;
      auto& [bytes, count] = held[block.name];
      bytes += block.size;
      ++count;
    }
  }

  // Returns the bytes by which memory of the device has to grow for a block that fits nowhere.
  int64_t wanted(bool small, int stream, int64_t size) {
    if (!expands) return small ? kSmallSegment : size < kLarge ? kLargeSegment : rounded(size, kStep);
    const int64_t page = small ? kSmallSegment : kLargeSegment;
    const auto last = last_of(small, stream);
    const int64_t there = last != blocks_.end() && last->second.free ? last->second.size : 0;
    return rounded(size - there, page);
  }

  // Segments that grow lie so far apart that none reaches the next.
  static int64_t begin_of(bool small, int stream) { return (2 * int64_t(stream) + small + 1) << 44; }

  Blocks::iterator last_of(bool small, int stream) {
    auto it = blocks_.lower_bound(begin_of(small, stream) + (int64_t(1) << 44));
    if (it == blocks_.begin()) return blocks_.end();
    return (--it)->second.segment == begin_of(small, stream) ? it : blocks_.end();
  }

  void grow(bool small, int stream, int64_t size) {
    const int64_t segment = begin_of(small, stream);
    const auto last = last_of(small, stream);
    const bool joins = last != blocks_.end() && last->second.free;
    if (joins) {
      forget(last);
      last->second.size += size;
      remember(last);
    } else {
      const int64_t at = last == blocks_.end() ? segment : last->first + last->second.size;
      put({segment, size, stream, small, true, ""}, at);
    }
    segments_[segment] += size;
    reserved += size;
    reserved_peak = std::max(reserved_peak, reserved);
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
    put({next_, size, stream, small, true, ""}, next_);
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
  int expands = -1;
};
