// A simulated accelerator on torch's PrivateUse1 key. accelerator.py builds, loads and documents it.
//
// 1. Memory is host memory with a device of its own. An operator runs on the CPU, on aliases of its device tensors: CPU
//    tensors with the same memory. Results are copied to the device; views and in-place results share the storage.
// 2. Operators run when they are called. A non-blocking copy between a device and pinned memory may run later: with
//    set_asynchronous, it waits in the queue of its stream. Before an operator runs, the copies of its stream are
//    executed, so a stream keeps its order. The host sees copied data only after it synchronized with the stream.
// 3. `mutex` protects the blocks, the queues and the counters. No torch operator and no Python code runs under it.
#include <ATen/EmptyTensor.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pthread.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <deque>
#include <map>
#include <mutex>

namespace at::autocast { // the header with this declaration takes long to compile
TORCH_API at::ScalarType get_autocast_dtype(at::DeviceType device_type);
}

namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::Storage;
using c10::Stream;
using c10::StreamId;

constexpr auto kSim = c10::DeviceType::PrivateUse1;
constexpr int kMaxDevices = 16;
constexpr int kUnwritten = 0xFF; // NaN in every floating point type

int device_count = 0;
thread_local DeviceIndex current_device = 0;
thread_local StreamId current_streams[kMaxDevices] = {};

void check_index(DeviceIndex index) {
  TORCH_CHECK(index >= 0 && index < device_count, "sim:", static_cast<int>(index), " does not exist: the simulated accelerator has ",
              device_count, " devices. Choose another index, or install(devices=...) more.");
}

// --- Memory, and the copies that wait ------------------------------------------------------------------------------

struct Block {
  char* data;
  size_t size;
  Device device;
  StreamId stream; // current when the block was allocated
  std::vector<StreamId> users; // from record_stream
  Block(char* data, size_t size, Device device, StreamId stream) : data(data), size(size), device(device), stream(stream) {}
  Block(const Block&) = delete;
  ~Block() { std::free(data); }
};

using StreamKey = std::pair<DeviceIndex, StreamId>;

struct Command {
  enum Kind { ToDevice, ToHost, Wait } kind;
  char* to = nullptr;
  const char* from = nullptr;
  size_t size = 0;
  // The memory outlives the command even if its tensor is freed first, as in torch's caching allocators.
  std::shared_ptr<Block> device, host;
  StreamKey other{}; // Wait: for `position` commands of this stream
  uint64_t position = 0;
  std::vector<char> read; // ToHost: what was on the device when the command was executed
};

struct Queue {
  std::deque<Command> commands; // from `completed` on
  uint64_t completed = 0; // the host sees their effect
  uint64_t executed = 0; // the device sees their effect
  uint64_t size() const { return completed + commands.size(); }
};

enum Counter { HostToDevice, DeviceToHost, WithinDevice, BetweenDevices, Copies, NonBlocking, Synchronizations, Counters };

std::mutex mutex;
std::map<const char*, std::shared_ptr<Block>> blocks;
std::map<StreamKey, Queue> queues;
int64_t counters[Counters] = {};
c10::CachingAllocator::Stat used[kMaxDevices];
std::atomic<bool> asynchronous{false};
std::atomic<uint64_t> last_stream{0};

using Lock = std::lock_guard<std::mutex>;

std::shared_ptr<Block> block_of(const void* pointer) {
  auto next = blocks.upper_bound(static_cast<const char*>(pointer));
  if (next == blocks.begin()) return nullptr;
  auto& block = std::prev(next)->second;
  return pointer < block->data + block->size ? block : nullptr;
}

// Runs the first `position` commands of a stream, as far as the device sees them.
void execute(StreamKey key, uint64_t position) {
  Queue& queue = queues[key];
  for (; queue.executed < position; queue.executed++) {
    Command& command = queue.commands[queue.executed - queue.completed];
    if (command.kind == Command::ToDevice) {
      std::memcpy(command.to, command.from, command.size);
    } else if (command.kind == Command::ToHost) {
      command.read.assign(command.from, command.from + command.size);
    } else {
      execute(command.other, command.position);
    }
  }
}

