// How an aclnn operator is written here: one line, from which the two C functions that torch_npu looks up are derived.
//
//   ACLNN(Exp, (In x, Out y), y = x().exp())
//
// The body runs later, on the device thread, over views of the caller's memory. An operator with preconditions is a
// function `Kernel Name_op(...)` that checks (on the caller's thread, as tiling does) and returns the body, followed by
// ACLNN_EXPORT(Name).
#pragma once

#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include <ATen/ATen.h>

#include "../runtime/device.h"

using Kernel = std::function<void()>;
using Shape = std::vector<int64_t>;

// A view as aclCreateTensor describes it; calling it gives the tensor.
struct aclTensor {
  Shape sizes, strides;
  int64_t offset = 0;
  at::ScalarType type = at::kFloat;
  int64_t format = 2;
  void* data = nullptr;

  at::Tensor operator()() const;
  int64_t dim() const { return int64_t(sizes.size()); }
  int64_t numel() const;
  bool contiguous() const;
};
struct aclScalar { at::Scalar value; };
struct aclIntArray { Shape values; };
struct aclBoolArray { std::vector<bool> values; };
struct aclTensorList { std::vector<aclTensor> tensors; };
struct aclScalarList { std::vector<at::Scalar> values; };
struct aclOpExecutor {
  const char* name;
  Kernel kernel;
};

namespace op {

at::ScalarType scalar_type(int64_t acl);

// Arguments by their role.
struct In : aclTensor {};
struct Out : aclTensor {
  // Writes a result; a shape other than announced would be memory corruption on hardware.
  void operator=(const at::Tensor& value) const;
};
struct MaybeIn : std::optional<aclTensor> {};
struct MaybeOut : std::optional<aclTensor> {
  void operator=(const at::Tensor& value) const;
};
struct Dynamic {  // an output whose shape the operator finds; torch_npu asks for it afterwards
  aclTensor* tensor;
  void operator=(const at::Tensor& value) const;
};
struct Num : at::Scalar {};
struct MaybeNum : std::optional<at::Scalar> {};
struct Ints : Shape {};
struct MaybeInts : std::optional<Shape> {};
struct List : std::vector<aclTensor> {
  std::vector<at::Tensor> operator()() const;
};
struct Dtype { at::ScalarType type; };
struct Text : std::string {};

[[noreturn]] inline void refuse(const std::string& why) { throw std::invalid_argument(why); }
inline void require(bool holds, const std::string& why) {
  if (!holds) refuse(why);
}
template <class T>
T& present(T* pointer) {
  require(pointer != nullptr, "a required argument is missing");
  return *pointer;
}

// From the C argument to the role.
template <class T> struct Wire { using C = T; static T take(T value) { return value; } };
template <> struct Wire<In> { using C = const aclTensor*; static In take(C p) { return {present(p)}; } };
template <> struct Wire<Out> { using C = const aclTensor*; static Out take(C p) { return {present(p)}; } };
template <> struct Wire<MaybeIn> {
  using C = const aclTensor*;
  static MaybeIn take(C p) { return p ? MaybeIn{*p} : MaybeIn{}; }
};
template <> struct Wire<MaybeOut> {
  using C = const aclTensor*;
  static MaybeOut take(C p) { return p ? MaybeOut{*p} : MaybeOut{}; }
};
template <> struct Wire<Dynamic> { using C = aclTensor*; static Dynamic take(C p) { return {&present(p)}; } };
template <> struct Wire<Num> { using C = const aclScalar*; static Num take(C p) { return {present(p).value}; } };
template <> struct Wire<MaybeNum> {
  using C = const aclScalar*;
  static MaybeNum take(C p) { return p ? MaybeNum{p->value} : MaybeNum{}; }
};
template <> struct Wire<Ints> { using C = const aclIntArray*; static Ints take(C p) { return {present(p).values}; } };
template <> struct Wire<MaybeInts> {
  using C = const aclIntArray*;
  static MaybeInts take(C p) { return p ? MaybeInts{p->values} : MaybeInts{}; }
};
template <> struct Wire<List> { using C = const aclTensorList*; static List take(C p) { return {present(p).tensors}; } };
template <> struct Wire<Dtype> { using C = int; static Dtype take(C v) { return {scalar_type(v)}; } };
template <> struct Wire<Text> { using C = const char*; static Text take(C p) { return {p ? p : ""}; } };

int launch(void*, uint64_t, aclOpExecutor* executor, aclrtStream stream);
int refused(const char* name, const std::string& why);

template <class Tag, class Maker> struct Entry;
template <class Tag, class... A> struct Entry<Tag, Kernel (*)(A...)> {
  static int plan(typename Wire<A>::C... arguments, uint64_t* workspace, aclOpExecutor** executor) {
    *workspace = Tag::workspace;
    try {
      *executor = new aclOpExecutor{Tag::name, Tag::make(Wire<A>::take(arguments)...)};
      return 0;
    } catch (const std::exception& error) {
      return refused(Tag::name, error.what());
    }
  }
};

}  // namespace op

// dlsym of an indirect function calls its resolver: so a C name can stand for a template's instance.
#define ACLNN_EXPORT(NAME) ACLNN_EXPORT_WITH(NAME, 0)
#define ACLNN_EXPORT_WITH(NAME, WORKSPACE)                                                                \
  namespace {                                                                                             \
  struct NAME##_tag {                                                                                     \
    static constexpr const char* name = "aclnn" #NAME;                                                    \
    static constexpr auto make = &NAME##_op;                                                              \
    static constexpr uint64_t workspace = WORKSPACE;                                                      \
  };                                                                                                      \
  }                                                                                                       \
  extern "C" {                                                                                            \
  static void* NAME##_plan_of() { return reinterpret_cast<void*>(&op::Entry<NAME##_tag, decltype(&NAME##_op)>::plan); } \
  static void* NAME##_launch_of() { return reinterpret_cast<void*>(&op::launch); }                        \
  EXPORT int aclnn##NAME##GetWorkspaceSize() __attribute__((ifunc(#NAME "_plan_of")));                    \
  EXPORT int aclnn##NAME() __attribute__((ifunc(#NAME "_launch_of")));                                    \
  }

#define ACLNN(NAME, PARAMETERS, ...)                           \
  namespace {                                                  \
  Kernel NAME##_op PARAMETERS {                                \
    return [=]() mutable { __VA_ARGS__; };                     \
  }                                                            \
  }                                                            \
  ACLNN_EXPORT(NAME)
