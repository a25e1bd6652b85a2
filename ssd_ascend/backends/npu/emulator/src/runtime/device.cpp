// The device thread, what it is given, and streams.
#include "machine.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <map>
#include <thread>

namespace npu {
namespace {

constexpr int kMaxStreams = 1984;        // per device, RT api_ref/06_stream_management

std::mutex& message_lock() {
  static auto* it = new std::mutex;
  return *it;
}
std::string& message() {
  static auto* it = new std::string;
  return *it;
}

std::thread::id main_thread;
std::string& lost() {
  static auto* it = new std::string;
  return *it;
}

std::map<std::string, int64_t>& counters() {
  static auto* it = new std::map<std::string, int64_t>;
  return *it;
}

// One try of the stream's first task, without the lock. Returns whether it is done.
bool try_first(Stream* stream, std::unique_lock<std::mutex>& held) {
  Node& first = stream->tasks.front();  // a deque: submissions at the back leave it where it is
  stream->running = true;
  held.unlock();
  bool done = true;
  aclError error = 0;
  try {
    done = stream->error && first.name != kRecord ? true : first.task();  // an event says that its stream is broken
  } catch (const std::exception& problem) {
    error = fail(507015, first.name + ": " + problem.what());
    std::fprintf(stderr, "[emulated NPU] %s: %s\n", first.name.c_str(), problem.what());  // as hardware's log would
  }
  held.lock();
  stream->running = false;
  if (error) stream->error = error;
  if (!done && stream->waiting_since == 0) stream->waiting_since = now();
  if (!done && now() - stream->waiting_since > first.patience) {
    const std::string why = first.name + " waited " + std::to_string(int(first.patience)) +
                            " s for something nobody did: a record is missing, or came too early";
    std::fprintf(stderr, "[emulated NPU] %s\n", why.c_str());
    stream->error = fail(507046, why);
    done = true;
  }
  if (done) {
    stream->waiting_since = 0;
    stream->tasks.pop_front();
  }
  return done;
}

void serve() {
  Machine& m = machine();
  std::unique_lock<std::mutex> held(m.lock);
  while (true) {
    bool moved = false, waiting = false;
    std::vector<Stream*> busy;
    for (Stream* stream : m.streams)
      if (!stream->tasks.empty()) busy.push_back(stream);
    for (Stream* stream : busy) {
      while (m.streams.count(stream) && !stream->tasks.empty()) {
        if (!try_first(stream, held)) {
          waiting = true;
          break;
        }
        moved = true;
      }
    }
    m.progress.notify_all();
    if (moved) continue;
    if (waiting)
      m.work.wait_for(held, std::chrono::microseconds(200));
    else
      m.work.wait(held);
  }
}

// Whether the device has so many streams left; needs the lock.
bool has_streams(int device, int more) {
  Machine& m = machine();
  int used = m.of_graphs[device];
  for (Stream* stream : m.streams) used += stream->device == device;
  return used + more <= kMaxStreams;
}

Stream* make_stream(int device) {
  Machine& m = machine();
  if (!m.started) {
    m.started = true;
    std::thread([&m] { m.wrapper(serve); }).detach();
  }
  auto* stream = new Stream;
  stream->device = device;
  stream->id = m.next_stream++;
  m.streams.insert(stream);
  return stream;
}

}  // namespace

Machine& machine() {
  static Machine* it = new Machine;
  return *it;
}

Graph* capturing(uint32_t id) {
  if (id)
    for (Stream* stream : machine().streams)
      if (stream->capture && stream->capture->id == id) return stream->capture;
  return nullptr;
}

aclError no_sync(const char* call) {
  return fail(107041, std::string(call) + " while a stream is being captured");
}

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void set_thread_start(std::function<void(std::function<void()>)> wrapper) { machine().wrapper = std::move(wrapper); }

aclError fail(aclError code, const std::string& text) {
  std::lock_guard<std::mutex> held(message_lock());
  message() = "[emulated NPU] " + text;
  return code;
}

void note_main_thread() { main_thread = std::this_thread::get_id(); }

aclError refuse_operator(aclError code, const std::string& text) {
  fail(code, text);
  std::lock_guard<std::mutex> held(message_lock());
  if (std::this_thread::get_id() != main_thread && lost().empty()) lost() = text;
  return code;
}

void count(const std::string& name) {
  std::lock_guard<std::mutex> held(message_lock());
  ++counters()[name];
}

Stream* stream_of(aclrtStream handle) {
  if (handle) return static_cast<Stream*>(handle);
  Machine& m = machine();
  std::lock_guard<std::mutex> held(m.lock);
  Stream*& stream = m.defaults[current_device()];
  if (!stream) stream = make_stream(current_device());
  return stream;
}

aclmdlRICaptureMode& thread_mode() {
  static thread_local aclmdlRICaptureMode mode = ACL_MODEL_RI_CAPTURE_MODE_GLOBAL;
  return mode;
}

bool take_streams(int device, int streams) {
  std::lock_guard<std::mutex> held(machine().lock);
  if (!has_streams(device, streams)) return false;
  machine().of_graphs[device] += streams;
  return true;
}

void give_streams(int device, int streams) {
  std::lock_guard<std::mutex> held(machine().lock);
  machine().of_graphs[device] -= streams;
}

void end_capture(Graph* graph) {
  std::lock_guard<std::mutex> held(machine().lock);
  for (Stream* stream : machine().streams)
    if (stream->capture == graph) stream->capture = nullptr;
}

bool spoils_capture(const std::string& call) {
  if (thread_mode() == ACL_MODEL_RI_CAPTURE_MODE_RELAXED) return false;
  Machine& m = machine();
  std::lock_guard<std::mutex> held(m.lock);
  for (Stream* stream : m.streams)
    if (stream->capture && stream->capture->mode != ACL_MODEL_RI_CAPTURE_MODE_RELAXED) {
      if (stream->capture->invalid.empty()) stream->capture->invalid = call;
      return true;
    }
  return false;
}

aclError submit(aclrtStream handle, std::string name, Task task, double patience) {
  Stream* stream = stream_of(handle);
  count(name);
  Machine& m = machine();
  std::lock_guard<std::mutex> held(m.lock);
  if (stream->updating) {
    stream->update.push_back({std::move(name), std::move(task), patience});
    return 0;
  }
  if (stream->capture) {
    stream->capture->collectives |= name.rfind("Hccl", 0) == 0;
    stream->capture->nodes.push_back({std::move(name), std::move(task), patience});
    return 0;
  }
  if (stream->error) return stream->error;
  stream->tasks.push_back({std::move(name), std::move(task), patience});
  m.work.notify_one();
  return 0;
}

aclError drain(Stream* only) {
  count("synchronize");
  std::string why;
  {
    std::lock_guard<std::mutex> held(message_lock());
    why = lost();
  }
  if (!why.empty()) return fail(507015, "the device is lost since an operator was refused: " + why);
  Machine& m = machine();
  std::unique_lock<std::mutex> held(m.lock);
  const int device = only ? only->device : current_device();
  const uint64_t aborts = m.aborts[device];
  aclError error = 0;
  m.progress.wait(held, [&] {
    if (m.aborts[device] != aborts) {
      error = kAborted;
      return true;
    }
    for (Stream* stream : m.streams) {
      if (only ? stream != only : stream->device != device) continue;
      if (!stream->tasks.empty()) return false;
      if (stream->error) error = stream->error;
    }
    return true;
  });
  return error == kAborted ? fail(error, "the tasks of device " + std::to_string(device) + " were aborted") : error;
}

}  // namespace npu

