# SPDX-License-Identifier: Apache-2.0
"""Draws the routing of a step; needs no devices and no exchange."""

from ep._src.base import public as _public
from ep._tools.debug import plot_routing as plot_routing
from ep._tools.debug import RoutingSizes as RoutingSizes

__all__ = list(_public.names(globals()))
