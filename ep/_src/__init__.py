# SPDX-License-Identifier: Apache-2.0
"""The implementation; tests/repository/layout_test.py lists its layers."""
