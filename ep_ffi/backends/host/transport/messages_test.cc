// SPDX-License-Identifier: Apache-2.0

// Tests messages.

#include "ep_ffi/backends/host/transport/messages.h"

#include <gtest/gtest.h>

#include "ep_ffi/core/status.h"

namespace ep::host {
namespace {

Message Failure() {
  Message message = {};
  message.type = Message::kFail;
  message.code = static_cast<int32_t>(Code::kInternal);
  message.launch = {/*site_id=*/1, /*run_id=*/2, /*number=*/3};
  return message;
}

bool Decodes(const std::string& bytes) {
  Message message;
  std::string text;
  return Decode(bytes.data(), bytes.size(), &message, &text);
}

TEST(MessagesTest, DecodesEncodedMessages) {
  const std::string bytes = Encode(Failure(), "why");
  Message message;
  std::string text;
  ASSERT_TRUE(Decode(bytes.data(), bytes.size(), &message, &text));
  EXPECT_EQ(Message::kFail, message.type);
  EXPECT_EQ(2, message.launch.run_id);
  EXPECT_EQ("why", text);
}

// Python could not raise an error with a part of a character.
TEST(MessagesTest, CutsALongTextBetweenCharacters) {
  std::string text = "x";
  while (text.size() < kMaxText) text += "\u00e9";
  const std::string bytes = Encode(Failure(), text);
  EXPECT_EQ(kMaxMessage - 1, bytes.size());
  EXPECT_TRUE(Decodes(bytes));
}

TEST(MessagesTest, SplitsJoinedNames) {
  std::string layer, program;
  SplitNames(JoinNames("moe_3", "jit_step"), &layer, &program);
  EXPECT_EQ("moe_3", layer);
  EXPECT_EQ("jit_step", program);
  SplitNames("a layer whose name was c", &layer, &program);
  EXPECT_EQ("a layer whose name was c", layer);
  EXPECT_EQ("", program);
}

TEST(MessagesTest, RejectsTooFewOrTooManyBytes) {
  const std::string bytes = Encode(Failure(), "why");
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_FALSE(Decodes(bytes.substr(0, size))) << size;
  }
  EXPECT_FALSE(Decodes(bytes + "y"));
}

TEST(MessagesTest, RejectsAnUnknownType) {
  Message message = Failure();
  for (uint32_t type : {uint32_t{Message::kBye} + 1, ~uint32_t{0}}) {
    message.type = static_cast<Message::Type>(type);
    EXPECT_FALSE(Decodes(Encode(message, "")));
  }
}

TEST(MessagesTest, RejectsAFailureWithoutAnError) {
  Message message = Failure();
  for (int32_t code : {-1, 0, 7, 256}) {
    message.code = code;
    EXPECT_FALSE(Decodes(Encode(message, ""))) << code;
  }
}

}  // namespace
}  // namespace ep::host
