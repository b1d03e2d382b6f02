// The sorted form: members of a segment are gathered through perm and accumulated in registers, column panel by
// column panel; segments are shared out among threads, and the chunks of a very long segment too.
#pragma once

#include "index.h"
#include "kinds.h"

constexpr i64 CHUNK = DETPASS_CHUNK_ROWS;
constexpr int LEVELS = 4;  // 256^(1 + 4) members: more than an int32 perm can name

// A run of rows to accumulate: rows[perm[i]], i < count.
template <class T> struct Members {
  const T* rows;
  i64 stride;
  const i32* perm;
  i64 count, ahead;  // perm may be read this far for prefetching
  INLINE const T* row(i64 i) const { return rows + i64(perm[i]) * stride; }
};

// Where a sum goes: into a row of partials, or to the output after dest and rounding.
template <class K> struct PartialRow {
  typename K::Value* out;
  template <int L> INLINE void put(i64 column, Vec<typename K::Value, L> v) const { memcpy(out + column, &v, sizeof(v)); }
};
template <class K> struct OutputRow {
  typename K::Stored* out;
  const typename K::Stored* dest;
  template <int L> INLINE void put(i64 column, Vec<typename K::Value, L> v) const {
    if (dest) v = K::template combine<L>(K::template load<L>(dest + column), v);
    const auto stored = K::template finish<L>(v);
    memcpy(out + column, &stored, sizeof(stored));
  }
};

template <class K> constexpr int lanes() {
  constexpr int fit = VECTOR_BYTES / int(sizeof(typename K::Value));
  return fit > 16 ? 16 : fit;
}

// At most one chunk of members, columns [column, column + NV * L), in registers.
template <class K, int L, int NV, class Row>
INLINE void panel(const Members<typename K::Stored>& m, i64 column, const Row& row) {
  constexpr i64 AHEAD = 12;
  Vec<typename K::Value, L> sum[NV];
  for (int v = 0; v < NV; v++) sum[v] = Vec<typename K::Value, L>{} + K::identity();
  for (i64 i = 0; i < m.count; i++) {
    if (i + AHEAD < m.ahead) prefetch(m.row(i + AHEAD) + column, NV * L * i64(sizeof(typename K::Stored)));
    const auto* from = m.row(i) + column;
    for (int v = 0; v < NV; v++) sum[v] = K::template combine<L>(sum[v], K::template load<L>(from + v * L));
  }
  for (int v = 0; v < NV; v++) row.template put<L>(column + v * L, sum[v]);
}

template <class K, int L, class Row>
INLINE void tail(const Members<typename K::Stored>& m, i64 column, i64 width, const Row& row) {
  if constexpr (L >= 1) {
    if (width & L) {
      panel<K, L, 1>(m, column, row);
      column += L;
    }
    tail<K, L / 2>(m, column, width, row);
  }
}

// All columns of at most one chunk of members.
template <class K, class Row> void accumulate_chunk(const Members<typename K::Stored>& m, i64 features, const Row& row) {
  constexpr int L = lanes<K>();
  i64 column = 0;
  if constexpr (K::wide) {
    for (; column + 4 * L <= features; column += 4 * L) panel<K, L, 4>(m, column, row);
    if (column + 2 * L <= features) { panel<K, L, 2>(m, column, row); column += 2 * L; }
  }
  for (; column + L <= features; column += L) panel<K, L, 1>(m, column, row);
  if constexpr (K::wide) tail<K, L / 2>(m, column, features - column, row);
  else for (; column < features; column++) panel<K, 1, 1>(m, column, row);
}

// The levels above the chunks of one long segment: an odometer of running rows in base 256.
template <class K> class Odometer {
  using A = typename K::Value;
  i64 features;
  int used[LEVELS] = {0};
  std::vector<A> rows[LEVELS];

  static void combine(A* into, const A* row, i64 n) {  // into = into (+) row
    for (i64 d = 0; d < n; d++)
      into[d] = K::template combine<1>(Vec<A, 1>{into[d]}, Vec<A, 1>{row[d]})[0];
  }

 public:
  explicit Odometer(i64 features_) : features(features_) {}
  void push(const A* partial) {
    for (int k = 0;; k++) {
      if (!used[k]) rows[k].assign(size_t(features), K::identity());
      combine(rows[k].data(), partial, features);
      if (++used[k] < DETPASS_FAN_IN || k + 1 == LEVELS) return;
      used[k] = 0;
      partial = rows[k].data();
    }
  }
  const A* total() {
    const A* below = nullptr;
    for (int k = 0; k < LEVELS; k++) {
      if (!used[k]) continue;
      if (below) combine(rows[k].data(), below, features);
      below = rows[k].data();
    }
    return below;
  }
};

template <class K> void write_row(const typename K::Value* total, i64 features, const OutputRow<K>& row) {
  constexpr int L = lanes<K>();
  i64 d = 0;
  for (; d + L <= features; d += L) row.template put<L>(d, load_bits<Vec<typename K::Value, L>>(total + d));
  for (; d < features; d++) row.template put<1>(d, Vec<typename K::Value, 1>{total[d]});
}

