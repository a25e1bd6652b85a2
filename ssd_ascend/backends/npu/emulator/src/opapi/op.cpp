// The C objects of the operator interface, and the launch of a planned operator.
#include "op.h"

#include <cstring>

#include <c10/core/InferenceMode.h>

namespace op {

at::ScalarType scalar_type(int64_t acl) {
  switch (acl) {
    case ACL_FLOAT: return at::kFloat;
    case ACL_FLOAT16: return at::kHalf;
    case ACL_INT8: return at::kChar;
    case ACL_INT32: return at::kInt;
    case ACL_UINT8: return at::kByte;
    case ACL_INT16: return at::kShort;
    case ACL_INT64: return at::kLong;
    case ACL_DOUBLE: return at::kDouble;
    case ACL_BOOL: return at::kBool;
    case ACL_BF16: return at::kBFloat16;
    default: refuse("data type " + std::to_string(acl) + " is not emulated");
  }
}

void Out::operator=(const at::Tensor& value) const {
  at::Tensor target = (*this)();
  require(value.sizes() == target.sizes(), "a result of another shape than its output");
  target.copy_(value);
}

void MaybeOut::operator=(const at::Tensor& value) const {
  if (has_value()) Out{**this} = value;
}

void Dynamic::operator=(const at::Tensor& value) const {
  aclTensor shrunk = *tensor;
  shrunk.sizes = value.sizes().vec();
  shrunk.strides = value.contiguous().strides().vec();
  require(shrunk.numel() <= tensor->numel(), "a result larger than its output");
  shrunk().copy_(value);
  *tensor = shrunk;
}

std::vector<at::Tensor> List::operator()() const {
  std::vector<at::Tensor> views;
  for (const aclTensor& tensor : *this) views.push_back(tensor());
  return views;
}

// The workspace is the operator's to scribble in: whoever keeps something there finds it gone.
int launch(void* workspace, uint64_t bytes, aclOpExecutor* executor, aclrtStream stream) {
  const int code = npu::submit(stream, executor->name, [kernel = std::move(executor->kernel), workspace, bytes] {
    if (workspace && bytes) std::memset(workspace, 0xFF, bytes);
    kernel();
    return true;
  });
  delete executor;
  return code;
}

int refused(const char* name, const std::string& why) {
  return npu::refuse_operator(561002, std::string(name) + ": " + why);
}

namespace {
const bool started = [] {
  npu::set_thread_start([](std::function<void()> body) {
    c10::InferenceMode guard;
    body();
  });
  return true;
}();
}  // namespace

}  // namespace op

at::Tensor aclTensor::operator()() const {
  const auto options = at::TensorOptions().dtype(type);
  if (numel() == 0) return at::empty(sizes, options);
  return at::from_blob(static_cast<char*>(data) + offset * c10::elementSize(type), sizes, strides, options);
}

int64_t aclTensor::numel() const {
  int64_t count = 1;
  for (int64_t size : sizes) count *= size;
  return count;
}

bool aclTensor::contiguous() const {
  int64_t expected = 1;
  for (int64_t i = dim() - 1; i >= 0; --i) {
    if (sizes[i] != 1 && strides[i] != expected) return false;
    expected *= sizes[i];
  }
  return true;
}

extern "C" {

EXPORT aclTensor* aclCreateTensor(const int64_t* sizes, uint64_t dims, aclDataType type, const int64_t* strides,
                                  int64_t offset, aclFormat format, const int64_t*, uint64_t, void* data) {
  auto* tensor = new aclTensor;
  tensor->sizes.assign(sizes, sizes + dims);
  tensor->strides.assign(strides, strides + dims);
  tensor->offset = offset;
  tensor->type = op::scalar_type(type);
  tensor->format = format;
  tensor->data = data;
  return tensor;
}

EXPORT aclScalar* aclCreateScalar(void* value, aclDataType type) {
  switch (op::scalar_type(type)) {
    case at::kDouble: return new aclScalar{*static_cast<double*>(value)};
    case at::kFloat: return new aclScalar{*static_cast<float*>(value)};
    case at::kLong: return new aclScalar{*static_cast<int64_t*>(value)};
    case at::kInt: return new aclScalar{*static_cast<int32_t*>(value)};
    case at::kBool: return new aclScalar{*static_cast<bool*>(value)};
    case at::kHalf: return new aclScalar{float(*static_cast<at::Half*>(value))};
    case at::kBFloat16: return new aclScalar{float(*static_cast<at::BFloat16*>(value))};
    default: return nullptr;
  }
}

EXPORT aclIntArray* aclCreateIntArray(const int64_t* values, uint64_t n) { return new aclIntArray{Shape(values, values + n)}; }
EXPORT aclBoolArray* aclCreateBoolArray(const bool* values, uint64_t n) {
  return new aclBoolArray{std::vector<bool>(values, values + n)};
}
// The list owns its tensors: torch_npu destroys them with it, never one by one.
EXPORT aclTensorList* aclCreateTensorList(const aclTensor* const* values, uint64_t n) {
  auto* list = new aclTensorList;
  for (uint64_t i = 0; i < n; ++i) list->tensors.push_back(values[i] ? *values[i] : aclTensor{});
  return list;
}
EXPORT aclScalarList* aclCreateScalarList(const aclScalar* const* values, uint64_t n) {
  auto* list = new aclScalarList;
  for (uint64_t i = 0; i < n; ++i) list->values.push_back(values[i]->value);
  return list;
}

EXPORT int aclDestroyTensor(const aclTensor* it) { delete it; return 0; }
EXPORT int aclDestroyScalar(const aclScalar* it) { delete it; return 0; }
EXPORT int aclDestroyIntArray(const aclIntArray* it) { delete it; return 0; }
EXPORT int aclDestroyBoolArray(const aclBoolArray* it) { delete it; return 0; }
EXPORT int aclDestroyTensorList(const aclTensorList* it) { delete it; return 0; }
EXPORT int aclDestroyScalarList(const aclScalarList* it) { delete it; return 0; }

EXPORT int aclGetViewShape(const aclTensor* tensor, int64_t** sizes, uint64_t* dims) {
  *dims = tensor->sizes.size();
  *sizes = new int64_t[*dims];
  std::copy(tensor->sizes.begin(), tensor->sizes.end(), *sizes);
  return 0;
}

}  // extern "C"
