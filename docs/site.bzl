# SPDX-License-Identifier: Apache-2.0
"""The rule that builds the site."""

def _site_impl(ctx):
    folder = ctx.actions.declare_directory("html")
    ctx.actions.run(
        executable = ctx.executable.builder,
        arguments = [folder.path],
        outputs = [folder],
        mnemonic = "Site",
        progress_message = "Building the site",
        # An index page would otherwise have the time of its build.
        env = {"JAX_PLATFORMS": "cpu", "SOURCE_DATE_EPOCH": "0"},
        use_default_shell_env = True,  # for --action_env=EP_SOURCE_URL=...
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
    },
)
