// Operators on the simulated devices. All but a few run on the CPU, on aliases of their tensors.
#pragma once
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <torch/library.h>

#include "devices.h"

namespace at::autocast { // the header with this declaration takes long to compile
TORCH_API at::ScalarType get_autocast_dtype(at::DeviceType device_type);
}

namespace {

using at::Tensor;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::Storage;

Tensor make_tensor(Storage storage, DispatchKeySet keys, const Tensor& like) {
  auto result = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, like.dtype());
  result.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return result;
}

// The tensors of one operator call, on the device and as the CPU kernel sees them.
struct Aliases {
  std::vector<std::pair<Storage, Storage>> storages; // on the device, on the CPU
  std::vector<std::pair<Tensor, Tensor>> tensors;

  Tensor on_cpu(const Tensor& tensor) {
    if (!tensor.defined() || tensor.device().type() != kSim) return tensor;
    const Storage& storage = tensor.storage();
    const Storage* shared = nullptr;
    for (auto& [device, cpu] : storages) {
      if (device.unsafeGetStorageImpl() == storage.unsafeGetStorageImpl()) shared = &cpu;
    }
    if (!shared) {
      Storage cpu(Storage::use_byte_size_t(), storage.nbytes(), c10::DataPtr(storage.mutable_data(), at::kCPU),
                  c10::GetCPUAllocator(), /*resizable=*/true);
      shared = &storages.emplace_back(storage, std::move(cpu)).second;
    }
    auto bits = tensor.key_set() & DispatchKeySet({DispatchKey::Conjugate, DispatchKey::Negative});
    Tensor alias = make_tensor(*shared, DispatchKeySet(DispatchKey::CPU) | bits, tensor);
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) alias.unsafeGetTensorImpl()->set_wrapped_number(true);
    tensors.emplace_back(tensor, alias);
    return alias;
  }

  // The kernel may have resized a tensor that it writes to.
  void take_over_sizes() {
    for (auto& [device, cpu] : storages) {
      if (device.data() == cpu.data() && device.nbytes() == cpu.nbytes()) continue;
      c10::DeviceGuard guard(device.device());
      auto data = device_memory.allocate(cpu.nbytes());
      if (cpu.nbytes()) std::memcpy(data.mutable_get(), cpu.data(), cpu.nbytes());
      device.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
      device.unsafeGetStorageImpl()->set_nbytes(cpu.nbytes());
    }
    for (auto& [device, cpu] : tensors) {
      bool same_layout = device.sizes() == cpu.sizes() && device.strides() == cpu.strides();
      if (same_layout && device.storage_offset() == cpu.storage_offset()) continue;
      device.unsafeGetTensorImpl()->set_sizes_and_strides(cpu.sizes(), cpu.strides(), cpu.storage_offset());
    }
  }

  Tensor on_device(const Tensor& result, Device target) {
    if (!result.defined() || !result.is_cpu() || target.type() != kSim) return result;
    for (auto& [device, cpu] : tensors) {
      if (cpu.is_same(result)) return device;
    }
    auto bits = result.key_set() & DispatchKeySet({DispatchKey::Conjugate, DispatchKey::Negative});
    DispatchKeySet keys = DispatchKeySet(DispatchKey::PrivateUse1) | bits; // a view of a conjugated tensor is conjugated
    for (auto& [device, cpu] : storages) {
      if (cpu.is_alias_of(result.storage())) return make_tensor(device, keys, result);
    }
    c10::DeviceGuard guard(target);
    auto size = result.storage().nbytes();
    auto data = device_memory.allocate(size);
    if (size) std::memcpy(data.mutable_get(), result.storage().data(), size);
    Storage storage(Storage::use_byte_size_t(), size, std::move(data), &device_memory, /*resizable=*/true);
    storages.emplace_back(storage, result.storage());
    return make_tensor(std::move(storage), keys, result);
  }
};

struct Target {
  const c10::OperatorHandle& op;
  std::optional<Device> device;

  // As on CUDA, only scalars and indices that are read may be on the CPU.
  void check(const Tensor& tensor, std::optional<Device>& cpu, bool index, bool written = false) {
    if (!tensor.defined()) return;
    if (tensor.device().type() == kSim) {
      if (!device) device = tensor.device();
      if (tensor.device() != *device) mismatch(*device, tensor.device());
    } else if (written || (tensor.dim() > 0 && !index)) {
      cpu = tensor.device();
    }
  }
  void mismatch(Device first, Device second) const {
    TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ", first,
                " and ", second, "! (when checking the arguments of ", op.schema().operator_name(), ")");
  }
};

