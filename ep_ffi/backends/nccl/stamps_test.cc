// SPDX-License-Identifier: Apache-2.0

// Tests the trace that each rank writes.

#include <gtest/gtest.h>

#include <fstream>
#include <numeric>

#include "ep_ffi/backends/nccl/testing/group_fixture.h"
#include "ep_ffi/core/json.h"

namespace ep::nccl {
namespace {

using StampsTest = NcclGroupTest;

std::vector<std::string> Lines(const std::string& path) {
  std::ifstream file(path);
  std::vector<std::string> lines;
  for (std::string line; std::getline(file, line);) lines.push_back(line);
  return lines;
}

// Returns the number that follows `words` and then `i` commas in `line`.
double NumberAfter(const std::string& words, int64_t i,
                   const std::string& line) {
  size_t at = line.find(words) + words.size();
  for (; i > 0; --i) at = line.find(',', at) + 1;
  return std::stod(line.substr(at));
}

TEST_F(StampsTest, TheTraceOfARankHasItsTimesAndRows) {
  const PlanDims dims = {
      /*num_experts=*/8, /*ep_size=*/4,   /*num_tokens=*/20,
      /*top_k=*/3,       /*capacity=*/24, /*alignment=*/4,
      /*drop=*/true};
  const Domain domain = MakeDomain({dims});
  std::vector<std::string> paths;
  (void)PrepareRandom(domain, dims);  // not traced
  for (int64_t rank = 0; rank < domain.size(); ++rank) {
    paths.push_back(StrCat(::testing::TempDir(), "/stamps.", rank));
    std::ofstream(paths.back()) << "{}\n";
    ExpectOk(domain.groups[rank]->StartTrace(paths.back()));
  }
  const Routed routed = PrepareRandom(domain, dims);
  for (Op op : kMoves) ExpectWorks(domain, op, routed, AnyType());
  ForEachRank(domain.size(), [&](int64_t rank) {
    ExpectOk(domain.groups[rank]->StopTrace());
  });
  (void)PrepareRandom(domain, dims);  // not traced

  EXPECT_TRUE(routed.layout.Overflows(dims));
  const auto sum = [](const std::vector<int32_t>& values) {
    return std::accumulate(values.begin(), values.end(), int64_t{0});
  };
  for (int64_t rank = 0; rank < domain.size(); ++rank) {
    SCOPED_TRACE(rank);
    // Formats a list by rank: `own` for this rank, `other` for the other ranks.
    const auto list = [&](const std::string& own, const std::string& other) {
      std::vector<std::string> all(dims.ep_size, other);
      all[rank] = own;
      return List(all, [](const std::string& one) { return one; });
    };
    const auto numbers = [&](const std::string& name, int64_t own) {
      return StrCat("\"", name, "\":", list(StrCat(own), "-1"), ",");
    };
    const std::vector<std::string> lines = Lines(paths[rank]);
    ASSERT_EQ(7u, lines.size());
    const int64_t slots = sum(routed.layout.group_sizes[rank]);
    double last_end = 0;
    for (size_t i = 1; i < 6; ++i) {
      const double came = NumberAfter("\"came\":[", rank, lines[i]);
      const double ended = NumberAfter("\"ended\":", 0, lines[i]);
      EXPECT_LE(last_end, came);
      EXPECT_LE(came, ended);
      last_end = ended;
      std::vector<std::string> words = {
          numbers("rows", slots), numbers("bytes", slots * AnyType().bytes()),
          numbers("dropped", 0)};
      if (i == 1) {
        const auto& tokens = routed.layout.token_counts[rank];
        words = {
            numbers("rows", routed.layout.total_recv_tokens[rank]),
            numbers("dropped", sum(routed.layout.dropped_counts[rank])),
            StrCat("\"tokens\":",
                   list(StrCat("[", tokens[0], ",", tokens[1], "]"), "[]"))};
      }
      words.push_back("\"began\":null");
      ExpectIn(lines[i], words);
    }
    EXPECT_EQ("{\"lost\":0}", lines[6]);
  }
}

TEST_F(StampsTest, AGroupThatClosesEndsItsTrace) {
  const Domain domain = MakeDomain(kWorld);
  const std::string path = StrCat(::testing::TempDir(), "/lost");
  ExpectOk(domain.groups[0]->StartTrace(path));
  for (int i = 0; i < 3; ++i) (void)PrepareRandom(domain, kDims);
  ExpectOk(domain.groups[0]->Check());  // writes the ended ops to the trace
  ExpectOk(domain.groups[0]->Close());
  EXPECT_EQ(4u, Lines(path).size());
}

}  // namespace
}  // namespace ep::nccl
