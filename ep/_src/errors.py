# SPDX-License-Identifier: Apache-2.0
"""EpError: what the functions and ops of ep raise, for `except`."""

# This is a tuple and no class of ours, because JAX raises what fails in a
# running program: as `jax.errors.JaxRuntimeError`, a RuntimeError, or, where a
# call of `jax.jit` that it has seen before fails before it returns, by its C++
# path as a ValueError with the same sentence. That path knows only ValueError.
EpError: tuple[type[Exception], ...] = (RuntimeError, ValueError)
