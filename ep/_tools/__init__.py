# SPDX-License-Identifier: Apache-2.0
"""Tools around a run; the core in ep/_src imports none of them."""
