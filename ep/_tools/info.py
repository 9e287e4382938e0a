# SPDX-License-Identifier: Apache-2.0
"""Prints versions, usable backends and the grouped matmul: python -m ep info.

The exit code is 0 if the default backend can run on this machine.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import pathlib
import platform

import jax
import jaxlib.version
import numpy as np

import ep
from ep._src.base.backend import CannotServe
from ep._src.group.bootstrap import BACKENDS, NATIVE
from ep._src.matmul import implementations
from ep._src.native import gpus

_DISTRIBUTION = "jax-ep"


def main(args: list[str]) -> int:
  parser = argparse.ArgumentParser(
    prog="python -m ep info",
    description="Prints installed versions, usable backends and the"
    " implementation of ep.grouped_matmul.",
  )
  parser.parse_args(args)
  owners = importlib.metadata.packages_distributions().get("ep", [])
  for other in sorted({*owners} - {_DISTRIBUTION}):
    print(
      f'WARNING: the distribution "{other}" also has a package ep. The one that'
      " was installed last has overwritten files of the other, and to uninstall"
      f" one removes files of both. Run: pip uninstall {other} {_DISTRIBUTION};"
      f" then install {_DISTRIBUTION} again."
    )
  print(f"ep {ep.__version__} in {pathlib.Path(__file__).parent.parent}")
  print(
    f"python {platform.python_version()}, jax {jax.__version__}, jaxlib"
    f" {jaxlib.version.__version__}, numpy {np.__version__}"
  )
  try:
    gpus.check_plugin()
    devices = jax.local_devices()
  except RuntimeError as e:
    print(f"JAX has no devices here: {e}")
    return 1
  print(f"devices of this process: {len(devices)} x {devices[0].device_kind}")
  outcomes = {name: _probe(name) for name in BACKENDS}
  default = NATIVE.get(devices[0].platform, "xla")
  if isinstance(outcomes[default], CannotServe):
    default = "xla"  # ep_bootstrap also falls back to "xla"
  for name, found in outcomes.items():
    label = f"{name:4} {'(the default) ' if name == default else ''}"
    if isinstance(found, Exception):
      why = str(found).removeprefix("ep_bootstrap: ")
      print(f"{label}cannot run: {why}")
    else:
      print(f"{label}can run{f' on {found}' if found else ''}")
  print(f"grouped matmul: {implementations.default_of(devices[0])}")
  return 1 if isinstance(outcomes[default], Exception) else 0


def _probe(name: str) -> str | Exception:
  """Returns the hardware that a backend would use, or why it is unusable."""
  try:
    return BACKENDS[name].probe()
  except (OSError, RuntimeError, ValueError) as e:
    return e
