// The scan form of a sum: nobody sorts. An owner has a run of segments, walks the index in order and adds the rows of
// its segments to their accumulators; a byte counts the members of each segment, and when it wraps the accumulator is
// carried to the next level: an odometer in base 256, kept for long segments only.
#pragma once

#include "index.h"
#include "kinds.h"

// Running sums of one level above the accumulators, for the segments that reached it.
template <class A> struct Carry {
  i64 features;
  std::vector<i32> table;  // open addressing: 1 + slot, 0 where empty
  std::vector<i64> segment;
  std::vector<u8> used;
  std::vector<A> sums;
  std::unique_ptr<Carry> next;

  explicit Carry(i64 features_) : features(features_), table(64, 0) {}

  i64 find(i64 s) const {
    const u64 mask = table.size() - 1;
    for (u64 h = mix(u64(s)) >> 32 & mask;; h = (h + 1) & mask) {
      if (!table[h]) return -1;
      if (segment[size_t(table[h] - 1)] == s) return table[h] - 1;
    }
  }
  void enter(i64 slot) {
    const u64 mask = table.size() - 1;
    u64 h = mix(u64(segment[size_t(slot)])) >> 32 & mask;
    while (table[h]) h = (h + 1) & mask;
    table[h] = i32(slot + 1);
  }
  i64 add(i64 s) {
    const i64 slot = i64(segment.size());
    segment.push_back(s);
    used.push_back(0);
    sums.resize(sums.size() + size_t(features), A(0));
    if (2 * segment.size() <= table.size()) enter(slot);
    else {
      table.assign(2 * table.size(), 0);
      for (i64 k = 0; k <= slot; k++) enter(k);
    }
    return slot;
  }
  // Carry `row`, a full sum of the level below, and clear it. Rare: kept out of the loops over rows.
  __attribute__((noinline, cold)) void push(i64 s, A* row) {
    i64 slot = find(s);
    if (slot < 0) slot = add(s);
    A* sum = &sums[size_t(slot * features)];
    for (i64 d = 0; d < features; d++) { sum[d] = sum[d] + row[d]; row[d] = A(0); }
    if (++used[size_t(slot)]) return;
    if (!next) next.reset(new Carry(features));
    next->push(s, sum);
  }
  // Add the running sums of all levels to `row`, the rest of the level below. An empty level holds +0.0.
  void total(i64 s, A* row) const {
    const i64 slot = find(s);
    if (slot < 0) return;
    const A* sum = &sums[size_t(slot * features)];
    for (i64 d = 0; d < features; d++) row[d] = sum[d] + row[d];
    if (next) next->total(s, row);
  }
};

template <class K, int L> INLINE void add_tail(typename K::Value* a, const typename K::Stored* r, i64 width) {
  if constexpr (L >= 1) {
    if (width & L) {
      const auto v = load_bits<Vec<typename K::Value, L>>(a) + K::template load<L>(r);
      memcpy(a, &v, sizeof(v));
      a += L;
      r += L;
    }
    add_tail<K, L / 2>(a, r, width);
  }
}
template <class K> INLINE void add_row(typename K::Value* a, const typename K::Stored* r, i64 width) {
  constexpr int L = VECTOR_BYTES / int(sizeof(typename K::Value));
  i64 d = 0;
  for (; d + L <= width; d += L) {
    const auto v = load_bits<Vec<typename K::Value, L>>(a + d) + K::template load<L>(r + d);
    memcpy(a + d, &v, sizeof(v));
  }
  add_tail<K, L / 2>(a + d, r + d, width - d);
}

// What `select` writes of a row where there is a single column: its value, widened.
template <class K> struct Values {
  using T = typename K::Stored;
  using A = typename K::Value;
  const T* source;
  i64 stride;
  A* values;
  void ahead(i64 i) const { __builtin_prefetch(source + i * stride); }
  void one(i64 i, i64 at) const { values[at] = K::template load<1>(source + i * stride)[0]; }
#if defined(__AVX512F__) && defined(__AVX512VL__)
  void eight(i64 i, __mmask8 mine, i64 at) const {
    Vec<T, 8> stored;
    if (stride == 1) stored = load_bits<Vec<T, 8>>(source + i);
    else for (int l = 0; l < 8; l++) stored[l] = source[(i + l) * stride];
    const Vec<A, 8> v = K::template load<8>(reinterpret_cast<const T*>(&stored));
    if constexpr (sizeof(A) == 4)
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(values + at), _mm256_maskz_compress_epi32(mine, cast_bits<__m256i>(v)));
    else _mm512_storeu_si512(values + at, _mm512_maskz_compress_epi64(mine, cast_bits<__m512i>(v)));
  }
#endif
};