using Call = void (*)(const c10::OperatorHandle& op, torch::jit::Stack* stack);

template <Call call>
void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView guard;
  auto begin = stack->size() - op.schema().arguments().size();
  Target target{op, std::nullopt};
  std::optional<Device> cpu, wanted;
  for (auto i = begin; i < stack->size(); i++) {
    c10::IValue& value = (*stack)[i];
    const auto* alias = op.schema().arguments()[i - begin].alias_info();
    if (value.isTensor()) target.check(value.toTensor(), cpu, false, alias && alias->isWrite());
    if (value.isTensorList()) for (const Tensor& tensor : value.toTensorVector()) target.check(tensor, cpu, false);
    if (value.isOptionalTensorList()) {
      for (const auto& tensor : value.toOptionalTensorVector()) if (tensor) target.check(*tensor, cpu, true);
    }
    if (value.isDevice()) wanted = value.toDevice();
  }
  if (target.device && cpu) target.mismatch(*target.device, *cpu);
  Device device = wanted ? *wanted : target.device ? *target.device : Guard().getDevice();
  if (device.type() == kSim && !device.has_index()) device = Guard().getDevice();
  if (target.device) execute_current(target.device->index());

  Aliases aliases;
  for (auto i = begin; i < stack->size(); i++) {
    c10::IValue& value = (*stack)[i];
    if (value.isTensor()) {
      value = aliases.on_cpu(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<Tensor> tensors;
      for (const Tensor& tensor : value.toTensorVector()) tensors.push_back(aliases.on_cpu(tensor));
      value = c10::List<Tensor>(tensors);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> tensors;
      for (const auto& tensor : value.toOptionalTensorVector()) {
        tensors.push_back(tensor ? std::optional<Tensor>(aliases.on_cpu(*tensor)) : std::nullopt);
      }
      value = tensors;
    } else if (value.isDevice()) {
      value = Device(at::kCPU);
    }
  }
  call(op, stack);
  aliases.take_over_sizes();
  for (auto i = stack->size() - op.schema().returns().size(); i < stack->size(); i++) {
    c10::IValue& value = (*stack)[i];
    if (value.isTensor()) {
      value = aliases.on_device(value.toTensor(), device);
    } else if (value.isTensorList()) {
      std::vector<Tensor> tensors;
      for (const Tensor& tensor : value.toTensorVector()) tensors.push_back(aliases.on_device(tensor, device));
      value = c10::List<Tensor>(tensors);
    }
  }
}

void call_same(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
}

// Torch calls operators of their own for the convolutions of a backend that it does not know.
void call_convolution(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "").callBoxed(stack);
}

void call_convolution_backward(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto first = stack->end() - op.schema().arguments().size();
  stack->insert(first + 3, std::vector<int64_t>{first->toTensor().size(1)}); // the sizes of the bias
  c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", "").callBoxed(stack);
}

