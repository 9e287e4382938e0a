# SPDX-License-Identifier: Apache-2.0
"""The implementation; tests/layout_test.py lists its layers."""
