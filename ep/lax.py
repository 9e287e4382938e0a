# SPDX-License-Identifier: Apache-2.0
"""`ragged_all_to_all` on CPUs, where `jax.lax.ragged_all_to_all` cannot run.

It needs no `EpGroup`. `install` makes `jax.lax.ragged_all_to_all` itself run on
CPUs, for programs that call JAX's function.
"""

from ep import _public
from ep._src.lax.ragged_all_to_all import install as install
from ep._src.lax.ragged_all_to_all import ragged_all_to_all as ragged_all_to_all

__all__ = list(_public.names(globals()))
