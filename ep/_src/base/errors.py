# SPDX-License-Identifier: Apache-2.0
"""EpError: the exceptions of ep's functions and ops, for `except`."""

# This is a tuple, not a class of our own, because JAX raises the failures of a
# running program. Usually it raises `jax.errors.JaxRuntimeError`, a
# RuntimeError. Where a repeated call of a jitted function fails before it
# returns, JAX's C++ path raises a ValueError with the same message.
EpError: tuple[type[Exception], ...] = (RuntimeError, ValueError)
