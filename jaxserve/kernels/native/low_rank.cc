// Low-rank adapters (LoRA) of float32 matrices, many in one product, for CPUs: an XLA custom call, run by XLA's own threads.
//
// Tokens of one slot are taken a few at a time: each number of A and B that is read serves them all. XLA would multiply every
// token with what all slots hold. What a token gets does not depend on the others, to the last bit.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cpu.h"

namespace ffi = xla::ffi;

namespace jaxserve {
namespace {

constexpr int kMostRows = 4;                    // tokens at a time
constexpr int64_t kWorthThreads = 1 << 17;      // multiplications below which one thread is faster

struct Problem {
  const float* x;                  // [T, size_in]
  const int32_t* slots;            // [T]: -1 without an adapter
  const float* a;                  // [num_slots, size_in, P, rank]
  std::vector<const float*> b;     // of each of P parts [num_slots, rank, its columns]
  std::vector<int64_t> columns;    // of each part
  std::vector<int64_t> widths;     // of each part, in one of the periods that columns of `out` come in
  float* out;                      // [T, size_out]: is added to
  int64_t size_in, size_out, num_slots, rank;
};

struct Item {
  int32_t slot;
  int num_tokens;
  int64_t tokens[kMostRows];
};

// c[Rows, columns] = a[Rows, depth] * b[depth, columns]
template <int Rows>
void multiply(const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc, int64_t columns, int64_t depth) {
  int64_t at = 0;
  for (; at + 2 * kWidth <= columns; at += 2 * kWidth) micro<Rows, 2, false>(a, lda, b + at, ldb, c + at, ldc, depth);
  for (; at + kWidth <= columns; at += kWidth) micro<Rows, 1, false>(a, lda, b + at, ldb, c + at, ldc, depth);
  for (; at < columns; ++at)
    for (int r = 0; r < Rows; ++r) {
      float sum = 0;
      for (int64_t k = 0; k < depth; ++k) sum = multiply_add(a[r * lda + k], b[k * ldb + at], sum);
      c[r * ldc + at] = sum;
    }
}

template <int Rows>
void add(const Problem& p, const Item& item) {
  const int64_t parts = p.b.size(), inner = parts * p.rank;
  static thread_local std::vector<float> buffer;
  const int64_t size = Rows * (p.size_in + inner + p.size_out);
  if (int64_t(buffer.size()) < size) buffer.resize(size);
  float *x = buffer.data(), *shrunk = x + Rows * p.size_in, *added = shrunk + Rows * inner;
  for (int r = 0; r < Rows; ++r) std::copy_n(p.x + item.tokens[r] * p.size_in, p.size_in, x + r * p.size_in);
  multiply<Rows>(x, p.size_in, p.a + item.slot * p.size_in * inner, inner, shrunk, inner, inner, p.size_in);
  int64_t before = 0, period = 0;
  for (int64_t width : p.widths) period += width;
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t columns = p.columns[part], width = p.widths[part];
    multiply<Rows>(shrunk + part * p.rank, inner, p.b[part] + item.slot * p.rank * columns, columns, added, columns, columns,
                   p.rank);
    for (int r = 0; r < Rows; ++r)
      for (int64_t from = 0, to = before; from < columns; from += width, to += period) {
        float* out = p.out + item.tokens[r] * p.size_out + to;
        const float* more = added + r * columns + from;
        for (int64_t i = 0; i < width; ++i) out[i] += more[i];
      }
    before += width;
  }
}

void add_item(const Problem& p, const Item& item) {
  switch (item.num_tokens) {
    case 1: return add<1>(p, item);
    case 2: return add<2>(p, item);
    case 3: return add<3>(p, item);
    default: return add<4>(p, item);
  }
}

ffi::Error run(ffi::ThreadPool threads, ffi::Buffer<ffi::F32> base, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::S32> slots,
               ffi::Buffer<ffi::F32> a, ffi::RemainingArgs b, ffi::ResultBuffer<ffi::F32> out,
               ffi::Span<const int64_t> widths) {
  const auto of_a = a.dimensions();
  const int64_t num_tokens = x.dimensions()[0];
  Problem p{x.typed_data(), slots.typed_data(), a.typed_data(), {}, {}, {widths.begin(), widths.end()}, out->typed_data(),
            x.dimensions()[1], out->dimensions()[1], of_a[0], of_a[3]};
  for (size_t part = 0; part < b.size(); ++part) {
    const auto matrix = b.get<ffi::Buffer<ffi::F32>>(part);
    if (!matrix) return ffi::Error::InvalidArgument("b must be float32");
    p.b.push_back(matrix->typed_data());
    p.columns.push_back(matrix->dimensions()[2]);
  }
  if (base.typed_data() != p.out) std::copy_n(base.typed_data(), num_tokens * p.size_out, p.out);

  std::vector<Item> items;
  std::vector<int64_t> open(p.num_slots, -1);  // of each slot the item that has room
  int64_t num_adapted = 0;
  for (int64_t t = 0; t < num_tokens; ++t) {
    const int32_t slot = p.slots[t];
    if (slot < 0 || slot >= p.num_slots) continue;
    if (open[slot] < 0) {
      open[slot] = items.size();
      items.push_back({slot, 0, {}});
    }
    Item& item = items[open[slot]];
    item.tokens[item.num_tokens++] = t;
    if (item.num_tokens == kMostRows) open[slot] = -1;
    ++num_adapted;
  }
  const int64_t work = num_adapted * p.rank * (p.size_in * int64_t(p.b.size()) + p.size_out);
  const int64_t helpers = work < kWorthThreads ? 0 : threads.num_threads() - 1;
  // Both outlive the call no longer than `share` does, which waits for all items.
  const Problem* problem = &p;
  const Item* first = items.data();
  share(threads, items.size(), helpers, [=](int64_t i) { add_item(*problem, first[i]); });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxserve

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxserveLowRank, jaxserve::run,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()   // base
                                  .Arg<ffi::Buffer<ffi::F32>>()   // x
                                  .Arg<ffi::Buffer<ffi::S32>>()   // slots
                                  .Arg<ffi::Buffer<ffi::F32>>()   // a
                                  .RemainingArgs()                // b, of each part
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<ffi::Span<const int64_t>>("widths"));
