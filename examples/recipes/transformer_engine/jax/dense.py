# SPDX-License-Identifier: Apache-2.0
"""A matmul of activations and a kernel."""

from jax import lax


def dense(
  x,
  kernel,
  bias=None,
  contracting_dims=((1,), (0,)),
  *,
  input_axes=None,
  kernel_axes=None,
  output_axes=None,
  collective_op_set=None,
  quantizer_set=None,
):
  """Returns `x @ kernel + bias` in the dtype of `x`; XLA needs no hints."""
  y = lax.dot_general(x, kernel.astype(x.dtype), (contracting_dims, ((), ())))
  return y if bias is None else y + bias.astype(y.dtype)
