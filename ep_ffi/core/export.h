// Marks a C function that Python calls; all other symbols are hidden.

#ifndef EP_FFI_CORE_EXPORT_H_
#define EP_FFI_CORE_EXPORT_H_

#define EP_EXPORT extern "C" __attribute__((visibility("default")))

#endif  // EP_FFI_CORE_EXPORT_H_
