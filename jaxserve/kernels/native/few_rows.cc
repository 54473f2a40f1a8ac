// Products of few rows with a large float32 matrix, for CPUs: an XLA custom call, run by XLA's own threads.
//
// So few rows take as long as reading the matrix does. XLA reads it with one thread, or copies it first. Here each thread reads
// a stretch of it once, from front to back, and asks memory for the next lines in that order. [in, out] is therefore cut along
// `in`, and what the parts sum up is added in their order (cut along `out`, it would come in shorter runs, which takes 8 rows 1.5
// times as long); [out, in] is cut along `out`. Neither depends on the rows: one gets the same, to the last bit, with any others.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cpu.h"

namespace ffi = xla::ffi;

namespace jaxserve {
namespace {

constexpr int kMostRows = 8;
constexpr int kDepth = 8;                       // lines of the matrix at a time
constexpr int kColumns = kWidth == 16 ? 2 : 1;  // registers of a row at a time
constexpr int64_t kWindow = 8192;               // columns, for which sums and the next lines stay in a core's cache
constexpr int64_t kWorthThreads = 1 << 16;      // elements of a matrix below which one thread is faster
constexpr int64_t kLine = 64 / sizeof(float);

struct Problem {
  const float* x;       // [rows, size_in]
  const float* matrix;  // [size_in, size_out], or [size_out, size_in]
  float* out;           // [rows, size_out]
  int64_t rows, size_in, size_out;
};

struct Range {
  int64_t begin, end;
};

// Of `parts` equal ones of [0, size), in multiples of `unit`, the one of this index.
Range part_of(int64_t size, int64_t parts, int64_t index, int64_t unit) {
  const int64_t units = (size + unit - 1) / unit;
  return {std::min(units * index / parts * unit, size), std::min(units * (index + 1) / parts * unit, size)};
}

// sums[Rows, columns] (+)= x[Rows, depth] * matrix[depth, columns], all `size_out` apart but x
template <int Rows, bool kAdd>
void add_lines(const Problem& p, const float* x, const float* matrix, float* sums, int64_t columns, int depth) {
  constexpr int kStep = kColumns * kWidth;
  const float* next = matrix + kDepth * p.size_out;
  int64_t c = 0, line = 0, column = 0;
  for (; c + kStep <= columns; c += kStep) {
    for (int i = 0; i < kDepth * kStep; i += kLine) {
      __builtin_prefetch(next + line * p.size_out + column, 0, 2);
      if ((column += kLine) >= columns) column = 0, ++line;
    }
    micro<Rows, kColumns, kAdd>(x, p.size_in, matrix + c, p.size_out, sums + c, p.size_out, depth);
  }
  for (; c < columns; ++c)
    for (int r = 0; r < Rows; ++r) {
      float sum = kAdd ? sums[r * p.size_out + c] : 0.0f;
      for (int k = 0; k < depth; ++k) sum = multiply_add(x[r * p.size_in + k], matrix[k * p.size_out + c], sum);
      sums[r * p.size_out + c] = sum;
    }
}

// What lines `in` of [in, out] add to columns `out`
template <int Rows>
void add_part(const Problem& p, Range in, Range out, float* sums) {
  for (int64_t k = in.begin; k < in.end; k += kDepth) {
    const float* matrix = p.matrix + k * p.size_out + out.begin;
    const int depth = std::min<int64_t>(kDepth, in.end - k);
    const auto lines = k == in.begin ? add_lines<Rows, false> : add_lines<Rows, true>;
    lines(p, p.x + k, matrix, sums + out.begin, out.end - out.begin, depth);
  }
}

// Lines `o` and following of [out, in]
template <int Rows, int Lines>
void dot_lines(const Problem& p, int64_t o) {
  const float *lines = p.matrix + o * p.size_in, *next = lines + Lines * p.size_in;
  Vec sum[Rows][Lines] = {};
  int64_t k = 0;
  for (; k + kWidth <= p.size_in; k += kWidth) {
    for (int n = 0; n < Lines; ++n) __builtin_prefetch(next + k * Lines + n * kWidth, 0, 2);
    Vec line[Lines];
    for (int n = 0; n < Lines; ++n) line[n] = load(lines + n * p.size_in + k);
    for (int r = 0; r < Rows; ++r) {
      const Vec x = load(p.x + r * p.size_in + k);
      for (int n = 0; n < Lines; ++n) sum[r][n] = multiply_add(x, line[n], sum[r][n]);
    }
  }
  for (int r = 0; r < Rows; ++r)
    for (int n = 0; n < Lines; ++n) {
      float total = 0;
      for (int i = 0; i < kWidth; ++i) total += sum[r][n][i];
      for (int64_t i = k; i < p.size_in; ++i) total = multiply_add(p.x[r * p.size_in + i], lines[n * p.size_in + i], total);
      p.out[r * p.size_out + o + n] = total;
    }
}

template <int Rows>
void dot_part(const Problem& p, Range out) {
  int64_t o = out.begin;
  for (; o + 2 <= out.end; o += 2) dot_lines<Rows, 2>(p, o);
  if (o < out.end) dot_lines<Rows, 1>(p, o);
}

// Chooses `add_part` and `dot_part` for a number of rows.
struct Kernels {
  void (*add)(const Problem&, Range in, Range out, float* sums);
  void (*dot)(const Problem&, Range out);

