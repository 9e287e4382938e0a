# SPDX-License-Identifier: Apache-2.0
"""`ragged_all_to_all` on CPUs, where `jax.lax.ragged_all_to_all` cannot run.

It needs no group. `install` makes `jax.lax.ragged_all_to_all` itself run on
CPUs, for code that one cannot change.
"""

from ep._src.base import public as _public
from ep._src.lax.ragged_all_to_all import install as install
from ep._src.lax.ragged_all_to_all import ragged_all_to_all as ragged_all_to_all

__all__ = list(_public.names(globals()))
