// How the processes of a group find each other: every pair gets a socket.
//
// Everyone listens, dials the processes below, and accepts those above. Nobody
// waits for the dead.

#ifndef EP_FFI_BACKENDS_HOST_HANDSHAKE_H_
#define EP_FFI_BACKENDS_HOST_HANDSHAKE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "ep_ffi/backends/host/fd.h"
#include "ep_ffi/core/status.h"

namespace ep::host {

// Of a process on this host, which may be dead already.
class Life {
 public:
  explicit Life(int32_t pid);  // 0: of one that cannot be watched

  // Can be read from its end on; -1 if that is not known.
  int fd() const { return end_.get(); }
  bool IsOver() const;

 private:
  Fd end_;
  bool is_over_ = false;
};

class Handshake {
 public:
  // Of `process`, with processes of these lives, who all know the secret.
  // Messages call them by their ids, if there are any.
  Handshake(int32_t process, const std::string& secret, double timeout_s,
            const std::vector<Life>& lives, const std::vector<int32_t>& ids);

  Status Connect();

  // By process, also those that were there when it failed.
  std::vector<Fd> TakeSockets() { return std::move(sockets_); }

 private:
  int32_t num_processes() const { return static_cast<int32_t>(lives_.size()); }
  Status Dial(int32_t process);
  Status Accept(int listener);
  // Why a process does not connect: a dead one, this or another.
  Status Lost(int32_t process) const;
  std::string NameOf(int32_t process) const;
  // A process that is known to have died, or -1.
  int32_t FindDead() const;

  const int32_t process_;
  const std::string& secret_;
  const double timeout_s_;
  const double deadline_;
  const std::vector<Life>& lives_;
  const std::vector<int32_t>& ids_;
  std::vector<Fd> sockets_;
};

}  // namespace ep::host

#endif  // EP_FFI_BACKENDS_HOST_HANDSHAKE_H_
