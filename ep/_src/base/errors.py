# SPDX-License-Identifier: Apache-2.0
"""EpError: names in `except` what the functions and ops of ep raise."""

# This is a tuple and no class of ours, because JAX raises the failures of a
# running program. Usually it raises `jax.errors.JaxRuntimeError`, a
# RuntimeError. Where a repeated call of a jitted function fails before it
# returns, JAX's C++ path raises a ValueError with the same message.
EpError: tuple[type[Exception], ...] = (RuntimeError, ValueError)
