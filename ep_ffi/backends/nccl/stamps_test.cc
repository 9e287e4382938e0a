// SPDX-License-Identifier: Apache-2.0

// Tests what a trace has of ops that the device has run.

#include <gtest/gtest.h>

#include <fstream>
#include <numeric>

#include "ep_ffi/backends/nccl/fake/fake.h"
#include "ep_ffi/backends/nccl/testing/group_fixture.h"

namespace ep::nccl {
namespace {

using StampsTest = NcclGroupTest;
INSTANTIATE_TEST_SUITE_P(Fake, StampsTest, ::testing::Values(FakeNccl()));

std::vector<std::string> Lines(const std::string& path) {
  std::ifstream file(path);
  std::vector<std::string> lines;
  for (std::string line; std::getline(file, line);) lines.push_back(line);
  return lines;
}

// Returns the number that follows these words and `i` commas.
double NumberAfter(const std::string& words, int64_t i,
                   const std::string& line) {
  size_t at = line.find(words) + words.size();
  for (; i > 0; --i) at = line.find(',', at) + 1;
  return std::stod(line.substr(at));
}

// Returns a list by rank that has `own` at `rank`, and else `other`.
std::string ListWith(int64_t size, int64_t rank, const std::string& own,
                     const std::string& other) {
  std::string list;
  for (int64_t r = 0; r < size; ++r) {
    list += (r ? "," : "[") + (r == rank ? own : other);
  }
  return list + "]";
}

TEST_P(StampsTest, TheTraceOfARankHasItsTimesAndRows) {
  const PlanDims dims = {
      /*num_experts=*/8, /*ep_size=*/4,   /*num_tokens=*/20,
      /*top_k=*/3,       /*capacity=*/24, /*alignment=*/4,
      /*drop=*/true};
  const Domain domain = MakeDomain({dims});
  std::vector<std::string> paths;
  (void)PrepareRandom(domain, dims);  // before the trace
  for (int64_t rank = 0; rank < domain.size(); ++rank) {
    paths.push_back(StrCat(::testing::TempDir(), "/stamps.", rank));
    std::ofstream head(paths.back());
    head << "{}\n";
    head.close();
    ExpectOk(domain.groups[rank]->StartTrace(paths.back()));
  }
  const Routed routed = PrepareRandom(domain, dims);
  for (Op op : kMoves) ExpectWorks(domain, op, routed, AnyType());
  ForEachRank(domain.size(), [&](int64_t rank) {
    ExpectOk(domain.groups[rank]->StopTrace());
  });
  (void)PrepareRandom(domain, dims);  // after it

  EXPECT_TRUE(routed.layout.Overflows(dims));
  const int64_t row_bytes = AnyType().width * ByteWidth(AnyType().dtype);
  for (int64_t rank = 0; rank < domain.size(); ++rank) {
    SCOPED_TRACE(rank);
    const auto list = [&](int64_t own) {
      return ListWith(dims.ep_size, rank, std::to_string(own), "-1");
    };
    const std::vector<std::string> lines = Lines(paths[rank]);
    ASSERT_EQ(7u, lines.size());
    const auto& sizes = routed.layout.group_sizes[rank];
    const int64_t slots =
        std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
    double last_end = 0;
    for (size_t i = 1; i < 6; ++i) {
      const double came = NumberAfter("\"came\":[", rank, lines[i]);
      const double ended = NumberAfter("\"ended\":", 0, lines[i]);
      EXPECT_LE(last_end, came);
      EXPECT_LE(came, ended);
      last_end = ended;
      const Status line(Code::kInternal, lines[i]);
      ExpectWords({"\"began\":null"}, line);
      if (i == 1) continue;
      ExpectWords({StrCat("\"rows\":", list(slots), ","),
                   StrCat("\"bytes\":", list(slots * row_bytes), ","),
                   StrCat("\"dropped\":", list(0), ",")},
                  line);
    }
    const auto& dropped = routed.layout.dropped_counts[rank];
    const auto& tokens = routed.layout.token_counts[rank];
    ExpectWords(
        {StrCat("\"rows\":", list(routed.layout.total_recv_tokens[rank]), ","),
         StrCat(
             "\"dropped\":",
             list(std::accumulate(dropped.begin(), dropped.end(), int64_t{0})),
             ","),
         StrCat("\"tokens\":",
                ListWith(dims.ep_size, rank,
                         StrCat("[", tokens[0], ",", tokens[1], "]"), "[]"))},
        Status(Code::kInternal, lines[1]));
    EXPECT_EQ("{\"lost\":0}", lines[6]);
  }
}

TEST_P(StampsTest, AGroupThatClosesEndsItsTrace) {
  const Domain domain = MakeDomain(kWorld);
  const std::string path = StrCat(::testing::TempDir(), "/lost");
  ExpectOk(domain.groups[0]->StartTrace(path));
  for (int i = 0; i < 3; ++i) (void)PrepareRandom(domain, kDims);
  ExpectOk(domain.groups[0]->Check());  // takes what has ended
  ExpectOk(domain.groups[0]->Close());
  EXPECT_EQ(4u, Lines(path).size());
}

}  // namespace
}  // namespace ep::nccl
