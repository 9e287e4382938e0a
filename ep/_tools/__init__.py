# SPDX-License-Identifier: Apache-2.0
"""Tools to plan, record and debug runs; ep/_src imports none."""