// Runs the first `position` commands of a stream and makes their effect visible to the host.
void complete(StreamKey key, uint64_t position) {
  Queue& queue = queues[key];
  while (queue.completed < position) {
    execute(key, queue.completed + 1);
    Command& command = queue.commands.front();
    if (command.kind == Command::ToHost) std::memcpy(command.to, command.read.data(), command.size);
    if (command.kind == Command::Wait) complete(command.other, command.position);
    queue.commands.pop_front();
    queue.completed++;
  }
}

StreamKey current_stream(DeviceIndex index) { return {index, current_streams[index]}; }

// What an operator of this device does first: it runs after the commands of the current stream.
void execute_current(DeviceIndex index) {
  Lock lock(mutex);
  execute(current_stream(index), queues[current_stream(index)].size());
}

void complete_all(DeviceIndex index) {
  for (auto& [key, queue] : queues) {
    if (key.first == index) complete(key, queue.size());
  }
}

char* allocate(size_t size, Device device) {
  auto* data = static_cast<char*>(std::malloc(size));
  TORCH_CHECK_WITH(OutOfMemoryError, data, "The host has no ", size, " bytes for a tensor on ", device, ".");
  if (asynchronous) std::memset(data, kUnwritten, size);
  auto stream = device.type() == kSim ? current_streams[device.index()] : 0;
  auto block = std::make_shared<Block>(data, size, device, stream);
  Lock lock(mutex);
  blocks[data] = std::move(block);
  if (device.type() == kSim) used[device.index()].increase(size);
  return data;
}

// A copy to the host that still waits on another stream would read memory that an allocator may have given away, unless
// record_stream named that stream.
void release(void* data) {
  Lock lock(mutex);
  auto found = blocks.find(static_cast<char*>(data));
  Block& block = *found->second;
  if (block.device.type() == kSim) {
    used[block.device.index()].decrease(block.size);
    for (auto& [key, queue] : queues) {
      bool allowed = key.second == block.stream || std::count(block.users.begin(), block.users.end(), key.second);
      for (auto position = queue.executed; position < queue.size() && !allowed; position++) {
        Command& command = queue.commands[position - queue.completed];
        if (command.kind == Command::ToHost && command.device.get() == &block) std::memset(block.data, kUnwritten, block.size);
      }
    }
  }
  blocks.erase(found);
}

void record_stream(const void* data, Stream stream) {
  Lock lock(mutex);
  if (auto block = block_of(data)) block->users.push_back(stream.id());
}

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t size) override {
    Device device(kSim, current_device);
    if (size == 0) return {nullptr, device};
    void* data = ::allocate(size, device);
    return {data, data, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
  bool initialized() override { return device_count > 0; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, Stream stream) override { record_stream(data.get(), stream); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex index) override {
    check_index(index);
    Lock lock(mutex);
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0] = stats.reserved_bytes[0] = stats.active_bytes[0] = stats.requested_bytes[0] = used[index];
    return stats;
  }
  void resetAccumulatedStats(DeviceIndex index) override {
    check_index(index);
    Lock lock(mutex);
    used[index].reset_accumulated();
  }
  void resetPeakStats(DeviceIndex index) override {
    check_index(index);
    Lock lock(mutex);
    used[index].reset_peak();
  }
} device_memory;

