# SPDX-License-Identifier: Apache-2.0
"""Options with which XLA:CPU compiles a program in a third of the time.

With the options, XLA does not optimize code, but runs the same operations.
"""

from jaxlib import version

QUICK = {"xla_backend_optimization_level": 0}
# Options that restore XLA's defaults, for a process whose flags select QUICK.
OPTIMIZED = {"xla_backend_optimization_level": 3}

# Newer jaxlib versions have one fusion emitter, and reject the option.
if tuple(map(int, version.__version__.split(".")[:2])) < (0, 11):
  QUICK["xla_cpu_use_fusion_emitters"] = False
  OPTIMIZED["xla_cpu_use_fusion_emitters"] = True

FLAGS = "".join(f"--{name}={int(value)} " for name, value in QUICK.items())
