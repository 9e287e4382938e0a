# SPDX-License-Identifier: Apache-2.0
"""Tests a transport, a MoE layer or a grouped matmul against its contract.

A transport is a pair of functions, dispatch and combine, from any library. It
declares its properties (padding, gradients, overflow and so on), and `check`
runs the rules for these properties on random sizes and routings:

    mine = ep.testing.Transport(name="mine", build=build, gradients=True)
    print(ep.testing.check(mine))  # a table of the rules and their results

`cases` returns the same tests as parameters of pytest.
"""

from ep import _public
from ep.testing._declarations import GroupedMatmul as GroupedMatmul
from ep.testing._declarations import Layer as Layer
from ep.testing._declarations import Received as Received
from ep.testing._declarations import Setting as Setting
from ep.testing._declarations import Subject as Subject
from ep.testing._declarations import Tolerance as Tolerance
from ep.testing._declarations import Transport as Transport
from ep.testing._report import Case as Case
from ep.testing._report import cases as cases
from ep.testing._report import check as check
from ep.testing._report import Line as Line
from ep.testing._report import Report as Report

__all__ = list(_public.names(globals()))
