// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/core/registry.h"

#include <gtest/gtest.h>

namespace ep {
namespace {

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

TEST(RegistryTest, ANameIsTakenWhileItsGroupLives) {
  Registry registry;
  auto first = std::make_shared<NoGroup>();
  EXPECT_EQ(nullptr, registry.Find("ep"));
  EXPECT_TRUE(registry.Add("ep", "", first).ok());
  EXPECT_NE(nullptr, registry.Find("ep"));
  EXPECT_FALSE(registry.Add("ep", "", std::make_shared<NoGroup>()).ok());
  EXPECT_EQ(first, registry.Remove("ep"));
  EXPECT_EQ(nullptr, registry.Find("ep"));
  EXPECT_EQ(nullptr, registry.Remove("ep"));
  EXPECT_TRUE(registry.Add("ep", "", std::make_shared<NoGroup>()).ok());
}

TEST(RegistryTest, ABindingKeepsItsGroupAlive) {
  Registry registry;
  EXPECT_TRUE(registry.Add("ep", "", std::make_shared<NoGroup>()).ok());
  const Binding binding = registry.Bind("ep", "step#0", 0);
  const std::weak_ptr<Group> group = registry.Remove("ep");
  EXPECT_FALSE(group.expired());
  EXPECT_EQ(nullptr, registry.Bind("ep", "step#0", 0).group);
}

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
  registry.Release("ep");  // there is none any more
}

TEST(RegistryTest, CopiesOfAnOpAreCountedByProgramAndPosition) {
  Registry registry;
  EXPECT_TRUE(registry.Add("ep", "", std::make_shared<NoGroup>()).ok());
  EXPECT_TRUE(registry.Add("other", "", std::make_shared<NoGroup>()).ok());
  EXPECT_EQ(0, registry.Bind("ep", "step#0", 3).clone);
  EXPECT_EQ(1, registry.Bind("ep", "step#0", 3).clone);
  EXPECT_EQ(0, registry.Bind("ep", "step#0", 4).clone);
  EXPECT_EQ(0, registry.Bind("ep", "step#1", 3).clone);
  EXPECT_EQ(0, registry.Bind("other", "step#0", 3).clone);
}

}  // namespace
}  // namespace ep
