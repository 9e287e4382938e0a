# SPDX-License-Identifier: Apache-2.0
"""Transports and a layer follow the rules of ep.testing.

Where several processes run this file, the rules that start ranks do not run,
and neither do subjects besides that of the platform's own backend.
"""

import jax
import pytest

import ep
from testing_subjects import SUBJECTS


def _all_cases():
  subjects = SUBJECTS[jax.default_backend()]
  if jax.process_count() > 1:
    subjects = subjects[:1]
  for subject in subjects:
    for case in ep.testing.cases(subject):
      yield case._replace(id=f"{subject.name}-{case.id}".replace(" ", "_"))


@pytest.mark.parametrize("case", list(_all_cases()))
def test_conformance(case):
  case.check()
