# SPDX-License-Identifier: Apache-2.0
"""The rule that builds the site."""

load("@bazel_skylib//rules:common_settings.bzl", "BuildSettingInfo")

def _site_impl(ctx):
    folder = ctx.actions.declare_directory("html")
    ctx.actions.run(
        executable = ctx.executable.builder,
        arguments = [folder.path],
        outputs = [folder],
        mnemonic = "Site",
        progress_message = "Building the site",
        env = {
            "EP_SOURCE_URL": ctx.attr._source_url[BuildSettingInfo].value,
            "JAX_PLATFORMS": "cpu",
            # An index page would otherwise have the time of its build.
            "SOURCE_DATE_EPOCH": "0",
        },
        use_default_shell_env = True,
    )
    return [DefaultInfo(
        files = depset([folder]),
        runfiles = ctx.runfiles([folder]),
    )]

site = rule(
    implementation = _site_impl,
    doc = "A folder of HTML that a program writes into its only argument.",
    attrs = {
        "builder": attr.label(
            # The tests have compiled the library for this configuration.
            cfg = "target",
            executable = True,
            mandatory = True,
        ),
        "_source_url": attr.label(default = ":source_url"),
    },
)
