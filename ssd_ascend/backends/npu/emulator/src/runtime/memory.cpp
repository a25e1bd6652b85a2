// Device memory (host memory in disguise, filled with NaN), pinned host memory, copies.
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "device.h"

namespace npu {
namespace {

constexpr size_t kAlignment = 512;
constexpr size_t kDeviceBytes = size_t(8) << 30;
constexpr int kPoison = 0xFF;  // NaN in every float format, -1 in every integer

struct Block {
  size_t size;
  int device;  // -1: pinned host memory
};
struct Heap {
  std::mutex lock;
  std::map<const char*, Block> blocks;
  size_t used[64] = {};
};
Heap& heap() {
  static Heap* it = new Heap;
  return *it;
}

const std::pair<const char* const, Block>* find(const void* pointer) {
  auto& blocks = heap().blocks;
  auto after = blocks.upper_bound(static_cast<const char*>(pointer));
  if (after == blocks.begin()) return nullptr;
  const auto& found = *std::prev(after);
  return static_cast<const char*>(pointer) < found.first + found.second.size ? &found : nullptr;
}

aclError allocate(void** out, size_t size, int device) {
  Heap& h = heap();
  const size_t rounded = (size + kAlignment - 1) / kAlignment * kAlignment;
  std::lock_guard<std::mutex> held(h.lock);
  if (device >= 0 && h.used[device] + rounded > kDeviceBytes) return fail(207001, "out of device memory");
  *out = std::aligned_alloc(kAlignment, rounded ? rounded : kAlignment);
  if (!*out) return fail(207001, "out of host memory");
  std::memset(*out, kPoison, rounded);
  h.blocks[static_cast<char*>(*out)] = {rounded, device};
  if (device >= 0) h.used[device] += rounded;
  return 0;
}

aclError release(void* pointer) {
  Heap& h = heap();
  std::lock_guard<std::mutex> held(h.lock);
  auto found = h.blocks.find(static_cast<char*>(pointer));
  if (found == h.blocks.end()) return fail(107000, "freed what was never allocated");
  if (found->second.device >= 0) h.used[found->second.device] -= found->second.size;
  std::free(pointer);
  h.blocks.erase(found);
  return 0;
}

// What the copy's direction says of both pointers must be true: mixing them up works here and crashes on hardware.
aclError check_kind(const void* dst, const void* src, aclrtMemcpyKind kind) {
  auto on_device = [](const void* p) {
    Heap& h = heap();
    std::lock_guard<std::mutex> held(h.lock);
    auto* found = find(p);
    return found && found->second.device >= 0;
  };
  const bool to = on_device(dst), from = on_device(src);
  const bool right = kind == ACL_MEMCPY_HOST_TO_HOST ? !to && !from
                     : kind == ACL_MEMCPY_HOST_TO_DEVICE ? to && !from
                     : kind == ACL_MEMCPY_DEVICE_TO_HOST ? !to && from
                     : kind == ACL_MEMCPY_DEVICE_TO_DEVICE ? to && from : true;
  return right ? 0 : fail(107000, "a copy whose direction does not fit its pointers");
}

}  // namespace

bool is_pinned(const void* pointer) {
  Heap& h = heap();
  std::lock_guard<std::mutex> held(h.lock);
  auto* found = find(pointer);
  return found && found->second.device < 0;
}

}  // namespace npu

using namespace npu;

extern "C" {

aclError aclrtMalloc(void** out, size_t size, aclrtMemMallocPolicy) { return allocate(out, size, current_device()); }
aclError aclrtMallocAlign32(void** out, size_t size, aclrtMemMallocPolicy) {
  return allocate(out, size, current_device());
}
aclError aclrtFree(void* pointer) { return release(pointer); }
aclError aclrtMallocHost(void** out, size_t size) { return allocate(out, size, -1); }
aclError aclrtFreeHost(void* pointer) { return release(pointer); }

aclError aclrtGetMemInfo(aclrtMemAttr, size_t* free, size_t* total) {
  std::lock_guard<std::mutex> held(heap().lock);
  *total = kDeviceBytes;
  *free = kDeviceBytes - heap().used[current_device()];
  return 0;
}

aclError aclrtPointerGetAttributes(const void* pointer, aclrtPtrAttributes* attributes) {
  std::lock_guard<std::mutex> held(heap().lock);
  auto* found = find(pointer);
  attributes->location.type = !found                      ? ACL_MEM_LOCATION_TYPE_UNREGISTERED
                              : found->second.device >= 0 ? ACL_MEM_LOCATION_TYPE_DEVICE
                                                          : ACL_MEM_LOCATION_TYPE_HOST;
  attributes->location.id = found && found->second.device >= 0 ? uint32_t(found->second.device) : 0;
  return 0;
}

aclError aclrtMemcpy(void* dst, size_t room, const void* src, size_t count, aclrtMemcpyKind kind) {
  npu::count("synchronous copy");
  if (spoils_capture("synchronous copy")) return fail(107041, "aclrtMemcpy while a stream is being captured");
  if (count > room) return fail(107000, "a copy larger than its destination");
  if (aclError error = check_kind(dst, src, kind)) return error;
  std::memcpy(dst, src, count);
  return 0;
}

aclError aclrtMemcpyAsync(void* dst, size_t room, const void* src, size_t count, aclrtMemcpyKind kind,
                          aclrtStream stream) {
  if (count > room) return fail(107000, "a copy larger than its destination");
  if (aclError error = check_kind(dst, src, kind)) return error;
  const void* host = kind == ACL_MEMCPY_HOST_TO_DEVICE ? src : kind == ACL_MEMCPY_DEVICE_TO_HOST ? dst : nullptr;
  if (host && stream_of(stream)->capture && !is_pinned(host)) {
    spoils_capture("copy with pageable host memory");
    return fail(107041, "a copy with pageable host memory while a stream is being captured");
  }
  if (host && !is_pinned(host)) npu::count("pageable copy");
  return submit(stream, "copy", [=] {
    std::memcpy(dst, src, count);
    return true;
  });
}

aclError aclrtMemset(void* dst, size_t room, int32_t value, size_t count) {
  if (spoils_capture("synchronous memset")) return fail(107041, "aclrtMemset while a stream is being captured");
  if (count > room) return fail(107000, "a memset larger than its destination");
  std::memset(dst, value, count);
  return 0;
}

aclError aclrtMemsetAsync(void* dst, size_t room, int32_t value, size_t count, aclrtStream stream) {
  if (count > room) return fail(107000, "a memset larger than its destination");
  return submit(stream, "memset", [=] {
    std::memset(dst, value, count);
    return true;
  });
}

}  // extern "C"
