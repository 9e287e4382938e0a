# SPDX-License-Identifier: Apache-2.0
"""A name that programs pass to `dense`."""

noop_collective_op_set = None  # of a matmul that XLA distributes
