// "cuda" devices of a torch that was built for CPUs. Their tensors have memory of the host, and their operations are those of
// a CPU on the same bytes, so every branch that asks for the device is the one of a GPU.
//
// Without `judge` there is one device, whose streams and events do nothing. With it there are several. Streams have vector
// clocks, as in torch.cuda._sanitizer: two accesses of the same bytes, one of which writes, must be ordered by events or waits
// of the host. Copies that do not block run as late as events allow, and until then what they write is poison, as is all
// memory that is new or freed. What a GPU would refuse, or compute wrongly without a word, is noted as a fault.
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/fill.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/autograd/function.h>
#include <torch/library.h>

#include "allocator.h"

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <limits>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

namespace {
using at::Tensor, c10::Device, c10::DeviceIndex, c10::DeviceType, c10::IValue, c10::Storage, c10::Stream;
using Clock = std::vector<uint64_t>;
constexpr int kDevices = 8;
constexpr int kPoison = 0xff;  // a NaN in every floating type
const Device kHost(DeviceType::CPU);

Device gpu(int index) { return Device(DeviceType::CUDA, static_cast<DeviceIndex>(index)); }

bool judging = false, late = true;
// Runs that are judged, so far. Ranks of one that has failed may go on beside the next: what they free is no fault of it.
int turn = 0;
std::recursive_mutex mutex;
thread_local int locks = 0;
thread_local std::vector<std::shared_ptr<void>> ended;

// Holds the mutex. Whoever lets go of a tensor may have to wait for Python's lock, whose owner may wait for the mutex: what
// is let go of meanwhile goes to `ended`, and from there once the mutex is free.
struct Lock {
  Lock() {
    mutex.lock();
    ++locks;
  }
  ~Lock() {
    decltype(ended) gone;
    if (--locks == 0) gone.swap(ended);
    mutex.unlock();
  }
};

template <typename T>
void drop_later(T&& value) {
  ended.push_back(std::make_shared<std::decay_t<T>>(std::forward<T>(value)));
}

std::vector<std::string> faults;
void (*tell)(const char*) = nullptr;  // who hears of operations for which the host waits

void fault(const std::string& text) {
  Lock lock;
  if (faults.size() < 200) faults.push_back(text);
}

// ---- Streams ----

// A copy that has not run yet.
struct Job {
  uint64_t number;
  std::function<void()> run;
};

// Bytes of page-locked memory that a copy of the stream reads: the host must leave them as they are until it has waited.
struct Reading {
  Storage storage;
  size_t offset;
  std::vector<char> bytes;
};

void check(const Reading& reading) {
  if (std::memcmp(static_cast<const char*>(reading.storage.data()) + reading.offset, reading.bytes.data(),
                  reading.bytes.size()))
    fault("host: page-locked memory was written before the copy that reads it was waited for");
}

struct Lane {
  int device = 0;
  Clock clock;
  std::deque<Job> jobs;
  uint64_t asked = 0;
  std::vector<Reading> readings;
};

std::vector<Lane> lanes;             // by number; that of a device's default stream is the device's
std::vector<Clock> known(kDevices);  // what has ended when the host has last waited for a device
std::vector<int> streams(kDevices);  // the number of streams of each device

void merge(Clock& into, const Clock& other) {
  if (into.size() < other.size()) into.resize(other.size());
  for (size_t i = 0; i < other.size(); ++i) into[i] = std::max(into[i], other[i]);
}

// A stream's number tells its device. Ranks that are processes have a device each, so a stream has one number in the clocks of
// all of them. Streams in between, of other devices, are made here too.
int new_lane(int device) {
  const int number = device + kDevices * streams[device]++;
  while (lanes.size() <= static_cast<size_t>(number)) {
    Lane lane;
    lane.device = static_cast<int>(lanes.size()) % kDevices;
    lane.clock.resize(lanes.size() + 1);
    lane.clock[lanes.size()] = 1;
    lanes.push_back(std::move(lane));
  }
  merge(lanes[number].clock, known[device]);
  return number;
}

void start() {
  if (lanes.empty()) for (int i = 0; i < kDevices; ++i) new_lane(i);
}

thread_local int device_now = 0, context_of = -1;
thread_local std::vector<int> stream_now(kDevices, -1);

int lane_of(const Stream& stream) { return stream.id() == 0 ? stream.device_index() : static_cast<int>(stream.id()); }
int lane_now(int device) { return stream_now[device] < 0 ? device : stream_now[device]; }
Stream stream_of(int lane) {
  return Stream(Stream::UNSAFE, gpu(lanes[lane].device), lane < kDevices ? 0 : lane);
}

// A thread serves one rank, which has one device.
void touch(int device) {
  if (!judging) return;
  if (context_of < 0) context_of = device;
  if (context_of != device)
    fault("device: a thread of device " + std::to_string(context_of) + " makes a context on device " +
          std::to_string(device));
}

// Runs the copies of a stream up to one.
void catch_up(int lane, uint64_t until) {
  Lock lock;
  while (!lanes[lane].jobs.empty() && lanes[lane].jobs.front().number <= until) {
    auto job = std::move(lanes[lane].jobs.front());
    lanes[lane].jobs.pop_front();
    job.run();
    drop_later(std::move(job));
  }
}

struct Event {
  int lane = -1;
  uint64_t jobs = 0;
  Clock clock;
  double at = 0;
};

double now_ms() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

Event recorded(int lane) {
  Lock lock;
  auto& own = lanes[lane];
  Event event{lane, own.asked, own.clock, now_ms()};
  ++own.clock[lane];
  return event;
}

void wait_for(int lane, const Event& event) {
  Lock lock;
  if (event.lane < 0) return;  // never recorded: CUDA does not wait either
  if (event.lane != lane) catch_up(event.lane, event.jobs);
  merge(lanes[lane].clock, event.clock);
}

// The host waits for an event: whatever it asks for from here on comes later.
void host_waits(const Event& event) {
  Lock lock;
  if (event.lane < 0) return;
  catch_up(event.lane, event.jobs);
  const int device = lanes[event.lane].device;
  merge(known[device], event.clock);
  for (auto& lane : lanes) if (lane.device == device) merge(lane.clock, event.clock);
  auto& readings = lanes[event.lane].readings;
  for (const auto& reading : readings) check(reading);
  drop_later(std::move(readings));
  readings.clear();
}

void synchronize(int device) {
  Lock lock;
  start();
  for (size_t i = 0; i < lanes.size(); ++i)
    if (lanes[i].device == device) host_waits(recorded(static_cast<int>(i)));
}

struct FakeGuard final : c10::impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device exchangeDevice(Device device) const override {
    const Device before = gpu(device_now);
    device_now = device.index();
    return before;
  }
  Device getDevice() const override { return gpu(device_now); }
  void setDevice(Device device) const override { device_now = device.index(); }
  void uncheckedSetDevice(Device device) const noexcept override { device_now = device.index(); }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }
  Stream getStream(Device device) const noexcept override {
    Lock lock;
    start();
    return stream_of(lane_now(device.has_index() ? device.index() : device_now));
  }
  Stream getDefaultStream(Device device) const override { return Stream(Stream::DEFAULT, device); }
  Stream getNewStream(Device device, int) const override {
    Lock lock;
    start();
    return stream_of(new_lane(device.index()));
  }
  Stream exchangeStream(Stream stream) const noexcept override {
    const Stream before = getStream(stream.device());
    stream_now[stream.device_index()] = lane_of(stream);
    return before;
  }
  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    if (!judging) return;
    if (!*event) *event = new Event;
    *static_cast<Event*>(*event) = recorded(lane_of(stream));
  }
  void block(void* event, const Stream& stream) const override {
    if (judging && event) wait_for(lane_of(stream), *static_cast<Event*>(event));
  }
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}
};

