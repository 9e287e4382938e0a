# SPDX-License-Identifier: Apache-2.0
"""Names the processes for which a job waits that stands still."""
