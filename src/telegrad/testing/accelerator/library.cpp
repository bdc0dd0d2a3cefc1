// A simulated accelerator on torch's PrivateUse1 key. The package's modules build, load and document it.
//
// 1. Memory is host memory with a device of its own. An operator runs on the CPU, on aliases of its device tensors: CPU
//    tensors with the same memory. Results are copied to the device; views and in-place results share the storage.
// 2. Operators run when they are called. A non-blocking copy between a device and pinned memory may run later: with
//    set_asynchronous, it waits in the queue of its stream. Before an operator runs, the copies of its stream are
//    executed, so a stream keeps its order. The host sees what was copied to it only after it synchronized.
#include <pthread.h>
#include <torch/csrc/autograd/engine.h>

#include "operators.h"

namespace {

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

void telegrad_sim_stop_engine() { torch::autograd::Engine::get_default_engine().stop(); }

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