using namespace npu;

extern "C" {

// Not a part of CANN: how often something was submitted, by the name it has in error messages.
EXPORT int64_t npuEmulatorCount(const char* name) {
  std::lock_guard<std::mutex> held(message_lock());
  auto found = counters().find(name);
  return found == counters().end() ? 0 : found->second;
}

// Not a part of CANN: all of them, as lines "name<tab>number". Returns the bytes that the whole text takes.
EXPORT int64_t npuEmulatorCounts(char* text, int64_t room) {
  std::lock_guard<std::mutex> held(message_lock());
  std::string all;
  for (const auto& [name, number] : counters()) all += name + "\t" + std::to_string(number) + "\n";
  if (int64_t(all.size()) <= room) std::memcpy(text, all.data(), all.size());
  return int64_t(all.size());
}

const char* aclGetRecentErrMsg() {
  static thread_local std::string copy;
  std::lock_guard<std::mutex> held(message_lock());
  copy.swap(message());
  message().clear();
  return copy.empty() ? nullptr : copy.c_str();
}

aclError aclrtCreateStreamWithConfig(aclrtStream* stream, uint32_t, uint32_t) {
  Machine& m = machine();
  std::lock_guard<std::mutex> held(m.lock);
  if (!has_streams(current_device(), 1)) return fail(207008, "stream resources are insufficient (EL0009)");
  *stream = make_stream(current_device());
  return 0;
}
aclError aclrtCreateStream(aclrtStream* stream) { return aclrtCreateStreamWithConfig(stream, 0, 0); }

aclError aclrtDestroyStreamForce(aclrtStream handle) {
  Machine& m = machine();
  std::unique_lock<std::mutex> held(m.lock);
  auto* stream = static_cast<Stream*>(handle);
  m.progress.wait(held, [&] { return !stream->running; });
  m.streams.erase(stream);
  delete stream;
  return 0;
}
aclError aclrtDestroyStream(aclrtStream handle) {
  drain(static_cast<Stream*>(handle));
  return aclrtDestroyStreamForce(handle);
}

// What is queued is dropped, also a task that waits, and who waits for it is told. Then the device takes tasks again.
aclError aclrtDeviceTaskAbort(int32_t device, uint32_t) {
  count("abort");
  Machine& m = machine();
  std::unique_lock<std::mutex> held(m.lock);
  const auto any = [&](auto&& what) {
    return std::any_of(m.streams.begin(), m.streams.end(), [&](Stream* s) { return s->device == device && what(s); });
  };
  m.progress.wait(held, [&] { return !any([](Stream* stream) { return stream->running; }); });
  for (Stream* stream : m.streams) {
    if (stream->device != device) continue;
    for (Node& node : stream->tasks)
      if (node.name == kRecord) node.task();  // nobody else would, and whoever asks for the event would ask for ever
    stream->tasks.clear();
    stream->waiting_since = 0;
    stream->error = 0;
  }
  ++m.aborts[device];
  m.progress.notify_all();
  return 0;
}

aclError aclrtStreamGetId(aclrtStream handle, int32_t* id) {
  *id = stream_of(handle)->id;
  return 0;
}

aclError aclrtSynchronizeStream(aclrtStream handle) {
  Stream* stream = stream_of(handle);
  if (stream->capture || spoils_capture("synchronize stream")) return no_sync("aclrtSynchronizeStream");
  return drain(stream);
}
aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t) { return aclrtSynchronizeStream(stream); }

