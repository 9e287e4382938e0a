# SPDX-License-Identifier: Apache-2.0
"""Tests a transport, or a whole MoE layer, against the numeric contract.

report = ep.testing.check(ep.testing.Transport(name="mine", build=build))
print(report)
"""

from ep._src.base import public as _public
from ep.testing._report import Case as Case
from ep.testing._report import cases as cases
from ep.testing._report import check as check
from ep.testing._report import Line as Line
from ep.testing._report import Report as Report
from ep.testing._subjects import Layer as Layer
from ep.testing._subjects import Received as Received
from ep.testing._subjects import Setting as Setting
from ep.testing._subjects import Subject as Subject
from ep.testing._subjects import Tolerance as Tolerance
from ep.testing._subjects import Transport as Transport

__all__ = list(_public.names(globals()))