// ---- Memory ----

struct Access {
  size_t begin, end;
  int lane;
  uint64_t at;
  bool writes;
  std::string name;
};

// Memory of a device.
struct Block {
  Storage bytes;
  int device, lane;
  int64_t at;  // of the allocator
  std::vector<Access> accesses;
  std::unordered_set<int> recorded;
  int made = turn;
};

std::unordered_map<c10::StorageImpl*, c10::weak_intrusive_ptr<c10::StorageImpl>> lending;  // by the host's, the device's

std::vector<Allocator> memories(kDevices);
void (*ask)() = nullptr;           // asked where in the program the calling thread is, before each operation
thread_local std::string where;    // what it has answered
thread_local std::string doing;    // the operation

// The name of a block that is about to be allocated.
std::string name_of_block(const Tensor& x) {
  std::string name = doing;
  if (x.defined()) {
    name += " " + std::string(c10::toString(x.scalar_type())) + " [";
    for (const auto size : x.sizes()) name += std::to_string(size) + ",";
    name += "]";
  }
  if (const auto node = torch::autograd::get_current_node()) name += " in " + node->name();
  return name + " " + where;
}

// Returns the block of some bytes on the stream that is current. Raises what torch raises where there is no room.
int64_t allocated(int device, size_t bytes, const Tensor& x = {}) {
  auto& memory = memories[device];
  const std::string name = memory.names ? name_of_block(x) : "";
  const int64_t at = memory.allocate(lane_now(device), static_cast<int64_t>(bytes), name);
  if (at < 0)
    C10_THROW_ERROR(OutOfMemoryError, "CUDA out of memory. Tried to allocate " + std::to_string(bytes) + " bytes. GPU " +
                                          std::to_string(device) + " has a total capacity of " +
                                          std::to_string(memory.limit) + " bytes of which " +
                                          std::to_string(memory.limit - memory.reserved) + " bytes are free.");
  return at;
}

