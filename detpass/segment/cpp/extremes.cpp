// Extremes: the sorted form alone.
#include "sorted.h"

#define ENTRY(NAME, ...)                                    \
  extern "C" i64 detpass_##NAME(const Call* c) {            \
    if (c->form == SCAN) return UNSUPPORTED;                \
    try {                                                   \
      return sorted<__VA_ARGS__>(*c);                       \
    } catch (const std::bad_alloc&) { return OUT_OF_MEMORY; } \
  }

#define EXTREMES(NAME, KIND, TYPE)      \
  ENTRY(amax_##NAME, KIND<TYPE, true>)  \
  ENTRY(amin_##NAME, KIND<TYPE, false>)

EXTREMES(float32, FloatExtreme, Plain<float>)
EXTREMES(float64, FloatExtreme, Plain<double>)
EXTREMES(bfloat16, FloatExtreme, BFloat16)
EXTREMES(float16, FloatExtreme, Float16)
EXTREMES(int8, IntegerExtreme, i8)
EXTREMES(uint8, IntegerExtreme, u8)
EXTREMES(int16, IntegerExtreme, i16)
EXTREMES(int32, IntegerExtreme, i32)
EXTREMES(int64, IntegerExtreme, i64)
ENTRY(amax_bool, Boolean<true>)
ENTRY(amin_bool, Boolean<false>)
