// libhccl for processes of one machine: a shared file per communicator with a ring of bytes for each ordered pair of
// ranks. Every collective is an exchange of messages between pairs, moved on by the device thread, then a local finish.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>

#include <third_party/hccl/inc/hccl/hccl.h>

#include "../runtime/device.h"

namespace {

constexpr size_t kRing = size_t(1) << 20;

double patience_seconds() {
  const char* seconds = std::getenv("HCCL_EXEC_TIMEOUT");
  return seconds ? std::atof(seconds) : 1836;
}

struct Ring {
  std::atomic<uint64_t> written, read;
  char pad[48];
  char bytes[kRing];
};
struct Shared {
  std::atomic<uint32_t> attached;
  char pad[60];
  Ring rings[];
};
struct Comm {
  uint32_t rank, size;
  std::string name;
  Shared* shared;
  Ring& ring(uint32_t from, uint32_t to) const { return shared->rings[from * size + to]; }
};

// One message to or from a peer: eight bytes of length, which must be what the other side expects, then the contents.
struct Leg {
  bool sending;
  uint32_t peer;
  char* data;
  uint64_t bytes;
  uint64_t announced = 0;  // of the eight bytes
  uint64_t moved = 0;
  uint64_t length = 0;
  bool done = false;
};

void move(const Comm& comm, Leg& leg) {
  Ring& ring = leg.sending ? comm.ring(comm.rank, leg.peer) : comm.ring(leg.peer, comm.rank);
  if (leg.sending) leg.length = leg.bytes;
  while (!leg.done) {
    const uint64_t filled = ring.written.load(std::memory_order_acquire) - ring.read.load(std::memory_order_acquire);
    const uint64_t can = leg.sending ? kRing - filled : filled;
    const bool header = leg.announced < 8;
    const uint64_t wanted = header ? 8 - leg.announced : leg.bytes - leg.moved;
    auto& cursor = leg.sending ? ring.written : ring.read;
    const uint64_t at = cursor.load() % kRing, step = std::min({can, wanted, kRing - at});
    if (step) {
      char* own = header ? reinterpret_cast<char*>(&leg.length) + leg.announced : leg.data + leg.moved;
      leg.sending ? std::memcpy(ring.bytes + at, own, step) : std::memcpy(own, ring.bytes + at, step);
      cursor.fetch_add(step, std::memory_order_release);
      (header ? leg.announced : leg.moved) += step;
    }
    if (leg.announced == 8 && leg.length != leg.bytes)
      throw std::runtime_error("expected " + std::to_string(leg.bytes) + " bytes of rank " + std::to_string(leg.peer) +
                               ", got " + std::to_string(leg.length));
    leg.done = leg.announced == 8 && leg.moved == leg.bytes;
    if (!leg.done && !step) return;
  }
}

// Legs of one direction with one peer go in order; all others side by side, so no order of ranks can block.
bool move_all(const Comm& comm, std::vector<Leg>& legs) {
  bool done = true;
  for (size_t i = 0; i < legs.size(); ++i) {
    Leg& leg = legs[i];
    const bool behind = std::any_of(legs.begin(), legs.begin() + i, [&](const Leg& earlier) {
      return !earlier.done && earlier.peer == leg.peer && earlier.sending == leg.sending;
    });
    if (!leg.done && !behind) move(comm, leg);
    done = done && leg.done;
  }
  return done;
}

// A task that may run again and again, as the node of a graph: each run starts from fresh legs.
HcclResult exchange(const char* name, Comm* comm, std::vector<Leg> legs, std::function<void()> finish, aclrtStream stream) {
  auto current = std::make_shared<std::vector<Leg>>();
  const int code = npu::submit(
      stream, name,
      [=] {
        if (current->empty()) *current = legs;
        if (!move_all(*comm, *current)) return false;
        current->clear();
        finish();
        return true;
      },
      patience_seconds());
  return code ? HCCL_E_RUNTIME : HCCL_SUCCESS;
}

// Between HcclGroupStart and HcclGroupEnd sends and receives gather, to move side by side.
struct Group {
  int depth = 0;
  Comm* comm = nullptr;
  aclrtStream stream = nullptr;
  std::vector<Leg> legs;
};
thread_local Group group;

HcclResult transfer(const char* name, HcclComm handle, Leg leg, aclrtStream stream) {
  auto* comm = static_cast<Comm*>(handle);
  if (group.depth == 0) return exchange(name, comm, {leg}, [] {}, stream);
  if (!group.legs.empty() && (group.comm != comm || group.stream != stream)) {
    npu::fail(HCCL_E_NOT_SUPPORT, "a group over several communicators or streams is not emulated");
    return HCCL_E_NOT_SUPPORT;
  }
  group.comm = comm;
  group.stream = stream;
  group.legs.push_back(leg);
  return HCCL_SUCCESS;
}

uint64_t width_of(HcclDataType type) {
  switch (type) {
    case HCCL_DATA_TYPE_INT8:
    case HCCL_DATA_TYPE_UINT8: return 1;
    case HCCL_DATA_TYPE_INT16:
    case HCCL_DATA_TYPE_FP16:
    case HCCL_DATA_TYPE_BFP16: return 2;
    case HCCL_DATA_TYPE_INT32:
    case HCCL_DATA_TYPE_FP32: return 4;
    case HCCL_DATA_TYPE_INT64: return 8;
    default: return 0;
  }
}

struct BFloat16 {
  uint16_t bits;
  operator float() const {
    const uint32_t wide = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
  }
  BFloat16& operator=(float value) {
    uint32_t wide;
    std::memcpy(&wide, &value, 4);
    bits = uint16_t((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16);  // to nearest even
    return *this;
  }
};

template <class T, class Wide>
void reduce_as(HcclReduceOp op, const std::vector<const char*>& parts, char* out, uint64_t count) {
  for (uint64_t i = 0; i < count; ++i) {
    Wide value = Wide(reinterpret_cast<const T*>(parts[0])[i]);
    for (size_t rank = 1; rank < parts.size(); ++rank) {
      const Wide other = Wide(reinterpret_cast<const T*>(parts[rank])[i]);
      value = op == HCCL_REDUCE_SUM ? value + other : op == HCCL_REDUCE_PROD ? value * other
            : op == HCCL_REDUCE_MAX ? std::max(value, other) : std::min(value, other);
    }
    reinterpret_cast<T*>(out)[i] = value;
  }
}

// In the order of ranks, so that all of them get the same bits.
void reduce(HcclDataType type, HcclReduceOp op, const std::vector<const char*>& parts, char* out, uint64_t count) {
  switch (type) {
    case HCCL_DATA_TYPE_FP32: return reduce_as<float, float>(op, parts, out, count);
    case HCCL_DATA_TYPE_FP16: return reduce_as<_Float16, float>(op, parts, out, count);
    case HCCL_DATA_TYPE_BFP16: return reduce_as<BFloat16, float>(op, parts, out, count);
    case HCCL_DATA_TYPE_INT8: return reduce_as<int8_t, int64_t>(op, parts, out, count);
    case HCCL_DATA_TYPE_INT16: return reduce_as<int16_t, int64_t>(op, parts, out, count);
    case HCCL_DATA_TYPE_INT32: return reduce_as<int32_t, int64_t>(op, parts, out, count);
    case HCCL_DATA_TYPE_INT64: return reduce_as<int64_t, int64_t>(op, parts, out, count);
    default: throw std::runtime_error("HCCL does not reduce this data type");
  }
}

HcclResult open_comm(uint32_t size, const HcclRootInfo* root, uint32_t rank, HcclComm* out) {
  const std::string name(root->internal);
  const size_t bytes = sizeof(Shared) + size_t(size) * size * sizeof(Ring);
  const int file = shm_open(name.c_str(), O_RDWR | O_CREAT, 0600);
  if (file < 0 || ftruncate(file, off_t(bytes)) != 0) return HCCL_E_INTERNAL;
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (memory == MAP_FAILED) return HCCL_E_MEMORY;
  auto* comm = new Comm{rank, size, name, static_cast<Shared*>(memory)};
  if (comm->shared->attached.fetch_add(1) + 1 == size) shm_unlink(name.c_str());  // all have it: no name is left behind
  *out = comm;
  return HCCL_SUCCESS;
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

HcclResult HcclGetRootInfo(HcclRootInfo* root) {
  static std::atomic<int> serial{0};
  const std::string name = "/ssd_hccl_" + std::to_string(getpid()) + "_" + std::to_string(serial++);
  std::memset(root, 0, sizeof *root);
  std::strncpy(root->internal, name.c_str(), sizeof root->internal - 1);
  return HCCL_SUCCESS;
}
HcclResult HcclCommInitRootInfo(uint32_t size, const HcclRootInfo* root, uint32_t rank, HcclComm* comm) {
  return open_comm(size, root, rank, comm);
}
HcclResult HcclCommInitRootInfoConfig(uint32_t size, const HcclRootInfo* root, uint32_t rank, const HcclCommConfig*,
                                      HcclComm* comm) {
  return open_comm(size, root, rank, comm);
}
HcclResult HcclCommDestroy(HcclComm) { return HCCL_SUCCESS; }  // queued tasks may still name it; it ends with the process
HcclResult HcclSetConfig(HcclConfig, HcclConfigValue) { return HCCL_SUCCESS; }
HcclResult HcclGetCommAsyncError(HcclComm, HcclResult* error) {
  *error = HCCL_SUCCESS;
  return HCCL_SUCCESS;
}
HcclResult HcclGetCommName(HcclComm handle, char* name) {
  std::strcpy(name, static_cast<Comm*>(handle)->name.c_str());
  return HCCL_SUCCESS;
}
HcclResult HcclGetRankSize(HcclComm handle, uint32_t* size) {
  *size = static_cast<Comm*>(handle)->size;
  return HCCL_SUCCESS;
}
HcclResult HcclGetRankId(HcclComm handle, uint32_t* rank) {
  *rank = static_cast<Comm*>(handle)->rank;
  return HCCL_SUCCESS;
}

// Expanded on the vector cores, HCCL has no point-to-point messages.
static bool has_messages() {
  const char* mode = std::getenv("HCCL_OP_EXPANSION_MODE");
  if (!mode || std::string(mode) != "AIV") return true;
  npu::refuse_operator(107000, "HCCL_OP_EXPANSION_MODE=AIV has no send and receive");
  return false;
}
HcclResult HcclSend(void* data, uint64_t count, HcclDataType type, uint32_t peer, HcclComm comm, aclrtStream stream) {
  if (!has_messages()) return HCCL_E_NOT_SUPPORT;
  return transfer("HcclSend", comm, {true, peer, static_cast<char*>(data), count * width_of(type)}, stream);
}
HcclResult HcclRecv(void* data, uint64_t count, HcclDataType type, uint32_t peer, HcclComm comm, aclrtStream stream) {
  if (!has_messages()) return HCCL_E_NOT_SUPPORT;
  return transfer("HcclRecv", comm, {false, peer, static_cast<char*>(data), count * width_of(type)}, stream);
}
HcclResult HcclGroupStart() {
  ++group.depth;
  return HCCL_SUCCESS;
}
HcclResult HcclGroupEnd() {
  if (--group.depth > 0 || group.legs.empty()) return HCCL_SUCCESS;
  std::vector<Leg> legs;
  legs.swap(group.legs);
  return exchange("HcclGroup", group.comm, legs, [] {}, group.stream);
}
HcclResult HcclBatchSendRecv(HcclSendRecvItem* items, uint32_t count, HcclComm comm, aclrtStream stream) {
  std::vector<Leg> legs;
  for (uint32_t i = 0; i < count; ++i)
    legs.push_back({items[i].sendRecvType == HCCL_SEND, items[i].remoteRank, static_cast<char*>(items[i].buf),
                    items[i].count * width_of(items[i].dataType)});
  return exchange("HcclBatchSendRecv", static_cast<Comm*>(comm), legs, [] {}, stream);
}

HcclResult HcclBroadcast(void* data, uint64_t count, HcclDataType type, uint32_t root, HcclComm handle, aclrtStream stream) {
  auto* comm = static_cast<Comm*>(handle);
  std::vector<Leg> legs;
  for (uint32_t peer = 0; peer < comm->size; ++peer)
    if (peer != comm->rank && (comm->rank == root || peer == root))
      legs.push_back({comm->rank == root, peer, static_cast<char*>(data), count * width_of(type)});
  return exchange("HcclBroadcast", comm, legs, [] {}, stream);
}

HcclResult HcclAllGather(void* from, void* to, uint64_t count, HcclDataType type, HcclComm handle, aclrtStream stream) {
  auto* comm = static_cast<Comm*>(handle);
  const uint64_t bytes = count * width_of(type);
  std::vector<Leg> legs;
  for (uint32_t peer = 0; peer < comm->size; ++peer) {
    if (peer == comm->rank) continue;
    legs.push_back({true, peer, static_cast<char*>(from), bytes});
    legs.push_back({false, peer, static_cast<char*>(to) + peer * bytes, bytes});
  }
  const uint32_t own = comm->rank;
  return exchange("HcclAllGather", comm, legs, [=] { std::memmove(static_cast<char*>(to) + own * bytes, from, bytes); }, stream);
}

HcclResult HcclAllReduce(void* from, void* to, uint64_t count, HcclDataType type, HcclReduceOp op, HcclComm handle,
                         aclrtStream stream) {
  auto* comm = static_cast<Comm*>(handle);
  const uint64_t bytes = count * width_of(type);
  auto others = std::make_shared<std::vector<std::vector<char>>>(comm->size, std::vector<char>(bytes));
  std::vector<Leg> legs;
  for (uint32_t peer = 0; peer < comm->size; ++peer) {
    if (peer == comm->rank) continue;
    legs.push_back({true, peer, static_cast<char*>(from), bytes});
    legs.push_back({false, peer, (*others)[peer].data(), bytes});
  }
  const uint32_t own = comm->rank;
  auto finish = [=] {
    std::memcpy((*others)[own].data(), from, bytes);
    std::vector<const char*> parts;
    for (const auto& part : *others) parts.push_back(part.data());
    reduce(type, op, parts, static_cast<char*>(to), count);
  };
  return exchange("HcclAllReduce", comm, legs, finish, stream);
}

}  // extern "C"
#pragma GCC visibility pop
