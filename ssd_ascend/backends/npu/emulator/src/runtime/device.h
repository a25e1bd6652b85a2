// The emulated device: streams of tasks run by one thread. Used by the files beside it and by libopapi (submit, fail).
//
// A task answers true when it is done and false while it must wait; a stream waits behind its first task, as on
// hardware. A task that throws breaks its stream: the error surfaces at the next synchronisation, as on hardware.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <string>
#include <vector>

#include <acl/acl_rt.h>

#define EXPORT __attribute__((visibility("default")))

namespace npu {

using Task = std::function<bool()>;

constexpr double kPatience = 300;  // seconds; hardware gives up with 507046 after minutes, too

struct Node {
  std::string name;
  Task task;
  double patience = kPatience;  // how long it may wait at the head of its stream
};

struct Graph;

struct TaskGroup {
  Graph* graph;
  size_t first;
  size_t last;
};

struct Graph {
  std::vector<Node> nodes;
  std::vector<TaskGroup*> groups;
  aclmdlRICaptureMode mode;
  std::string invalid;  // why the capture cannot succeed, once something forbidden was done during it
  uint32_t id = 0;
  int device = 0;
  int streams = 1;           // each that took part in the capture costs the device one
  bool collectives = false;  // holds messages between devices
  std::atomic<int> replays{0};  // queued or running
};

struct Stream {
  int device = 0;
  int32_t id = 0;
  std::deque<Node> tasks;
  bool running = false;  // its first task is being tried
  aclError error = 0;    // sticky, like the state of a broken stream
  double waiting_since = 0;
  Graph* capture = nullptr;
  TaskGroup* open_group = nullptr;   // being captured
  TaskGroup* updating = nullptr;     // being updated
  std::vector<Node> update;
};

// Queues a task, or records it where the stream captures, or takes it as an update of a task group.
EXPORT aclError submit(aclrtStream stream, std::string name, Task task, double patience = kPatience);

// Remembers the message for aclGetRecentErrMsg and hands the code back.
EXPORT aclError fail(aclError code, const std::string& message);

// The same for an operator. On torch_npu's queue thread such an error is raised once, and all later launches vanish
// without a word; so the device is lost with it, and every synchronisation says so.
EXPORT aclError refuse_operator(aclError code, const std::string& message);

// The thread that initialised CANN: the user's, not the queue's.
void note_main_thread();

// Counts a call by its name, for tests and budgets: launches count by themselves in submit.
void count(const std::string& name);

// The stream behind a handle; null is the default stream of the current device.
Stream* stream_of(aclrtStream handle);

// Takes `streams` more of a device's streams for a graph; false when there are not as many left.
bool take_streams(int device, int streams);
void give_streams(int device, int streams);

// Lets go of all streams that take part in a capture.
void end_capture(Graph* graph);

// How this thread may behave while others capture: relaxed lets synchronous calls pass.
aclmdlRICaptureMode& thread_mode();

// Whether any stream captures in a mode that forbids synchronous calls; then the capture is invalid, for this reason.
bool spoils_capture(const std::string& call);

int current_device();
bool is_pinned(const void* pointer);

// Blocks until these streams (all of the device's, when null) are empty; the first error met.
aclError drain(Stream* stream);

// Runs inside the device thread, before its first task.
EXPORT void set_thread_start(std::function<void(std::function<void()>)> wrapper);

double now();

}  // namespace npu
