// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/backends/nccl/watchdog.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "ep_ffi/core/clock.h"
#include "ep_ffi/core/status.h"

namespace ep::nccl {
namespace {

void Print(const std::string& sentence) {
  std::fprintf(stderr, "ep_ffi: %s\n", sentence.c_str());
}

}  // namespace

Watchdog::Watchdog(std::shared_ptr<const Device> device, std::string rank,
                   double timeout_s, double exit_after_s)
    : device_(std::move(device)),
      rank_(std::move(rank)),
      timeout_s_(timeout_s),
      exit_after_s_(exit_after_s),
      moved_at_(Now()),
      thread_([this] { Watch(); }) {}

void Watchdog::Stop() {
  {
    MutexLock lock(mutex_);
    is_stopped_ = true;
    changed_.NotifyAll();
  }
  if (thread_.joinable()) thread_.join();
}

void Watchdog::Number(Routing* routing) {
  MutexLock lock(mutex_);
  routing->progress = device_->progress();
  routing->number = num_added_ + 1;
}

void Watchdog::Add(std::string op) {
  MutexLock lock(mutex_);
  const bool was_idle = ops_.empty();
  if (was_idle) moved_at_ = Now();
  ops_.push_back(std::move(op));
  ++num_added_;
  Update();  // the op may have ended already
  if (was_idle && !ops_.empty()) changed_.NotifyAll();
}

void Watchdog::Update() {
  const Progress progress = device_->ReadProgress();
  if (progress.begun != progress_.begun || progress.ended != progress_.ended) {
    progress_ = progress;
    moved_at_ = Now();
    is_told_ = false;
  }
  while (!ops_.empty() && num_added_ - ops_.size() < progress.ended) {
    last_ended_ = std::move(ops_.front());
    ops_.pop_front();
  }
}

void Watchdog::Watch() {
  // Polls often enough to see a timeout early, and rarely enough to be cheap.
  const auto pause = std::chrono::duration_cast<std::chrono::nanoseconds>(
      std::chrono::duration<double>(std::min(timeout_s_ / 16, 1.0)));
  MutexLock lock(mutex_);
  while (!is_stopped_) {
    if (ops_.empty()) {
      changed_.Wait(mutex_);
      continue;
    }
    changed_.WaitUntil(mutex_, std::chrono::steady_clock::now() + pause);
    Update();
    if (ops_.empty() || is_stopped_) continue;
    const double still_s = Now() - moved_at_;
    if (still_s > timeout_s_ && !is_told_) {
      Print(Describe());
      is_told_ = true;
    }
    if (still_s > timeout_s_ + exit_after_s_) {
      Print(StrCat(rank_, " ends its process: exit_after_s = ", exit_after_s_,
                   " s later it still waits. ", Describe()));
      std::_Exit(kExitCode);
    }
  }
}

bool Watchdog::IsStuck(std::string* op) {
  MutexLock lock(mutex_);
  Update();
  if (ops_.empty() || !HasBegun()) return false;
  if (Now() - moved_at_ <= timeout_s_) return false;
  *op = ops_.front();
  return true;
}

Watchdog::Place Watchdog::FindPlace() {
  MutexLock lock(mutex_);
  Update();
  Place place = {static_cast<int64_t>(num_added_ - ops_.size()), HasBegun(),
                 static_cast<int64_t>(ops_.size()), Now() - moved_at_, ""};
  if (!ops_.empty()) {
    place.text =
        StrCat(place.has_begun ? "is in " : "has not begun ", ops_.front());
  } else if (!last_ended_.empty()) {
    place.text = StrCat("has enqueued nothing after ", last_ended_);
  } else {
    place.text = "has enqueued no op";
  }
  return place;
}

void Watchdog::Hear(std::string others) {
  MutexLock lock(mutex_);
  heard_ = std::move(others);
}

std::string Watchdog::heard() const {
  MutexLock lock(mutex_);
  return heard_;
}

std::string Watchdog::Describe() const {
  std::string text = StrCat(ops_.front(), ": ", rank_);
  if (HasBegun()) {
    text += StrCat(" has waited timeout_s = ", timeout_s_,
                   " s in this op for other ranks. ",
                   heard_.empty() ? "Look for a rank that prints no line like "
                                    "this one: it failed, is slow, or runs "
                                    "another program."
                                  : heard_);
  } else {
    text += StrCat(" has not begun this op. For timeout_s = ", timeout_s_,
                   " s its GPU has not ended what was enqueued before, such as "
                   "a collective of XLA. Ranks that wait in this op wait for "
                   "this rank.");
  }
  if (last_ended_.empty()) return text;
  return StrCat(text, " The last op in which all ranks took part was ",
                last_ended_, ".");
}

}  // namespace ep::nccl
