// Fused attention, in the one form our backend uses: TND, paged, causal from the right and bottom (sparse_mode 3).
#include <cmath>
#include <limits>

#include "op.h"

using namespace op;

namespace {

struct Problem {
  int64_t heads, kv_heads, width, block_size;
  double scale;
  Shape query_ends, kv_lens;
};

void check_shapes(const In& q, const aclTensor& k, const aclTensor& v, const Problem& p) {
  require(q.type == at::kHalf || q.type == at::kBFloat16, "query must be float16 or bfloat16");
  require(k.type == q.type && v.type == q.type, "query, key and value must have one data type");
  require(q.dim() == 3 && q.sizes[1] == p.heads, "TND wants query [tokens, heads, width]");
  require(p.width % 16 == 0 && p.width <= 256, "TND without rope wants a head width that is a multiple of 16, at most 256");
  require(p.kv_heads > 0 && p.heads % p.kv_heads == 0 && p.heads / p.kv_heads <= 64, "heads per key-value head: at most 64");
  require(p.block_size == 128, "only block size 128 is legal for every query length");
  for (const aclTensor* cache : {&k, &v}) {
    require(cache->dim() == 3 && cache->sizes[1] == p.block_size && cache->sizes[2] == p.kv_heads * p.width,
            "a paged cache is [blocks, block_size, kv_heads * width]");
    require(cache->sizes[2] <= 65535, "kv_heads * width is at most 65535 in this layout");
    require(cache->contiguous(), "key and value must be contiguous");
  }
  require(q.contiguous(), "query must be contiguous");
}

void check_lengths(const In& q, const aclTensor& table, const Problem& p) {
  require(table.type == at::kInt && table.dim() == 2, "block_table is int32 [batch, blocks]");
  require(table.contiguous(), "block_table must be contiguous");
  const size_t batch = size_t(table.sizes[0]);
  require(p.query_ends.size() == batch && p.kv_lens.size() == batch,
          "batch of block_table (" + std::to_string(batch) + "), actual_seq_lengths (" + std::to_string(p.query_ends.size()) +
              ") and actual_seq_lengths_kv (" + std::to_string(p.kv_lens.size()) + ") must agree");
  require(batch <= 4096, "at most 4096 sequences in TND");
  require(batch > 0 && p.query_ends.back() == q.sizes[0], "the last of the cumulative actual_seq_lengths must be the number of tokens");
  int64_t before = 0;
  for (size_t row = 0; row < batch; ++row) {
    require(p.query_ends[row] >= before, "actual_seq_lengths must be cumulative");
    require(p.kv_lens[row] >= 0 && p.kv_lens[row] <= table.sizes[1] * p.block_size,
            "actual_seq_lengths_kv must be per sequence, within the block table");
    before = p.query_ends[row];
  }
}

void check_mask(const MaybeIn& mask, int64_t sparse_mode, int64_t inner_precise) {
  require(sparse_mode == 3, "only sparse_mode 3 is emulated (TND takes 0 without, 3 and 4 with a mask)");
  require(mask.has_value(), "sparse_mode 3 wants atten_mask");
  require(mask->type == at::kBool || mask->type == at::kChar || mask->type == at::kByte, "atten_mask is bool, int8 or uint8");
  require(mask->dim() >= 2 && mask->sizes[mask->dim() - 1] == 2048 && mask->sizes[mask->dim() - 2] == 2048 && mask->numel() == 2048 * 2048,
          "sparse_mode 3 wants the compressed mask of 2048 x 2048");
  require(inner_precise == 0, "TND with grouped heads wants inner_precise 0");
}

constexpr int64_t kFew = 1 << 14;  // products; a dozen tensor operations cost as much

// A few queries and keys of one row, number by number: nearly every row of toy models. As `attend`, in float64.
template <class T>
__attribute__((optimize("O3"))) void attend_few(const T* q, const T* k, const T* v, const int32_t* blocks, int64_t n, int64_t length, const Problem& p, T* out) {
  const int64_t stride = p.kv_heads * p.width, group = p.heads / p.kv_heads;
  std::vector<double> weights(size_t(length), 0.0), sums(size_t(p.width), 0.0), query(size_t(p.width), 0.0);
  auto place = [&](int64_t key, int64_t head) {
    return (blocks[key / p.block_size] * p.block_size + key % p.block_size) * stride + head * p.width;
  };
  for (int64_t i = 0; i < n * p.heads; ++i, q += p.width, out += p.width) {
    const int64_t seen = length - n + i / p.heads + 1, head = i % p.heads / group;
    double most = -std::numeric_limits<double>::infinity(), total = 0;
    for (int64_t d = 0; d < p.width; ++d) query[d] = double(float(q[d]));
    for (int64_t j = 0; j < seen; ++j) {
      const T* key = k + place(j, head);
      double sum = 0;
      for (int64_t d = 0; d < p.width; ++d) sum += query[d] * double(float(key[d]));
      most = std::max(most, weights[j] = sum * p.scale);
    }
    for (int64_t j = 0; j < seen; ++j) total += weights[j] = std::exp(weights[j] - most);
    std::fill(sums.begin(), sums.end(), seen > 0 ? 0.0 : std::nan(""));
    for (int64_t j = 0; j < seen; ++j) {
      const T* value = v + place(j, head);
      const double weight = weights[j] / total;
      for (int64_t d = 0; d < p.width; ++d) sums[d] += weight * double(float(value[d]));
    }
    for (int64_t d = 0; d < p.width; ++d) out[d] = T(float(sums[d]));
  }
}

void attend_few(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& blocks, int64_t length,
                const Problem& p, at::Tensor& out) {
  auto run = [&](auto zero) {
    using T = decltype(zero);
    attend_few<T>(q.data_ptr<T>(), k.data_ptr<T>(), v.data_ptr<T>(), blocks.data_ptr<int32_t>(), q.size(0), length, p,
                  out.data_ptr<T>());
  };
  q.scalar_type() == at::kHalf ? run(at::Half{}) : run(at::BFloat16{});
}

// In float64, so that a token's bits do not depend on what is computed beside it. A query that sees no key gets NaN.
void attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& table, const at::Tensor& mask,
            const Problem& p, at::Tensor out, const MaybeOut& lse) {
  require(mask[0][1].item<int64_t>() == 1 && mask[1][0].item<int64_t>() == 0, "1 means masked: the mask is upside down");
  int64_t start = 0;
  for (size_t row = 0; row < p.kv_lens.size(); ++row) {
    const int64_t n = p.query_ends[row] - start, length = p.kv_lens[row];
    if (n == 0) continue;
    at::Tensor target = out.narrow(0, start, n);
    const at::Tensor few = table[int64_t(row)].slice(0, 0, (length + p.block_size - 1) / p.block_size);
    if (length == 0) {
      target.fill_(std::nan(""));
      start += n;
      continue;
    }
    for (int64_t i = 0; i < few.size(0); ++i)
      require(few.data_ptr<int32_t>()[i] >= 0 && few.data_ptr<int32_t>()[i] < k.size(0), "a block beyond the cache");
    if (n * length * p.heads * p.width <= kFew && !lse.has_value()) {
      attend_few(q.narrow(0, start, n), k, v, few, length, p, target);
      start += n;
      continue;
    }
    const at::Tensor blocks = few.to(at::kLong);
    auto rows_of = [&](const at::Tensor& cache) {
      return cache.index_select(0, blocks).flatten(0, 1).narrow(0, 0, length).to(at::kDouble)
          .view({length, p.kv_heads, 1, p.width}).permute({1, 2, 3, 0});  // [Hkv, 1, D, L]
    };
    at::Tensor queries = q.narrow(0, start, n).to(at::kDouble).view({n, p.kv_heads, -1, p.width}).permute({1, 2, 0, 3});
    at::Tensor scores = at::matmul(queries, rows_of(k)) * p.scale;  // [Hkv, G, n, L]
    at::Tensor place = at::arange(length - n, length).unsqueeze(1);
    scores.masked_fill_(at::arange(length).unsqueeze(0) > place, -std::numeric_limits<double>::infinity());
    at::Tensor weights = at::softmax(scores, -1);
    at::Tensor sums = at::matmul(weights, rows_of(v).transpose(-1, -2));  // [Hkv, G, n, D]
    target.copy_(sums.permute({2, 0, 1, 3}).reshape({n, p.heads, p.width}));
    if (lse.has_value() && (*lse).dim() == 3)
      (*lse)().narrow(0, start, n).copy_(at::logsumexp(scores, {-1}).permute({2, 0, 1}).reshape({n, p.heads, 1}));
    start += n;
  }
}

