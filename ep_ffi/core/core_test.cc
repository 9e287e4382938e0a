// SPDX-License-Identifier: Apache-2.0

// Tests of denormals.h, export.h, pages.h, registry.h and str_cat.h.

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "ep_ffi/core/denormals.h"
#include "ep_ffi/core/export.h"
#include "ep_ffi/core/pages.h"
#include "ep_ffi/core/registry.h"
#include "ep_ffi/core/str_cat.h"

namespace ep {
namespace {

// Returns whether this thread flushes denormal inputs and results.
bool Flushes() {
  volatile float smallest = std::numeric_limits<float>::min();
  volatile float denormal = std::numeric_limits<float>::denorm_min();
  volatile float half = 0.5f, large = 1e30f;
  const float made = smallest * half;
  const float taken = denormal * large;
  EXPECT_EQ(made == 0, taken == 0);
  return made == 0;
}

TEST(DenormalsTest, FlushesInTheScopeOnly) {
  EXPECT_FALSE(Flushes());
  {
    const ScopedFlushDenormals outer;
    EXPECT_TRUE(Flushes());
    {
      const ScopedFlushDenormals inner;
      EXPECT_TRUE(Flushes());
    }
    EXPECT_TRUE(Flushes());
  }
  EXPECT_FALSE(Flushes());
}

constexpr std::byte kOld{0x5c};
constexpr int64_t kBytes = 8 << 20;

const int64_t kPage = sysconf(_SC_PAGESIZE);

// Mapped memory, filled with kOld.
class Memory {
 public:
  explicit Memory(int flags, int fd = -1)
      : data_(static_cast<std::byte*>(
            mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, flags, fd, 0))) {
    std::fill(data_, data_ + kBytes, kOld);
  }
  ~Memory() { munmap(data_, kBytes); }

  std::byte* data() { return data_; }

  // Returns how many bytes are mapped.
  int64_t MappedBytes() const {
    std::vector<unsigned char> pages(kBytes / kPage);
    EXPECT_EQ(0, mincore(data_, kBytes, pages.data()));
    return kPage * std::count_if(pages.begin(), pages.end(),
                                 [](unsigned char page) { return page & 1; });
  }

  // Expects zeros in [begin, end), and kOld in the other bytes.
  void ExpectZeros(int64_t begin, int64_t end) const {
    const auto count = [&](int64_t from, int64_t to, std::byte value) {
      return std::count(data_ + from, data_ + to, value);
    };
    EXPECT_EQ(begin, count(0, begin, kOld));
    EXPECT_EQ(end - begin, count(begin, end, std::byte{0}));
    EXPECT_EQ(kBytes - end, count(end, kBytes, kOld));
  }

