// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/backends/host/engine/trace.h"

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

Status CannotWrite(const std::string& path) {
  return Status(Code::kInvalidArgument,
                StrCat("cannot write ", path,
                       "; choose a folder that exists and has room"));
}

}  // namespace

Status Trace::Start(const std::string& path) {
  MutexLock lock(mutex_);
  if (is_on_) {
    return Status(Code::kFailedPrecondition,
                  StrCat("this group is traced already, to ", path_,
                         "; end that trace first"));
  }
  file_ = std::ofstream(path);
  if (!file_) return CannotWrite(path);
  path_ = path;
  num_lost_ = 0;
  is_on_ = true;
  return Status();
}

void Trace::Add(const Exchange& exchange) {
  Event event = {exchange.key.domain, {}, exchange.complete_at, Now(), {}, {}};
  for (const Part& part : exchange.parts) {
    if (part.came_at == 0) return;
    event.came.push_back(part.came_at);
    Moved moved = {-1, -1, -1, {}};
    if (part.done) {
      event.op = part.op;
      moved = part.contribution.moved ? part.contribution.moved() : Moved();
    }
    event.moved.push_back(std::move(moved));
  }
  MutexLock lock(mutex_);
  if (!is_on_) return;
  if (events_.size() < kKept) {
    events_.push_back(std::move(event));
  } else {
    ++num_lost_;
  }
}

Status Trace::Stop(const Topology& topology) {
  MutexLock lock(mutex_);
  if (!is_on_.exchange(false)) return Status();
  file_ << "{\"process\":" << topology.process
        << ",\"ep_size\":" << topology.ep_size << ",\"processes\":"
        << List(topology.members,
                [](const auto& m) { return std::to_string(m.process); })
        << ",\"lost\":" << num_lost_ << "}\n";
  for (const Event& e : std::exchange(events_, {})) {
    const auto numbers = [&](int64_t Moved::* field) {
      return List(e.moved,
                  [&](const Moved& m) { return std::to_string(m.*field); });
    };
    file_ << "{\"op\":" << Quoted(OpName(e.op.op))
          << ",\"layer\":" << Quoted(e.op.layer)
          << ",\"program\":" << Quoted(e.op.program) << ",\"site\":\""
          << e.op.launch.site_id << "\",\"step\":" << e.op.launch.number
          << ",\"domain\":" << e.domain << ",\"began\":" << Seconds(e.began)
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
  file_.close();
  return file_ ? Status() : CannotWrite(path_);
}

}  // namespace ep::host