Kernel FusedInferAttentionScoreV3_op(
    In q, List k, List v, MaybeIn pse_shift, MaybeIn mask, MaybeInts query_ends, MaybeInts kv_lens, MaybeIn, MaybeIn, MaybeIn,
    MaybeIn, MaybeIn, MaybeIn antiquant, MaybeIn, MaybeIn table, MaybeIn, MaybeIn, MaybeIn, MaybeIn, MaybeIn, MaybeIn,
    MaybeIn key_prefix, MaybeIn, MaybeInts, MaybeIn query_rope, MaybeIn, MaybeIn, int64_t heads, double scale, int64_t,
    int64_t, Text layout, int64_t kv_heads, int64_t sparse_mode, int64_t inner_precise, int64_t block_size, int64_t,
    bool lse_wanted, int64_t, int64_t, Out out, MaybeOut lse) {
  require(layout == "TND", "input_layout '" + layout + "' is not emulated, only TND");
  require(!pse_shift.has_value() && !antiquant.has_value() && !key_prefix.has_value() && !query_rope.has_value(),
          "pse_shift, quantisation, shared prefix and rope are not emulated");
  require(k.size() == 1 && v.size() == 1 && table.has_value(), "only paged keys and values are emulated");
  require(query_ends.has_value() && kv_lens.has_value(), "TND wants actual_seq_lengths and actual_seq_lengths_kv");
  Problem p{heads, kv_heads ? kv_heads : heads, q.dim() == 3 ? q.sizes[2] : 0, block_size, scale, *query_ends, *kv_lens};
  check_shapes(q, k[0], v[0], p);
  check_lengths(q, *table, p);
  check_mask(mask, sparse_mode, inner_precise);
  require(out.sizes == q.sizes && out.type == q.type, "attention_out is as query");
  if (!lse_wanted) lse.reset();
  return [=] { attend(q(), k[0](), v[0](), (*table)(), (*mask)(), p, out(), lse); };
}

}  // namespace

ACLNN_EXPORT_WITH(FusedInferAttentionScoreV3, 4096)

namespace {
// The largest workspace over all lengths: asked for before a capture, so that replays with other lengths fit.
template <class Maker> struct Workspace;
template <class... A> struct Workspace<Kernel (*)(A...)> {
  static int ask(typename Wire<A>::C... arguments, uint64_t* bytes, aclOpExecutor** executor) {
    using Plan = Entry<FusedInferAttentionScoreV3_tag, Kernel (*)(A...)>;
    return Plan::plan(arguments..., bytes, executor);
  }
};
}  // namespace
extern "C" {
static void* fia_workspace_of() {
  return reinterpret_cast<void*>(&Workspace<decltype(&FusedInferAttentionScoreV3_op)>::ask);
}
EXPORT int aclnnFusedInferAttentionScoreV3GetMaxWorkspaceSize() __attribute__((ifunc("fia_workspace_of")));
}
