# SPDX-License-Identifier: Apache-2.0
"""Stands still for several causes: stalls.py FOLDER PROGRAM CAUSE...

Each step runs PROGRAM: a plain `psum`, or an `op` of ep. For each cause, the
last process stands still until the test makes the file FOLDER/CAUSE, and the
other process waits in PROGRAM. Then the processes run steps without end.
"""

import os
import pathlib
import signal
import sys
import time

import jax
import numpy as np

from cases import Case
import conftest  # makes this process a rank
import ep
from groups import layer

STALL_S = 1.0
IS_LATE = jax.process_index() == jax.process_count() - 1


def load_batch(go):
  while not go.exists():
    time.sleep(0.05)


def sleeping(go):
  load_batch(go)


def evaluating(go):
  """Waits in a program that no other process runs."""

  def score(x):
    load_batch(go)
    return np.asarray(x)

  program = jax.jit(lambda x: jax.pure_callback(score, x, x))
  with ep.watch.step("evaluate") as launched:
    launched(program(np.float32(1))).block_until_ready()


def raising(go):
  try:
    with ep.watch.step("train"):
      raise KeyError("shard 7")
  except KeyError:
    load_batch(go)


def stopped(_):
  os.kill(os.getpid(), signal.SIGSTOP)


def psum():
  mesh = conftest.make_mesh({"x": jax.device_count()})
  shard = conftest.PartitionSpec("x")
  total = jax.jit(
    jax.shard_map(
      lambda x: jax.lax.psum(x, "x"),
      mesh=mesh,
      in_specs=shard,
      out_specs=conftest.PartitionSpec(),
    )
  )
  x = conftest.to_global(np.ones(mesh.size, np.float32), mesh, shard)
  return lambda: total(x)


def op():
  config = layer()
  case = Case(config)
  prepare = jax.jit(lambda topk_idx: ep.ep_prepare(config, topk_idx))
  topk_idx = case.put(case.topk_idx)
  return lambda: prepare(topk_idx)


def main(folder, program, *causes):
  run = globals()[program]()

  def step():
    with ep.watch.step("train") as launched:
      jax.block_until_ready(launched(run()))

  step()  # compiles
  for cause in causes:
    with ep.watch(stall_s=STALL_S):
      step()
      step()
      if IS_LATE:
        globals()[cause](pathlib.Path(folder) / cause)
      step()
  with ep.watch(stall_s=STALL_S, exit_after_s=2):
    try:
      while True:
        step()
        print("stepped", flush=True)
        time.sleep(0.1)
    except jax.errors.JaxRuntimeError:  # the other process ended
      time.sleep(600)


main(*sys.argv[1:])
