// The host backend between real processes: how they end, and what the others
// see of it. The parent forks all ranks while it has a single thread.

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "ep_ffi/backends/host/group.h"
#include "ep_ffi/testing/oracle.h"
#include "ep_ffi/testing/ranks.h"
#include "ep_ffi/testing/samples.h"

namespace ep::host {
namespace {

using testing::Choices;
using testing::Domain;
using testing::Random;
using testing::RandomChoices;
using testing::RandomData;
using testing::RankInput;
using testing::RowType;
using testing::Step;

constexpr double kTimeout = 60;  // far longer than any test may take
constexpr PlanDims kDims = {/*num_experts=*/8, /*ep_size=*/4,
                            /*num_tokens=*/64, /*top_k=*/2,
                            /*capacity=*/512,  /*alignment=*/2,
                            /*drop=*/false};
constexpr RowType kType = {128, DType::kFloat32};

// One rank in its own process. All ranks draw the same inputs.
class Rank {
 public:
  Rank(int32_t rank, const std::string& secret) : rank_(rank) {
    HostGroup::Options options = {};
    options.name = "group";
    options.num_experts = kDims.num_experts;
    options.timeout_s = kTimeout;
    options.secret = secret;
    options.topology = {rank, kDims.ep_size, kDims.ep_size, {}};
    domain_.groups.resize(kDims.ep_size);
    for (int32_t r = 0; r < kDims.ep_size; ++r) {
      options.topology.members.push_back({r, /*device=*/r});
      domain_.devices.push_back(r);
    }
    status_ = HostGroup::Create(options, &domain_.groups[rank]);
  }

  int32_t rank() const { return rank_; }

  // The status of the first thing that failed on this rank.
  const Status& status() const { return status_; }

  void Prepare() {
    const Choices choices = RandomChoices(random_, kDims);
    std::vector<RankInput> inputs(kDims.ep_size);
    for (int32_t r = 0; r < kDims.ep_size; ++r) {
      inputs[r].dims = kDims;
      inputs[r].topk_idx = choices[r];
    }
    mem_ = Run(Op::kPrepare, inputs).mem;
  }

  void Dispatch() {
    std::vector<RankInput> inputs(kDims.ep_size);
    for (int32_t r = 0; r < kDims.ep_size; ++r) {
      inputs[r].dims = kDims;
      inputs[r].type = kType;
      inputs[r].data =
          RandomData(random_, kType, kDims.num_tokens, kDims.num_choices());
    }
    inputs[rank_].mem = mem_;
    Run(Op::kDispatch, inputs);
  }

  void Close() {
    if (domain_.groups[rank_]) (void)domain_.groups[rank_]->Close();
  }

 private:
  testing::RankOutput Run(Op op, const std::vector<RankInput>& inputs) {
    if (!status_.ok()) return {};
    auto step = Step::Make(domain_, op, {next_run_++}, inputs);
    step->Post(rank_);
    status_ = step->Wait(rank_);
    return step->output(rank_);
  }

