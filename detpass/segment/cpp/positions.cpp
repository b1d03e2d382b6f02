// Work on indices alone: plans, counts, last positions, linear indices.
#include "index.h"

template <class F> static i64 guarded(F body) {
  try {
    return body();
  } catch (const std::bad_alloc&) { return OUT_OF_MEMORY; }
}

// out: int64[segments], counts. Owners have runs of segments and look at every row.
template <class I> static i64 count(const Call& c) {
  const Index<I> ix(c);
  i64* out = reinterpret_cast<i64*>(c.out);
  const i64 owners = std::max<i64>(1, std::min<i64>(c.threads, c.segments));
  i64 owned = 0;
#pragma omp parallel for num_threads(int(owners)) schedule(static) reduction(+ : owned)
  for (i64 owner = 0; owner < owners; owner++) {
    const i64 low = c.segments * owner / owners, high = c.segments * (owner + 1) / owners;
    memset(out + low, 0, size_t(high - low) * sizeof(i64));
    alignas(64) i32 rows[BLOCK + 16], segments[BLOCK + 16];
    for (i64 from = low; from < high; from += i64(1) << 30) {
      const i64 size = std::min(high - from, i64(1) << 30);
      for (i64 first = 0; first < c.rows; first += BLOCK) {
        const i64 found = select(ix, first, std::min(c.rows, first + BLOCK), from, size, RowNumbers{rows, first}, segments);
        for (i64 j = 0; j < found; j++) out[from + segments[j]]++;
        owned += found;
      }
    }
  }
  return owned == c.rows ? OK : ix.first_bad();
}

// out: int64[rows]. A table of the last position of each segment; of its pages only the named ones are touched.
template <class I, class P> static i64 last_by_table(const Call& c) {
  const Index<I> ix(c);
  i64* out = reinterpret_cast<i64*>(c.out);
  auto table = scratch<P>(c.segments);
  const i64 owners = std::max<i64>(1, std::min<i64>(c.threads, c.segments));
#pragma omp parallel for num_threads(int(owners)) schedule(static)
  for (i64 owner = 0; owner < owners; owner++) {
    const i64 low = c.segments * owner / owners, high = c.segments * (owner + 1) / owners;
    alignas(64) i32 rows[BLOCK + 16], segments[BLOCK + 16];
    for (i64 from = low; from < high; from += i64(1) << 30) {
      const i64 size = std::min(high - from, i64(1) << 30);
      for (i64 first = 0; first < c.rows; first += BLOCK) {
        const i64 found = select(ix, first, std::min(c.rows, first + BLOCK), from, size, RowNumbers{rows, first}, segments);
        for (i64 j = 0; j < found; j++) table[size_t(from + segments[j])] = P(first + rows[j]);
      }
    }
  }
  i64 bad = c.rows;
#pragma omp parallel for num_threads(int(std::max<i64>(c.threads, 1))) schedule(static) reduction(min : bad)
  for (i64 i = 0; i < c.rows; i++) {
    const i64 k = ix[i];
    if (ix.inside(k)) out[i] = i64(table[size_t(k)]);
    else if (ix.data[i * ix.stride] == Index<I>::skipped) out[i] = i;
    else bad = std::min(bad, i);
  }
  return bad < c.rows ? bad : OK;
}

// The same for few rows and a far larger table: segments are renumbered first.
template <class I> static i64 last_by_hash(const Call& c) {
  const Compact compact{Index<I>(c)};
  if (compact.bad != OK) return compact.bad;
  i64* out = reinterpret_cast<i64*>(c.out);
  std::vector<i32> last(compact.segment.size());
  for (i64 i = 0; i < c.rows; i++)
    if (compact.number[size_t(i)] >= 0) last[size_t(compact.number[size_t(i)])] = i32(i);
  for (i64 i = 0; i < c.rows; i++) {
    const i32 number = compact.number[size_t(i)];
    out[i] = number >= 0 ? last[size_t(number)] : i;
  }
  return OK;
}

template <class I> static i64 last(const Call& c) {
  if (c.form == SPARSE) return last_by_hash<I>(c);
  return c.rows < (i64(1) << 31) ? last_by_table<I, i32>(c) : last_by_table<I, i64>(c);
}

template <class I> static i64 plan(const Call& c) {
  const i64 bad = counting_sort(Index<I>(c), reinterpret_cast<i32*>(c.perm), reinterpret_cast<i32*>(c.offsets), c.threads);
  return bad;
}

#define ENTRY(NAME, BODY)                                                                        \
  extern "C" i64 detpass_##NAME(const Call* c) {                                                 \
    return guarded([&] { return c->index_bytes == 8 ? BODY<i64>(*c) : BODY<i32>(*c); });         \
  }

ENTRY(segment_count, count)
ENTRY(last_positions, last)
ENTRY(plan, plan)

// Broadcast index components combined row-major. `layout` holds, for each component: address, bytes of an element,
// size, then `dims` strides in elements; `shape` the broadcast shape. Returns OK or component * rows + position.
extern "C" i64 detpass_linear_index(const i64* shape, i64 dims, const i64* layout, i64 components, i64 wrap, i64 threads,
                                    i64* out) {
  i64 rows = 1;
  for (i64 d = 0; d < dims; d++) rows *= shape[d];
  const i64 inner = dims ? shape[dims - 1] : 1, record = 3 + dims;
  const i64 piece = 4096, pieces = (rows + piece - 1) / piece;
  i64 bad = std::numeric_limits<i64>::max();
#pragma omp parallel for num_threads(int(std::max<i64>(1, std::min(threads, pieces)))) schedule(static) reduction(min : bad)
  for (i64 p = 0; p < pieces; p++) {
    const i64 end = std::min(rows, (p + 1) * piece);
    for (i64 position = p * piece; position < end;) {
      const i64 step = position % inner, run = std::min(inner - step, end - position);
      for (i64 k = 0; k < components; k++) {
        const i64* component = layout + k * record;
        const i64* strides = component + 3;
        i64 base = 0, rest = position / inner;
        for (i64 d = dims - 2; d >= 0; d--) { base += rest % shape[d] * strides[d]; rest /= shape[d]; }
        const i64 stride = dims ? strides[dims - 1] : 0, size = component[2];
        base += step * stride;
        const bool wide = component[1] == 8;
        const i64 skipped = wide ? Index<i64>::skipped : i64(Index<i32>::skipped);
        for (i64 j = 0; j < run; j++) {
          const i64 at = base + j * stride;
          const i64 raw = wide ? reinterpret_cast<const i64*>(component[0])[at] : reinterpret_cast<const i32*>(component[0])[at];
          const i64 value = raw + (wrap && raw < 0 ? size : 0);
          i64& linear = out[position + j];
          const bool inside = u64(value) < u64(size);
          if (__builtin_expect(!inside && raw != skipped, 0)) bad = std::min(bad, k * rows + position + j);
          const bool live = inside && (k == 0 || linear >= 0);
          linear = live ? (k == 0 ? 0 : linear) * size + value : Index<i64>::skipped;
        }
      }
      position += run;
    }
  }
  return bad == std::numeric_limits<i64>::max() ? OK : bad;
}
