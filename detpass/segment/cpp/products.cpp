// Products and the sums of small integers: the sorted form alone.
#include "sorted.h"

#define ENTRY(NAME, ...)                                    \
  extern "C" i64 detpass_##NAME(const Call* c) {            \
    if (c->form == SCAN) return UNSUPPORTED;                \
    try {                                                   \
      return sorted<__VA_ARGS__>(*c);                       \
    } catch (const std::bad_alloc&) { return OUT_OF_MEMORY; } \
  }

// `int8` stands for every type of eight bits, signed or not: additions and products have the same bits.
ENTRY(sum_int8, Sum<Plain<u8>>)
ENTRY(sum_int16, Sum<Plain<u16>>)
ENTRY(prod_int8, Product<Plain<u8>>)
ENTRY(prod_int16, Product<Plain<u16>>)
ENTRY(prod_int32, Product<Plain<u32>>)
ENTRY(prod_int64, Product<Plain<u64>>)
ENTRY(prod_float32, Product<Plain<float>>)
ENTRY(prod_float64, Product<Plain<double>>)
ENTRY(prod_bfloat16, Product<BFloat16>)
ENTRY(prod_float16, Product<Float16>)
