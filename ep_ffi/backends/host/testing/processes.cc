// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/backends/host/testing/processes.h"

#include <dirent.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <numeric>
#include <utility>

#include "ep_ffi/backends/host/group.h"
#include "ep_ffi/backends/host/testing/sockets.h"
#include "ep_ffi/backends/host/transport/fd.h"
#include "ep_ffi/core/clock.h"
#include "ep_ffi/testing/samples.h"

namespace ep::host {
namespace {

using testing::RankData;
using testing::RankInput;
using testing::RowType;

constexpr double kLimitS = 40;  // time limit of a job
constexpr double kPatienceS = 20;
constexpr RowType kType = {128, DType::kFloat32};

PlanDims DimsOf(int32_t ep_size) {
  PlanDims dims = {
      /*num_experts=*/12, ep_size,        /*num_tokens=*/64,
      /*top_k=*/2,        /*capacity=*/0, /*alignment=*/2,
      /*drop=*/false};
  dims.capacity = testing::WorstCaseCapacity(dims);
  return dims;
}

// The inputs and expected results of every op on every rank of a group.
struct Sample {
  PlanDims dims;
  testing::Choices choices;
  testing::Layout layout;
  std::map<Op, std::vector<RankData>> inputs, outputs;

  // Returns the sample for a group size, made by Job::Run before it forks.
  static const Sample& Of(int32_t ep_size) {
    static auto* samples = new std::map<int32_t, Sample>();  // leaked
    auto [found, is_new] = samples->try_emplace(ep_size);
    if (is_new) found->second.Draw(DimsOf(ep_size));
    return found->second;
  }

