# SPDX-License-Identifier: Apache-2.0
"""Stands still for several causes, in a plain `psum`: stalls.py FOLDER CAUSE...

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

import conftest  # makes this process a rank
import ep

STALL_S = 2.0
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

  def step():
    with ep.watch.step("train") as launched:
      jax.block_until_ready(launched(total(x)))

  for cause in causes:
    with ep.watch(stall_s=STALL_S):
      step()
      step()
      if IS_LATE:
        globals()[cause](pathlib.Path(folder) / cause)
      step()
  with ep.watch(stall_s=STALL_S, exit_after_s=2):
    while True:
      step()
      print("stepped", flush=True)


main(*sys.argv[1:])
