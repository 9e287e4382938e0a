# SPDX-License-Identifier: Apache-2.0
"""The modules for JAX."""

from . import cpp_extensions as cpp_extensions
from . import dense as dense
from . import flax as flax