template <class K> struct Scan {
  using T = typename K::Stored;
  using A = typename K::Value;
  const Call& c;
  // Accumulators live in the output itself where that is fresh memory of the accumulation dtype; where it is fresh and
  // of half the width, those of half the segments do.
  bool direct, half_direct;
  // A single column most of whose rows belong to one segment.
  bool hot;

  explicit Scan(const Call& c_)
      : c(c_), direct(std::is_same<T, A>::value && c_.out != c_.dest && c_.out_row == c_.features),
        half_direct(2 * sizeof(T) == sizeof(A) && c_.out != c_.dest && c_.out_row == c_.features && c_.features > 1),
        hot(c_.features == 1 && has_hot_segment(c_, 300)) {}

  static constexpr i64 AHEAD = 12;  // rows whose accumulators are fetched beforehand

  struct Cell {  // the accumulator of a single column beside its count: one cache line for both
    A sum;
    u32 used;
  };

  i64 within_output(i64 count) const { return direct ? count : half_direct ? count / 2 : 0; }

  struct Rows {  // where the accumulators of a segment are: the first ones lie together, the others together elsewhere
    char* first;
    i64 row_bytes, together, elsewhere;

    INLINE A* operator()(i64 s) const {
      return reinterpret_cast<A*>(first + s * row_bytes + (s < together ? 0 : elsewhere));
    }
  };

  struct Room {  // an owner's memory, used for one run of segments after another
    std::vector<A> sums;
    std::vector<u8> used;
    std::vector<Cell> cells;

    // Once for the longest run: a vector that grows holds its old memory and its new at the same time.
    void reserve(i64 sums_, i64 used_) {
      sums.reserve(size_t(sums_));
      used.reserve(size_t(used_));
    }
  };

  // Add `found` rows of a block to their accumulators. Apart from its caller so that its few values stay in registers.
  template <int FEATURES>
  static __attribute__((noinline)) void add_block(const Rows sums, u8* __restrict used, const T* __restrict block,
                                                  i64 stride, i64 width, const i32* __restrict rows,
                                                  const i32* __restrict segments, i64 found, Carry<A>& carry) {
    const i64 features = FEATURES ? FEATURES : width;
    for (i64 j = 0; j < found; j++) {
      if (j + AHEAD < found) {
        prefetch(sums(segments[j + AHEAD]), features * i64(sizeof(A)));
        prefetch(block + i64(rows[j + AHEAD]) * stride, features * i64(sizeof(T)));
      }
      const i64 s = segments[j];
      A* sum = sums(s);
      add_row<K>(sum, block + i64(rows[j]) * stride, features);
      if (__builtin_expect(++used[s] == 0, 0)) carry.push(s, sum);
    }
  }

  // The same for a single column.
  static __attribute__((noinline)) void add_values(A* __restrict sums, u8* __restrict used, const A* __restrict values,
                                                   const i32* __restrict segments, i64 found, Carry<A>& carry) {
    for (i64 j = 0; j < found; j++) {
      const i64 s = segments[j];
      sums[s] = sums[s] + values[j];
      if (__builtin_expect(++used[s] == 0, 0)) carry.push(s, sums + s);
    }
  }
  // HOT: most rows belong to one segment; those that follow one another are summed in a register, where each addition
  // would wait for the store of the one before. Elsewhere the branch costs more than it saves.
  template <bool HOT>
  static __attribute__((noinline)) void add_cells(Cell* __restrict cells, const A* __restrict values,
                                                  const i32* __restrict segments, i64 found, Carry<A>& carry) {
    for (i64 j = 0; j < found; j++) {
      const i64 s = segments[j];
      Cell& cell = cells[s];
      cell.sum = cell.sum + values[j];
      if (__builtin_expect((++cell.used & 255) == 0, 0)) carry.push(s, &cell.sum);
      if constexpr (HOT) {
        A sum = cell.sum;
        u32 used = cell.used;
        for (; j + 1 < found && segments[j + 1] == s; j++) {
          sum = sum + values[j + 1];
          if (__builtin_expect((++used & 255) == 0, 0)) carry.push(s, &sum);
        }
        cell.sum = sum;
        cell.used = used;
      }
    }
  }

  // An owner of every segment has nothing to pick: short rows are added as they are read. HOT: see `add_cells`.
  template <class I, int FEATURES, bool HOT>
  static __attribute__((noinline)) i64 add_all(const Index<I> ix, const Rows sums, u8* __restrict used,
                                               const T* __restrict source, i64 stride, Carry<A>& carry) {
    i64 owned = 0;
    for (i64 i = 0; i < ix.rows; i++) {
      if (!(i & 7)) __builtin_prefetch(ix.data + (i + BLOCK) * ix.stride);  // as in `select`
      if (FEATURES > 1 || !(i & 7)) prefetch(source + (i + BLOCK / FEATURES) * stride, FEATURES * i64(sizeof(T)));
      if (FEATURES > 1 && i + AHEAD < ix.rows) {
        const i64 next = ix[i + AHEAD];
        if (ix.inside(next)) prefetch(sums(next), FEATURES * i64(sizeof(A)));
      }
      const i64 s = ix[i];
      if (__builtin_expect(!ix.inside(s), 0)) continue;
      owned++;
      A* sum = sums(s);
      add_row<K>(sum, source + i * stride, FEATURES);
      if (__builtin_expect(++used[s] == 0, 0)) carry.push(s, sum);
      if constexpr (HOT) {
        A held = *sum;
        u8 count = used[s];
        for (; i + 1 < ix.rows && ix[i + 1] == s; i++) {
          owned++;
          held = held + K::template load<1>(source + (i + 1) * stride)[0];
          if (__builtin_expect(++count == 0, 0)) carry.push(s, &held);
        }
        *sum = held;
        used[s] = count;
      }
    }
    return owned;
  }
  template <class I, int FEATURES> i64 add_all(const Rows& sums, u8* used, const T* source, Carry<A>& carry) const {
    if constexpr (FEATURES == 1)
      if (hot) return add_all<I, 1, true>(Index<I>(c), sums, used, source, c.source_row, carry);
    return add_all<I, FEATURES, false>(Index<I>(c), sums, used, source, c.source_row, carry);
  }

  // FEATURES: the number of columns when the compiler shall know it, or 0. Returns how many rows it owned.
  template <int FEATURES> i64 own(i64 b, i64 low, i64 count, Room& room) const {
    const i64 features = FEATURES ? FEATURES : c.features;
    const T* source = reinterpret_cast<const T*>(c.source) + b * c.source_batch;
    T* out = reinterpret_cast<T*>(c.out) + b * c.out_batch + low * c.out_row;
    const i64 row_bytes = features * i64(sizeof(A)), within = within_output(count);
    memset(static_cast<void*>(out), 0, size_t(within * row_bytes));
    room.sums.assign(size_t((count - within) * features), A(0));
    char* const scratch = reinterpret_cast<char*>(room.sums.data());
    const Rows sums = within ? Rows{reinterpret_cast<char*>(out), row_bytes, within,
                                    i64(scratch) - i64(out) - within * row_bytes}
                             : Rows{scratch, row_bytes, count, 0};
    room.used.assign(size_t(count), 0);
    u8* used = room.used.data();
    Carry<A> carry(features);
    if constexpr (0 < FEATURES && FEATURES <= 8)
      if (count == c.segments) {
        const i64 owned = c.index_bytes == 8 ? add_all<i64, FEATURES>(sums, used, source, carry)
                                             : add_all<i32, FEATURES>(sums, used, source, carry);
        finish(b, low, count, sums, used, carry, out);
        return owned;
      }
    const bool in_cells = FEATURES == 1 && count * i64(sizeof(Cell)) <= c.owner_bytes;
    if (in_cells) room.cells.assign(size_t(count), Cell{A(0), 0});
    alignas(64) i32 rows[BLOCK + 16], segments[BLOCK + 16];
    alignas(64) A values[FEATURES == 1 ? BLOCK + 16 : 1];
    i64 owned = 0;
    for (i64 first = 0; first < c.rows; first += BLOCK) {
      const i64 last = std::min(c.rows, first + BLOCK);
      i64 found;
      if constexpr (FEATURES == 1) {
        found = select_rows(c, first, last, low, count, Values<K>{source, c.source_row, values}, segments);
        if (in_cells && hot) add_cells<true>(room.cells.data(), values, segments, found, carry);
        else if (in_cells) add_cells<false>(room.cells.data(), values, segments, found, carry);
        else add_values(sums(0), used, values, segments, found, carry);
      } else {
        found = select_rows(c, first, last, low, count, RowNumbers{rows, first}, segments);
        const T* block = source + first * c.source_row;
        add_block<FEATURES>(sums, used, block, c.source_row, features, rows, segments, found, carry);
      }
      owned += found;
    }
    if (in_cells)
      for (i64 s = 0; s < count; s++) {
        *sums(s) = room.cells[size_t(s)].sum;
        used[s] = room.cells[size_t(s)].used != 0;
      }
    finish(b, low, count, sums, used, carry, out);
    return owned;
  }

  // Accumulators within the output are overwritten from the first on: a row of results ends before the next of them.
  void finish(i64 b, i64 low, i64 count, const Rows& sums, const u8* used, const Carry<A>& carry, T* out) const {
    for (i64 s : carry.segment) carry.total(s, sums(s));
    if (!c.dest && c.out_row == c.features) {  // a segment without members has the sum +0.0
      if (direct) {
        if constexpr (std::is_floating_point<A>::value) settle_nan(sums(0), count * c.features);
        return;
      }
      const i64 together = sums.together;
      write(sums(0), nullptr, out, together * c.features);
      if (together < count) write(sums(together), nullptr, out + together * c.features, (count - together) * c.features);
      return;
    }
    const T* dest = c.dest ? reinterpret_cast<const T*>(c.dest) + b * c.dest_batch + low * c.dest_row : nullptr;
    for (i64 s = 0; s < count; s++) {
      A* sum = sums(s);
      T* to = out + s * c.out_row;
      const T* from = dest ? dest + s * c.dest_row : nullptr;
      if (used[s] || (!carry.segment.empty() && carry.find(s) >= 0)) write(sum, from, to, c.features);
      else if (!from) std::fill(to, to + c.features, T(0));
      else if (from != to) memcpy(to, from, size_t(c.features) * sizeof(T));
    }
  }

  template <int L> static INLINE void write_some(const A* sum, const T* from, T* to) {
    auto v = load_bits<Vec<A, L>>(sum);
    if (from) v = K::template load<L>(from) + v;
    const auto stored = K::template finish<L>(v);
    memcpy(to, &stored, sizeof(stored));
  }
  template <int L> static INLINE void write_tail(const A* sum, const T* from, T* to, i64 width) {
    if constexpr (L >= 1) {
      const bool some = width & L;
      if (some) write_some<L>(sum, from, to);
      const i64 done = some ? L : 0;
      write_tail<L / 2>(sum + done, from ? from + done : nullptr, to + done, width);
    }
  }
  static void write(const A* sum, const T* from, T* to, i64 width) {
    constexpr int L = VECTOR_BYTES / int(sizeof(A));
    i64 d = 0;
    for (; d + L <= width; d += L) write_some<L>(sum + d, from ? from + d : nullptr, to + d);
    write_tail<L / 2>(sum + d, from ? from + d : nullptr, to + d, width - d);
  }
  static void settle_nan(A* sums, i64 n) {
    for (i64 i = 0; i < n; i++) sums[i] = sums[i] == sums[i] ? sums[i] : std::numeric_limits<A>::quiet_NaN();
  }

  i64 dispatch(i64 b, i64 low, i64 count, Room& room) const {
    if (c.features == 1) return own<1>(b, low, count, room);
    if constexpr (std::is_same<A, float>::value) {
      switch (c.features) {
        case 4: return own<4>(b, low, count, room);
        case 8: return own<8>(b, low, count, room);
        case 16: return own<16>(b, low, count, room);
        case 32: return own<32>(b, low, count, room);
      }
    }
    return own<0>(b, low, count, room);
  }

  i64 run() const {
    if (c.out != c.dest)
      want_huge_pages(reinterpret_cast<void*>(c.out), c.batch * c.segments * c.features * i64(sizeof(T)));
    const i64 threads = std::max<i64>(c.threads, 1);
    const i64 owners = std::max<i64>(1, std::min(c.segments, (threads + c.batch - 1) / std::max<i64>(c.batch, 1)));
    const i64 row_bytes = std::max<i64>(1, c.features * i64(sizeof(A)) / (half_direct ? 2 : 1));  // besides the output
    const i64 most = direct ? i64(1) << 30 : std::max<i64>(1, std::min<i64>(c.owner_bytes / row_bytes, i64(1) << 30));
    i64 owned = 0;  // over the first batch entry: each valid row must have had exactly one owner
    bool failed = false;
#pragma omp parallel num_threads(int(threads)) reduction(+ : owned) reduction(|| : failed)
    {
      PlainArithmetic guard;
      Room room;
#pragma omp for schedule(static)
      for (i64 task = 0; task < owners * c.batch; task++) {
        const i64 b = task / owners, owner = task % owners;
        const i64 low = c.segments * owner / owners, high = c.segments * (owner + 1) / owners;
        const i64 runs = (high - low + most - 1) / most;
        const i64 longest = runs ? (high - low + runs - 1) / runs : 0;
        try {
          room.reserve((longest - within_output(longest)) * c.features, longest);
          for (i64 r = 0; r < runs; r++) {
            const i64 from = low + (high - low) * r / runs, to = low + (high - low) * (r + 1) / runs;
            const i64 rows = dispatch(b, from, to - from, room);
            if (b == 0) owned += rows;
          }
        } catch (const std::bad_alloc&) { failed = true; }
      }
    }
    if (failed) return OUT_OF_MEMORY;
    return owned == c.rows || c.batch == 0 ? OK : first_bad_row(c);
  }
};

template <class K> i64 scan(const Call& c) { return Scan<K>(c).run(); }
