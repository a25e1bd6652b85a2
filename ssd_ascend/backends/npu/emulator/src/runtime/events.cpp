// Events: records are numbered by the host as they are submitted, and the device says which number it has reached.
#include <atomic>
#include <stdexcept>

#include "machine.h"

namespace npu {
namespace {

struct Event {
  uint32_t flag = 0;
  uint64_t recorded = 0;   // by the host, in order of submission
  std::atomic<uint64_t> completed{0};  // by the device
  double when = 0;
  aclError error = 0;  // of the stream that was to reach it
  uint32_t capture = 0;  // the id of the graph it was recorded in, if in any
};

}  // namespace
}  // namespace npu

using namespace npu;

extern "C" {

aclError aclrtCreateEventExWithFlag(aclrtEvent* event, uint32_t flag) {
  auto* made = new Event;
  made->flag = flag;
  *event = made;
  return 0;
}
aclError aclrtCreateEventWithFlag(aclrtEvent* event, uint32_t flag) { return aclrtCreateEventExWithFlag(event, flag); }
aclError aclrtCreateEvent(aclrtEvent* event) { return aclrtCreateEventExWithFlag(event, 0); }

// Kept until the process ends: tasks still queued may name it, and it is forty bytes.
aclError aclrtDestroyEvent(aclrtEvent) { return 0; }

aclError aclrtRecordEvent(aclrtEvent handle, aclrtStream stream_handle) {
  auto* event = static_cast<Event*>(handle);
  Stream* stream = stream_of(stream_handle);
  uint64_t number;
  {
    std::lock_guard<std::mutex> held(machine().lock);
    event->capture = stream->capture ? stream->capture->id : 0;
    if (stream->capture) return 0;  // inside a graph, order of capture is order of execution
    number = ++event->recorded;
  }
  return submit(stream_handle, kRecord, [event, number, stream] {
    event->when = now();
    event->error = stream->error;
    event->completed = number;
    return true;
  });
}

aclError aclrtStreamWaitEvent(aclrtStream stream_handle, aclrtEvent handle) {
  auto* event = static_cast<Event*>(handle);
  Stream* stream = stream_of(stream_handle);
  uint64_t number;
  {
    std::lock_guard<std::mutex> held(machine().lock);
    Graph* graph = capturing(event->capture);
    if (graph && !stream->capture) {  // it joins the capture, and costs the graph a stream
      stream->capture = graph;
      ++graph->streams;
      ++machine().of_graphs[graph->device];
    }
    if (stream->capture) {
      if (graph == stream->capture || event->recorded == event->completed) return 0;
      return fail(107031, "a captured stream waits for an event recorded outside its graph");
    }
    number = event->recorded;
  }
  return submit(stream_handle, "wait for event", [event, number] {
    if (event->completed < number) return false;
    if (event->error) throw std::runtime_error("its stream is broken: " + std::to_string(event->error));
    return true;
  });
}
aclError aclrtStreamWaitEventWithTimeout(aclrtStream s, aclrtEvent e, int32_t) { return aclrtStreamWaitEvent(s, e); }

aclError aclrtResetEvent(aclrtEvent, aclrtStream) { return 0; }  // records are counted, so nothing is left set

aclError aclrtQueryEventStatus(aclrtEvent handle, aclrtEventRecordedStatus* status) {
  count("query event");
  auto* event = static_cast<Event*>(handle);
  std::lock_guard<std::mutex> held(machine().lock);
  if (capturing(event->capture)) return no_sync("aclrtQueryEventStatus");
  *status = event->completed == event->recorded ? ACL_EVENT_RECORDED_STATUS_COMPLETE : ACL_EVENT_RECORDED_STATUS_NOT_READY;
  return 0;
}

aclError aclrtQueryEventWaitStatus(aclrtEvent handle, aclrtEventWaitStatus* status) {
  auto* event = static_cast<Event*>(handle);
  std::lock_guard<std::mutex> held(machine().lock);
  *status = event->completed == event->recorded ? ACL_EVENT_WAIT_STATUS_COMPLETE : ACL_EVENT_WAIT_STATUS_NOT_READY;
  return 0;
}

aclError aclrtSynchronizeEvent(aclrtEvent handle) {
  if (spoils_capture("synchronize event")) return no_sync("aclrtSynchronizeEvent");
  count("synchronize event");
  auto* event = static_cast<Event*>(handle);
  Machine& m = machine();
  std::unique_lock<std::mutex> held(m.lock);
  const uint64_t& aborts = m.aborts[current_device()];
  const uint64_t before = aborts;
  m.progress.wait(held, [&] {
    if (event->completed >= event->recorded || aborts != before) return true;
    for (Stream* stream : m.streams)
      if (stream->error) return true;  // it will never be recorded
    return false;
  });
  if (aborts != before) return fail(kAborted, "the tasks of the device were aborted");
  for (Stream* stream : m.streams)
    if (stream->error) return stream->error;
  return 0;
}
aclError aclrtSynchronizeEventWithTimeout(aclrtEvent event, int32_t) { return aclrtSynchronizeEvent(event); }

aclError aclrtEventElapsedTime(float* ms, aclrtEvent start, aclrtEvent end) {
  *ms = float((static_cast<Event*>(end)->when - static_cast<Event*>(start)->when) * 1e3);
  return 0;
}
aclError aclrtEventGetTimestamp(aclrtEvent event, uint64_t* microseconds) {
  *microseconds = uint64_t(static_cast<Event*>(event)->when * 1e6);
  return 0;
}

}  // extern "C"