  void Draw(const PlanDims& d) {
    testing::Random random(1);
    dims = d;
    choices = testing::RandomChoices(random, dims);
    layout = testing::LayOut(dims, choices);
    for (Op op : testing::kMoves) {
      for (int64_t r = 0; r < dims.ep_size; ++r) {
        inputs[op].push_back(RandomInput(random, op, dims, kType));
      }
      outputs[op] = Apply(op, dims, layout, kType, inputs[op]);
    }
  }
};

// Counts the failures of this test. A child inherits the parent's count.
int CountFailures() {
  return ::testing::UnitTest::GetInstance()
      ->current_test_info()
      ->result()
      ->total_part_count();
}

}  // namespace

bool WaitFor(double seconds, const std::function<bool()>& holds) {
  const double end = Now() + seconds;
  while (!holds()) {
    if (Now() > end) return false;
    usleep(50);
  }
  return true;
}

size_t CountEntries(const char* folder) {
  DIR* entries = opendir(folder);
  size_t count = 0;
  while (readdir(entries)) ++count;
  closedir(entries);
  return count;
}

std::string Lines(const std::string& path, const std::string& word) {
  std::ifstream file(path);
  std::string line, found;
  while (std::getline(file, line)) {
    if (line.find(word) != std::string::npos) found += line + "\n";
  }
  return found;
}

Rank::Rank(int32_t rank, Records* records, std::vector<Fd> for_all,
           std::vector<Fd> for_some)
    : rank_(rank),
      records_(records),
      for_all_(std::move(for_all)),
      for_some_(std::move(for_some)) {
  record().pid = getpid();
}

void Rank::Bootstrap(double timeout_s, std::vector<int32_t> members) {
  std::vector<Fd>& sockets = members.empty() ? for_all_ : for_some_;
  if (members.empty()) {
    members.resize(kNumRanks);
    std::iota(members.begin(), members.end(), 0);
  }
  const int32_t size = members.size();
  const auto me = std::find(members.begin(), members.end(), rank_);
  index_ = me - members.begin();
  HostGroup::Options options = {};
  options.name = "group";
  options.num_experts = DimsOf(size).num_experts;
  options.timeout_s = timeout_s;
  options.topology.process = index_;
  options.topology.ep_size = size;
  domain_ = {};
  domain_.groups.resize(size);
  for (int32_t i = 0; i < size; ++i) {
    const Record& other = records()[members[i]];
    WaitFor(kPatienceS, [&] { return other.pid != 0; });
    options.topology.processes.push_back({i, other.pid});
    options.sockets.push_back(std::move(sockets[members[i]]));
    options.topology.members.push_back({i, /*device=*/members[i]});
    domain_.devices.push_back(members[i]);
  }
  num_posts_ = 0;
  status_ = HostGroup::Create(std::move(options), &domain_.groups[index_]);
  if (status_.ok()) {
    ++record().joined;
  } else {
    record().failed = Now();
  }
}

void Rank::Next() {
  Post();
  Wait();
}

void Rank::Post() {
  if (!status_.ok()) return;
  const int64_t run_id = 1 + num_posts_ / kNumOps;
  const int64_t position = num_posts_ % kNumOps;
  step_ = Post(static_cast<Op>(position), {run_id, position});
  ++num_posts_;
  ++record().posted;
}

testing::StepPtr Rank::Post(Op op, testing::Place place) {
  const Sample& sample = Sample::Of(domain_.size());
  std::vector<RankInput> inputs(domain_.size());
  RankInput& mine = inputs[index_];
  mine.dims = sample.dims;
  if (op == Op::kPrepare) {
    mine.topk_idx = sample.choices[index_];
  } else {
    mine.mem = mem_;
    mine.type = kType;
    mine.data = sample.inputs.at(op)[index_];
  }
  const testing::StepPtr step =
      testing::Step::Make(domain_, op, place, std::move(inputs));
  step->Post(index_);
  return step;
}

void Rank::Wait() {
  if (!status_.ok()) return;
  const Op op = static_cast<Op>((num_posts_ - 1) % kNumOps);
  status_ = step_->Wait(index_);
  if (!status_.ok()) {
    record().failed = Now();
    return;
  }
  ++record().completed;
  const testing::RankOutput& output = step_->output(index_);
  const Sample& sample = Sample::Of(domain_.size());
  if (op == Op::kPrepare) {
    mem_ = output.mem;
    EXPECT_EQ(sample.layout.group_sizes[index_], output.group_sizes);
  } else {
    EXPECT_EQ("", Difference(kType, sample.outputs.at(op)[index_], output.data))
        << OpName(op) << " on rank " << rank_;
  }
}

void Rank::NextStep() {
  num_posts_ = (num_posts_ + kNumOps - 1) / kNumOps * kNumOps;
  status_ = Status();
}

std::string Rank::Abandon() {
  step_ = nullptr;
  if (domain_.groups[index_]) {
    const Status closed = domain_.groups[index_]->Close();
    EXPECT_TRUE(closed.ok()) << closed.message();
  }
  domain_ = {};
  return status_.message();
}

std::string Rank::Close() {
  const std::string said = Abandon();
  const auto segments = [] { return Lines("/proc/self/maps", "memfd:ep_ffi"); };
  EXPECT_TRUE(WaitFor(kPatienceS, [&] { return segments().empty(); }))
      << segments();
  return said;
}

void Rank::WaitForOthers(int32_t but,
                         const std::function<bool(const Record&)>& holds) {
  EXPECT_TRUE(WaitFor(kPatienceS,
                      [&] {
                        for (int32_t r = 0; r < kNumRanks; ++r) {
                          if (r != but && !holds(records()[r])) return false;
                        }
                        return true;
                      }))
      << "rank " << rank_ << " waited in vain";
}

void Rank::Die(Way way) {
  record().died = Now();
  switch (way) {
    case Way::kKill:
      raise(SIGKILL);
      break;
    case Way::kCrash:
      signal(SIGSEGV, SIG_DFL);  // removes a sanitizer's handler
      raise(SIGSEGV);
      break;
    case Way::kExit:
      // On another thread, exit() would destroy data that the main thread uses.
      if (getpid() == syscall(SYS_gettid)) exit(0);
      break;
  }
  _exit(0);
}

void ExpectNothingSaid(const std::vector<Ending>& endings) {
  for (const Ending& ending : endings) {
    EXPECT_EQ("", ending.said);
    EXPECT_EQ(0, ending.status);
  }
}

Job::Job()
    : records(static_cast<Records*>(mmap(nullptr, sizeof(Records),
                                         PROT_READ | PROT_WRITE,
                                         MAP_SHARED | MAP_ANONYMOUS, -1, 0))) {
  new (records) Records();
}

Job::~Job() { munmap(records, sizeof(Records)); }

std::vector<Ending> Job::Run(const std::function<std::string(Rank&)>& body) {
  for (int32_t size = kNumRanks - 1; size <= kNumRanks; ++size) {
    Sample::Of(size);
  }
  std::vector<Ending> endings(kNumRanks);
  std::vector<pid_t> children;
  std::vector<int> reports;
  Sockets for_all(kNumRanks), for_some(kNumRanks);
  const auto close_sockets = [&] {
    for_all = Sockets(0);
    for_some = Sockets(0);
  };
  for (int32_t r = 0; r < kNumRanks; ++r) {
    int report[2];
    EXPECT_EQ(0, pipe(report));
    children.push_back(fork());
    if (children.back() == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      const rlimit no_core = {0, 0};
      setrlimit(RLIMIT_CORE, &no_core);
      close(report[0]);
      const int failures = CountFailures();
      const size_t threads = CountEntries("/proc/self/task");
      size_t descriptors;
      std::string said;
      {
        Rank rank(r, records, for_all.Take(r), for_some.Take(r));
        close_sockets();  // of the other ranks
        descriptors = CountEntries("/proc/self/fd") - 2 * (kNumRanks - 1);
        said = body(rank);
      }
      // A thread of the engine may still receive descriptors and close them.
      WaitFor(kPatienceS, [&] {
        return CountEntries("/proc/self/task") == threads &&
               CountEntries("/proc/self/fd") == descriptors;
      });
      EXPECT_EQ(threads, CountEntries("/proc/self/task"));
      EXPECT_EQ(descriptors, CountEntries("/proc/self/fd"));
      const ssize_t size = write(report[1], said.data(), said.size());
      _exit(size != ssize_t(said.size()) || CountFailures() > failures);
    }
    close(report[1]);
    reports.push_back(report[0]);
  }
  close_sockets();
  const double end = Now() + kLimitS;
  for (int32_t r = 0; r < kNumRanks; ++r) {
    char text[4096];
    ssize_t size = 1;
    while (size > 0) {
      const int left_ms = std::max(0.0, (end - Now()) * 1e3);
      pollfd report = {reports[r], POLLIN, 0};
      if (poll(&report, 1, left_ms) == 0) {
        ADD_FAILURE() << "rank " << r << " takes too long";
        kill(children[r], SIGKILL);
      }
      size = read(reports[r], text, sizeof(text));
      endings[r].said.append(text, std::max<ssize_t>(size, 0));
    }
    close(reports[r]);
    EXPECT_EQ(children[r], waitpid(children[r], &endings[r].status, 0));
  }
  return endings;
}

}  // namespace ep::host