void check_options(std::optional<c10::Layout> layout, std::optional<bool> pin) {
  TORCH_CHECK(c10::layout_or_default(layout) == c10::kStrided, "The simulated accelerator has dense tensors only.");
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
}

Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout> layout,
             std::optional<Device> device, std::optional<bool> pin, std::optional<c10::MemoryFormat> format) {
  check_options(layout, pin);
  c10::OptionalDeviceGuard guard(device);
  DispatchKeySet keys(DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, &device_memory, keys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                     std::optional<c10::Layout> layout, std::optional<Device> device, std::optional<bool> pin) {
  check_options(layout, pin);
  c10::OptionalDeviceGuard guard(device);
  DispatchKeySet keys(DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, &device_memory, keys, c10::dtype_or_default(dtype));
}

// One run of bytes on both sides: what a device copies without the help of a kernel or of the CPU.
bool is_memcpy(const Tensor& from, const Tensor& to) {
  return from.dtype() == to.dtype() && from.sizes() == to.sizes() && from.strides() == to.strides() &&
      to.is_non_overlapping_and_dense() && from.is_conj() == to.is_conj() && from.is_neg() == to.is_neg();
}

// Queues a copy, if it is one that the host need not wait for, and returns whether it did. Counts it in any case.
bool enqueue_copy(const Tensor& from, const Tensor& to, bool non_blocking) {
  bool from_device = from.device().type() == kSim, to_device = to.device().type() == kSim;
  const Tensor& on_device = to_device ? to : from; // types are converted on the CPU, as on CUDA
  auto counter = !from_device             ? HostToDevice
      : !to_device                     ? DeviceToHost
      : from.device() == to.device()   ? WithinDevice
                                       : BetweenDevices;
  Command command{to_device ? Command::ToDevice : Command::ToHost};
  command.to = static_cast<char*>(to.mutable_data_ptr());
  command.from = static_cast<const char*>(from.const_data_ptr());
  command.size = to.numel() * on_device.itemsize();
  bool candidate = non_blocking && from_device != to_device && is_memcpy(from, to);
  Lock lock(mutex);
  counters[counter] += command.size;
  counters[Copies]++;
  if (!candidate) return false;
  command.host = block_of(to_device ? command.from : command.to);
  command.device = block_of(to_device ? command.to : command.from);
  if (!command.host) return false; // not pinned
  counters[NonBlocking]++;
  if (!asynchronous) return false;
  queues[current_stream(on_device.device().index())].commands.push_back(std::move(command));
  return true;
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  at::AutoDispatchBelowADInplaceOrView guard;
  if (to.numel() == 0 || enqueue_copy(from, to, non_blocking)) return to;
  bool host_waits = from.device().type() != to.device().type();
  for (Device device : {from.device(), to.device()}) {
    if (device.type() == kSim) (host_waits ? complete_current : execute_current)(device.index());
  }
  Aliases aliases;
  Tensor target = aliases.on_cpu(to);
  at::native::copy_(target, aliases.on_cpu(from), false);
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

c10::Scalar item(const Tensor& self) {
  complete_current(self.device().index());
  {
    Lock lock(mutex);
    counters[DeviceToHost] += self.itemsize();
    counters[Copies]++;
  }
  return at::native::_local_scalar_dense_cpu(Aliases().on_cpu(self));
}

const Tensor& resize(const Tensor& self, c10::IntArrayRef size, std::optional<c10::MemoryFormat> format) {
  c10::DeviceGuard guard(self.device());
  execute_current(self.device().index());
  return at::native::resize_(self, size, format);
}

void check_storage(const Tensor& self, const Storage& source) {
  TORCH_CHECK(self.device() == source.device(), "Cannot set a tensor on ", self.device(), " to a storage on ",
              source.device());
}

Tensor& set_storage(Tensor& self, Storage source) {
  check_storage(self, source);
  return at::native::set_(self, std::move(source));
}

Tensor& set_strided(Tensor& self, Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  check_storage(self, source);
  c10::DeviceGuard guard(self.device());
  return at::native::set_storage_cpu_(self, std::move(source), offset, size, stride);
}

Tensor& set_tensor(Tensor& self, const Tensor& source) { return at::native::set_tensor_(self, source); }

Tensor& set_empty(Tensor& self) {
  c10::DeviceGuard guard(self.device());
  Storage storage(Storage::use_byte_size_t(), 0, device_memory.allocate(0), &device_memory, /*resizable=*/true);
  return self.set_(storage, 0, {0}, {});
}

void record_stream_of(Tensor& self, Stream stream) { record_stream(self.const_data_ptr(), stream); }

template <Call function>
torch::CppFunction boxed() {
  return torch::CppFunction::makeFromBoxedFunction<function>();
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &item);
  m.impl("resize_", &resize);
  m.impl("set_", &set_empty);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Storage_storage_offset", &set_strided);
  m.impl("record_stream", &record_stream_of);
  m.impl("convolution_overrideable", boxed<&run_on_cpu<call_convolution>>());
  m.impl("convolution_backward_overrideable", boxed<&run_on_cpu<call_convolution_backward>>());
}

// copy_from handles conjugated and negated tensors. Torch would first resolve them, with another copy, without end.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(boxed<&run_on_cpu<call_same>>()); }

// torch.autocast("sim"): these operators run in the lower precision, as on other devices; all others do not change.
void run_in_lower_precision(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard guard(DispatchKey::AutocastPrivateUse1);
  auto dtype = at::autocast::get_autocast_dtype(kSim);
  for (auto i = stack->size() - op.schema().arguments().size(); i < stack->size(); i++) {
    c10::IValue& value = (*stack)[i];
    if (!value.isTensor() || !value.toTensor().defined()) continue;
    const Tensor& tensor = value.toTensor();
    bool eligible = tensor.is_floating_point() && tensor.scalar_type() != at::kDouble;
    if (eligible && tensor.device().type() == kSim) value = tensor.to(dtype);
  }
  op.callBoxed(stack);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  for (const char* name : {"matmul", "mm", "bmm", "addmm", "baddbmm", "linear", "conv1d", "conv2d", "conv3d"}) {
    m.impl(name, boxed<&run_in_lower_precision>());
  }
}

} // namespace
