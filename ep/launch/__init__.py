# SPDX-License-Identifier: Apache-2.0
"""Starts the ranks of a program on each host, and joins them from inside.

    python -m ep launch --num_processes=4 train.py --steps=10
    python -m ep launch --num_processes=4 -m pytest tests

`launch` is the same as a function, and `initialize`, which the program calls
before anything else touches JAX, makes each process one rank. `launch` and
`initialize` share only a few environment variables, so a cluster's own launcher
can replace `launch`:

    JAX_COORDINATOR_ADDRESS   host:port of JAX's coordination service
    JAX_NUM_PROCESSES         how many ranks there are
    JAX_PROCESS_ID            which of them this process is

The service is a process of the launcher's, so that it survives the death of any
rank. JAX makes rank 0 start one too; nothing connects to it.

Under another launcher that JAX knows (SLURM, Open MPI, an indexed Kubernetes
job, Cloud TPU) `initialize` needs no variables.

If there is a variable EP_LAUNCH_STATE, ranks tell this launcher how far they
have come: joining, joined or ending. So it can name ranks that ran alone, ranks
for which others wait in vain, and the rank that failed first.

Only `initialize` touches JAX's devices: a process that launches must not hold
the devices of its ranks.
"""

from ep._src.base import public as _public
from ep.launch._initialize import initialize as initialize
from ep.launch._initialize import inside_launcher as inside_launcher
from ep.launch._launch import launch as launch

__all__ = list(_public.names(globals()))
