# SPDX-License-Identifier: Apache-2.0
"""ep at the call sites of other frameworks and libraries of modules."""