bool before(const Access& access, const Clock& clock) {
  return clock.size() > static_cast<size_t>(access.lane) && clock[access.lane] >= access.at;
}

void forget(void* kept) {
  auto* block = static_cast<Block*>(kept);
  {
    Lock lock;
    const auto it = lending.find(block->bytes.unsafeGetStorageImpl());
    if (it != lending.end() && it->second.expired()) lending.erase(it);
    const std::string name = memories[block->device].name_of(block->at);
    memories[block->device].free(block->at);
    if (judging && block->lane >= 0 && block->made == turn) {
      const auto& clock = lanes[block->lane].clock;
      for (const auto& access : block->accesses)
        if (access.lane != block->lane && !block->recorded.count(access.lane) && !before(access, clock)) {
          fault("memory: freed while " + access.name + " of stream " + std::to_string(access.lane) +
                " may still use it, without record_stream" + (name.empty() ? "" : ": " + name));
          break;
        }
      // A copy that has not run may still use it; the allocator waits for its end.
      if (block->bytes.use_count() == 1) std::memset(block->bytes.mutable_data(), kPoison, block->bytes.nbytes());
    }
  }
  delete block;
}

Block* block_of(const Storage& storage) {
  return storage.data_ptr().get_deleter() == &forget ? static_cast<Block*>(storage.data_ptr().get_context()) : nullptr;
}

// The device's storage that was lent these bytes, if it is still there.
Storage lent_before(const Storage& from) {
  c10::weak_intrusive_ptr<c10::StorageImpl> there(c10::intrusive_ptr<c10::StorageImpl>{});
  {
    Lock lock;
    start();
    if (auto it = lending.find(from.unsafeGetStorageImpl()); it != lending.end()) there = it->second;
  }
  return Storage(there.lock());  // may wait for Python's lock
}

// The same bytes as a device's. Views share one storage.
Storage lent(const Storage& from, int device, const Tensor& x = {}) {
  if (auto there = lent_before(from)) return there;
  Lock lock;
  auto* impl = from.unsafeGetStorageImpl();
  auto* block = new Block{from, device, judging ? lane_now(device) : -1, allocated(device, from.nbytes(), x), {}, {}};
  c10::DataPtr bytes(const_cast<void*>(from.data()), block, &forget, gpu(device));
  Storage made(Storage::use_byte_size_t(), from.nbytes(), std::move(bytes), c10::GetCPUAllocator(), true);
  lending.insert_or_assign(impl, c10::weak_intrusive_ptr<c10::StorageImpl>(
                                     c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(made.unsafeGetStorageImpl())));
  return made;
}

Storage of_host(const Storage& from) {
  auto* block = block_of(from);
  return block ? block->bytes : from;
}

Tensor tensor_of(const Tensor& x, Storage storage, c10::DispatchKey key) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), x.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_storage_offset(x.storage_offset());
  impl->set_sizes_and_strides(x.sizes(), x.strides());
  if (x.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return made;
}

