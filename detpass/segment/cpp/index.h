// Reading an index: wrap, skip, bounds, and picking the rows of one owner out of a block.
#pragma once

#include "common.h"

template <class I> struct Index {
  const I* data;
  i64 stride, rows, segments;
  bool wrap;

  explicit Index(const Call& c)
      : data(reinterpret_cast<const I*>(c.index)), stride(c.index_stride), rows(c.rows), segments(c.segments),
        wrap(c.wrap != 0) {}
  Index(const I* data_, i64 rows_, i64 segments_)
      : data(data_), stride(1), rows(rows_), segments(segments_), wrap(false) {}

  static constexpr I skipped = std::numeric_limits<I>::min();

  // The settled segment, or a value outside [0, segments) for a skipped row or a bad one.
  i64 operator[](i64 i) const {
    i64 k = data[i * stride];
    return k + (wrap && k < 0 ? segments : 0);
  }
  bool inside(i64 k) const { return u64(k) < u64(segments); }

  // The first position that is neither inside nor skipped, or OK.
  i64 first_bad() const {
    for (i64 i = 0; i < rows; i++)
      if (!inside((*this)[i]) && data[i * stride] != skipped) return i;
    return OK;
  }
};

constexpr i64 BLOCK = 2048;  // rows looked at in one go by a scan

// What `select` writes beside the segment of each row it picks: the row itself, as an offset from `first`.
struct RowNumbers {
  i32* rows;
  i64 first;
  void ahead(i64) const {}
  void one(i64 i, i64 at) const { rows[at] = i32(i - first); }
#if defined(__AVX512F__) && defined(__AVX512VL__)
  void eight(i64 i, __mmask8 mine, i64 at) const {
    const __m256i row = _mm256_add_epi32(_mm256_set1_epi32(i32(i - first)), _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(rows + at), _mm256_maskz_compress_epi32(mine, row));
  }
#endif
};

// The rows of [first, last) whose segment lies in [low, low + count): what `emit` writes of each, segments from `low`.
template <class I, class Emit>
inline i64 select(const Index<I>& ix, i64 first, i64 last, i64 low, i64 count, const Emit emit, i32* segments) {
  i64 found = 0, i = first;
#if defined(__AVX512F__) && defined(__AVX512VL__)
  if (ix.stride == 1) {
    const __m512i base = _mm512_set1_epi64(low), size = _mm512_set1_epi64(count);
    const __m512i turn = _mm512_set1_epi64(ix.wrap ? ix.segments : 0), zero = _mm512_setzero_si512();
    for (; i + 8 <= last; i += 8) {
      __builtin_prefetch(ix.data + i + BLOCK);  // the hardware's own prefetching stops at each page
      emit.ahead(i + BLOCK);
      __m512i k;
      if constexpr (sizeof(I) == 8) k = _mm512_loadu_si512(ix.data + i);
      else k = _mm512_cvtepi32_epi64(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(ix.data + i)));
      k = _mm512_mask_add_epi64(k, _mm512_cmplt_epi64_mask(k, zero), k, turn);
      k = _mm512_sub_epi64(k, base);
      const __mmask8 mine = _mm512_cmplt_epu64_mask(k, size);
      emit.eight(i, mine, found);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(segments + found),
                          _mm256_maskz_compress_epi32(mine, _mm512_cvtepi64_epi32(k)));
      found += __builtin_popcount(mine);
    }
  }
#endif
  for (; i < last; i++) {
    const i64 k = ix[i] - low;
    emit.one(i, found);
    segments[found] = i32(k);
    found += u64(k) < u64(count);
  }
  return found;
}

// The same, the index type known at run time only: one dispatch for a block.
template <class Emit>
__attribute__((noinline)) static i64 select_rows(const Call& c, i64 first, i64 last, i64 low, i64 count, const Emit emit,
                                                 i32* segments) {
  return c.index_bytes == 8 ? select(Index<i64>(c), first, last, low, count, emit, segments)
                            : select(Index<i32>(c), first, last, low, count, emit, segments);
}
__attribute__((noinline)) static i64 first_bad_row(const Call& c) {
  return c.index_bytes == 8 ? Index<i64>(c).first_bad() : Index<i32>(c).first_bad();
}

// Whether one segment has more than `permille` of the rows, judged by a sample. It decides time alone.
__attribute__((noinline)) static bool has_hot_segment(const Call& c, i64 permille) {
  constexpr i64 SAMPLE = 512;
  if (!permille || c.rows < 8 * SAMPLE) return false;
  std::vector<i64> seen(SAMPLE);
  for (i64 j = 0; j < SAMPLE; j++) {
    const i64 i = c.rows * j / SAMPLE * c.index_stride;
    seen[size_t(j)] = c.index_bytes == 8 ? reinterpret_cast<const i64*>(c.index)[i] : reinterpret_cast<const i32*>(c.index)[i];
  }
  std::sort(seen.begin(), seen.end());
  const i64 run = SAMPLE * permille / 1000;
  for (i64 j = 0; j + run < SAMPLE; j++)
    if (seen[size_t(j)] == seen[size_t(j + run)]) return true;
  return false;
}

