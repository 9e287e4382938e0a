// SPDX-License-Identifier: Apache-2.0

// The processes of a group, and the location of its ranks. The mesh consists of
// EP domains of P ranks. A rank is one device. A process may have any number of
// ranks of any domain.

#ifndef EP_FFI_BACKENDS_HOST_TRANSPORT_TOPOLOGY_H_
#define EP_FFI_BACKENDS_HOST_TRANSPORT_TOPOLOGY_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "ep_ffi/core/status.h"

namespace ep::host {

struct Topology {
  struct Process {
    int32_t id;   // JAX's process index, for messages
    int32_t pid;  // 0 if in another PID namespace
  };

  struct Member {
    int32_t process;  // index into `processes`
    int32_t device;   // XLA's global device id
  };

  int32_t process;  // index of this process
  int32_t ep_size;
  std::vector<Process> processes;
  std::vector<Member> members;  // [num_domains * P], domain-major

  int32_t num_processes() const {
    return static_cast<int32_t>(processes.size());
  }
  int32_t num_domains() const {
    return static_cast<int32_t>(members.size()) / ep_size;
  }
  const Member& member(int32_t domain, int32_t rank) const {
    return members[domain * ep_size + rank];
  }
  bool is_local(int32_t domain, int32_t rank) const {
    return member(domain, rank).process == process;
  }
  bool has_local_rank(int32_t domain) const {
    for (int32_t r = 0; r < ep_size; ++r) {
      if (is_local(domain, r)) return true;
    }
    return false;
  }
  // Returns the index in `members` of a device, or -1.
  int32_t FindDevice(int32_t device) const {
    for (size_t i = 0; i < members.size(); ++i) {
      if (members[i].device == device) return static_cast<int32_t>(i);
    }
    return -1;
  }
  // Returns the other processes that have ranks of this domain, ascending.
  std::vector<int32_t> OtherProcesses(int32_t domain) const {
    std::vector<int32_t> others;
    for (int32_t p = 0; p < num_processes(); ++p) {
      for (int32_t r = 0; r < ep_size && p != process; ++r) {
        if (member(domain, r).process != p) continue;
        others.push_back(p);
        break;
      }
    }
    return others;
  }

  // ---- Names in messages

  std::string ProcessName(int32_t process) const {
    return StrCat("process ", processes[process].id);
  }
  std::string RankName(int32_t domain, int32_t rank) const {
    std::string name = StrCat("rank ", rank);
    if (num_domains() > 1) name += StrCat(" of EP domain ", domain);
    if (num_processes() > 1) {
      name += StrCat(" (", ProcessName(member(domain, rank).process), ")");
    }
    return name;
  }
  std::string MemberName(size_t index) const {
    return RankName(static_cast<int32_t>(index) / ep_size,
                    static_cast<int32_t>(index) % ep_size);
  }
};

}  // namespace ep::host

#endif  // EP_FFI_BACKENDS_HOST_TRANSPORT_TOPOLOGY_H_