Tensor on_device(const Tensor& x, int device) {
  return tensor_of(x, lent(x.storage(), device, x), c10::DispatchKey::CUDA);
}
Tensor on_host(const Tensor& x) { return tensor_of(x, of_host(x.storage()), c10::DispatchKey::CPU); }

// First and last byte of a tensor in its storage.
std::pair<size_t, size_t> reach(const Tensor& x) {
  if (x.numel() == 0) return {0, 0};
  int64_t last = x.storage_offset();
  for (int64_t i = 0; i < x.dim(); ++i) last += (x.size(i) - 1) * x.stride(i);
  return {x.storage_offset() * x.itemsize(), (last + 1) * x.itemsize()};
}

std::unordered_map<const void*, Block> locked;  // page-locked memory of the host, by its address

// A stream reads or writes a tensor of the device, or page-locked memory.
void use(const Tensor& x, bool writes, int lane, const std::string& name) {
  if (!judging) return;
  auto* block = block_of(x.storage());
  if (!x.is_cuda()) {
    Lock lock;
    const auto it = locked.find(x.storage().data());
    block = it == locked.end() ? nullptr : &it->second;
  }
  if (!block || block->made != turn) return;
  const auto [begin, end] = reach(x);
  if (begin == end) return;
  Lock lock;
  const auto& clock = lanes[lane].clock;
  std::vector<Access> left;
  for (auto& other : block->accesses) {
    const bool meets = other.begin < end && begin < other.end;
    const bool ordered = other.lane == lane || before(other, clock);
    if (meets && !ordered && (writes || other.writes))
      fault("race: " + name + (writes ? " writes" : " reads") + " on stream " + std::to_string(lane) + " what " +
            other.name + (other.writes ? " writes" : " reads") + " on stream " + std::to_string(other.lane) + ", " +
            std::to_string(end - begin) + " bytes");
    const bool within = begin <= other.begin && other.end <= end;
    // What this access comes after, whoever comes after this one comes after too.
    if (!(within && ordered && (writes || (!other.writes && other.lane == lane)))) left.push_back(std::move(other));
  }
  left.push_back({begin, end, lane, clock[lane], writes, name});
  block->accesses = std::move(left);
}

struct Pinned final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto made = c10::GetCPUAllocator()->allocate(bytes);
    void* at = made.get();
    Lock lock;
    if (at) locked[at] = {{}, 0, 0, 0, {}, {}};
    return {at, made.release_context(), [](void* p) {
              Lock lock;
              locked.erase(p);
              c10::GetCPUAllocator()->raw_deleter()(p);
            }, kHost};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

bool is_locked(const void* at) {
  Lock lock;
  return locked.count(at) > 0;
}

struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return false; }
  DeviceIndex deviceCount() const override { return kDevices; }
  DeviceIndex current_device() const override { return device_now; }
  DeviceIndex getCurrentDevice() const override { return device_now; }
  void setCurrentDevice(DeviceIndex device) const override { device_now = device; }
  DeviceIndex exchangeDevice(DeviceIndex device) const override { return std::exchange(device_now, device); }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return std::exchange(device_now, device); }
  int getNumGPUs() const override { return kDevices; }
  const at::Generator& getDefaultGenerator(DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
  at::Generator getNewGenerator(DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  at::Allocator* getPinnedMemoryAllocator() const override {
    static Pinned pinned;
    return &pinned;
  }
  bool isPinnedPtr(const void* at) const override { return is_locked(at); }
  Device getDeviceFromPtr(void*) const override { return gpu(device_now); }
};

// ---- Operations ----

template <typename Change>
IValue changed(const IValue& value, Change change) {
  if (value.isTensor()) return value.toTensor().defined() ? IValue(change(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<Tensor> all;
    for (const Tensor& x : value.toTensorVector()) all.push_back(change(x));
    return all;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> all;
    for (const auto& x : value.toOptionalTensorVector()) all.push_back(x ? std::optional<Tensor>(change(*x)) : x);
    return all;
  }
  return value;
}

void poison(const Tensor& x) {  // of the host
  if (x.numel() == 0) return;
  if (x.is_floating_point()) const_cast<Tensor&>(x).fill_(std::numeric_limits<double>::quiet_NaN());
  else if (x.scalar_type() == at::kByte) const_cast<Tensor&>(x).fill_(kPoison);
  else if (x.scalar_type() != at::kBool) const_cast<Tensor&>(x).fill_(-1);
}

struct Given {
  Tensor host, own;
  bool writes;
};

Reading read_by(const Tensor& from) {
  const auto [begin, end] = reach(from);
  const char* bytes = static_cast<const char*>(from.storage().data());
  return {from.storage(), begin, std::vector<char>(bytes + begin, bytes + end)};
}

// A copy of which the host does not wait for the end runs when somebody waits for it.
void put_off(const Tensor& to, const Tensor& from, const Tensor& pinned, int lane) {
  Lock lock;
  auto& own = lanes[lane];
  std::optional<Reading> reading;
  if (pinned.defined() && pinned.is_same(from)) reading = read_by(from);
  ++own.asked;
  poison(to);
  own.jobs.push_back({own.asked, [to, from, reading] {
                        c10::impl::ExcludeDispatchKeyGuard below(c10::autograd_dispatch_keyset);
                        if (reading) check(*reading);
                        const_cast<Tensor&>(to).copy_(from);
                      }});
}

// Any operation of the device.
void run(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const std::string& name = schema.name();
  const size_t first = stack->size() - schema.arguments().size();
  if (ask) {
    ask();
    doing = name.substr(name.rfind(':') + 1);
  }
  int device = -1;
  bool crosses = false;
  for (size_t i = first; i < stack->size(); ++i)
    changed((*stack)[i], [&](const Tensor& x) {
      if (x.is_cuda() && device < 0) device = x.device().index();
      return x;
    });
  if (name == "aten::record_stream") {
    const auto& x = (*stack)[first].toTensor();
    if (auto* block = block_of(x.storage())) {
      Lock lock;
      block->recorded.insert(lane_of((*stack)[first + 1].toStream()));
    }
    torch::jit::drop(*stack, 2);
    return;
  }
  std::vector<Given> given;
  for (size_t i = first; i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isDevice()) {
      if (device < 0) device = value.toDevice().has_index() ? value.toDevice().index() : device_now;
      value = kHost;
    }
    if (value.isStorage()) {
      if (device < 0) device = value.toStorage().device().index();
      value = of_host(value.toStorage());
    }
    const auto* alias = schema.arguments()[i - first].alias_info();
    value = changed(value, [&](const Tensor& x) {
      given.push_back({x.is_cuda() ? on_host(x) : x, x, alias && alias->isWrite()});
      return given.back().host;
    });
  }
  if (device < 0) device = device_now;
  if (!judging) device = 0;
  static const std::unordered_set<std::string> waits{"aten::_local_scalar_dense", "aten::nonzero", "aten::equal",
                                                     "aten::masked_select", "aten::_unique2"};
  static const std::unordered_set<std::string> mixes{"aten::copy_", "aten::index", "aten::index_put_", "aten::_index_put_impl_",
                                                     "aten::set_"};
  // torch waits for the stream behind a copy between host and device, in both directions, unless told not to.
  crosses = name == "aten::copy_" && given[0].own.is_cuda() != given[1].own.is_cuda();
  const bool blocks = crosses && !stack->back().toBool();
  const bool read = blocks || waits.count(name);
  if (tell && read) tell(crosses && given[0].own.is_cuda() ? "copy there" : name.c_str() + 6);
  bool is_view = false;
  for (const auto& result : schema.returns()) is_view |= result.alias_info() && !result.alias_info()->isWrite();
  const bool empty = name.rfind("aten::empty", 0) == 0;
  if (judging) {
    start();
    touch(device);
    const int lane = lane_now(device);
    for (const auto& x : given) {
      const bool fits = x.own.is_cuda() ? x.own.device().index() == device : x.own.dim() == 0 || mixes.count(name);
      TORCH_CHECK(fits, "Expected all tensors to be on the same device, but ", name, " has one on ",
                  x.own.device().str(), " and one on ", gpu(device).str());
    }
    if (!is_view && !empty && name != "aten::set_")
      for (const auto& x : given) use(x.own, x.writes, lane, name.substr(name.rfind(':') + 1));
    if (name == "aten::copy_" && stack->back().toBool()) {
      Tensor pinned;
      for (const auto& x : given) if (!x.own.is_cuda() && is_locked(x.own.storage().data())) pinned = x.host;
      // Pageable memory is read at the call, and written before it returns.
      if (late && (crosses ? pinned.defined() : lane != device)) {
        if (lane == device && given[0].own.is_cuda()) {  // the device computes with it at once
          Lock lock;
          lanes[lane].readings.push_back(read_by(given[1].host));
        } else {
          put_off(given[0].host, given[1].host, pinned, lane);
          const Tensor out = given[0].own;
          torch::jit::drop(*stack, schema.arguments().size());
          torch::jit::push(*stack, out);
          return;
        }
      }
    }
    // What is asked for later runs later.
    if (!empty && !is_view) catch_up(lane, std::numeric_limits<uint64_t>::max());
    if (read) host_waits(recorded(lane));
  }
  op.callBoxed(stack);
  for (const auto& x : given) {  // an argument may have got another size
    if (!x.own.is_cuda() || (x.host.sizes() == x.own.sizes() && x.host.storage().data() == x.own.storage().data())) continue;
    x.own.unsafeGetTensorImpl()->set_storage_keep_dtype(lent(x.host.storage(), device));
    x.own.unsafeGetTensorImpl()->set_sizes_and_strides(x.host.sizes(), x.host.strides(), x.host.storage_offset());
  }
  const int poisoned = judging ? kPoison : 0;
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i)
    (*stack)[i] = changed((*stack)[i], [&](const Tensor& x) {
      for (const auto& one : given) if (one.host.is_same(x)) return one.own;
      if (empty && x.storage().nbytes()) std::memset(x.storage().mutable_data(), poisoned, x.storage().nbytes());
      auto made = on_device(x, device);
      if (judging && !is_view) use(made, true, lane_now(device), name.substr(name.rfind(':') + 1));
      return made;
    });
}
}  // namespace

