// The fused operators of a decoder layer. What CANN documents as an error is an error here, before anything is computed.
#include "op.h"

using namespace op;

namespace {

bool is_half(at::ScalarType type) { return type == at::kHalf || type == at::kBFloat16; }

at::Tensor normed(const at::Tensor& x, const at::Tensor& gamma, double eps, const MaybeOut& rstd) {
  at::Tensor wide = x.to(at::kDouble);
  at::Tensor scale = (wide.square().mean(-1, true) + eps).rsqrt();
  if (rstd.has_value()) (*rstd)().copy_(scale.reshape((*rstd).sizes));
  return wide * scale * gamma.to(at::kDouble);
}

void check_norm(const aclTensor& x, const aclTensor& gamma) {
  require(is_half(x.type) || x.type == at::kFloat, "the data type of x");
  require(gamma.type == x.type || gamma.type == at::kFloat, "gamma has another data type than x");
  require(x.dim() >= 1 && gamma.dim() == 1 && gamma.sizes[0] == x.sizes.back(), "gamma does not fit x");
}

Kernel RmsNorm_op(In x, In gamma, double eps, Out y, MaybeOut rstd) {
  check_norm(x, gamma);
  return [=] { y = normed(x(), gamma(), eps, rstd); };
}

Kernel AddRmsNorm_op(In x1, In x2, In gamma, double eps, Out y, MaybeOut rstd, Out sum) {
  check_norm(x1, gamma);
  require(x1.sizes == x2.sizes && x1.type == x2.type, "x1 and x2 differ");
  return [=] {
    at::Tensor total = x1() + x2();
    sum = total;
    y = normed(total, gamma(), eps, rstd);
  };
}

Kernel SwiGlu_op(In x, int64_t dim, Out y) {
  require(is_half(x.type) || x.type == at::kFloat, "the data type of x");
  const int64_t axis = dim < 0 ? dim + x.dim() : dim;
  require(axis >= 0 && axis < x.dim() && x.sizes[axis] % 2 == 0, "the halved dimension must exist and be even");
  return [=] {
    auto halves = x().to(at::kFloat).chunk(2, axis);
    y = at::silu(halves[0]) * halves[1];
  };
}

Kernel RotaryPositionEmbedding_op(In x, In cos, In sin, int64_t mode, Out y) {
  require(x.dim() == 4 && cos.dim() == 4 && cos.sizes == sin.sizes, "x, cos and sin have four dimensions");
  require(x.type == cos.type && x.type == sin.type, "x, cos and sin have one data type");
  require(is_half(x.type) || x.type == at::kFloat, "the data type of x");
  const int64_t width = x.sizes[3];
  require(width % 2 == 0 && width < 896, "the head dimension must be even and below 896");
  require(cos.sizes[3] == width, "cos and sin are as wide as x");
  require(mode == 0, "only mode 'half' is emulated");
  return [=] {
    auto halves = x().to(at::kFloat).chunk(2, -1);
    at::Tensor turned = at::cat({-halves[1], halves[0]}, -1);
    y = x().to(at::kFloat) * cos().to(at::kFloat) + turned * sin().to(at::kFloat);
  };
}

Kernel ScatterPaKvCache_op(In key, Out key_cache, In slots, MaybeIn value, MaybeOut value_cache, MaybeIn compress_lens,
                           MaybeIn compress_offsets, MaybeIn seq_lens, Text cache_mode, Text scatter_mode, MaybeInts,
                           MaybeInts) {
  require(cache_mode == "Norm", "cache_mode '" + cache_mode + "' is not emulated: the caches here are plain");
  require(!compress_lens.has_value() && !compress_offsets.has_value() && !seq_lens.has_value(), "compression is not emulated");
  require(value.has_value() && value_cache.has_value(), "value and value_cache are needed");
  require(slots.type == at::kInt || slots.type == at::kLong, "slot_mapping must be int32 or int64");
  require(key.dim() == 3 && value->dim() == 3 && key_cache.dim() == 4 && value_cache->dim() == 4, "key [T, N, D], cache [B, S, N, D]");
  require(key.contiguous() && value->contiguous() && key_cache.contiguous() && value_cache->contiguous(), "all must be contiguous");
  require(key.type == key_cache.type && value->type == value_cache->type, "the cache has another data type");
  require(slots.numel() == key.sizes[0] && value->sizes[0] == key.sizes[0], "one slot for each token");
  require(key.sizes[1] == key_cache.sizes[2] && key.sizes[2] == key_cache.sizes[3], "heads or their width differ from the cache's");
  return [=] {
    at::Tensor all = slots().to(at::kLong);
    at::Tensor kept = (all >= 0).nonzero().squeeze(1);  // negative slots are padding
    at::Tensor used = all.index_select(0, kept);
    require(used.numel() == 0 || used.max().item<int64_t>() < key_cache.sizes[0] * key_cache.sizes[1], "a slot beyond the cache");
    at::Tensor sorted = std::get<0>(used.sort());
    require(used.numel() < 2 || !(sorted.slice(0, 1) == sorted.slice(0, 0, -1)).any().item<bool>(), "two tokens for one slot");
    key_cache().flatten(0, 1).index_copy_(0, used, key().index_select(0, kept));
    (*value_cache)().flatten(0, 1).index_copy_(0, used, (*value)().index_select(0, kept));
  };
}

}  // namespace

ACLNN_EXPORT(RmsNorm)
ACLNN_EXPORT(AddRmsNorm)
ACLNN_EXPORT(SwiGlu)
ACLNN_EXPORT(RotaryPositionEmbedding)
ACLNN_EXPORT(ScatterPaKvCache)
