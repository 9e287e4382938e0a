# SPDX-License-Identifier: Apache-2.0

# Prints what Python and the library must agree on: the types of C functions and
# of handlers, the attributes of handlers, C structs and enums. The bodies of
# functions and comments are left out.
{ sub("//.*", "") }
/^(EP_EXPORT|ffi::)/ { end = "[{]" }
/^(extern "C" [{]|auto Bind)/ { end = "^[}] *$" }
/^(enum class|EP_DEFINE_HANDLER|XLA_FFI_REGISTER)/ { end = ";" }
end { print }
end && $0 ~ end { end = "" }
