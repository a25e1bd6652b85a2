// Operators that move: concatenation, padding, gather and scatter in all their forms, matrix products.
#include "op.h"

using namespace op;

namespace {

// Undefined dimensions of an index list arrive as tensors without elements.
c10::List<std::optional<at::Tensor>> indices_of(const List& list) {
  c10::List<std::optional<at::Tensor>> indices;
  for (const aclTensor& tensor : list)
    indices.push_back(tensor.data == nullptr || tensor.numel() == 0 ? std::nullopt : std::optional<at::Tensor>(tensor()));
  return indices;
}

// Float64 for small matrices: a sum rounded once is the same for every number of rows, so that what the engine promises
// token by token can be tested here to the bit. Float32 for large ones, whose widening would cost too much.
at::Tensor product(const at::Tensor& a, const at::Tensor& b) {
  require(a.scalar_type() == b.scalar_type(), "a matrix product of two data types");
  require(at::isFloatingType(a.scalar_type()) && a.scalar_type() != at::kDouble, "a matrix product in this data type");
  const auto wide = b.numel() <= (1 << 20) ? at::kDouble : at::kFloat;
  return at::matmul(a.to(wide), b.to(wide));
}

at::Tensor reduced(const at::Tensor& x, int64_t dim, const at::Tensor& index, const at::Tensor& source, int64_t reduce) {
  require(reduce == 0 || reduce == 1, "this reduction of a scatter is not emulated");
  return reduce == 0 ? at::scatter(x, dim, index, source) : at::scatter_add(x, dim, index, source);
}

}  // namespace

ACLNN(Cat, (List parts, int64_t dim, Out y), y = at::cat(parts(), dim))
ACLNN(Stack, (List parts, int64_t dim, Out y), y = at::stack(parts(), dim))
ACLNN(Repeat, (In x, Ints times, Out y), y = x().repeat(times))
ACLNN(RepeatInterleaveIntWithDim, (In x, int64_t times, int64_t dim, int64_t, Out y), y = x().repeat_interleave(times, dim))
ACLNN(Flip, (In x, Ints dims, Out y), y = x().flip(dims))
ACLNN(Tril, (In x, int64_t diagonal, Out y), y = x().tril(diagonal))
ACLNN(InplaceTril, (Out x, int64_t diagonal), x().tril_(diagonal))
ACLNN(Triu, (In x, int64_t diagonal, Out y), y = x().triu(diagonal))
ACLNN(InplaceTriu, (Out x, int64_t diagonal), x().triu_(diagonal))
ACLNN(ConstantPadNd, (In x, Ints pad, Num value, Out y), y = at::constant_pad_nd(x(), pad, value))

ACLNN(Index, (In x, List indices, Out y), y = at::index(x(), indices_of(indices)))
ACLNN(IndexPutImpl, (Out x, List indices, In value, bool accumulate, bool), x().index_put_(indices_of(indices), value(), accumulate))
ACLNN(IndexSelect, (In x, int64_t dim, In index, Out y), y = x().index_select(dim, index()))
ACLNN(IndexAdd, (In x, int64_t dim, In index, In source, Num alpha, Out y), y = x().index_add(dim, index(), source(), alpha))
ACLNN(InplaceIndexCopy, (Out x, int64_t dim, In index, In source), x().index_copy_(dim, index(), source()))
ACLNN(InplaceIndexFill, (Out x, int64_t dim, In index, Num value), x().index_fill_(dim, index(), value))
ACLNN(Gather, (In x, int64_t dim, In index, Out y), y = x().gather(dim, index()))
ACLNN(Scatter, (In x, int64_t dim, In index, In source, int64_t reduce, Out y), y = reduced(x(), dim, index(), source(), reduce))
ACLNN(InplaceScatter, (Out x, int64_t dim, In index, In source, int64_t reduce), x = reduced(x(), dim, index(), source(), reduce))
ACLNN(ScatterValue, (In x, int64_t dim, In index, Num value, int64_t reduce, Out y),
      require(reduce == 0, "this reduction of a scatter is not emulated"); y = x().scatter(dim, index(), value))
ACLNN(InplaceScatterValue, (Out x, int64_t dim, In index, Num value, int64_t reduce),
      require(reduce == 0, "this reduction of a scatter is not emulated"); x().scatter_(dim, index(), value))
ACLNN(ScatterAdd, (In x, int64_t dim, In index, In source, Out y), y = x().scatter_add(dim, index(), source()))
ACLNN(Embedding, (In weight, In ids, Out y), y = at::embedding(weight(), ids()))
ACLNN(Nonzero, (In x, Dynamic y), y = x().nonzero())
ACLNN(NonzeroV2, (In x, Dynamic y), y = x().nonzero().t())
ACLNN(MaskedSelect, (In x, In mask, Dynamic y), y = x().masked_select(mask()))

ACLNN(Mm, (In a, In b, Out y, int8_t), y = product(a(), b()))
ACLNN(Matmul, (In a, In b, Out y, int8_t), y = product(a(), b()))
ACLNN(BatchMatMul, (In a, In b, Out y, int8_t), y = product(a(), b()))
ACLNN(Addmm, (In c, In a, In b, Num beta, Num alpha, Out y, int8_t), y = product(a(), b()) * alpha + c() * beta)