struct PinnedMemory final : at::HostAllocator {
  c10::DataPtr allocate(size_t size) override {
    if (size == 0) return {nullptr, at::kCPU};
    void* data = ::allocate(size, at::kCPU);
    return {data, data, &release, at::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
  bool record_event(void*, void*, Stream) override { return true; } // waiting commands hold their memory
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
} pinned_memory;

// --- Devices, streams and events -----------------------------------------------------------------------------------

struct Event {
  StreamKey stream;
  uint64_t position;
  std::chrono::steady_clock::time_point time;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kSim; }
  DeviceIndex deviceCount() const noexcept override { return static_cast<DeviceIndex>(device_count); }
  Device getDevice() const override { return Device(kSim, current_device); }
  void setDevice(Device device) const override {
    check_index(device.index());
    current_device = device.index();
  }
  void uncheckedSetDevice(Device device) const noexcept override { current_device = device.index(); }
  Device exchangeDevice(Device device) const override {
    Device previous = getDevice();
    setDevice(device);
    return previous;
  }
  c10::DeviceCapability getDeviceCapability(Device) const override { return {}; }

  Stream stream(Device device, StreamId id) const {
    DeviceIndex index = device.has_index() ? device.index() : current_device;
    check_index(index);
    return Stream(Stream::UNSAFE, Device(kSim, index), id < 0 ? current_streams[index] : id);
  }
  Stream getStream(Device device) const override { return stream(device, -1); }
  Stream getDefaultStream(Device device) const override { return stream(device, 0); }
  Stream getNewStream(Device device, int) const override { return stream(device, ++last_stream); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return stream(device, ++last_stream); }
  Stream exchangeStream(Stream next) const override {
    Stream previous = getStream(next.device());
    current_streams[next.device_index()] = next.id();
    return previous;
  }
  // Every query makes progress, so that a loop around it ends.
  bool finished(StreamKey key, uint64_t position) const {
    Lock lock(mutex);
    Queue& queue = queues[key];
    if (queue.completed >= position) return true;
    complete(key, queue.completed + 1);
    return false;
  }
  void finish(StreamKey key, uint64_t position) const {
    Lock lock(mutex);
    counters[Synchronizations]++;
    complete(key, position);
  }
  uint64_t length(StreamKey key) const {
    Lock lock(mutex);
    return queues[key].size();
  }
  bool queryStream(const Stream& stream) const override {
    StreamKey key{stream.device_index(), stream.id()};
    return finished(key, length(key));
  }
  void synchronizeStream(const Stream& stream) const override {
    StreamKey key{stream.device_index(), stream.id()};
    finish(key, length(key));
  }
  void synchronizeDevice(DeviceIndex index) const override {
    check_index(index);
    Lock lock(mutex);
    counters[Synchronizations]++;
    complete_all(index);
  }
  void* getStreamNativeHandle(Stream stream) const override { return reinterpret_cast<void*>(stream.id()); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override {
    record_stream(data.get(), stream);
  }

  void record(void** event, const Stream& stream, DeviceIndex, c10::EventFlag) const override {
    StreamKey key{stream.device_index(), stream.id()};
    delete static_cast<Event*>(*event);
    *event = new Event{key, length(key), std::chrono::steady_clock::now()};
  }
  void block(void* opaque, const Stream& stream) const override {
    auto* event = static_cast<Event*>(opaque);
    if (!event) return;
    Lock lock(mutex);
    if (queues[event->stream].completed >= event->position) return;
    Command wait{Command::Wait};
    wait.other = event->stream;
    wait.position = event->position;
    queues[{stream.device_index(), stream.id()}].commands.push_back(std::move(wait));
  }
  bool queryEvent(void* opaque) const override {
    auto* event = static_cast<Event*>(opaque);
    return !event || finished(event->stream, event->position);
  }
  void synchronizeEvent(void* opaque) const override {
    if (auto* event = static_cast<Event*>(opaque)) finish(event->stream, event->position);
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* first, void* second, DeviceIndex) const override {
    std::chrono::duration<double, std::milli> passed = static_cast<Event*>(second)->time - static_cast<Event*>(first)->time;
    return passed.count();
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return static_cast<DeviceIndex>(device_count); }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(DeviceIndex index) const override { Guard().setDevice(Device(kSim, index)); }
  DeviceIndex exchangeDevice(DeviceIndex index) const override { return Guard().exchangeDevice(Device(kSim, index)).index(); }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override {
    return index < 0 || index >= device_count ? current_device : exchangeDevice(index);
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  bool isPinnedPtr(const void* data) const override {
    Lock lock(mutex);
    auto block = block_of(data);
    return block && block->device.is_cpu();
  }
  Device getDeviceFromPtr(void* data) const override {
    Lock lock(mutex);
    auto block = block_of(data);
    TORCH_CHECK(block && block->device.type() == kSim, "The pointer does not belong to a simulated device.");
    return block->device;
  }
  void resizePrivateUse1Bytes(const Storage& storage, size_t size) const override {
    c10::DeviceGuard guard(storage.device());
    execute_current(storage.device().index());
    at::native::resize_bytes_cpu(storage.unsafeGetStorageImpl(), size); // uses the storage's own allocator
  }
};

// --- Operators -----------------------------------------------------------------------------------------------------

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
      if (device.sizes() == cpu.sizes() && device.strides() == cpu.strides()) continue;
      device.unsafeGetTensorImpl()->set_sizes_and_strides(cpu.sizes(), cpu.strides(), cpu.storage_offset());
    }
  }

