// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/backends/host/engine/batch.h"

#include <gtest/gtest.h>

#include <new>
#include <utility>

#include "ep_ffi/testing/ranks.h"

namespace ep::host {
namespace {

// Makes an exchange of local ranks, which have these numbers of chunks.
ExchangePtr MakeExchange(
    const std::vector<int64_t>& num_chunks,
    const std::function<Status(int64_t rank, int64_t chunk)>& run) {
  auto exchange = std::make_shared<Exchange>();
  for (size_t rank = 0; rank < num_chunks.size(); ++rank) {
    Part& part = exchange->parts.emplace_back();
    part.is_posted = true;
    part.done = [](const Status&) {};
    part.contribution.num_chunks = num_chunks[rank];
    part.contribution.run = [run, rank](const AllArrays&, int64_t chunk) {
      return run(rank, chunk);
    };
  }
  return exchange;
}

TEST(BatchTest, EachChunkRunsOnceAndOneThreadEndsTheLast) {
  const std::vector<int64_t> num_chunks = {3, 0, 100, 1};
  std::vector<std::vector<std::atomic<int>>> runs;
  for (int64_t n : num_chunks) runs.emplace_back(n);
  Batch batch(MakeExchange(num_chunks, [&](int64_t rank, int64_t chunk) {
    ++runs[rank][chunk];
    return Status();
  }));
  std::atomic<int> num_last{0};
  testing::ForEachRank(4, [&](int64_t) { num_last += batch.Work(); });
  EXPECT_EQ(1, num_last);
  EXPECT_TRUE(batch.status().ok());
  for (const auto& rank : runs) {
    for (const auto& chunk : rank) EXPECT_EQ(1, chunk);
  }
}

TEST(BatchTest, TheFirstFailureIsKeptAndTheOtherChunksRun) {
  int num_runs = 0;
  Batch batch(MakeExchange({2, 2}, [&](int64_t rank, int64_t chunk) {
    ++num_runs;
    return rank + chunk == 0
               ? Status()
               : Status(Code::kInvalidArgument, StrCat("bad ", rank, chunk));
  }));
  EXPECT_TRUE(batch.Work());
  EXPECT_EQ(4, num_runs);
  EXPECT_EQ("ep_prepare(layer \"\"): bad 01", batch.status().message());
}

TEST(BatchTest, LackOfMemoryIsAFailure) {
  Batch batch(MakeExchange({3}, [&](int64_t, int64_t chunk) {
    if (chunk == 1) throw std::bad_alloc();
    return Status();
  }));
  EXPECT_TRUE(batch.Work());
  EXPECT_EQ(Code::kResourceExhausted, batch.status().code());
}

TEST(BatchTest, WithoutChunksTheWorkIsDoneAtOnce) {
  Batch batch(MakeExchange({0, 0}, nullptr));
  EXPECT_EQ(1, batch.NumUsefulThreads(8));
  EXPECT_TRUE(batch.Work());
}

TEST(BatchTest, SmallWorkIsForOneThread) {
  const auto useful = [](int64_t bytes) {
    ExchangePtr exchange = MakeExchange({5, 5}, nullptr);
    exchange->parts[0].contribution.signature[Signature::kFirstBytes] = bytes;
    return Batch(std::move(exchange)).NumUsefulThreads(8);
  };
  EXPECT_EQ(1, useful(1000));
  EXPECT_EQ(8, useful(1 << 30));
}

}  // namespace
}  // namespace ep::host
