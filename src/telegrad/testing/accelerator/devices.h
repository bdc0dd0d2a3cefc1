// What torch asks of a backend: current devices and streams, events, and hooks.
#pragma once
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <chrono>

#include "memory.h"

namespace {

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
    auto passed = static_cast<Event*>(second)->time - static_cast<Event*>(first)->time;
    return std::chrono::duration<double, std::milli>(passed).count();
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
  DeviceIndex exchangeDevice(DeviceIndex index) const override {
    return Guard().exchangeDevice(Device(kSim, index)).index();
  }
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
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    c10::DeviceGuard guard(storage.device());
    execute_current(storage.device().index());
    at::native::resize_bytes_cpu(storage.unsafeGetStorageImpl(), size); // uses the storage's own allocator
  }
};

} // namespace