// A stable counting sort. perm: members by segment, then skipped rows; offsets: segments + 1 entries. Threads take
// equal runs of rows, each with its own histogram. Returns OK or the position of a bad index.
template <class I> i64 counting_sort(const Index<I>& ix, i32* perm, i32* offsets, i64 threads) {
  const i64 n = ix.rows, buckets = ix.segments + 1;  // the last bucket holds the skipped rows
  const i64 team = std::max<i64>(1, std::min(threads, n / std::max<i64>(buckets, 4096)));
  auto histogram = scratch<i32>(team * buckets);
  std::vector<i64> sums(size_t(team) + 1, 0), bad(size_t(team), OK);
#pragma omp parallel num_threads(int(team))
  {
    const i64 t = thread_number(), begin = n * t / team, end = n * (t + 1) / team;
    i32* mine = histogram.get() + t * buckets;
    memset(mine, 0, size_t(buckets) * sizeof(i32));
    for (i64 i = begin; i < end; i++) {
      i64 k = ix[i];
      if (__builtin_expect(!ix.inside(k), 0)) {
        if (ix.data[i * ix.stride] != Index<I>::skipped) { bad[size_t(t)] = i; break; }
        k = ix.segments;
      }
      mine[k]++;
    }
#pragma omp barrier
    const i64 low = buckets * t / team, high = buckets * (t + 1) / team;
    i64 sum = 0;
    for (i64 q = 0; q < team; q++)
      for (i64 s = low; s < high; s++) sum += histogram[size_t(q * buckets + s)];
    sums[size_t(t) + 1] = sum;
#pragma omp barrier
    i64 run = 0;
    for (i64 q = 0; q <= t; q++) run += sums[size_t(q)];
    for (i64 s = low; s < high; s++) {
      offsets[s] = i32(run);
      for (i64 q = 0; q < team; q++) {
        i32& entry = histogram[size_t(q * buckets + s)];
        const i32 count = entry;
        entry = i32(run);
        run += count;
      }
    }
#pragma omp barrier
    bool good = true;
    for (i64 q = 0; q < team; q++) good = good && bad[size_t(q)] == OK;
    if (good)
      for (i64 i = begin; i < end; i++) {
        const i64 k = ix[i];
        perm[mine[ix.inside(k) ? k : ix.segments]++] = i32(i);
      }
  }
  for (i64 position : bad)
    if (position != OK) return position;
  return OK;
}

inline u64 mix(u64 key) { return key * u64(0x9E3779B97F4A7C15); }

// Segments renumbered by first appearance, for a table far larger than the index: no pass over the table.
struct Compact {
  std::vector<i64> segment;       // the table row of each number
  std::unique_ptr<i32[]> number;  // for each row of the index; INT32_MIN where skipped
  i64 bad = OK;

  template <class I> explicit Compact(const Index<I>& ix) : number(scratch<i32>(ix.rows)) {
    struct Slot { i64 key; i32 number; };
    int bits = 4;
    while ((i64(1) << bits) < 2 * ix.rows) bits++;
    std::vector<Slot> table(size_t(1) << bits, Slot{-1, 0});
    const u64 mask = (u64(1) << bits) - 1;
    for (i64 i = 0; i < ix.rows; i++) {
      if (i + 16 < ix.rows) __builtin_prefetch(&table[mix(u64(ix[i + 16])) >> (64 - bits)]);
      const i64 k = ix[i];
      if (!ix.inside(k)) {
        if (ix.data[i * ix.stride] != Index<I>::skipped) { bad = i; return; }
        number[size_t(i)] = Index<i32>::skipped;
        continue;
      }
      u64 h = mix(u64(k)) >> (64 - bits);
      while (table[h].key != k && table[h].key != -1) h = (h + 1) & mask;
      if (table[h].key == -1) {
        table[h] = Slot{k, i32(segment.size())};
        segment.push_back(k);
      }
      number[size_t(i)] = table[h].number;
    }
  }
};

// The plan of a call: members by segment, and for SPARSE calls the table row of each renumbered segment.
struct Plan {
  std::unique_ptr<i32[]> perm, offsets;
  std::vector<i64> table_row;
  i64 segments = 0, bad = OK;

  explicit Plan(const Call& c) : perm(scratch<i32>(c.rows)) {
    if (c.index_bytes == 8) build(c, Index<i64>(c));
    else build(c, Index<i32>(c));
  }
  template <class I> void build(const Call& c, const Index<I>& ix) {
    if (c.form == SPARSE) {
      Compact compact(ix);
      bad = compact.bad;
      if (bad != OK) return;
      segments = i64(compact.segment.size());
      offsets = scratch<i32>(segments + 2);
      counting_sort(Index<i32>(compact.number.get(), c.rows, segments), perm.get(), offsets.get(), c.threads);
      table_row = std::move(compact.segment);
    } else {
      segments = c.segments;
      offsets = scratch<i32>(segments + 2);
      bad = counting_sort(ix, perm.get(), offsets.get(), c.threads);
    }
  }
};
