// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/backends/host/engine/trace.h"

#include <algorithm>
#include <cstdio>
#include <utility>

namespace ep::host {
namespace {

std::string Quoted(const std::string& text) {
  std::string out = "\"";
  for (const unsigned char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    if (c >= ' ') {
      out += static_cast<char>(c);
      continue;
    }
    char escaped[8];
    std::snprintf(escaped, sizeof(escaped), "\\u%04x", c);
    out += escaped;
  }
  return out + '"';
}

// Returns a JSON list of what `format` makes of each item.
template <typename Items, typename Format>
std::string List(const Items& items, Format format) {
  std::string out;
  for (const auto& item : items) out += (out.empty() ? "" : ",") + format(item);
  return "[" + out + "]";
}

std::string Seconds(double time) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.7f", time);
  return text;
}

// Returns the begin of a line about an exchange.
std::string Name(const PostedOp& op, int32_t domain) {
  return StrCat(
      "{\"op\":", Quoted(OpName(op.op)), ",\"layer\":", Quoted(op.layer),
      ",\"program\":", Quoted(op.program), ",\"site\":\"", op.launch.site_id,
      "\",\"step\":", op.launch.number, ",\"domain\":", domain);
}

Status CannotWrite(const std::string& path) {
  return Status(Code::kInvalidArgument,
                StrCat("cannot write ", path,
                       "; choose a folder that exists and has room"));
}

}  // namespace

Status Trace::Start(const std::string& path, const Topology& topology) {
  MutexLock lock(mutex_);
  if (is_on_) {
    return Status(Code::kFailedPrecondition,
                  StrCat("this group is traced already, to ", path_,
                         "; end that trace first"));
  }
  file_ = std::ofstream(path);
  file_ << "{\"process\":" << topology.process
        << ",\"ep_size\":" << topology.ep_size << ",\"processes\":"
        << List(topology.members,
                [](const auto& m) { return std::to_string(m.process); })
        << "}\n"
        << std::flush;
  if (!file_) return CannotWrite(path);
  path_ = path;
  num_added_ = num_failed_ = 0;
  is_on_ = true;
  return Status();
}

void Trace::Add(const Exchange& exchange) {
  Event event = {exchange.key.domain, {}, exchange.complete_at, Now(), {}, {}};
  double waited = 0;
  for (const Part& part : exchange.parts) {
    if (part.came_at == 0) return;
    event.came.push_back(part.came_at);
    Moved moved = {-1, -1, -1, {}};
    if (part.done) {
      event.op = part.op;
      waited += exchange.complete_at - part.came_at;
      moved = part.contribution.moved ? part.contribution.moved() : Moved();
    }
    event.moved.push_back(std::move(moved));
  }
  MutexLock lock(mutex_);
  if (!is_on_) return;
  waited_ += waited;
  if (++num_added_ <= kKept) events_.push_back(std::move(event));
}

double Trace::Waited() {
  MutexLock lock(mutex_);
  return waited_;
}

void Trace::Fail(const Failure& failure, const Status& status) {
  MutexLock lock(mutex_);
  if (!is_on_ || ++num_failed_ > kFailed) return;
  Write();
  file_ << Name(failure.op, failure.domain) << ",\"at\":" << Seconds(Now())
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
  file_ << "{\"lost\":" << std::max<int64_t>(0, num_added_ - kKept) << "}\n";
  file_.close();
  return file_ ? Status() : CannotWrite(path_);
}

void Trace::Write() {
  for (const Event& e : std::exchange(events_, {})) {
    const auto numbers = [&](int64_t Moved::* field) {
      return List(e.moved,
                  [&](const Moved& m) { return std::to_string(m.*field); });
    };
    file_ << Name(e.op, e.domain) << ",\"began\":" << Seconds(e.began)
          << ",\"ended\":" << Seconds(e.ended)
          << ",\"came\":" << List(e.came, Seconds)
          << ",\"rows\":" << numbers(&Moved::rows)
          << ",\"dropped\":" << numbers(&Moved::dropped)
          << ",\"bytes\":" << numbers(&Moved::bytes) << ",\"tokens\":"
          << List(e.moved,
                  [](const Moved& m) {
                    return List(m.tokens,
                                [](int32_t n) { return std::to_string(n); });
                  })
          << "}\n";
  }
}

}  // namespace ep::host
