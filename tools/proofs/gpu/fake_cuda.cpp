// A "cuda" device of a torch that was built for CPUs: it has one device, whose streams and events do nothing. Its tensors have
// memory of the host, and its operations are those of a CPU on the same bytes, so every branch that asks for the device is
// the one of a GPU. Operations for which a GPU's host would wait are told.
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstring>
#include <unordered_set>

namespace {
using at::Tensor, c10::Device, c10::DeviceIndex, c10::DeviceType, c10::IValue, c10::Storage, c10::Stream;
const Device kDevice(DeviceType::CUDA, 0), kHost(DeviceType::CPU);
const Stream kStream(Stream::DEFAULT, kDevice);

struct FakeGuard final : c10::impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device exchangeDevice(Device) const override { return kDevice; }
  Device getDevice() const override { return kDevice; }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  Stream getStream(Device) const noexcept override { return kStream; }
  Stream getNewStream(Device, int) const override { return kStream; }
  Stream exchangeStream(Stream) const noexcept override { return kStream; }
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}
};

struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return false; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  int getNumGPUs() const override { return 1; }
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  bool isPinnedPtr(const void*) const override { return false; }
};

void (*tell)(const char*) = nullptr;  // who hears of operations for which the host waits

void forget(void* kept) { delete static_cast<Storage*>(kept); }

// The same bytes as another device's. What was lent comes back as itself, so that views share one storage.
Storage lent(const Storage& from, Device to) {
  if (from.data_ptr().get_deleter() == &forget) {
    const auto& kept = *static_cast<Storage*>(from.data_ptr().get_context());
    if (kept.device() == to) return kept;
  }
  c10::DataPtr bytes(const_cast<void*>(from.data()), new Storage(from), &forget, to);
  return Storage(Storage::use_byte_size_t(), from.nbytes(), std::move(bytes), c10::GetCPUAllocator(), true);
}

Tensor on(const Tensor& x, Device to) {
  const auto key = to == kHost ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA;
  auto made = at::detail::make_tensor<c10::TensorImpl>(lent(x.storage(), to), c10::DispatchKeySet(key), x.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_storage_offset(x.storage_offset());
  impl->set_sizes_and_strides(x.sizes(), x.strides());
  if (x.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return made;
}

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

// Any operation of the device.
void run(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const std::string& name = op.schema().name();
  std::vector<std::pair<Tensor, Tensor>> given;  // of the host, and its own
  for (size_t i = stack->size() - op.schema().arguments().size(); i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isDevice()) value = kHost;
    if (value.isStorage()) value = lent(value.toStorage(), kHost);
    value = changed(value, [&](const Tensor& x) {
      given.emplace_back(x.is_cuda() ? on(x, kHost) : x, x);
      return given.back().first;
    });
  }
  static const std::unordered_set<std::string> waits{"aten::_local_scalar_dense", "aten::nonzero", "aten::equal",
                                                     "aten::masked_select", "aten::_unique2"};
  // torch waits for the stream behind a copy between host and device, in both directions, unless told not to.
  const bool crosses = name == "aten::copy_" && given[0].second.is_cuda() != given[1].second.is_cuda();
  const bool blocks = crosses && !stack->back().toBool();
  if (tell && (blocks || waits.count(name))) tell(crosses && given[0].second.is_cuda() ? "copy there" : name.c_str() + 6);
  op.callBoxed(stack);
  for (const auto& [host, own] : given) {  // an argument may have got another size
    if (!own.is_cuda() || (host.sizes() == own.sizes() && host.storage().data() == own.storage().data())) continue;
    own.unsafeGetTensorImpl()->set_storage_keep_dtype(lent(host.storage(), kDevice));
    own.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
  }
  for (size_t i = stack->size() - op.schema().returns().size(); i < stack->size(); ++i)
    (*stack)[i] = changed((*stack)[i], [&](const Tensor& x) {
      for (const auto& [host, own] : given) if (host.is_same(x)) return own;
      if (name.rfind("aten::empty", 0) == 0) std::memset(x.storage().mutable_data(), 0, x.storage().nbytes());
      return on(x, kDevice);
    });
}
}  // namespace

extern "C" void tell_of_waits(void (*to)(const char*)) { tell = to; }

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) {  // of these torch would take what it is made of, which has no such device
  m.impl("copy_", torch::CppFunction::makeFromBoxedFunction<&run>());
  m.impl("_grouped_mm", torch::CppFunction::makeFromBoxedFunction<&run>());
}

namespace at {
C10_REGISTER_GUARD_IMPL(CUDA, FakeGuard)
REGISTER_CUDA_HOOKS(CUDAHooks)  // torch asks for the class of this name
}  // namespace at
