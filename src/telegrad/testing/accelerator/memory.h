// The memory of the simulated devices, pinned memory, and the queues of copies that wait.
//
// `mutex` protects the blocks, the queues and the counters. No torch operator and no Python code runs under it.
#pragma once
#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <map>
#include <mutex>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;
using c10::StreamId;

constexpr auto kSim = c10::DeviceType::PrivateUse1;
constexpr int kMaxDevices = 16;
constexpr int kUnwritten = 0xFF; // NaN in every floating point type

int device_count = 0;
thread_local DeviceIndex current_device = 0;
thread_local StreamId current_streams[kMaxDevices] = {};

void check_index(DeviceIndex index) {
  TORCH_CHECK(index >= 0 && index < device_count, "sim:", static_cast<int>(index),
              " does not exist: the simulated accelerator has ", device_count,
              " devices. Choose another index, or install(devices=...) more.");
}

struct Block {
  char* data;
  size_t size;
  Device device;
  StreamId stream; // current when the block was allocated
  std::vector<StreamId> users; // from record_stream
  Block(char* data, size_t size, Device device, StreamId stream)
      : data(data), size(size), device(device), stream(stream) {}
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
  bool written = false; // ToHost: `read` is in the host's memory
};

struct Queue {
  std::deque<Command> commands; // from `completed` on
  uint64_t completed = 0; // the host sees their effect
  uint64_t executed = 0; // the device sees their effect
  uint64_t size() const { return completed + commands.size(); }
};

// In the order of the fields of Copies in copies.py.
enum Counter {
  HostToDevice,
  DeviceToHost,
  WithinDevice,
  BetweenDevices,
  Copies,
  NonBlocking,
  Synchronizations,
  Counters
};

// Never destroyed: tensors may be freed after the destructors of this library have run.
std::mutex& mutex = *new std::mutex;
auto& blocks = *new std::map<const char*, std::shared_ptr<Block>>;
auto& queues = *new std::map<StreamKey, Queue>;
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

void write_to_host(Command& command) {
  if (!command.written) std::memcpy(command.to, command.read.data(), command.size);
  command.written = true;
}

// A device that reads pinned memory sees what the device has written there before, even if the host may not see it yet.
void write_what_was_read_for(const Block& host) {
  for (auto& [key, queue] : queues) {
    for (uint64_t i = 0; i < queue.executed - queue.completed; i++) {
      Command& command = queue.commands[i];
      if (command.kind == Command::ToHost && command.host.get() == &host) write_to_host(command);
    }
  }
}

// Runs the first `position` commands of a stream, as far as the device sees them.
void execute(StreamKey key, uint64_t position) {
  Queue& queue = queues[key];
  for (; queue.executed < position; queue.executed++) {
    Command& command = queue.commands[queue.executed - queue.completed];
    if (command.kind == Command::ToDevice) {
      write_what_was_read_for(*command.host);
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
    if (command.kind == Command::ToHost) write_to_host(command);
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

// What a copy does first if the host waits for it.
void complete_current(DeviceIndex index) {
  Lock lock(mutex);
  complete(current_stream(index), queues[current_stream(index)].size());
}

void complete_all(DeviceIndex index) {
  for (auto& [key, queue] : queues) {
    if (key.first == index) complete(key, queue.size());
  }
}

char* allocate(size_t size, Device device) {
  constexpr size_t alignment = 64; // as on the CPU: kernels then sum in the same order
  auto* data = static_cast<char*>(std::aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment));
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
        if (command.kind != Command::ToHost || command.device.get() != &block) continue;
        std::memset(block.data, kUnwritten, block.size);
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
};
auto& device_memory = *new DeviceMemory;

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
};
auto& pinned_memory = *new PinnedMemory;

} // namespace
