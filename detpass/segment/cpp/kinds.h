// A Kind says how one storage dtype is accumulated under one reduction: load, identity, combine, finish.
// Vectors are the compiler's own (vector_size), so one text serves every instruction set with the same bits.
#pragma once

#include <limits>

#include "common.h"

#define INLINE inline __attribute__((always_inline))

template <class E, int L> struct VectorOf { typedef E type __attribute__((vector_size(L * sizeof(E)))); };
template <class E, int L> using Vec = typename VectorOf<E, L>::type;

#if defined(__AVX512F__)
constexpr int VECTOR_BYTES = 64;
#elif defined(__AVX2__)
constexpr int VECTOR_BYTES = 32;
#else
constexpr int VECTOR_BYTES = 16;
#endif

template <class V, class E> INLINE V load_bits(const E* p) { V v; memcpy(&v, p, sizeof(V)); return v; }
template <class V, class W> INLINE V cast_bits(W w) { static_assert(sizeof(V) == sizeof(W)); V v; memcpy(&v, &w, sizeof(V)); return v; }

INLINE float half_to_float(u16 h) {
  const u32 sign = u32(h & 0x8000) << 16, exponent = (h >> 10) & 31, fraction = h & 1023;
  u32 bits;
  if (exponent == 31) bits = sign | 0x7f800000 | (fraction << 13);
  else if (exponent) bits = sign | ((exponent + 112) << 23) | (fraction << 13);
  else if (!fraction) bits = sign;
  else {
    const int shift = __builtin_clz(fraction) - 21;
    bits = sign | (u32(113 - shift) << 23) | (((fraction << shift) & 1023) << 13);
  }
  return cast_bits<float>(bits);
}

INLINE u16 float_to_half(float f) {  // nearest, ties to even
  const u32 bits = cast_bits<u32>(f), sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return 0x7e00;
  if (magnitude >= 0x477ff000) return u16(sign | 0x7c00);  // rounds to infinity
  if (magnitude < 0x33000001) return u16(sign);            // at most half the smallest denormal
  u32 kept, rest, half;
  if (magnitude < 0x38800000) {  // denormal
    const int shift = 126 - int(magnitude >> 23);
    const u32 fraction = (magnitude & 0x7fffff) | 0x800000;
    kept = fraction >> shift;
    rest = fraction & ((u32(1) << shift) - 1);
    half = u32(1) << (shift - 1);
  } else {
    kept = (magnitude - 0x38000000) >> 13;
    rest = magnitude & 0x1fff;
    half = 0x1000;
  }
  return u16(sign | (kept + (rest > half || (rest == half && (kept & 1)))));
}

// -- storage formats: to the accumulation type and back ----------------------------------------------------------------

template <class E> struct Plain {  // stored as accumulated
  using Stored = E;
  using Value = E;
  template <int L> static INLINE Vec<E, L> widen(const E* p) { return load_bits<Vec<E, L>>(p); }
  template <int L> static INLINE Vec<E, L> narrow(Vec<E, L> v) {
    if constexpr (std::is_floating_point<E>::value) return v == v ? v : Vec<E, L>{} + std::numeric_limits<E>::quiet_NaN();
    else return v;
  }
};

struct BFloat16 {
  using Stored = u16;
  using Value = float;
  template <int L> static INLINE Vec<float, L> widen(const u16* p) {
    return cast_bits<Vec<float, L>>(__builtin_convertvector(load_bits<Vec<u16, L>>(p), Vec<u32, L>) << 16);
  }
  template <int L> static INLINE Vec<u16, L> narrow(Vec<float, L> v) {
    const Vec<u32, L> bits = cast_bits<Vec<u32, L>>(v);
    const Vec<u32, L> rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return __builtin_convertvector(v == v ? rounded : Vec<u32, L>{} + 0x7fc0, Vec<u16, L>);
  }
};

struct Float16 {
  using Stored = u16;
  using Value = float;
  template <int L> static INLINE Vec<float, L> widen(const u16* p) {
#if defined(__F16C__)
#if defined(__AVX512F__)
    if constexpr (L == 16) return cast_bits<Vec<float, L>>(_mm512_cvtph_ps(load_bits<__m256i>(p)));
#endif
    if constexpr (L == 8) return cast_bits<Vec<float, L>>(_mm256_cvtph_ps(load_bits<__m128i>(p)));
#endif
    Vec<float, L> v;
    for (int l = 0; l < L; l++) v[l] = half_to_float(p[l]);
    return v;
  }
  template <int L> static INLINE Vec<u16, L> narrow(Vec<float, L> v) {
    Vec<u16, L> h;
    for (int l = 0; l < L; l++) h[l] = float_to_half(v[l]);
    return h;
  }
};

