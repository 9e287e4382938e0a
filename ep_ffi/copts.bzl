"""How the native code is compiled, wherever it is built from."""

EP_COPTS = [
    "-std=c++17",
    "-fvisibility=hidden",
    "-fvisibility-inlines-hidden",
    # A fused multiply-add rounds once where the contract rounds twice, and
    # whether a compiler fuses depends on the target.
    "-ffp-contract=off",
    "-Wall",
    "-Wextra",
]
