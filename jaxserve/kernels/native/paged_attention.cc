// Paged attention in float32 for CPUs: an XLA custom call, run by XLA's own threads. Layout and rules are the reference backend's.
//
// The step is cut into items: up to kTileRows rows of scores (a tile of one request's queries, times the group) of one KV head.
// An item reads its keys and values once, kChunk tokens at a time, into buffers that stay in the core's cache, and keeps a
// running softmax (Milakov & Gimelshein, arXiv 1805.02867). Chunks begin at multiples of kChunk, and each product sums in one
// order; so what a query gets does not depend, to the last bit, on what else is in the batch or how its prompt was cut.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cpu.h"

namespace ffi = xla::ffi;

namespace jaxserve {
namespace {

constexpr int kPanel = kWidth == 8 ? 2 : 4;  // registers in a row of a micro-kernel
constexpr int kMicroRows = kWidth == 8 ? 5 : 6;
constexpr int kChunk = 64;       // keys at a time
constexpr int kTileRows = 128;   // about so many rows of scores in an item
constexpr int64_t kWorthThreads = 1 << 18;  // multiply-adds below which one thread is faster

template <int N, bool kAdd>
void panel(int rows, const float* a, int lda, const float* b, int ldb, float* c, int ldc, int depth) {
  int r = 0;
  for (; r + kMicroRows <= rows; r += kMicroRows)
    micro<kMicroRows, N, kAdd>(a + r * lda, lda, b, ldb, c + r * ldc, ldc, depth);
  a += r * lda;
  c += r * ldc;
  switch (rows - r) {
    case 5: return micro<5, N, kAdd>(a, lda, b, ldb, c, ldc, depth);
    case 4: return micro<4, N, kAdd>(a, lda, b, ldb, c, ldc, depth);
    case 3: return micro<3, N, kAdd>(a, lda, b, ldb, c, ldc, depth);
    case 2: return micro<2, N, kAdd>(a, lda, b, ldb, c, ldc, depth);
    case 1: return micro<1, N, kAdd>(a, lda, b, ldb, c, ldc, depth);
  }
}

// c[rows, columns] (+)= a[rows, depth] * b[depth, columns]; columns is a multiple of kWidth
template <bool kAdd>
void multiply(int rows, int columns, int depth, const float* a, int lda, const float* b, int ldb, float* c, int ldc) {
  int n = 0;
  for (; n + kPanel * kWidth <= columns; n += kPanel * kWidth)
    panel<kPanel, kAdd>(rows, a, lda, b + n, ldb, c + n, ldc, depth);
  for (; n < columns; n += kWidth) panel<1, kAdd>(rows, a, lda, b + n, ldb, c + n, ldc, depth);
}

// e^x for x <= 0, to about a unit in the last place; NaN stays NaN.
inline Vec exponential(Vec x) {
  const Vec least = all(-87.0f);
  x = x < least ? least : x;
  const Vec shift = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low bits
  Vec shifted = x * 1.44269504f + shift;
  Vec n = shifted - shift;
  Vec r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  Vec p = all(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  IntVec bits;
  std::memcpy(&bits, &shifted, sizeof(bits));
  bits = (bits - 0x4B400000 + 127) << 23;
  Vec power;
  std::memcpy(&power, &bits, sizeof(power));
  return p * power;
}

struct Problem {
  const float* q;       // [T, Hkv, G, D]
  const float* pool;    // [P, Hkv, 2, page_size, D]
  const int32_t* kv_lens;
  const int32_t* cu_q_lens;
  const int32_t* page_table;  // [R, max_pages]
  const float* sinks;   // [Hkv, G], or null
  float* out;           // [T, Hkv, G, D]
  int32_t page_offset;
  int num_rows, num_heads, group, dim, page_size, max_pages;
  int64_t num_tokens, num_pages, window;  // window 0: none
  float scale, soft_cap;                  // soft_cap 0: none
  int decode_q_len;                       // 0: prompts
  bool causal;

  int padded_dim() const { return (dim + kWidth - 1) / kWidth * kWidth; }
  int first_token(int row) const { return decode_q_len ? row * decode_q_len : cu_q_lens[row]; }
  int num_queries(int row) const {
    return decode_q_len == 1 ? kv_lens[row] > 0 : cu_q_lens[row + 1] - cu_q_lens[row];
  }
  // What a query sees: positions [seen_from, seen_to). If attention is not causal, a window reaches as far behind it as before it.
  int64_t seen_from(int64_t position) const { return window ? std::max<int64_t>(position - window + 1, 0) : 0; }
  int64_t seen_to(int64_t position, int row) const {
    if (causal) return position + 1;
    return window ? std::min<int64_t>(position + window, kv_lens[row]) : kv_lens[row];
  }
};

struct Item {
  int row, head, first_query, num_queries;
  int64_t cost;
};

// What a thread computes an item in.
struct Scratch {
  std::vector<float> queries, keys, values, scores, sums, highest, totals, nothing;

  void fit(int rows, const Problem& p) {
    grow(queries, rows * p.dim);
    grow(keys, p.dim * kChunk);
    grow(values, kChunk * p.padded_dim());
    grow(scores, rows * kChunk);
    grow(sums, rows * p.padded_dim());
    grow(highest, rows);
    grow(totals, rows);
    grow(nothing, p.dim);
  }

  static void grow(std::vector<float>& buffer, size_t size) {
    if (buffer.size() < size) buffer.resize(size);
  }
};

// Writes rows[kWidth][dim], `stride` apart, to columns [0, kWidth) of to[dim, kChunk].
void transpose(const float* const* rows, int dim, float* to) {
  int d = 0;
#if !defined(__clang__)
  IntVec low, high;  // of two registers: their first halves in turns, their second halves in turns
  for (int i = 0; i < kWidth; ++i) low[i] = i / 2 + (i % 2) * kWidth, high[i] = low[i] + kWidth / 2;
  for (; d + kWidth <= dim; d += kWidth) {
    Vec line[kWidth], next[kWidth];
    for (int i = 0; i < kWidth; ++i) line[i] = load(rows[i] + d);
    // Each round shuffles the rows perfectly; after log2(kWidth) rounds, rows are columns.
    for (int round = 1; round < kWidth; round *= 2) {
      for (int i = 0; i < kWidth / 2; ++i) {
        next[2 * i] = __builtin_shuffle(line[i], line[i + kWidth / 2], low);
        next[2 * i + 1] = __builtin_shuffle(line[i], line[i + kWidth / 2], high);
      }
      for (int i = 0; i < kWidth; ++i) line[i] = next[i];
    }
    for (int i = 0; i < kWidth; ++i) store(to + (d + i) * kChunk, line[i]);
  }
#endif
  for (; d < dim; ++d)
    for (int i = 0; i < kWidth; ++i) to[d * kChunk + i] = rows[i][d];
}

// Where a token's key stands; its value is a page's tokens behind it.
const float* key_of(const Problem& p, int row, int head, int64_t position) {
  const int64_t index = std::min<int64_t>(position / p.page_size, p.max_pages - 1);
  const int64_t page = int64_t{p.page_table[int64_t{row} * p.max_pages + index]} + p.page_offset;
  const int64_t there = std::min(std::max<int64_t>(page, 0), p.num_pages - 1);
  return p.pool + ((there * p.num_heads + head) * 2 * p.page_size + position % p.page_size) * p.dim;
}

inline void prefetch(const float* line, int dim) {
  for (int d = 0; d < dim; d += 64 / sizeof(float)) __builtin_prefetch(line + d);
}

// Copies tokens [begin, end) of a chunk: keys as [D, kChunk], values as [kChunk, padded D]. Others become zero, and are not read:
// a page may hold another request's leftovers, which may be NaN. Asks memory for the next chunk, which comes during the products.
void read_chunk(const Problem& p, int row, int head, int64_t start, int64_t begin, int64_t end, Scratch& s) {
  const int dim = p.dim, padded = p.padded_dim();
  const float* keys[kChunk];
  for (int j = 0; j < kChunk; ++j) {
    const int64_t position = start + j;
    float* value = s.values.data() + j * padded;
    if (position + kChunk < end) {
      const float* next = key_of(p, row, head, position + kChunk);
      prefetch(next, dim);
      prefetch(next + int64_t{p.page_size} * dim, dim);
    }
    if (position < begin || position >= end) {
      keys[j] = s.nothing.data();
      std::fill(value, value + padded, 0.0f);
      continue;
    }
    keys[j] = key_of(p, row, head, position);
    std::memcpy(value, keys[j] + int64_t{p.page_size} * dim, dim * sizeof(float));
    std::fill(value + dim, value + padded, 0.0f);
  }
  for (int j = 0; j < kChunk; j += kWidth) transpose(keys + j, dim, s.keys.data() + j);
}

// Turns scores [low, high) of a row into weights and the others into 0; updates the row's maximum, total and sums.
void weigh(float* scores, int low, int high, float soft_cap, float& highest, float& total, float* sums, int padded) {
  if (low >= high) {
    std::fill(scores, scores + kChunk, 0.0f);
    return;
  }
  if (soft_cap > 0)
    for (int j = low; j < high; ++j) scores[j] = soft_cap * std::tanh(scores[j] / soft_cap);
  float top = highest;
  for (int j = low; j < high; ++j) top = scores[j] > top ? scores[j] : top;
  if (top != highest) {
    const float kept = exponential(all(highest - top))[0];
    total *= kept;
    for (int d = 0; d < padded; d += kWidth) store(sums + d, load(sums + d) * kept);
    highest = top;
  }
  Vec added = {};
  for (int j = 0; j < kChunk; j += kWidth) {
    Vec weight = exponential(load(scores + j) - top);
    if (j < low || j + kWidth > high)
      for (int i = 0; i < kWidth; ++i) weight[i] = j + i < low || j + i >= high ? 0.0f : weight[i];
    store(scores + j, weight);
    added += weight;
  }
  for (int i = 0; i < kWidth; ++i) total += added[i];
}

void attend(const Problem& p, const Item& item, Scratch& s) {
  const int group = p.group, dim = p.dim, padded = p.padded_dim(), rows = item.num_queries * group;
  s.fit(rows, p);
  const int64_t first_position = int64_t{p.kv_lens[item.row]} - p.num_queries(item.row) + item.first_query;
  const int64_t token = p.first_token(item.row) + item.first_query;
  for (int i = 0; i < item.num_queries; ++i) {
    const float* q = p.q + ((token + i) * p.num_heads + item.head) * group * dim;
    for (int x = 0; x < group * dim; ++x) s.queries[i * group * dim + x] = q[x] * p.scale;
  }
  std::fill_n(s.sums.begin(), rows * padded, 0.0f);
  std::fill_n(s.highest.begin(), rows, -1.7e38f);
  std::fill_n(s.totals.begin(), rows, 0.0f);

  const int64_t begin = p.seen_from(first_position), end = p.seen_to(first_position + item.num_queries - 1, item.row);
  for (int64_t start = begin / kChunk * kChunk; start < end; start += kChunk) {
    read_chunk(p, item.row, item.head, start, begin, end, s);
    multiply<false>(rows, kChunk, dim, s.queries.data(), dim, s.keys.data(), kChunk, s.scores.data(), kChunk);
    for (int r = 0; r < rows; ++r) {
      const int64_t position = first_position + r / group;
      const int64_t from = p.seen_from(position) - start, to = p.seen_to(position, item.row) - start;
      const int low = std::clamp<int64_t>(from, 0, kChunk), high = std::clamp<int64_t>(to, 0, kChunk);
      weigh(&s.scores[r * kChunk], low, high, p.soft_cap, s.highest[r], s.totals[r], &s.sums[r * padded], padded);
    }
    multiply<true>(rows, padded, kChunk, s.scores.data(), kChunk, s.values.data(), padded, s.sums.data(), padded);
  }

  for (int r = 0; r < rows; ++r) {
    float total = s.totals[r], factor = 1.0f;
    if (p.sinks) {
      const float sink = p.sinks[item.head * group + r % group], top = std::max(s.highest[r], sink);
      factor = std::exp(s.highest[r] - top);
      total = total * factor + std::exp(sink - top);
    }
    float* out = p.out + (((token + r / group) * p.num_heads + item.head) * group + r % group) * dim;
    for (int d = 0; d < dim; ++d) out[d] = s.sums[r * padded + d] * factor / total;
  }
}

// Costliest first, so that threads end together.
std::vector<Item> cut(const Problem& p) {
  const int tile = std::max(1, kTileRows / p.group);
  std::vector<Item> items;
  for (int row = 0; row < p.num_rows; ++row) {
    const int count = p.num_queries(row);
    for (int first = 0; first < count; first += tile) {
      const int queries = std::min(tile, count - first);
      int64_t seen = p.causal ? p.kv_lens[row] - count + first + queries : p.kv_lens[row];
      if (p.window) seen = std::min(seen, (p.causal ? 1 : 2) * p.window + queries);
      const int64_t cost = seen * queries * p.group * p.dim;
      for (int head = 0; head < p.num_heads; ++head) items.push_back({row, head, first, queries, cost});
    }
  }
  std::stable_sort(items.begin(), items.end(), [](const Item& a, const Item& b) { return a.cost > b.cost; });
  return items;
}

void zero_padding(const Problem& p) {
  const int64_t line = int64_t{p.num_heads} * p.group * p.dim;
  if (!p.decode_q_len) {
    const int64_t live = p.cu_q_lens[p.num_rows];
    std::fill(p.out + live * line, p.out + p.num_tokens * line, 0.0f);
    return;
  }
  for (int row = 0; row < p.num_rows; ++row) {
    float* first = p.out + int64_t{row} * p.decode_q_len * line;
    std::fill(first + p.num_queries(row) * line, first + p.decode_q_len * line, 0.0f);
  }
}

ffi::Error run(ffi::ThreadPool threads, ffi::Buffer<ffi::F32> q, ffi::Buffer<ffi::F32> pool, ffi::Buffer<ffi::S32> kv_lens,
               ffi::Buffer<ffi::S32> cu_q_lens, ffi::Buffer<ffi::S32> page_table, ffi::Buffer<ffi::S32> page_offset,
               ffi::Buffer<ffi::F32> sinks, ffi::ResultBuffer<ffi::F32> out, float scale, float soft_cap, int64_t window,
               int64_t decode_q_len, bool causal) {
  const auto queries = q.dimensions(), pages = pool.dimensions(), table = page_table.dimensions();
  Problem p;
  p.q = q.typed_data(), p.pool = pool.typed_data(), p.kv_lens = kv_lens.typed_data();
  p.cu_q_lens = cu_q_lens.typed_data(), p.page_table = page_table.typed_data();
  p.sinks = sinks.element_count() ? sinks.typed_data() : nullptr;
  p.out = out->typed_data(), p.page_offset = *page_offset.typed_data();
  p.num_rows = table[0], p.max_pages = table[1];
  p.num_tokens = queries[0], p.num_heads = queries[1], p.group = queries[2], p.dim = queries[3];
  p.num_pages = pages[0], p.page_size = pages[3];
  p.window = window, p.scale = scale, p.soft_cap = soft_cap, p.decode_q_len = decode_q_len, p.causal = causal;

  zero_padding(p);
  const std::vector<Item> items = cut(p);
  int64_t cost = 0;
  for (const Item& item : items) cost += item.cost;
  const int64_t count = items.size(), helpers = cost < kWorthThreads ? 0 : std::min<int64_t>(threads.num_threads(), count) - 1;
  share(threads, count, helpers, [p, items](int64_t i) {
    static thread_local Scratch scratch;
    attend(p, items[i], scratch);
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxserve

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxservePagedAttention, jaxserve::run,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()   // q
                                  .Arg<ffi::Buffer<ffi::F32>>()   // pool
                                  .Arg<ffi::Buffer<ffi::S32>>()   // kv_lens
                                  .Arg<ffi::Buffer<ffi::S32>>()   // cu_q_lens
                                  .Arg<ffi::Buffer<ffi::S32>>()   // page_table
                                  .Arg<ffi::Buffer<ffi::S32>>()   // page_offset
                                  .Arg<ffi::Buffer<ffi::F32>>()   // sinks
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<float>("scale")
                                  .Attr<float>("soft_cap")
                                  .Attr<int64_t>("window")
                                  .Attr<int64_t>("decode_q_len")
                                  .Attr<bool>("causal"));
