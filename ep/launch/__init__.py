# SPDX-License-Identifier: Apache-2.0
"""Starts the ranks of a program on this machine, and connects them.

    python -m ep launch --num_processes=4 train.py --steps=10
    python -m ep launch --num_processes=4 -m pytest tests

`launch` is the same as a function. The program calls `initialize`, which joins
its process to the other ranks, before anything else touches JAX. The two share
only a few environment variables, so another launcher can replace `launch`:

    JAX_COORDINATOR_ADDRESS   host:port of JAX's coordination service
    JAX_NUM_PROCESSES         number of ranks
    JAX_PROCESS_ID            index of this rank

On a cluster that `jax.distributed` detects (SLURM, MPI, a JobSet or an indexed
job of Kubernetes, a slice of TPUs), `initialize` needs no variables.

Only `initialize` touches JAX devices, because a launching process must not
occupy the devices of its ranks.
"""

from ep import _public
from ep.launch._initialize import initialize as initialize
from ep.launch._initialize import inside_launcher as inside_launcher
from ep.launch._launch import launch as launch

__all__ = list(_public.names(globals()))
