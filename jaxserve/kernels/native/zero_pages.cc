// Zeros that the operating system writes when they are first touched: an XLA custom call for arrays far larger than what is used
// of them soon, such as an empty KV cache. Writing a GiB takes a CPU a quarter of a second, and keeps it.

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

// XLA allocates private anonymous memory. Linux takes its whole pages back at this advice and gives zeros in their place, also
// where something was written before; elsewhere the advice means less.
bool give_back(char* begin, char* end) {
#ifdef __linux__
  return begin < end && madvise(begin, end - begin, MADV_DONTNEED) == 0;
#else
  return false;
#endif
}

ffi::Error run(ffi::Result<ffi::AnyBuffer> out) {
  char* begin = static_cast<char*>(out->untyped_data());
  char* end = begin + out->size_bytes();
  const uintptr_t page = sysconf(_SC_PAGESIZE);
  char* first = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(begin) + page - 1) / page * page);
  char* last = reinterpret_cast<char*>(reinterpret_cast<uintptr_t>(end) / page * page);
  if (give_back(first, last)) {
    std::memset(begin, 0, first - begin);
    std::memset(last, 0, end - last);
  } else {
    std::memset(begin, 0, end - begin);
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxserveZeroPages, run, ffi::Ffi::Bind().Ret<ffi::AnyBuffer>());
