# SPDX-License-Identifier: Apache-2.0
"""A whole layer and its gradients in float64, in numpy, by hand.

It shares no code with the contenders. It works on one expert at a time, since
all matrices at once may not fit. The outputs' cotangents are the tokens.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from benchmarks.workload import Workload


class _Expert(NamedTuple):
  """Results of one expert, for the choices `k` of tokens `t` that are its."""

  t: np.ndarray
  k: np.ndarray
  output: np.ndarray  # times its weight
  token_grads: np.ndarray
  weight_grads: np.ndarray
  matrix_grads: tuple[np.ndarray, ...]  # of w_gate, w_up, w_down


class DenseLayer:
  """The results of ops "moe" and "moe_grad", for the tokens of all ranks."""

  def __init__(self, workload: Workload):
    self._workload = workload

  @property
  def outputs(self) -> np.ndarray:
    return self._sums[0]

  @property
  def token_grads(self) -> np.ndarray:
    return self._sums[1]

  @property
  def weight_grads(self) -> np.ndarray:
    return self._sums[2]

  def matrix_grads(self, expert: int) -> tuple[np.ndarray, ...]:
    return self._apply(expert).matrix_grads

  @functools.cached_property
  def _sums(self) -> tuple[np.ndarray, ...]:
    shape, choices = self._workload.layout.shape, self._workload.choices
    outputs, token_grads = np.zeros((2, len(choices), shape.hidden))
    weight_grads = np.zeros(choices.shape)
    for expert in range(shape.num_experts):
      result = self._apply(expert)
      outputs[result.t] += result.output  # the experts of a token are distinct
      token_grads[result.t] += result.token_grads
      weight_grads[result.t, result.k] = result.weight_grads
    return outputs, token_grads, weight_grads

  def _apply(self, expert: int) -> _Expert:
    work = self._workload
    t, k = np.nonzero(work.choices == expert)
    x = work.tokens(t).astype(np.float64)
    weight = work.topk_weights(t)[np.arange(len(k)), k, None].astype(np.float64)
    w_gate, w_up, w_down = (
      matrix(np.asarray(expert)).astype(np.float64)
      for matrix in (work.w_gate, work.w_up, work.w_down)
    )
    gate, up = x @ w_gate, x @ w_up
    sigmoid = 1 / (1 + np.exp(-gate))
    silu = gate * sigmoid
    inner = silu * up
    output = inner @ w_down
    # The d_... are cotangents; that of a token's output is the token.
    d_weight = (output * x).sum(axis=1)
    d_output = weight * x
    d_inner = d_output @ w_down.T
    d_up = d_inner * silu
    d_gate = d_inner * up * (sigmoid + silu * (1 - sigmoid))
    return _Expert(
      t,
      k,
      weight * output,
      d_gate @ w_gate.T + d_up @ w_up.T,
      d_weight,
      (x.T @ d_gate, x.T @ d_up, inner.T @ d_output),
    )
