# SPDX-License-Identifier: Apache-2.0
"""All processes refuse a variable of NCCL EP that one of them must not set.

The processes meet as in `ep_bootstrap`, but connect no GPUs.
"""

import dataclasses
import os
import time

import jax
import pytest

from conftest import make_mesh, refused
from ep._src.backends.nccl import backend as nccl_backend
from ep._src.backends.nccl import environment, installation
from ep._src.backends.nccl.backend import NcclBackend
from ep._src.group import agreement
from ep._src.native import ffi
from groups import bootstrap
from nccl_testing import gpu

LAST = jax.process_count() - 1
IS_ODD = jax.process_index() == LAST
VARIABLES = (
  *environment.REFUSED,
  *environment.AGREED,
  *environment.PASSED_ON,
)


class Agreed(Exception):
  """The processes agreed on a group."""


@pytest.fixture(scope="module")
def config():
  with bootstrap(make_mesh({"ep": jax.device_count()}), backend="xla") as group:
    return dataclasses.replace(group.connection.group, name="of GPUs")


@pytest.fixture(autouse=True)
def machine(monkeypatch):
  """Simulates an installed NCCL EP, and an environment without variables."""
  for variable in VARIABLES:
    monkeypatch.delenv(variable, raising=False)
  monkeypatch.setattr(installation, "prepare", lambda _: ("", ""))
  monkeypatch.setattr(ffi, "library", lambda _: None)
  monkeypatch.setattr(ffi, "new_nccl_id", lambda *_: b"an id")
  monkeypatch.setattr(nccl_backend, "_borrow", lambda *_: None)
  for function in ("create_nccl_group", "connect_nccl_group", "close_group"):
    monkeypatch.setattr(ffi, function, lambda *_, **__: None)

  def succeed(_):
    raise Agreed

  monkeypatch.setattr(ffi, "open_nccl_group", succeed)


def meet(config):
  NcclBackend().connect(config, agreement.join)


@pytest.mark.parametrize("variable", environment.REFUSED)
def test_a_variable_of_one_process_is_refused(config, monkeypatch, variable):
  if IS_ODD:
    monkeypatch.setenv(variable, "1")
  with refused("ep_bootstrap: ", f"{variable} = 1 ", "; unset it"):
    meet(config)
  monkeypatch.setenv(variable, "OFF" if IS_ODD else "0")
  with pytest.raises(Agreed):
    meet(config)


@pytest.mark.skipif(LAST == 0, reason="needs several processes")
@pytest.mark.parametrize("variable", environment.AGREED)
def test_processes_with_other_values_are_refused(config, monkeypatch, variable):
  default = environment.AGREED[variable]
  if IS_ODD:
    monkeypatch.setenv(variable, "xla")
  with refused(
    f"ep_bootstrap: {variable} = {default} on process 0, but xla on process"
    f" {LAST}; all processes must",
    "same settings",
  ):
    meet(config)
  monkeypatch.setenv(variable, "xla")
  with pytest.raises(Agreed):
    meet(config)


@pytest.mark.parametrize("variable", environment.PASSED_ON)
def test_processes_may_differ_in_other_variables(config, monkeypatch, variable):
  value = str(1 + IS_ODD)
  monkeypatch.setenv(variable, value)
  with pytest.raises(Agreed):
    meet(config)
  assert os.environ[variable] == value


@pytest.mark.parametrize(
  "step", ["prepare", "create_nccl_group", "connect_nccl_group"]
)
def test_the_refusal_of_one_process_reaches_all_immediately(
  config, monkeypatch, step
):
  """No process enters a collective of NCCL EP, or keeps its group."""
  closed = []

  def refuse(*_, **__):
    raise ffi.NativeError("ep_bootstrap: this GPU lacks something")

  if IS_ODD:
    module = installation if step == "prepare" else ffi
    monkeypatch.setattr(module, step, refuse)
  monkeypatch.setattr(ffi, "close_group", lambda *names: closed.append(names))
  begin = time.monotonic()
  with pytest.raises(RuntimeError, match="this GPU lacks something"):
    meet(dataclasses.replace(config, timeout_s=600.0))
  assert time.monotonic() - begin < 60
  is_made = not IS_ODD or step == "connect_nccl_group"
  assert closed == ([("nccl", config.name)] if is_made else [])


def test_ep_info_reports_a_refused_variable(monkeypatch):
  monkeypatch.setattr(jax, "local_devices", lambda: [gpu()])
  monkeypatch.setenv("NCCL_EP_DISABLE_GUARD", "on")
  with refused("NCCL_EP_DISABLE_GUARD = on lets an op overwrite rows"):
    NcclBackend().probe()
