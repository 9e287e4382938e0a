# SPDX-License-Identifier: Apache-2.0
"""Programs that use ep: python -m ep.examples.ep_moe, train_moe_lm or dry_run.

They need the packages of the extra `examples`, which ep itself does not.
"""

import importlib.util as _importlib_util

if not _importlib_util.find_spec("absl"):
  raise ImportError(
    "ep.examples needs more packages than ep; run: pip install absl-py"
    " matplotlib optax orbax-checkpoint tqdm"
  )
