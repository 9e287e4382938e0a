# SPDX-License-Identifier: Apache-2.0
"""The code of ep; tests/repository/layout_test.py lists its layers."""
