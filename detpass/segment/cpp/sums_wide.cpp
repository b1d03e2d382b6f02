// Sums of half floats, doubles and wide integers: both forms.
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

ENTRY(sum_float16, Sum<Float16>)
ENTRY(sum_float64, Sum<Plain<double>>)
ENTRY(sum_int64, Sum<Plain<u64>>)
ENTRY(sum_int32, Sum<Plain<u32>>)