// -- reductions --------------------------------------------------------------------------------------------------------

template <class F> struct Sum : F {
  using Stored = typename F::Stored;
  using Value = typename F::Value;
  static constexpr bool wide = true;  // worth register tiles of several vectors
  static Value identity() { return Value(0); }
  static Stored empty() { return Stored(0); }
  template <int L> static INLINE Vec<Value, L> load(const Stored* p) { return F::template widen<L>(p); }
  template <int L> static INLINE Vec<Value, L> combine(Vec<Value, L> a, Vec<Value, L> b) { return a + b; }
  template <int L> static INLINE Vec<Stored, L> finish(Vec<Value, L> v) { return F::template narrow<L>(v); }
};

template <class F> struct Product : Sum<F> {
  using Stored = typename F::Stored;
  using Value = typename F::Value;
  static constexpr bool wide = false;
  static Value identity() { return Value(1); }
  static Stored empty() { return finish<1>(Vec<Value, 1>{Value(1)})[0]; }
  template <int L> static INLINE Vec<Value, L> combine(Vec<Value, L> a, Vec<Value, L> b) { return a * b; }
  template <int L> static INLINE Vec<Stored, L> finish(Vec<Value, L> v) { return F::template narrow<L>(v); }
};

// Extremes of floats are extremes of integer keys that order -0.0 below +0.0 and put NaN beyond the infinities.
template <class F, bool LARGEST> struct FloatExtreme {
  using Stored = typename F::Stored;
  using Float = typename F::Value;
  using Value = typename std::conditional<sizeof(Float) == 4, i32, i64>::type;
  static constexpr bool wide = false;
  static constexpr Value top = std::numeric_limits<Value>::max();
  static constexpr Value nan_key = LARGEST ? top : std::numeric_limits<Value>::min();
  template <int L> static INLINE Vec<Value, L> swap_sign(Vec<Value, L> bits) { return bits ^ ((bits >> (8 * sizeof(Value) - 1)) & top); }
  template <int L> static INLINE Vec<Value, L> load(const Stored* p) {
    const Vec<Float, L> v = F::template widen<L>(p);
    const Vec<Value, L> key = swap_sign<L>(cast_bits<Vec<Value, L>>(v));
    return v == v ? key : Vec<Value, L>{} + nan_key;
  }
  template <int L> static INLINE Vec<Value, L> combine(Vec<Value, L> a, Vec<Value, L> b) {
    if constexpr (LARGEST) return a > b ? a : b;
    else return a < b ? a : b;
  }
  template <int L> static INLINE Vec<Stored, L> finish(Vec<Value, L> key) {
    return F::template narrow<L>(cast_bits<Vec<Float, L>>(swap_sign<L>(key)));
  }
  static Value identity() {
    const Float infinity = std::numeric_limits<Float>::infinity();
    return swap_sign<1>(cast_bits<Vec<Value, 1>>(Vec<Float, 1>{LARGEST ? -infinity : infinity}))[0];
  }
  static Stored empty() { return finish<1>(Vec<Value, 1>{identity()})[0]; }
};

template <class E, bool LARGEST> struct IntegerExtreme {
  using Stored = E;
  using Value = E;
  static constexpr bool wide = false;
  static Value identity() { return LARGEST ? std::numeric_limits<E>::min() : std::numeric_limits<E>::max(); }
  static Stored empty() { return identity(); }
  template <int L> static INLINE Vec<E, L> load(const E* p) { return load_bits<Vec<E, L>>(p); }
  template <int L> static INLINE Vec<E, L> combine(Vec<E, L> a, Vec<E, L> b) {
    if constexpr (LARGEST) return a > b ? a : b;
    else return a < b ? a : b;
  }
  template <int L> static INLINE Vec<E, L> finish(Vec<E, L> v) { return v; }
};

template <bool LARGEST> struct Boolean : IntegerExtreme<u8, LARGEST> {  // any (sum, amax) and all (prod, amin)
  static u8 identity() { return LARGEST ? 0 : 1; }
  static u8 empty() { return identity(); }
};
