# SPDX-License-Identifier: Apache-2.0
"""Declares the rule sets of a WORKSPACE build, which are modules in Bzlmod."""

load("@bazel_tools//tools/build_defs/repo:http.bzl", "http_archive")
load("@bazel_tools//tools/build_defs/repo:utils.bzl", "maybe")

def ep_rule_sets():
    """Declares the rule sets that the WORKSPACE has not declared yet."""
    maybe(
        http_archive,
        name = "platforms",
        sha256 = "dbad4a23abcca6171e47b79edc53bd6a41067a3b75f9e8b104656b459ff25046",
        url = "https://github.com/bazelbuild/platforms/releases/download/1.1.0/platforms-1.1.0.tar.gz",
    )
    maybe(
        http_archive,
        name = "bazel_skylib",
        sha256 = "37cdfbc6faefea94f7b37760a305c98c08981116c2bc9e821e3b423221fad8c8",
        url = "https://github.com/bazelbuild/bazel-skylib/releases/download/1.9.2/bazel-skylib-1.9.2.tar.gz",
    )

    # Later rules_cc loads protobuf, which needs more calls in a WORKSPACE.
    maybe(
        http_archive,
        name = "rules_cc",
        sha256 = "7e2a1f6c5dd908e6e88d7c80257c99d14e16fa985b56342287fddb6a32c435b5",
        strip_prefix = "rules_cc-0.0.11",
        url = "https://github.com/bazelbuild/rules_cc/releases/download/0.0.11/rules_cc-0.0.11.tar.gz",
    )
    maybe(
        http_archive,
        name = "rules_python",
        sha256 = "25a00d55e4376ef6d9f28938b68038faca17c95580c9afe6953e7dde013d00e4",
        strip_prefix = "rules_python-2.3.2",
        url = "https://github.com/bazel-contrib/rules_python/releases/download/2.3.2/rules_python-2.3.2.tar.gz",
    )