aclError aclrtSynchronizeDevice() {
  if (spoils_capture("synchronize device")) return no_sync("aclrtSynchronizeDevice");
  return drain(nullptr);
}
aclError aclrtSynchronizeDeviceWithTimeout(int32_t) { return aclrtSynchronizeDevice(); }

aclError aclrtStreamQuery(aclrtStream handle, aclrtStreamStatus* status) {
  Stream* stream = stream_of(handle);
  if (stream->capture) return no_sync("aclrtStreamQuery");
  std::lock_guard<std::mutex> held(machine().lock);
  *status = stream->tasks.empty() ? ACL_STREAM_STATUS_COMPLETE : ACL_STREAM_STATUS_NOT_READY;
  return stream->error;
}

aclError aclrtLaunchHostFunc(aclrtStream stream, aclrtHostFunc function, void* args) {
  return submit(stream, "host function", [function, args] {
    function(args);
    return true;
  });
}

aclError aclrtValueWrite(void* address, uint64_t value, uint32_t, aclrtStream stream) {
  return submit(stream, "write value", [address, value] {
    *static_cast<volatile uint64_t*>(address) = value;
    return true;
  });
}

aclError aclrtValueWait(void* address, uint64_t value, uint32_t flag, aclrtStream stream) {
  return submit(stream, "wait for value", [address, value, flag] {
    const uint64_t found = *static_cast<volatile uint64_t*>(address);
    switch (flag) {
      case ACL_STREAM_WAIT_VALUE_GEQ: return found >= value;
      case ACL_STREAM_WAIT_VALUE_EQ: return found == value;
      case ACL_STREAM_WAIT_VALUE_AND: return (found & value) != 0;
      default: return ~(found | value) != 0;
    }
  });
}

}  // extern "C"