extern "C" {
void tell_of_waits(void (*to)(const char*)) { tell = to; }

// From here on faults are noted. late: copies that do not block run when somebody waits for them, or at once.
void judge(int on, int be_late) {
  Lock lock;
  start();
  judging = on;
  if (on) ++turn;
  late = be_late;
  faults.clear();
}

int number_of_faults() { return static_cast<int>(faults.size()); }
const char* fault_at(int i) { return faults[i].c_str(); }
void add_fault(const char* text) { fault(text); }

int get_device() { return device_now; }
void set_device(int device) {
  touch(device);
  device_now = device;
}
int exchange_device(int device) { return std::exchange(device_now, device); }
int get_stream(int device) {
  Lock lock;
  start();
  return lane_now(device < 0 ? device_now : device);
}
// Another rank's new stream may move all lanes.
int device_of(int lane) {
  Lock lock;
  return lanes[lane].device;
}
void set_stream(int lane) {
  const int device = device_of(lane);
  if (device != device_now) set_device(device);
  stream_now[device] = lane;
}
int new_stream(int device) {
  Lock lock;
  start();
  touch(device);
  return new_lane(device);
}
void* new_event() { return new Event; }
void drop_event(void* event) { delete static_cast<Event*>(event); }
void record_event(void* event, int lane) {
  Lock lock;
  *static_cast<Event*>(event) = recorded(lane);
}
// What an event stands behind, for a rank that is another process: "stream:tick" for each stream.
const char* clock_of(void* event) {
  static thread_local std::string text;
  const auto& clock = static_cast<Event*>(event)->clock;
  text.clear();
  for (size_t i = 0; i < clock.size(); ++i)
    if (clock[i]) text += std::to_string(i) + ":" + std::to_string(clock[i]) + " ";
  return text.c_str();
}
// What a stream gets from here on comes after the event of another process that has this clock.
void wait_clock(int lane, const char* text) {
  Clock clock;
  while (*text) {
    char* end;
    const size_t number = std::strtoull(text, &end, 10);
    if (clock.size() <= number) clock.resize(number + 1);
    clock[number] = std::strtoull(end + 1, &end, 10);
    text = end + 1;
  }
  Lock lock;
  merge(lanes[lane].clock, clock);
}
void wait_event(int lane, void* event) { wait_for(lane, *static_cast<Event*>(event)); }
void host_waits_event(void* event) { host_waits(*static_cast<Event*>(event)); }
int over(void* event) {  // nobody has waited for it: the host is ahead
  const auto& own = *static_cast<Event*>(event);
  Lock lock;
  return own.lane < 0 || (known[lanes[own.lane].device].size() > static_cast<size_t>(own.lane) &&
                          known[lanes[own.lane].device][own.lane] >= own.clock[own.lane]);
}
// Gives a storage of a device other memory, as a storage's resize_ does.
void resize_storage(void* storage, size_t bytes) {
  auto* own = static_cast<c10::StorageImpl*>(storage);
  auto there = Storage(Storage::use_byte_size_t(), bytes, c10::GetCPUAllocator(), true);
  if (bytes) std::memset(there.mutable_data(), kPoison, bytes);
  Lock lock;
  start();
  const int device = own->device().index();
  std::memcpy(there.mutable_data(), own->data(), std::min(bytes, own->nbytes()));
  auto* block = new Block{there, device, judging ? lane_now(device) : -1, allocated(device, bytes), {}, {}};
  // What was there goes, with the checks of memory that is freed; its place may be another tensor's from here on.
  if (own->data_ptr().get_deleter() == &forget)
    lending.erase(static_cast<Block*>(own->data_ptr().get_context())->bytes.unsafeGetStorageImpl());
  drop_later(own->set_data_ptr({there.mutable_data(), block, &forget, gpu(device)}));
  own->set_nbytes(bytes);
  lending.insert_or_assign(there.unsafeGetStorageImpl(),
                           c10::weak_intrusive_ptr<c10::StorageImpl>(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(own)));
}
double event_ms(void* event) { return static_cast<Event*>(event)->at; }
void synchronize_device(int device) { synchronize(device); }

// What torch.cuda.memory_stats says: bytes allocated and their peak, reserved and their peak; number of blocks.
int64_t memory_of(int device, int what) {
  Lock lock;
  const auto& memory = memories[device];
  const int64_t all[] = {memory.allocated, memory.allocated_peak, memory.reserved, memory.reserved_peak, memory.blocks()};
  return all[what];
}
void reset_peak(int device) {
  Lock lock;
  memories[device].allocated_peak = memories[device].allocated;
  memories[device].reserved_peak = memories[device].reserved;
}
// A kernel that is a function here begins or ends on the device of the calling thread.
void kernel(int begins) {
  Lock lock;
  begins ? memories[device_now].begin() : memories[device_now].end();
}
// From here on blocks have names. to: asked where in the program the calling thread is; it calls `be_at`.
void name_blocks(void (*to)()) {
  Lock lock;
  ask = to;
  for (auto& memory : memories) memory.names = to != nullptr;
}
void be_at(const char* place) { where = place; }
// The names of the blocks at a device's peak, the largest first: bytes, number and name on a line.
const char* held_at_peak(int device) {
  static thread_local std::string text;
  Lock lock;
  std::vector<std::pair<int64_t, std::string>> lines;
  for (const auto& [name, sizes] : memories[device].held)
    lines.push_back({sizes.first, std::to_string(sizes.second) + " " + name});
  std::sort(lines.rbegin(), lines.rend());
  text.clear();
  for (const auto& [bytes, line] : lines) text += std::to_string(bytes) + " " + line + "\n";
  return text.c_str();
}
void empty_cache(int device) {
  Lock lock;
  memories[device].release();
}
// Bytes of each device; 0 for no limit.
void limit_memory(int64_t bytes) {
  Lock lock;
  for (auto& memory : memories) memory.limit = bytes;
}
}

TORCH_LIBRARY(emulated, m) {
  m.def("host(Tensor x) -> Tensor", [](const Tensor& x) { return on_host(x); });
  m.def("use(Tensor x, bool writes, int lane, str name) -> ()",
        [](const Tensor& x, bool writes, int64_t lane, const c10::string_view name) {
          use(x, writes, static_cast<int>(lane), std::string(name));
        });
  m.def("poison(Tensor x) -> ()", [](const Tensor& x) { poison(on_host(x)); });
}
TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) {  // of these torch would take what it is made of, which has no such device
  m.impl("copy_", torch::CppFunction::makeFromBoxedFunction<&run>());
  m.impl("_grouped_mm", torch::CppFunction::makeFromBoxedFunction<&run>());
}

namespace at {
C10_REGISTER_GUARD_IMPL(CUDA, FakeGuard)
REGISTER_CUDA_HOOKS(CUDAHooks)  // torch asks for the class of this name
}  // namespace at
