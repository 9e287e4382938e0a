# SPDX-License-Identifier: Apache-2.0
"""Stands still for several causes: stalls.py FOLDER CAUSE...

Steps are a plain `psum`; with the cause "exchanging", they are an op of ep.

The last process stands still until the test makes the file FOLDER/CAUSE. After
the last cause, the processes run steps without end.
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

STALL_S = 2.0
IS_LATE = jax.process_index() == jax.process_count() - 1


def load_batch(go):
  while not go.exists():
    time.sleep(0.05)


def sleeping(go):
  load_batch(go)


def exchanging(go):
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


def stopped(go):
  (go.parent / "pid").write_text(str(os.getpid()))
  os.kill(os.getpid(), signal.SIGSTOP)


def main(folder, *causes):
  mesh = conftest.make_mesh({"x": jax.device_count()})
  shard = conftest.PartitionSpec("x")
  x = conftest.to_global(np.ones(mesh.size, np.float32), mesh, shard)
  total = jax.jit(
    jax.shard_map(
      lambda x: jax.lax.psum(x, "x"),
      mesh=mesh,
      in_specs=shard,
      out_specs=conftest.PartitionSpec(),
    )
  )

  config = layer()
  case = Case(config)
  prepare = jax.jit(lambda topk_idx: ep.ep_prepare(config, topk_idx))
  routing = case.put(case.topk_idx)

  def step(cause=""):
    with ep.watch.step("train") as launched:
      is_op = cause == "exchanging"
      results = launched(prepare(routing) if is_op else total(x))
      jax.block_until_ready(results)

  for cause in causes:
    with ep.watch(stall_s=STALL_S):
      step(cause)
      step(cause)
      if IS_LATE:
        globals()[cause](pathlib.Path(folder) / cause)
      step(cause)
  with ep.watch(stall_s=STALL_S, exit_after_s=5):
    while True:
      step()
      print("stepped", flush=True)


main(*sys.argv[1:])