  template <int Rows = kMostRows>
  static Kernels of(int64_t rows) {
    if constexpr (Rows > 1) {
      if (rows < Rows) return of<Rows - 1>(rows);
    }
    return {add_part<Rows>, dot_part<Rows>};
  }
};

void multiply(const Problem& p, int64_t cores, ffi::ThreadPool& threads) {
  const int64_t windows = (p.size_out + kWindow - 1) / kWindow, size = p.rows * p.size_out;
  const int64_t parts = std::clamp<int64_t>(4 * cores / windows, 1, std::min(cores, (p.size_in + kDepth - 1) / kDepth));
  static thread_local std::vector<float> buffer;  // what parts but the first sum up
  if (int64_t(buffer.size()) < (parts - 1) * size) buffer.resize((parts - 1) * size);
  float* sums = buffer.data();
  share(threads, parts * windows, cores - 1, [=, add = Kernels::of(p.rows).add](int64_t i) {
    const int64_t part = i % parts;
    float* to = part ? sums + (part - 1) * size : p.out;
    add(p, part_of(p.size_in, parts, part, kDepth), part_of(p.size_out, windows, i / parts, kLine), to);
  });
  for (int64_t part = 1; part < parts; ++part)
    for (int64_t i = 0; i < size; ++i) p.out[i] += sums[(part - 1) * size + i];
}

void multiply_transposed(const Problem& p, int64_t cores, ffi::ThreadPool& threads) {
  const int64_t parts = cores * 4;
  share(threads, parts, cores - 1,
        [=, dot = Kernels::of(p.rows).dot](int64_t i) { dot(p, part_of(p.size_out, parts, i, 2)); });
}

ffi::Error run(ffi::ThreadPool threads, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> matrix, ffi::ResultBuffer<ffi::F32> out,
               bool transposed) {
  const auto from = x.dimensions(), to = out->dimensions();
  if (from[0] > kMostRows) return ffi::Error::InvalidArgument("more rows than few_rows.cc has kernels for");
  const Problem p{x.typed_data(), matrix.typed_data(), out->typed_data(), from[0], from[1], to[1]};
  const int64_t cores = p.size_in * p.size_out < kWorthThreads ? 1 : threads.num_threads();
  (transposed ? multiply_transposed : multiply)(p, cores, threads);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxserve

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxserveFewRows, jaxserve::run,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()   // x
                                  .Arg<ffi::Buffer<ffi::F32>>()   // matrix
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<bool>("transposed"));
