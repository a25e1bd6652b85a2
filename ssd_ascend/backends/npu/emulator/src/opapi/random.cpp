// Random numbers: a pure function of the seed and offset that torch_npu hands over, so that `manual_seed` repeats. Eager
// only: in a capture torch_npu 2.13 synchronises the captured stream to hand them over, which is refused.
#include "op.h"

#include <ATen/CPUGeneratorImpl.h>

using namespace op;

namespace {

at::Generator seeded(int64_t seed, int64_t offset) {
  uint64_t mixed = uint64_t(seed) * 0x9E3779B97F4A7C15ull + uint64_t(offset);
  mixed = (mixed ^ (mixed >> 31)) * 0xBF58476D1CE4E5B9ull;
  return at::detail::createCPUGenerator(mixed ^ (mixed >> 29));
}

}  // namespace

// in float32 and rounded: 16-bit uniform numbers of the CPU have other steps than the device's
ACLNN(InplaceUniform, (Out x, double from, double to, int64_t seed, int64_t offset),
      x().copy_(at::empty(x.sizes, at::kFloat).uniform_(from, to, seeded(seed, offset))))
ACLNN(InplaceNormal, (Out x, float mean, float deviation, int64_t seed, int64_t offset),
      x().copy_(at::empty(x.sizes, at::kFloat).normal_(mean, deviation, seeded(seed, offset))))
ACLNN(InplaceRandom, (Out x, int64_t from, int64_t to, int64_t seed, int64_t offset),
      x().random_(from, to, seeded(seed, offset)))
ACLNN(Multinomial, (In weights, int64_t samples, bool replacement, int64_t seed, int64_t offset, Out y),
      y = at::multinomial(weights().to(at::kFloat), samples, replacement, seeded(seed, offset)))
