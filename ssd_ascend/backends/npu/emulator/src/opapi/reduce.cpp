// Operators along a dimension: sums, extremes, softmax, scans, sorting.
#include "op.h"

using namespace op;

namespace {
void both(Out& values, Out& indices, const std::tuple<at::Tensor, at::Tensor>& found) {
  values = std::get<0>(found);
  indices = std::get<1>(found);
}
at::Tensor over(const at::Tensor& x, const Shape& dims, bool keep, at::Tensor (*reduce)(const at::Tensor&, int64_t, bool)) {
  if (dims.empty() || int64_t(dims.size()) == x.dim()) {
    at::Tensor all = reduce(x.reshape(-1), 0, false);
    return keep ? all.reshape(Shape(x.dim(), 1)) : all;
  }
  require(dims.size() == 1, "a reduction over some of several dimensions is not emulated");
  return reduce(x, dims[0], keep);
}
}  // namespace

ACLNN(ReduceSum, (In x, Ints dims, bool keep, Dtype type, Out y), y = at::sum(x(), dims, keep, type.type))
ACLNN(Mean, (In x, Ints dims, bool keep, Dtype type, Out y), y = at::mean(x(), dims, keep, type.type))
ACLNN(Amax, (In x, Ints dims, bool keep, Out y), y = at::amax(x(), dims, keep))
ACLNN(Amin, (In x, Ints dims, bool keep, Out y), y = at::amin(x(), dims, keep))
ACLNN(Max, (In x, Out y), y = at::max(x()))
ACLNN(Min, (In x, Out y), y = at::min(x()))
ACLNN(MaxDim, (In x, int64_t dim, bool keep, Out value, Out index), both(value, index, at::max(x(), dim, keep)))
ACLNN(MinDim, (In x, int64_t dim, bool keep, Out value, Out index), both(value, index, at::min(x(), dim, keep)))
ACLNN(ArgMax, (In x, int64_t dim, bool keep, Out y), y = at::argmax(x(), dim, keep))
ACLNN(ArgMin, (In x, int64_t dim, bool keep, Out y), y = at::argmin(x(), dim, keep))
ACLNN(Any, (In x, Ints dims, bool keep, Out y),
      y = over(x(), dims, keep, [](const at::Tensor& t, int64_t dim, bool k) { return at::any(t, dim, k); }))
ACLNN(All, (In x, Ints dims, bool keep, Out y),
      y = over(x(), dims, keep, [](const at::Tensor& t, int64_t dim, bool k) { return at::all(t, dim, k); }))
ACLNN(Equal, (In a, In b, Out y), y = at::full(y.sizes, at::equal(a(), b()), at::kBool))
ACLNN(LogSumExp, (In x, Ints dims, bool keep, Out y), y = at::logsumexp(x(), dims, keep))
ACLNN(Softmax, (In x, int64_t dim, Out y), y = at::softmax(x(), dim, y.type))
ACLNN(LogSoftmax, (In x, int64_t dim, Out y), y = at::log_softmax(x(), dim, y.type))
ACLNN(Cumsum, (In x, int64_t dim, Dtype type, Out y), y = at::cumsum(x(), dim, type.type))
ACLNN(Cumprod, (In x, Num dim, Dtype type, Out y), y = at::cumprod(x(), dim.toLong(), type.type))
ACLNN(Topk, (In x, int64_t k, int64_t dim, bool largest, bool sorted, Out values, Out indices),
      both(values, indices, at::topk(x(), k, dim, largest, sorted)))
ACLNN(Sort, (In x, bool stable, int64_t dim, bool descending, Out values, Out indices),
      both(values, indices, at::sort(x(), std::optional<bool>(stable), dim, descending)))
