// Captured graphs (aclmdlRI): recorded nodes, replayed in order; task groups whose nodes an update replaces.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <stdexcept>

#include "device.h"

using namespace npu;

namespace {

uint32_t next_id = 1;
// Collectives are expanded on the AI CPU by default, which serves so many graphs of a card (HCCL_OP_EXPANSION_MODE).
constexpr int kGraphsWithCollectives = 6;
int with_collectives[64] = {};

bool expands_on_ai_cpu() {
  const char* mode = std::getenv("HCCL_OP_EXPANSION_MODE");
  return !mode || std::string(mode).rfind("AI_CPU", 0) == 0;
}

}  // namespace

extern "C" {

aclError aclmdlRICaptureBegin(aclrtStream handle, aclmdlRICaptureMode mode) {
  if (!handle) return fail(107030, "the default stream cannot be captured");
  Stream* stream = stream_of(handle);
  if (stream->capture) return fail(107032, "the stream is being captured already");
  if (!take_streams(stream->device, 1)) return fail(207008, "no stream is left for a graph (EL0009)");
  stream->capture = new Graph;
  stream->capture->device = stream->device;
  stream->capture->mode = mode;
  stream->capture->id = next_id++;
  return 0;
}

aclError aclmdlRICaptureEnd(aclrtStream handle, aclmdlRI* out) {
  Stream* stream = stream_of(handle);
  Graph* graph = stream->capture;
  *out = nullptr;
  if (!graph) return fail(107036, "the stream is not being captured");
  end_capture(graph);
  if (stream->open_group) {
    stream->open_group = nullptr;
    return fail(107034, "the capture ended inside a task group");
  }
  if (!graph->invalid.empty()) return fail(107041, "the capture is invalid: " + graph->invalid);
  if (graph->collectives && expands_on_ai_cpu() && ++with_collectives[graph->device] > kGraphsWithCollectives) {
    --with_collectives[graph->device];
    return fail(207008, "a device serves at most " + std::to_string(kGraphsWithCollectives) +
                            " graphs with collectives that are expanded on the AI CPU");
  }
  *out = graph;
  return 0;
}

aclError aclmdlRICaptureGetInfo(aclrtStream handle, aclmdlRICaptureStatus* status, aclmdlRI* model) {
  Graph* graph = handle ? stream_of(handle)->capture : nullptr;
  *status = !graph                    ? ACL_MODEL_RI_CAPTURE_STATUS_NONE
            : graph->invalid.empty() ? ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE
                                     : ACL_MODEL_RI_CAPTURE_STATUS_INVALIDATED;
  *model = graph;
  return 0;
}

aclError aclmdlRICaptureThreadExchangeMode(aclmdlRICaptureMode* mode) {
  std::swap(*mode, thread_mode());
  return 0;
}

aclError aclmdlRIExecuteAsync(aclmdlRI handle, aclrtStream stream) {
  auto* graph = static_cast<Graph*>(handle);
  auto next = std::make_shared<size_t>(0);
  double patience = kPatience;
  for (const Node& node : graph->nodes) patience = std::max(patience, node.patience);
  ++graph->replays;
  const std::shared_ptr<void> replay(nullptr, [graph](void*) { --graph->replays; });  // also of one that is dropped
  return submit(stream, "graph", [graph, next, replay] {
    for (; *next < graph->nodes.size(); ++*next) {
      Node& node = graph->nodes[*next];
      try {
        if (!node.task()) return false;
      } catch (const std::exception& problem) {
        throw std::runtime_error("node " + std::to_string(*next) + ", " + node.name + ": " + problem.what());
      }
    }
    return true;
  }, patience);
}

// Nobody waits for a replay here, and torch_npu does not either: whoever drops a graph must know that it has ended.
aclError aclmdlRIDestroy(aclmdlRI handle) {
  auto* graph = static_cast<Graph*>(handle);
  if (graph->replays) {
    std::fprintf(stderr, "[emulated NPU] a graph was destroyed while it ran\n");  // destructors cannot raise
    npu::count("graph destroyed while it ran");
    return fail(107000, "a graph was destroyed while it ran");  // and it is not freed
  }
  for (TaskGroup* group : graph->groups) delete group;
  give_streams(graph->device, graph->streams);
  if (graph->collectives && expands_on_ai_cpu()) --with_collectives[graph->device];
  delete graph;
  return 0;
}

aclError aclmdlRIGetId(aclmdlRI handle, uint32_t* id) {
  *id = static_cast<Graph*>(handle)->id;
  return 0;
}

aclError aclmdlRICaptureTaskGrpBegin(aclrtStream handle) {
  Stream* stream = stream_of(handle);
  if (!stream->capture || stream->open_group) return fail(107033, "a task group begins in a capture, one at a time");
  stream->open_group = new TaskGroup{stream->capture, stream->capture->nodes.size(), 0};
  return 0;
}

aclError aclmdlRICaptureTaskGrpEnd(aclrtStream handle, aclrtTaskGrp* out) {
  Stream* stream = stream_of(handle);
  TaskGroup* group = stream->open_group;
  if (!group) return fail(107033, "no task group is open");
  stream->open_group = nullptr;
  group->last = stream->capture->nodes.size();
  if (group->first == group->last) return fail(107033, "an empty task group");
  stream->capture->groups.push_back(group);
  *out = group;
  return 0;
}

aclError aclmdlRICaptureTaskUpdateBegin(aclrtStream handle, aclrtTaskGrp group) {
  Stream* stream = stream_of(handle);
  if (stream->capture || stream->updating) return fail(107033, "an update needs a stream that does nothing else");
  stream->updating = static_cast<TaskGroup*>(group);
  return 0;
}

aclError aclmdlRICaptureTaskUpdateEnd(aclrtStream handle) {
  Stream* stream = stream_of(handle);
  TaskGroup* group = stream->updating;
  if (!group) return fail(107033, "no update is open");
  stream->updating = nullptr;
  auto nodes = std::make_shared<std::vector<Node>>(std::move(stream->update));
  stream->update.clear();
  if (nodes->size() != group->last - group->first)
    return fail(107040, "an update of " + std::to_string(group->last - group->first) + " tasks with " +
                            std::to_string(nodes->size()));
  for (size_t i = 0; i < nodes->size(); ++i) {
    const std::string& captured = group->graph->nodes[group->first + i].name;
    if (captured != (*nodes)[i].name) return fail(107040, "captured " + captured + ", updated with " + (*nodes)[i].name);
  }
  return submit(handle, "update task group", [group, nodes] {
    for (size_t i = 0; i < nodes->size(); ++i) group->graph->nodes[group->first + i] = (*nodes)[i];
    return true;
  });
}

}  // extern "C"
