# SPDX-License-Identifier: Apache-2.0
"""Lets a context see every routing that `ep_prepare` traces in it.

A tap is called as `tap(layer, topk_idx, topk_weights, leaves)` with the arrays
of a rank, where `topk_weights` may be None, and the leaves of its handle. It
returns the leaves, so that whoever uses one has the tap look. It is hashable,
as a part of the key of JAX's caches.
"""

import jax

# `with tapping(tap):` is the context, and `tapping.value` the tap that it has;
# None ends a context within.
tapping = jax.make_user_context(default_value=None)
