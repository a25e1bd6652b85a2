// What streams and events share. Used by device.cpp and events.cpp only.
#pragma once

#include <condition_variable>
#include <mutex>
#include <set>

#include "device.h"

namespace npu {

// Leaked on purpose: the device thread may outlive static destructors.
struct Machine {
  std::mutex lock;
  std::condition_variable work, progress;
  std::set<Stream*> streams;
  Stream* defaults[64] = {};
  int32_t next_stream = 0;
  int of_graphs[64] = {};  // streams that captured graphs hold, by device
  uint64_t aborts[64] = {};  // how often all that a device was given has been dropped
  bool started = false;
  std::function<void(std::function<void()>)> wrapper = [](std::function<void()> body) { body(); };
};
Machine& machine();

constexpr aclError kAborted = 107022;  // of those who waited for tasks that were dropped
constexpr const char* kRecord = "record event";

// The graph with this id, while it is being captured; needs the lock.
Graph* capturing(uint32_t id);

// The error of a call that would wait, during a capture.
aclError no_sync(const char* call);

}  // namespace npu
