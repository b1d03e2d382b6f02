// What every kernel shares: the call record, memory helpers, the floating-point environment.
// The ABI is plain C with raw pointers, so one build serves every release of torch.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__linux__)
#include <sys/mman.h>
#endif
#if defined(_OPENMP)
#include <omp.h>
#endif

#ifndef DETPASS_CHUNK_ROWS
#error "the build passes the constants of the canonical order"
#endif
static_assert(DETPASS_CHUNK_ROWS == 256 && DETPASS_FAN_IN == 256, "the odometer's digits are bytes");

using i8 = int8_t;
using i16 = int16_t;
using i32 = int32_t;
using i64 = int64_t;
using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;

// One accumulation. cpu.py packs it (FIELDS there); strides count elements.
struct Call {
  i64 index, index_stride, index_bytes, wrap;
  i64 batch, rows, segments, features;
  i64 source, source_batch, source_row;
  i64 dest, dest_batch, dest_row;
  i64 out, out_batch, out_row;
  i64 perm, offsets;
  i64 threads, form, owner_bytes, hot_permille;
};

enum Form : i64 { SCAN = 0, SORTED = 1, SPARSE = 2, PLANNED = 3 };

// Results of an entry point: OK, a position (>= 0) of an index out of bounds, or one of these.
constexpr i64 OK = -1, OUT_OF_MEMORY = -2, UNSUPPORTED = -3;

// Additions must not flush denormals to zero, whatever the process asked for (torch.set_flush_denormal): the worker
// threads would not see that setting and the bits would depend on the thread. Default rounding, restored on exit.
struct PlainArithmetic {
#if defined(__x86_64__)
  unsigned saved = _mm_getcsr();
  PlainArithmetic() { _mm_setcsr(0x1f80); }
  ~PlainArithmetic() { _mm_setcsr(saved); }
#elif defined(__aarch64__)
  u64 saved;
  PlainArithmetic() {
    asm volatile("mrs %0, fpcr" : "=r"(saved));
    asm volatile("msr fpcr, %0" ::"r"(u64(0)));
  }
  ~PlainArithmetic() { asm volatile("msr fpcr, %0" ::"r"(saved)); }
#endif
};

inline int thread_number() {
#if defined(_OPENMP)
  return omp_get_thread_num();
#else
  return 0;
#endif
}

template <class T> inline std::unique_ptr<T[]> scratch(i64 count) {
  return std::unique_ptr<T[]>(new T[size_t(std::max<i64>(count, 1))]);
}

// Large fresh memory: ask for huge pages before the first touch, page faults dominate otherwise.
inline void want_huge_pages(void* memory, i64 bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr u64 page = u64(1) << 21;
  u64 first = (u64(memory) + page - 1) & ~(page - 1), last = (u64(memory) + u64(bytes)) & ~(page - 1);
  if (last >= first + 2 * page) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

inline void prefetch(const void* address, i64 bytes) {
  const char* p = static_cast<const char*>(address);
  for (i64 k = 0; k < bytes; k += 64) __builtin_prefetch(p + k);
}