 private:
  std::byte* data_;
};

TEST(PagesTest, WritesZerosOfAnySizeAndPosition) {
  for (int64_t begin : {int64_t{0}, int64_t{1}, kPage - 1, kPage, kPage + 1}) {
    for (int64_t bytes : {int64_t{0}, int64_t{1}, kPage - 1, kPage, kPage + 1,
                          int64_t{1} << 20, (int64_t{4} << 20) + 3}) {
      Memory memory(MAP_PRIVATE | MAP_ANONYMOUS);
      WriteZeros(memory.data() + begin, bytes);
      memory.ExpectZeros(begin, begin + bytes);
    }
  }
}

// Returns how much memory this process uses, in bytes.
int64_t UsedBytes() {
  std::ifstream file("/proc/self/smaps_rollup");
  std::string word;
  while (file >> word && word != "Rss:") {
  }
  int64_t kilobytes = 0;
  file >> kilobytes;
  return kilobytes << 10;
}

TEST(PagesTest, ZerosAreMappedAndTakeNoMemory) {
  Memory memory(MAP_PRIVATE | MAP_ANONYMOUS);
  const int64_t before = UsedBytes();
  WriteZeros(memory.data() + 1, kBytes - 2);
  EXPECT_LE(kBytes / 4, before - UsedBytes());  // the whole huge pages
  EXPECT_EQ(kBytes, memory.MappedBytes());
}

// If WriteZeros returned shared pages to the kernel, the next access would find
// the old bytes again, through the other mapping.
TEST(PagesTest, WritesZerosToSharedMemory) {
  const int fd = memfd_create("pages_test", MFD_CLOEXEC);
  ASSERT_EQ(0, ftruncate(fd, kBytes));
  for (int flags : {MAP_SHARED, MAP_PRIVATE}) {
    Memory other(MAP_SHARED, fd), memory(flags, fd);
    WriteZeros(memory.data() + 1, kBytes - 2);
    memory.ExpectZeros(1, kBytes - 1);
    if (flags == MAP_SHARED) other.ExpectZeros(1, kBytes - 1);
  }
  close(fd);
}

TEST(PagesTest, WritesZerosToLockedMemory) {
  Memory memory(MAP_PRIVATE | MAP_ANONYMOUS);
  ASSERT_EQ(0, mlock(memory.data() + kBytes / 2, kPage));
  WriteZeros(memory.data() + 1, kBytes - 2);
  memory.ExpectZeros(1, kBytes - 1);
}

class NoGroup : public Group {
  int64_t num_experts() const override { return 0; }
  int64_t ep_size() const override { return 0; }
  Status MemBytes(const Layer&, int64_t, int64_t*) const override {
    return Status();
  }
  void Prepare(Call, const PrepareArgs&) override {}
  void Scatter(Call, const ScatterArgs&) override {}
  void Gather(Call, const GatherArgs&) override {}
  void FailRun(int64_t, const Status&) override {}
  Status Close() override { return Status(); }
};

TEST(RegistryTest, AReleasedGroupLivesAsLongAsItsBindings) {
  Registry registry;
  const std::weak_ptr<Group> group = [&] {
    auto group = std::make_shared<NoGroup>();
    EXPECT_TRUE(registry.Add("ep", "", group).ok());
    return group;
  }();
  Binding binding = registry.Bind("ep", "step#0", 0);
  registry.Release("ep");
  EXPECT_EQ(nullptr, registry.Find("ep"));
  EXPECT_FALSE(group.expired());
  registry.CloseReleased();
  binding.group = nullptr;
  EXPECT_TRUE(group.expired());
  registry.Release("ep");  // no group has this name any more
}

TEST(StrCatTest, JoinsTextsAndNumbers) {
  EXPECT_EQ("", StrCat());
  EXPECT_EQ("abcd, ", StrCat("a", std::string("b"), std::string_view("cde", 2),
                             ',', ' '));
  EXPECT_EQ("-7 0 1", StrCat(-7, ' ', false, ' ', true));
  EXPECT_EQ("18446744073709551615",
            StrCat(std::numeric_limits<uint64_t>::max()));
  EXPECT_EQ("1 1.5 0.1 1e-09", StrCat(1.0, ' ', 1.5f, ' ', 0.1, ' ', 1e-9));
}

TEST(StrCatTest, CutsATextBetweenCharacters) {
  const std::string text = "a\u00e9\U0001f600z";  // of 1, 2, 4 and 1 bytes
  const size_t ends[] = {0, 1, 1, 3, 3, 3, 3, 7, 8, 8};
  for (size_t bytes = 0; bytes < std::size(ends); ++bytes) {
    EXPECT_EQ(text.substr(0, ends[bytes]), Truncated(text, bytes));
  }
  EXPECT_EQ("", Truncated("\x80\x80\x80", 2));  // no text, from a peer
}

TEST(ExportTest, TheErrorFitsAndHasWholeCharacters) {
  const Status status(Code::kInternal, "caf\u00e9");
  for (const auto& [bytes, expected] :
       {std::pair{1, ""}, {5, "caf"}, {6, "caf\u00e9"}, {9, "caf\u00e9"}}) {
    char error[10] = "*********";
    EXPECT_EQ(6, Export(error, bytes, [&] { return status; }));
    EXPECT_STREQ(expected, error);
    EXPECT_EQ('*', error[std::strlen(expected) + 1]);
  }
}

}  // namespace
}  // namespace ep
