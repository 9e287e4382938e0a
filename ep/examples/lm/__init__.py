# SPDX-License-Identifier: Apache-2.0
"""A language model with experts, and its training run."""
