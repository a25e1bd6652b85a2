// Devices, versions, options, and the legacy operator path, which refuses everything by name.
#include <dlfcn.h>
#include <cstdarg>
#include <cstring>

#include <acl/acl.h>
#include <acl/acl_op_compiler.h>

#include "device.h"

namespace npu {
namespace {

constexpr int kDevices = 8;
thread_local int device = 0;
int64_t options[64] = {};

}  // namespace

int current_device() { return device; }

}  // namespace npu

using namespace npu;

extern "C" {

// libopapi needs libtorch, so it cannot be opened before torch: by now it can, and torch_npu finds it by its SONAME.
aclError aclInit(const char*) {
  note_main_thread();
  Dl_info self;
  dladdr(reinterpret_cast<void*>(&aclInit), &self);
  const std::string path(self.dli_fname);
  const std::string operators = path.substr(0, path.rfind('/') + 1) + "libopapi.so";
  if (!dlopen(operators.c_str(), RTLD_NOW | RTLD_GLOBAL)) return fail(500000, std::string("libopapi: ") + dlerror());
  return 0;
}
aclError aclFinalize() { return 0; }

aclError aclrtGetDeviceCount(uint32_t* count) {
  *count = kDevices;
  return 0;
}
aclError aclrtSetDevice(int32_t index) {
  if (index < 0 || index >= kDevices) return fail(107001, "no device " + std::to_string(index));
  device = index;
  return 0;
}
aclError aclrtGetDevice(int32_t* index) {
  *index = device;
  return 0;
}
aclError aclrtResetDevice(int32_t) { return 0; }
aclError aclrtGetCurrentContext(aclrtContext* context) {
  *context = reinterpret_cast<aclrtContext>(intptr_t(device + 1));
  return 0;
}
aclError aclrtSetCurrentContext(aclrtContext context) {
  device = int(reinterpret_cast<intptr_t>(context)) - 1;
  return 0;
}
aclError aclrtGetPrimaryCtxState(int32_t, uint32_t* flags, int32_t* active) {
  *flags = 0;
  *active = 1;
  return 0;
}
aclError aclrtDeviceCanAccessPeer(int32_t* can, int32_t, int32_t) {
  *can = 1;
  return 0;
}
aclError aclrtDeviceEnablePeerAccess(int32_t, uint32_t) { return 0; }
aclError aclrtDeviceGetBareTgid(int32_t* pid) {
  *pid = 0;
  return 0;
}
aclError aclrtGetLogicDevIdByUserDevId(const int32_t user, int32_t* const logic) {
  *logic = user;
  return 0;
}

// Only a question about workspace leaves a plan that is never launched; it is small and asked once for each capture.
// torch_npu looks for this in libnnopbase, which leads here.
EXPORT int aclDestroyAclOpExecutor(void*) { return 0; }

const char* aclrtGetSocName() { return "Ascend910_9392"; }

aclError aclrtGetDeviceInfo(uint32_t, aclrtDevAttr attribute, int64_t* value) {
  switch (attribute) {
    case ACL_DEV_ATTR_AICORE_CORE_NUM:
    case ACL_DEV_ATTR_CUBE_CORE_NUM: *value = 24; return 0;
    case ACL_DEV_ATTR_VECTOR_CORE_NUM: *value = 48; return 0;
    case ACL_DEV_ATTR_TOTAL_GLOBAL_MEM_SIZE: *value = int64_t(8) << 30; return 0;
    case ACL_DEV_ATTR_L2_CACHE_SIZE: *value = 192 << 20; return 0;
    default: return fail(207000, "device attribute " + std::to_string(attribute) + " is not emulated");
  }
}

aclError aclGetDeviceCapability(uint32_t, aclDeviceInfo, int64_t* value) {
  *value = 48;
  return 0;
}

#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
aclError aclsysGetCANNVersion(aclCANNPackageName, aclCANNPackageVersion* version) {
  std::memset(version, 0, sizeof *version);
  std::strcpy(version->version, "9.1.0");
  std::strcpy(version->majorVersion, "9");
  std::strcpy(version->minorVersion, "1");
  std::strcpy(version->releaseVersion, "0");
  return 0;
}
aclError aclsysGetVersionStr(char*, char* text) {
  std::strcpy(text, "9.1.0");
  return 0;
}

aclError aclrtGetSysParamOpt(aclSysParamOpt option, int64_t* value) {
  *value = options[option];
  return 0;
}
aclError aclrtSetSysParamOpt(aclSysParamOpt option, int64_t value) {
  options[option] = value;
  return 0;
}
aclError aclrtCtxSetSysParamOpt(aclSysParamOpt option, int64_t value) { return aclrtSetSysParamOpt(option, value); }

aclError aclrtSetOpWaitTimeout(uint32_t) { return 0; }
aclError aclrtSetOpExecuteTimeOut(uint32_t) { return 0; }
aclError aclrtSetDeviceSatMode(aclrtFloatOverflowMode) { return 0; }
aclError aclrtSetStreamFailureMode(aclrtStream, uint64_t) { return 0; }
aclError aclrtSetStreamAttribute(aclrtStream, aclrtStreamAttr, aclrtStreamAttrValue*) { return 0; }
aclError aclrtPeekAtLastError(aclrtLastErrLevel) { return 0; }
aclError aclrtGetLastError(aclrtLastErrLevel) { return 0; }

void aclAppLog(aclLogLevel, const char*, const char*, uint32_t, const char*, ...) {}

// "disable" for the just-in-time compiler: operators then go to aclnn, never to the graph engine.
aclError aclGetCompileopt(aclCompileOpt, char* value, size_t room) {
  std::strncpy(value, "disable", room);
  return 0;
}
size_t aclGetCompileoptSize(aclCompileOpt) { return sizeof "disable"; }
aclError aclSetCompileopt(aclCompileOpt, const char*) { return 0; }

aclError aclopCompileAndExecute(const char* type, int, const aclTensorDesc* const[], const aclDataBuffer* const[], int,
                                const aclTensorDesc* const[], aclDataBuffer* const[], const aclopAttr*, aclopEngineType,
                                aclopCompileType, const char*, aclrtStream) {
  return refuse_operator(561103, std::string("the operator ") + type + " is not emulated");
}
aclError aclopCompileAndExecuteV2(const char* type, int, aclTensorDesc*[], aclDataBuffer*[], int, aclTensorDesc*[],
                                  aclDataBuffer*[], aclopAttr*, aclopEngineType, aclopCompileType, const char*,
                                  aclrtStream) {
  return refuse_operator(561103, std::string("the operator ") + type + " is not emulated");
}

}  // extern "C"
