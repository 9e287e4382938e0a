// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/handlers/borrowed_communicator.h"

#include "ep_ffi/handlers/collectives.h"

namespace ep {
namespace {

constexpr int64_t kCollectives = 129;
constexpr int32_t kMajorVersion = 0;
constexpr int32_t kFlattenedId = 3;
// The letters "ep". XLA numbers the ids of its own communication from 0 on.
constexpr int64_t kCommunicationId = 0x6570;

constexpr int64_t kMostRanks = int64_t{1} << 31;

// The offset of FindExtension: right after the last function in our headers.
constexpr size_t kFindExtensionAt =
    offsetof(XLA_FFI_Api, XLA_FFI_DeviceOrdinal_Get) + sizeof(void*);
static_assert(kFindExtensionAt == sizeof(XLA_FFI_Api),
              "newer headers declare XLA_FFI_InvokeContext_FindExtension, "
              "and may declare the extension");

// Converts and destroys an error of XLA. Null becomes Ok.
Status ToStatus(const XLA_FFI_Api* api, XLA_FFI_Error* error,
                const char* what) {
  if (!error) return Status();
  ErrorDetailsArgs details = {};
  details.struct_size = sizeof(details);
  details.error = error;
  api->XLA_FFI_Error_GetMessage(
      reinterpret_cast<XLA_FFI_Error_GetMessage_Args*>(&details));
  const Status status(Code::kInternal,
                      StrCat("XLA cannot ", what, ": ", details.message));
  XLA_FFI_Error_Destroy_Args destroy = {};
  destroy.struct_size = XLA_FFI_Error_Destroy_Args_STRUCT_SIZE;
  destroy.error = error;
  api->XLA_FFI_Error_Destroy(&destroy);
  return status;
}

// Finds the collectives extension, or null, and checks its version.
Status FindCollectives(const XlaContext& xla, const Collectives** out) {
  *out = nullptr;
  if (xla.api->struct_size < kFindExtensionAt + sizeof(void*)) return Status();
  const auto find = *reinterpret_cast<FindExtension* const*>(
      reinterpret_cast<const std::byte*>(xla.api) + kFindExtensionAt);
  FindExtensionArgs args = {};
  args.struct_size = sizeof(args);
  args.context = xla.context;
  args.type = kCollectives;
  EP_RETURN_IF_ERROR(
      ToStatus(xla.api, find(&args), "look for its communicators"));
  if (!args.extension) return Status();
  if (args.extension->major_version != kMajorVersion ||
      args.extension->struct_size < sizeof(Collectives)) {
    return Status(
        Code::kFailedPrecondition,
        StrCat("XLA lends its communicators by version ",
               args.extension->major_version, ".",
               args.extension->minor_version,
               " of its interface, and this ep knows ", kMajorVersion,
               ".1 and newer minor versions; unset EP_NCCL_COMMUNICATOR, or "
               "install an ep and a JAX that fit each other"));
  }
  *out = reinterpret_cast<const Collectives*>(args.extension);
  return Status();
}

// Calls a function of the extension for `domains`. `args` has the fields that
// follow `clique`.
template <typename Args>
Status CallXla(const XlaContext& xla, const Domains& domains,
               const Collectives& collectives, Function<Args>* function,
               const char* what, Args* args) {
  std::vector<ReplicaGroup> groups;
  for (size_t i = 0; i < domains.places.size(); i += domains.size) {
    groups.push_back(
        {domains.places.data() + i, static_cast<size_t>(domains.size)});
  }
  args->clique = {sizeof(Args),  nullptr,       kFlattenedId,
                  groups.data(), groups.size(), kCommunicationId};
  return ToStatus(xla.api, function(&collectives, args), what);
}

}  // namespace

Status DecodeDomains(xla::ffi::Span<const int64_t> mesh_shape, int64_t axis,
                     Domains* out) {
  const int64_t num_axes = mesh_shape.size();
  if (num_axes == 0) return Status();
  bool fits = 0 <= axis && axis < num_axes;
  int64_t num_ranks = 1;
  for (int64_t size : mesh_shape) {
    fits = fits && 0 < size && size <= kMostRanks / num_ranks;
    if (fits) num_ranks *= size;
  }
  if (!fits) {
    return Status(Code::kInvalidArgument,
                  "lent_mesh and lent_axis are of no mesh; use the library "
                  "that came with the ep package");
  }
  int64_t stride = 1;  // distance between a domain's ranks
  for (int64_t i = axis + 1; i < num_axes; ++i) {
    stride *= mesh_shape.begin()[i];
  }
  out->size = mesh_shape.begin()[axis];
  for (int64_t first = 0; first < num_ranks; ++first) {
    if (first / stride % out->size != 0) continue;
    for (int64_t rank = 0; rank < out->size; ++rank) {
      out->places.push_back(first + rank * stride);
    }
  }
  return Status();
}

Status RequestCommunicators(const XlaContext& xla, const Domains& domains) {
  if (domains.size == 0) return Status();
  const Collectives* collectives = nullptr;
  EP_RETURN_IF_ERROR(FindCollectives(xla, &collectives));
  if (!collectives) return Status();
  CommunicatorRequest args = {};
  return CallXla(xla, domains, *collectives, collectives->request_communicator,
                 "make a communicator for an EP domain", &args);
}

Status FindCommunicator(const XlaContext& xla, const Domains& domains,
                        void** out) {
  *out = nullptr;
  if (domains.size == 0) return Status();
  const Collectives* collectives = nullptr;
  EP_RETURN_IF_ERROR(FindCollectives(xla, &collectives));
  if (!collectives) return Status();
  CommunicatorGet args = {};
  EP_RETURN_IF_ERROR(CallXla(xla, domains, *collectives,
                             collectives->get_communicator,
                             "lend the communicator of an EP domain", &args));
  *out = args.communicator;
  return Status();
}

}  // namespace ep