  const int32_t rank_;
  Random random_{1};
  int64_t next_run_ = 1;
  Domain domain_;  // only this rank's group is there
  std::vector<std::byte> mem_;
  Status status_;
};

// How a rank ended: what it said, and its wait status.
struct Ending {
  std::string said;
  int status;
};

// When a rank exits, without closing anything that it has not closed.
enum class Leave {
  kAtOnce,    // when its body returns
  kTogether,  // when all bodies have returned, so that none looks dead before
};

// Runs `body` as every rank, each in a process; what it returns is what the
// rank says.
std::vector<Ending> RunRanks(Leave leave,
                             const std::function<std::string(Rank&)>& body) {
  const std::string secret = testing::NewSecret();
  std::vector<Ending> endings(kDims.ep_size);
  std::vector<pid_t> children;
  std::vector<int> reports;
  int stop[2];
  EXPECT_EQ(0, pipe(stop));
  for (int32_t r = 0; r < kDims.ep_size; ++r) {
    int report[2];
    EXPECT_EQ(0, pipe(report));
    children.push_back(fork());
    if (children.back() == 0) {
      close(stop[1]);
      Rank rank(r, secret);
      const std::string said = body(rank);
      ssize_t size = write(report[1], said.data(), said.size());
      if (leave == Leave::kTogether) {
        close(report[1]);
        char nothing;
        size += read(stop[0], &nothing, 1);
      }
      _exit(size != ssize_t(said.size()) || ::testing::Test::HasFailure());
    }
    close(report[1]);
    reports.push_back(report[0]);
  }
  for (int32_t r = 0; r < kDims.ep_size; ++r) {
    char text[4096];
    ssize_t size;
    while ((size = read(reports[r], text, sizeof(text))) > 0) {
      endings[r].said.append(text, size);
    }
    close(reports[r]);
  }
  close(stop[1]);
  close(stop[0]);
  for (int32_t r = 0; r < kDims.ep_size; ++r) {
    EXPECT_EQ(children[r], waitpid(children[r], &endings[r].status, 0));
  }
  return endings;
}

double Now() {
  return std::chrono::duration<double>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// All ranks but `dead`, which was killed, blame it by its name.
void ExpectBlamed(int32_t dead, const std::vector<Ending>& endings) {
  for (int32_t r = 0; r < kDims.ep_size; ++r) {
    SCOPED_TRACE(StrCat("rank ", r));
    if (r == dead) {
      EXPECT_TRUE(WIFSIGNALED(endings[r].status));
      continue;
    }
    EXPECT_EQ(0, endings[r].status);
    for (const std::string& word :
         {StrCat("ep_dispatch(layer \"", testing::kLayerName, "\")"),
          StrCat("rank ", r),
          StrCat("rank ", dead, " (process ", dead, ") died")}) {
      EXPECT_NE(std::string::npos, endings[r].said.find(word))
          << endings[r].said;
    }
  }
}

TEST(ProcessTest, APeerThatIsKilledIsNamedAtOnce) {
  const double begin = Now();
  ExpectBlamed(2, RunRanks(Leave::kTogether, [](Rank& rank) {
                 rank.Prepare();
                 if (rank.rank() == 2) {
                   // While the others wait.
                   usleep(200000);
                   raise(SIGKILL);
                 }
                 rank.Dispatch();
                 return rank.status().message();
               }));
  EXPECT_LT(Now() - begin, kTimeout / 3);
}

TEST(ProcessTest, NobodyBeginsToWaitForAPeerThatWasKilled) {
  const double begin = Now();
  ExpectBlamed(0, RunRanks(Leave::kTogether, [](Rank& rank) {
                 rank.Prepare();
                 if (rank.rank() == 0) raise(SIGKILL);
                 usleep(200000);
                 rank.Dispatch();
                 return rank.status().message();
               }));
  EXPECT_LT(Now() - begin, kTimeout / 3);
}

TEST(ProcessTest, APeerMayBeKilledAtAnyMoment) {
  for (int i = 0; i < 10; ++i) {
    const double begin = Now();
    ExpectBlamed(1, RunRanks(Leave::kTogether, [i](Rank& rank) {
                   rank.Prepare();
                   if (rank.rank() == 1) {
                     std::thread([i] {
                       usleep(2000 + 700 * i);
                       raise(SIGKILL);
                     }).detach();
                   }
                   while (rank.status().ok()) rank.Dispatch();
                   return rank.status().message();
                 }));
    EXPECT_LT(Now() - begin, kTimeout / 3);
  }
}

// Each rank leaves as soon as its own last op is done; the others may still
// be reading what it posted.
TEST(ProcessTest, RanksThatLeaveDoNotDisturbTheOthers) {
  for (int i = 0; i < 20; ++i) {
    const std::vector<Ending> endings =
        RunRanks(Leave::kAtOnce, [](Rank& rank) {
          rank.Prepare();
          for (int j = 0; j < 5; ++j) rank.Dispatch();
          rank.Close();
          return rank.status().message();
        });
    for (const Ending& ending : endings) {
      EXPECT_EQ("", ending.said);
      EXPECT_EQ(0, ending.status);
    }
  }
}

}  // namespace
}  // namespace ep::host
