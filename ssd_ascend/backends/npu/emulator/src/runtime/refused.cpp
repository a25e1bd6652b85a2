// What libtorch_npu binds when it is loaded and this emulator does not have: refused by name, never answered with zeros.
// No header of CANN here, so that one shape serves for all.
#include <string>

namespace npu {
__attribute__((visibility("default"))) int fail(int code, const std::string& message);
}

#define REFUSE(NAME) \
  extern "C" __attribute__((visibility("default"))) int NAME() { return npu::fail(207000, #NAME " is not emulated"); }
#define NOTHING(NAME) \
  extern "C" __attribute__((visibility("default"))) void* NAME() { return nullptr; }

// descriptions for the legacy path, whose execution is refused with the operator's name
NOTHING(aclCreateDataBuffer)
NOTHING(aclCreateTensorDesc)
NOTHING(aclDestroyDataBuffer)
NOTHING(aclDestroyTensorDesc)
NOTHING(aclGetTensorDescDimV2)
NOTHING(aclGetTensorDescFormat)
NOTHING(aclGetTensorDescNumDims)
NOTHING(aclGetTensorDescType)
NOTHING(aclSetTensorDescName)
NOTHING(aclSetTensorFormat)
NOTHING(aclSetTensorPlaceMent)
NOTHING(aclSetTensorShape)
NOTHING(aclopCreateAttr)
NOTHING(aclopDestroyAttr)
NOTHING(aclopSetAttrBool)
NOTHING(aclopSetAttrDataType)
NOTHING(aclopSetAttrFloat)
NOTHING(aclopSetAttrInt)
NOTHING(aclopSetAttrListBool)
NOTHING(aclopSetAttrListFloat)
NOTHING(aclopSetAttrListInt)
NOTHING(aclopSetAttrListListInt)
NOTHING(aclopSetAttrString)

// the profiler is told things at every call; nobody listens
NOTHING(MsprofGetHashId)
NOTHING(MsprofRegisterCallback)
NOTHING(MsprofReportAdditionalInfo)
NOTHING(MsprofReportApi)
NOTHING(MsprofReportCompactInfo)
NOTHING(MsprofSysCycleTime)

REFUSE(aclmdlFinalizeDump)
REFUSE(aclmdlInitDump)
REFUSE(aclmdlSetDump)
REFUSE(aclrtBinaryGetFunction)
REFUSE(aclrtBinaryLoadFromData)
REFUSE(aclrtFreePhysical)
REFUSE(aclrtGetFunctionAddr)
REFUSE(aclrtMallocPhysical)
REFUSE(aclrtMapMem)
REFUSE(aclrtMemExportToShareableHandle)
REFUSE(aclrtMemImportFromShareableHandle)
REFUSE(aclrtMemSetPidToShareableHandle)
REFUSE(aclrtProcessReport)
REFUSE(aclrtReleaseMemAddress)
REFUSE(aclrtReserveMemAddress)
REFUSE(aclrtUnmapMem)
REFUSE(rtDevBinaryRegister)
REFUSE(rtFunctionRegister)
REFUSE(rtGetC2cCtrlAddr)
REFUSE(rtKernelLaunch)
