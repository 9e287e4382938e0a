# SPDX-License-Identifier: Apache-2.0
"""Collectives of `jax.lax`, on CPUs that have none.

They need no group. `install` lets JAX's own run on CPUs, for code that cannot
be changed.
"""

from ep._src.base import public as _public
from ep._src.lax.ragged_all_to_all import install as install
from ep._src.lax.ragged_all_to_all import ragged_all_to_all as ragged_all_to_all

__all__ = list(_public.names(globals()))
