// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/core/trace.h"

#include <utility>

#include "ep_ffi/core/json.h"

namespace ep {
namespace {

// Returns the first JSON fields of a trace line: the names of the op.
std::string Name(const TracedOp& op) {
  return StrCat("{\"op\":", Quoted(OpName(op.op)),
                ",\"layer\":", Quoted(op.layer),
                ",\"program\":", Quoted(op.program), ",\"site\":\"", op.site,
                "\",\"step\":", op.step, ",\"domain\":", op.domain);
}

Status CannotWrite(const std::string& path) {
  return Status(Code::kInvalidArgument,
                StrCat("cannot write ", path,
                       "; choose a folder that exists and has room"));
}

}  // namespace

Status Trace::Start(const std::string& path) {
  MutexLock lock(mutex_);
  file_ = std::ofstream(path, std::ios::app);
  if (!file_) return CannotWrite(path);
  path_ = path;
  num_kept_ = num_lost_ = num_failed_ = 0;
  is_on_ = true;
  return Status();
}

void Trace::Add(TracedExchange exchange, double waited) {
  MutexLock lock(mutex_);
  if (!is_on_) return;
  waited_ += waited;
  if (num_kept_ == kKept) {
    ++num_lost_;
    return;
  }
  ++num_kept_;
  kept_.push_back(std::move(exchange));
}

void Trace::Lose() {
  MutexLock lock(mutex_);
  ++num_lost_;
}

double Trace::Waited() {
  MutexLock lock(mutex_);
  return waited_;
}

void Trace::Fail(const TracedFailure& failure, const Status& status) {
  MutexLock lock(mutex_);
  if (!is_on_ || ++num_failed_ > kFailed) return;
  Write();
  file_ << Name(failure.op) << ",\"at\":" << Seconds(Now())
        << ",\"failed\":" << Quoted(status.message()) << ",\"ranks\":"
        << List(failure.ranks, [](int32_t r) { return std::to_string(r); })
        << ",\"are_absent\":" << (failure.are_absent ? "true" : "false")
        << "}\n"
        << std::flush;
}

Status Trace::Stop() {
  MutexLock lock(mutex_);
  if (!is_on_.exchange(false)) return Status();
  Write();
  file_ << StrCat("{\"lost\":", num_lost_, "}\n");
  file_.close();
  return file_ ? Status() : CannotWrite(path_);
}

void Trace::Write() {
  for (const TracedExchange& e : std::exchange(kept_, {})) {
    const auto numbers = [&](int64_t TracedRows::* field) {
      return List(e.moved, [&](const TracedRows& m) {
        return std::to_string(m.*field);
      });
    };
    file_ << Name(e.op)
          << ",\"began\":" << (e.began ? Seconds(*e.began) : "null")
          << ",\"ended\":" << Seconds(e.ended)
          << ",\"came\":" << List(e.came, Seconds)
          << ",\"rows\":" << numbers(&TracedRows::rows)
          << ",\"dropped\":" << numbers(&TracedRows::dropped)
          << ",\"bytes\":" << numbers(&TracedRows::bytes) << ",\"tokens\":"
          << List(e.moved,
                  [](const TracedRows& m) {
                    return List(m.tokens,
                                [](int32_t n) { return std::to_string(n); });
                  })
          << "}\n";
  }
}

}  // namespace ep
