// Sums of float32 and bfloat16: both forms.
#include "scan.h"
#include "sorted.h"

template <class K> static i64 run(const Call& c) {
  if (c.form == SCAN && !has_hot_segment(c, c.hot_permille)) return scan<K>(c);
  return sorted<K>(c);
}

#define ENTRY(NAME, KIND)                                   \
  extern "C" i64 detpass_##NAME(const Call* c) {            \
    try {                                                   \
      return run<KIND>(*c);                                 \
    } catch (const std::bad_alloc&) { return OUT_OF_MEMORY; } \
  }

ENTRY(sum_float32, Sum<Plain<float>>)
ENTRY(sum_bfloat16, Sum<BFloat16>)