// One accumulation over a plan. `table_row` maps a segment of the plan to its row of the output (null: itself).
template <class K> struct Sorted {
  using T = typename K::Stored;
  using A = typename K::Value;
  const Call& c;
  const i32* perm;
  const i32* offsets;
  i64 segments;
  const i64* table_row;

  T* out(i64 b, i64 s) const {
    return reinterpret_cast<T*>(c.out) + b * c.out_batch + (table_row ? table_row[s] : s) * c.out_row;
  }
  const T* dest(i64 b, i64 s) const {
    if (!c.dest) return nullptr;
    return reinterpret_cast<const T*>(c.dest) + b * c.dest_batch + (table_row ? table_row[s] : s) * c.dest_row;
  }
  Members<T> members(i64 b, i64 first, i64 last, i64 limit) const {
    return {reinterpret_cast<const T*>(c.source) + b * c.source_batch, c.source_row, perm + first, last - first,
            limit - first};
  }

  // `room`: one row of partials.
  void one(i64 b, i64 s, i64 limit, A* room) const {
    const i64 first = offsets[s], last = offsets[s + 1];
    const OutputRow<K> row{out(b, s), dest(b, s)};
    if (first == last) {
      if (!row.dest) std::fill(row.out, row.out + c.features, K::empty());
      else if (row.dest != row.out) memcpy(row.out, row.dest, size_t(c.features) * sizeof(T));
    } else if (last - first <= CHUNK) {
      if constexpr (K::wide) accumulate_chunk<K>(members(b, first, last, limit), c.features, row);
      else {
        accumulate_chunk<K>(members(b, first, last, limit), c.features, PartialRow<K>{room});
        write_row<K>(room, c.features, row);
      }
    } else {
      Odometer<K> odometer(c.features);
      for (i64 begin = first; begin < last; begin += CHUNK) {
        accumulate_chunk<K>(members(b, begin, std::min(last, begin + CHUNK), limit), c.features, PartialRow<K>{room});
        odometer.push(room);
      }
      write_row<K>(odometer.total(), c.features, row);
    }
  }

  // Segments [0, segments) cut into `units` runs of about equal work.
  i64 boundary(i64 unit, i64 units) const {
    if (unit == units) return segments;
    const i64 target = (offsets[segments] + segments) / units * unit;
    i64 low = 0, high = segments;
    while (low < high) {
      const i64 middle = (low + high) / 2;
      if (offsets[middle] + middle < target) low = middle + 1; else high = middle;
    }
    return low;
  }

  void run() const {
    if (c.out != c.dest)
      want_huge_pages(reinterpret_cast<void*>(c.out), c.batch * c.segments * c.features * i64(sizeof(T)));
    const i64 threads = std::max<i64>(c.threads, 1), units = threads == 1 ? 1 : threads * 16;
    const i64 long_run = threads == 1 ? std::numeric_limits<i64>::max()
                                      : std::max<i64>(8 * CHUNK, i64(offsets[segments]) / (4 * threads));
    std::vector<i64> long_ones;
#pragma omp parallel num_threads(int(threads))
    {
      PlainArithmetic guard;
      auto room = scratch<A>(c.features);
#pragma omp for schedule(dynamic, 1)
      for (i64 task = 0; task < units * c.batch; task++) {
        const i64 b = task / units, unit = task % units, end = boundary(unit + 1, units);
        const i64 limit = offsets[end];
        for (i64 s = boundary(unit, units); s < end; s++) {
          if (offsets[s + 1] - offsets[s] <= long_run) { one(b, s, limit, room.get()); continue; }
          if (b == 0) {
#pragma omp critical(detpass_long)
            long_ones.push_back(s);
          }
        }
      }
    }
    for (i64 s : long_ones)
      for (i64 b = 0; b < c.batch; b++) split(b, s, threads);
  }

  // One long segment: its chunks by all threads, then the partials in order.
  void split(i64 b, i64 s, i64 threads) const {
    constexpr i64 GROUP = 8;
    const i64 first = offsets[s], last = offsets[s + 1], chunks = (last - first + CHUNK - 1) / CHUNK;
    auto partials = scratch<A>(chunks * c.features);
#pragma omp parallel num_threads(int(threads))
    {
      PlainArithmetic guard;
#pragma omp for schedule(dynamic, GROUP)
      for (i64 k = 0; k < chunks; k++) {
        const i64 begin = first + k * CHUNK, end = std::min(last, begin + CHUNK);
        accumulate_chunk<K>(members(b, begin, end, last), c.features, PartialRow<K>{partials.get() + k * c.features});
      }
    }
    PlainArithmetic guard;
    Odometer<K> odometer(c.features);
    for (i64 k = 0; k < chunks; k++) odometer.push(partials.get() + k * c.features);
    write_row<K>(odometer.total(), c.features, OutputRow<K>{out(b, s), dest(b, s)});
  }
};

// Build the plan that the call asks for, or take its own, and run it. Returns OK or the position of a bad index.
template <class K> i64 sorted(const Call& c) {
  if (c.form == PLANNED) {
    Sorted<K>{c, reinterpret_cast<const i32*>(c.perm), reinterpret_cast<const i32*>(c.offsets), c.segments, nullptr}.run();
    return OK;
  }
  const Plan plan(c);
  if (plan.bad != OK) return plan.bad;
  const i64* table_row = c.form == SPARSE ? plan.table_row.data() : nullptr;
  Sorted<K>{c, plan.perm.get(), plan.offsets.get(), plan.segments, table_row}.run();
  return OK;
}
