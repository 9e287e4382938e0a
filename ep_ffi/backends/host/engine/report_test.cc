// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/backends/host/engine/report.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>

namespace ep::host {
namespace {

// Process 1 has the ranks 1 and 2 of three. In an exchange it waits with rank 1
// for rank 0, and rank 2 has run no op yet.
class ProgressTest : public ::testing::Test {
 protected:
  ProgressTest() {
    topology_.process = 1;
    topology_.ep_size = 3;
    topology_.processes = {{"address", 0, 0}, {"other", 1, 0}};
    topology_.members = {{0, 0}, {1, 1}, {1, 2}};
    exchange_.key = {};
    exchange_.began_at = 2.5;
    exchange_.parts.resize(3);
    exchange_.parts[1].is_posted = true;
    exchange_.parts[1].op = Posted(Op::kDispatch, /*step=*/7);
    last_posts_ = {LastPost{Posted(Op::kPrepare, 7), 1.25},
                   LastPost{Posted(Op::kDispatch, 7), 2.5}, std::nullopt};
  }

  static PostedOp Posted(Op op, int64_t step) {
    PostedOp posted;
    posted.op = op;
    posted.launch.number = step;
    posted.layer = "a\\b";
    posted.program = "jit_step#0";
    return posted;
  }

  // Returns the text after the time at which it was made.
  std::string Text(size_t max_bytes) const {
    const std::string text = Progress(topology_, "ep0", {&exchange_},
                                      last_posts_, /*since=*/0.5, max_bytes);
    EXPECT_LE(text.size(), max_bytes);
    const std::string begin = StrCat("{\"pid\":", getpid(), ",\"time\":");
    EXPECT_EQ(begin, text.substr(0, begin.size()));
    return text.substr(text.find(",\"group\""));
  }

  Topology topology_;
  Exchange exchange_;
  LastPosts last_posts_;
};

// Returns a text with other quotes.
std::string Json(std::string text) {
  std::replace(text.begin(), text.end(), '\'', '"');
  return text;
}

constexpr char kBegin[] =
    ",'group':'ep0','job':'address','process':1,'waits':[";
constexpr char kWait[] =
    "{'op':'ep_dispatch(layer \\'a\\\\b\\'), step 7 of \\'jit_step#0\\', op "
    "0','waiting':'rank 1 (process 1)','missing':'rank 0 (process 0) whose "
    "last op was ep_prepare(layer \\'a\\\\b\\'), step 7 of \\'jit_step#0\\', "
    "op 0, rank 2 (process 1) that has run no op yet','since':2.5000000}";
constexpr char kOther[] =
    "{'rank':'rank 2 (process 1)','last':'','since':0.5000000}";

TEST_F(ProgressTest, SaysWhoWaitsAndWhoDoesNot) {
  EXPECT_EQ(
      Json(StrCat(kBegin, kWait, "],'others':[", kOther, "],'left_out':0}")),
      Text(1000));
}

TEST_F(ProgressTest, LeavesOutWhatDoesNotFit) {
  EXPECT_EQ(Json(StrCat(kBegin, "],'others':[", kOther, "],'left_out':1}")),
            Text(300));
  EXPECT_EQ(Json(StrCat(kBegin, "],'others':[],'left_out':2}")), Text(150));
}

}  // namespace
}  // namespace ep::host
