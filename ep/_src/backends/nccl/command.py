# SPDX-License-Identifier: Apache-2.0
"""Compiles kernels where there is no GPU, as in the build of an image."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
import os
import re
import time
from typing import Any

import jax.numpy as jnp
import numpy as np

from ep._src.backends.nccl import backend, installation, kernels, variants

# The streaming multiprocessors of a GPU, and the bytes of shared memory that a
# block of threads may have, by the compute capability: H100 SXM and B200.
_GPUS = {90: (132, 232448), 100: (148, 232448)}

_DTYPES = {
  "bfloat16": jnp.dtype(jnp.bfloat16),
  "float16": np.dtype(np.float16),
  "float32": np.dtype(np.float32),
}


def main(arguments: Sequence[str], presets: Mapping[str, Any]) -> int:
  """Compiles the kernels of a group, and prints what it did.

  Args:
    arguments: of the command line.
    presets: layers by name, with `hidden`, `num_experts` and `top_k`.

  Returns:
    The exit code: 0 if NCCL EP will find all kernels.
  """
  options = _parser(presets).parse_args(arguments)
  preset = presets[options.preset]
  if preset.num_experts % options.ranks:
    return _refuse(
      f"--ranks={options.ranks} does not divide the {preset.num_experts}"
      f" experts of {options.preset}; choose a divisor."
    )
  found = re.fullmatch(r"sm_(\d+)", options.arch)
  sm = int(found[1]) if found else 0
  if sm not in _GPUS:
    known = ", ".join(f"sm_{sm}" for sm in _GPUS)
    return _refuse(
      f"--arch={options.arch} is not known; NCCL EP's names have no letter at"
      f" the end, and these are known: {known}."
    )
  num_sms, shared_bytes = _GPUS[sm]
  if options.cache:
    os.environ[installation.CACHE_VARIABLE] = os.path.abspath(options.cache)
  sizes = variants.Sizes(
    num_experts=preset.num_experts,
    ep_size=options.ranks,
    nvlink_ranks=options.ranks,
    max_tokens=options.max_tokens_per_rank,
    width=backend.padded_width(preset.hidden),
    dtype=_DTYPES[options.max_token_dtype],
    top_k=preset.top_k,
    max_num_sms=options.max_num_sms,
  )
  gpu = variants.Gpu(sm, options.sms or num_sms, shared_bytes)
  start = time.monotonic()
  try:
    _, nccl_ep, compiler = installation.prepare_for(options.cuda, sm)
    states = kernels.compile_missing(sizes, gpu, nccl_ep, compiler)
  except (OSError, RuntimeError, LookupError, ValueError) as e:
    return _refuse(str(e).removeprefix("ep_bootstrap: "))
  for name, state in states.items():
    print(f"{name} {state}")
  cache = os.environ[installation.CACHE_VARIABLE]
  print(
    f"{len(states)} kernels for {options.arch} with {gpu.num_sms} SMs took"
    f" {time.monotonic() - start:.1f} s, and are in {cache}. Set"
    f" {installation.CACHE_VARIABLE} to it where the program runs, with nvcc,"
    " NCCL and NCCL EP in the same places, and call ep_bootstrap with"
    f" max_tokens_per_rank={sizes.max_tokens}, hidden_dim={preset.hidden},"
    f" top_k={preset.top_k} and max_token_dtype={sizes.dtype}."
  )
  return 1 if kernels.FAILED in states.values() else 0


def _parser(presets: Mapping[str, Any]) -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog="python -m ep compile",
    description="Compiles NCCL EP's kernels for a group, without a GPU.",
  )
  add = parser.add_argument
  add("--preset", required=True, choices=presets, help="the layer's name")
  add("--ranks", required=True, type=_positive, help="ranks of an EP domain")
  add("--max_tokens_per_rank", type=_positive, default=4096)
  add("--max_token_dtype", choices=_DTYPES, default="bfloat16")
  add("--max_num_sms", type=int, default=0)
  add("--arch", default="sm_90", help="the GPU's compute capability")
  add("--sms", type=_positive, help="the GPU's streaming multiprocessors")
  add("--cuda", type=int, default=13, choices=(12, 13))
  add("--cache", help="the folder; default: as ep_bootstrap chooses it")
  return parser


def _positive(text: str) -> int:
  value = int(text)
  if value < 1:
    raise ValueError
  return value


def _refuse(why: str) -> int:
  print(f"compile: {why}")
  return 1