  Tensor on_device(const Tensor& result, Device target) {
    if (!result.defined() || !result.is_cpu() || target.type() != kSim) return result;
    for (auto& [device, cpu] : tensors) {
      if (cpu.is_same(result)) return device;
    }
    DispatchKeySet keys(DispatchKey::PrivateUse1);
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

  // As on CUDA, only scalars and indices may be on the CPU.
  void check(const Tensor& tensor, std::optional<Device>& cpu, bool index) {
    if (!tensor.defined()) return;
    if (tensor.device().type() == kSim) {
      if (!device) device = tensor.device();
      if (tensor.device() != *device) mismatch(*device, tensor.device());
    } else if (tensor.dim() > 0 && !index) {
      cpu = tensor.device();
    }
  }
  void mismatch(Device first, Device second) const {
    TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ", first, " and ", second,
                "! (when checking the arguments of ", op.schema().operator_name(), ")");
  }
};

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView guard;
  auto begin = stack->size() - op.schema().arguments().size();
  Target target{op, std::nullopt};
  std::optional<Device> cpu, wanted;
  for (auto i = begin; i < stack->size(); i++) {
    c10::IValue& value = (*stack)[i];
    if (value.isTensor()) target.check(value.toTensor(), cpu, false);
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
  op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
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

void check_options(std::optional<c10::Layout> layout, std::optional<bool> pin) {
  TORCH_CHECK(c10::layout_or_default(layout) == c10::kStrided, "The simulated accelerator has dense tensors only.");
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
}

Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout> layout,
             std::optional<Device> device, std::optional<bool> pin, std::optional<c10::MemoryFormat> format) {
  check_options(layout, pin);
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, &device_memory, DispatchKeySet(DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                     std::optional<c10::Layout> layout, std::optional<Device> device, std::optional<bool> pin) {
  check_options(layout, pin);
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, &device_memory, DispatchKeySet(DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

// One run of bytes on both sides: what a device copies without the help of a kernel or of the CPU.
bool is_memcpy(const Tensor& from, const Tensor& to) {
  return from.dtype() == to.dtype() && from.sizes() == to.sizes() && from.strides() == to.strides() && to.is_non_overlapping_and_dense() &&
      from.is_conj() == to.is_conj() && from.is_neg() == to.is_neg();
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  at::AutoDispatchBelowADInplaceOrView guard;
  bool from_device = from.device().type() == kSim, to_device = to.device().type() == kSim;
  const Tensor& on_device = to_device ? to : from; // types are converted on the CPU, as on CUDA
  auto counter = !from_device ? HostToDevice : !to_device ? DeviceToHost : from.device() == to.device() ? WithinDevice : BetweenDevices;
  auto size = to.numel() * on_device.itemsize();
  {
    Lock lock(mutex);
    counters[counter] += size;
    counters[Copies]++;
    const Tensor& on_host = to_device ? from : to;
    auto host = from_device && to_device ? nullptr : block_of(on_host.const_data_ptr());
    if (non_blocking && host && host->device.is_cpu() && is_memcpy(from, to)) {
      counters[NonBlocking]++;
      if (asynchronous && size) {
        Command command{to_device ? Command::ToDevice : Command::ToHost};
        command.to = static_cast<char*>(to.mutable_data_ptr());
        command.from = static_cast<const char*>(from.const_data_ptr());
        command.size = size;
        command.host = std::move(host);
        command.device = block_of(on_device.const_data_ptr());
        queues[current_stream(on_device.device().index())].commands.push_back(std::move(command));
        return to;
      }
    }
  }
  if (from_device) execute_current(from.device().index());
  if (to_device) execute_current(to.device().index());
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
  execute_current(self.device().index());
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

Tensor& set_storage(Tensor& self, Storage source) {
  TORCH_CHECK(self.device() == source.device(), "Cannot set a tensor on ", self.device(), " to a storage on ", source.device());
  return at::native::set_(self, std::move(source));
}

Tensor& set_strided(Tensor& self, Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  TORCH_CHECK(self.device() == source.device(), "Cannot set a tensor on ", self.device(), " to a storage on ", source.device());
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
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>()); }

// torch.autocast("sim"): these operators run in the lower precision, as on other devices; all others as they are called.
void run_in_lower_precision(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard guard(DispatchKey::AutocastPrivateUse1);
  auto dtype = at::autocast::get_autocast_dtype(kSim);
  for (auto i = stack->size() - op.schema().arguments().size(); i < stack->size(); i++) {
    c10::IValue& value = (*stack)[i];
    if (!value.isTensor() || !value.toTensor().defined()) continue;
    const Tensor& tensor = value.toTensor();
    if (tensor.device().type() == kSim && tensor.is_floating_point() && tensor.scalar_type() != at::kDouble) value = tensor.to(dtype);
  }
  op.callBoxed(stack);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  for (const char* name : {"matmul", "mm", "bmm", "addmm", "baddbmm", "linear", "conv1d", "conv2d", "conv3d"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_in_lower_precision>());
  }
}

// The engine starts a thread for each device at its first pass. If that pass came before install, it had no devices.
struct StartedEngine : torch::autograd::Engine {
  static void start_device_threads_late() {
    auto& engine = get_default_engine();
    auto pool = engine.*(&StartedEngine::thread_pool_shared_);
    if (!pool || !(engine.*(&StartedEngine::device_ready_queues_)).empty()) return;
    (engine.*(&StartedEngine::start_device_threads))();
    engine.*(&StartedEngine::thread_pool_shared_) = pool; // threads of nested passes wait in it
  }
};

} // namespace

extern "C" {

void telegrad_sim_install(int devices) {
  device_count = devices;
  c10::SetAllocator(kSim, &device_memory);
  at::setHostAllocator(kSim, &pinned_memory);
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  pthread_atfork([] { mutex.lock(); }, [] { mutex.unlock(); }, [] { new (&mutex) std::mutex; });
  StartedEngine::start_device_threads_late();
}

int telegrad_sim_max_devices() { return kMaxDevices; }

int telegrad_sim_devices() { return device_count; }

void telegrad_sim_set_asynchronous(int enabled) {
  Lock lock(mutex);
  asynchronous = enabled;
  for (DeviceIndex index = 0; index < device_count && !enabled; index++) complete_all(index);
}

void telegrad_sim_copies(int64_t* values, int reset) {
  Lock lock(mutex);
  std::copy(counters, counters + Counters, values);
  if (reset) std::fill(counters, counters + Counters, 0);
}

} // extern "C"
