// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/backends/host/engine/report.h"

namespace ep::host {
namespace {

void Append(std::string* list, const std::string& item) {
  if (!list->empty()) *list += ", ";
  *list += item;
}

// Names of the ranks that have posted to an exchange, and of missing ranks.
struct Wait {
  std::string op, waiting, missing;
  bool is_for_same_op = false;  // a missing rank's last op has the same name

  std::string Sentence(const std::string& how_long) const {
    return StrCat(op, ": ", waiting, " waited ", how_long, " for ", missing);
  }
};

Wait WhoWaits(const Topology& topology, const Exchange& exchange,
              const LastPosts& last_posts) {
  const int32_t domain = exchange.key.domain;
  Wait wait;
  wait.op = exchange.FirstPost().op.FullName();
  for (int32_t r = 0; r < topology.ep_size; ++r) {
    const std::string rank = topology.RankName(domain, r);
    if (exchange.parts[r].is_posted) {
      Append(&wait.waiting, rank);
      continue;
    }
    const auto& last = last_posts[domain * topology.ep_size + r];
    const std::string last_op = last ? last->FullName() : "";
    Append(&wait.missing, rank + (last ? " whose last op was " + last_op
                                       : " that has run no op yet"));
    wait.is_for_same_op |= last_op == wait.op;
  }
  return wait;
}

}  // namespace

Status FailedOnRank(const std::string& op_name, const std::string& rank_name,
                    const Status& reason) {
  return Status(reason.code(),
                StrCat(op_name, ", ", rank_name, ": ", reason.message()));
}

Status Disagreement(const Topology& topology, const Exchange& exchange) {
  const Part& zero = exchange.parts[0];
  for (int32_t r = 1; r < topology.ep_size; ++r) {
    const Part& other = exchange.parts[r];
    const auto field = zero.signature.FirstDifference(other.signature);
    if (!field) continue;
    const std::string other_op = other.op.FullName();
    const bool is_same_op = zero.op.FullName() == other_op;
    const auto value_on = [&](int32_t rank) {
      const Part& part = exchange.parts[rank];
      return StrCat(part.signature.ValueOf(*field), " on ",
                    topology.RankName(exchange.key.domain, rank),
                    is_same_op ? "" : " in " + part.op.FullName());
    };
    return Status(
        Code::kFailedPrecondition,
        StrCat(exchange.OpName(), ": the ranks disagree on ",
               Signature::Name(*field), ": ", value_on(0), ", ", value_on(r),
               "; every rank must run the same program on the same "
               "layer and handle"));
  }
  return Status();
}

std::string Slow(const Topology& topology, const Exchange& exchange,
                 const LastPosts& last_posts, double timeout_s) {
  return WhoWaits(topology, exchange, last_posts)
             .Sentence(StrCat("a third of timeout_s = ", timeout_s, " s")) +
         "; if they do not come in time, the op fails on every rank";
}

Status Late(const Topology& topology, const Exchange& exchange,
            const LastPosts& last_posts, double timeout_s) {
  const Wait wait = WhoWaits(topology, exchange, last_posts);
  return Status(
      Code::kDeadlineExceeded,
      StrCat(wait.Sentence(StrCat("timeout_s = ", timeout_s, " s")),
             wait.is_for_same_op
                 ? ", the same op: in another iteration of a loop, or in "
                   "another copy, if processes have compiled the program "
                   "unequally often or with other options "
                   "(jitted.lower(...).compile()); compile it alike on all"
                 : "",
             "; every rank must run the same program, equally often. If ranks "
             "are only slow, raise timeout_s; if many launches are in flight, "
             "wait for results now and then (jax.block_until_ready)"));
}

Status Missed(const Topology& topology, const LastPosts& last_posts,
              const Launches& launches) {
  for (size_t i = 0; i < last_posts.size(); ++i) {
    const auto& last = last_posts[i];
    if (!last || launches.HasReached(last->launch)) continue;
    return Status(Code::kFailedPrecondition,
                  StrCat(topology.MemberName(i), " ran ", last->FullName(),
                         ", which ", topology.ProcessName(topology.process),
                         " has not run; every rank must run the same program, "
                         "equally often"));
  }
  return Status();
}

Status Stuck(const Topology& topology, const Status& failure,
             double exit_after_s) {
  return Status(
      failure.code(),
      StrCat(
          topology.ProcessName(topology.process),
          " ends: exit_after_s = ", exit_after_s,
          " s ago an op failed, and the process has neither closed the group "
          "nor run another op on each of its devices, so that one may wait "
          "for a failed rank in a collective of XLA; restart the job. This "
          "was the failure: ",
          failure.message()));
}

Status Left(const Topology& topology, int32_t process, bool is_orderly,
            const std::string& group_name) {
  std::string ranks;
  for (size_t i = 0; i < topology.members.size(); ++i) {
    if (topology.members[i].process == process) {
      Append(&ranks, topology.MemberName(i));
    }
  }
  return Status(
      Code::kUnavailable,
      is_orderly
          ? StrCat(ranks, " finalized the group \"", group_name,
                   "\", or its program ended; finalize it only after the "
                   "last op has completed on all ranks")
          : StrCat(ranks,
                   " died; restart the job, or bootstrap a new "
                   "group without it"));
}

Status Closed(const std::string& group_name) {
  return Status(Code::kFailedPrecondition,
                StrCat("the group \"", group_name,
                       "\" was finalized; run no op after ep_finalize"));
}

Status InvalidPost(const Topology& topology, int32_t process) {
  return Status(Code::kInternal, StrCat(topology.ProcessName(process),
                                        " sent a post that makes no sense"));
}

}  // namespace ep::host
