# SPDX-License-Identifier: Apache-2.0
"""Tools to place experts and to debug programs; ep/_src imports none."""
