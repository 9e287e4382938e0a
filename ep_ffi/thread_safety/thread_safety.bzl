# SPDX-License-Identifier: Apache-2.0
"""A test that locks are held where core/thread_annotations.h says so.

GCC compiles our code and does not know the annotations. Clang's analysis does,
and clang-tidy is the part of Clang that a small wheel carries.
"""

load("@rules_cc//cc/common:cc_info.bzl", "CcInfo")

_ReportsInfo = provider(
    "Clang's reports on the sources of a target and of its dependencies.",
    fields = {"reports": "A depset of files. A file without errors is empty."},
)

# Writes the output of clang-tidy to the report if it fails. The action itself
# succeeds, so that the test fails rather than its build.
_RUN = """\
report=$1
shift
if output=$("$@" 2>&1); then output=; fi
printf '%s' "$output" >"$report"
"""

def _check(ctx, src, headers, contexts):
    """Returns the report on the source file `src`."""
    report = ctx.actions.declare_file(
        "{}_thread_safety/{}.txt".format(ctx.label.name, src.basename),
    )
    args = ctx.actions.args()
    args.add(report)
    args.add(ctx.executable._clang_tidy)
    args.add_all([
        "--allow-no-checks",  # Clang's warnings do not count as checks
        "--checks=-*,clang-diagnostic-thread-safety*",
        "--quiet",
        "--warnings-as-errors=*",
    ])
    args.add(src)
    args.add("--")
    args.add_all(ctx.rule.attr.copts)
    args.add_all(["-Wno-error", "-Wthread-safety", "-Wthread-safety-beta"])
    for flag, attribute in [
        ("-D", "defines"),
        ("-I", "includes"),
        ("-iquote", "quote_includes"),
        ("-isystem", "system_includes"),
        ("-isystem", "external_includes"),
    ]:
        folders = [getattr(context, attribute) for context in contexts]
        args.add_all(depset(transitive = folders), before_each = flag)
    ctx.actions.run_shell(
        command = _RUN,
        arguments = [args],
        inputs = depset(
            [src] + ctx.files._clang_headers,
            transitive = [headers],
        ),
        tools = [ctx.executable._clang_tidy],
        outputs = [report],
        mnemonic = "ThreadSafety",
        progress_message = "Checking the locks of %{input}",
    )
    return report

def _reports_aspect_impl(target, ctx):
    deps = getattr(ctx.rule.attr, "deps", [])
    reports = []
    if ctx.label.workspace_name == Label("//ep_ffi").workspace_name:
        srcs = getattr(ctx.rule.files, "srcs", [])
        contexts = [
            dep[CcInfo].compilation_context
            for dep in deps + [target]
            if CcInfo in dep
        ]
        headers = depset(
            [src for src in srcs if src.extension == "h"],
            transitive = [context.headers for context in contexts],
        )
        reports = [
            _check(ctx, src, headers, contexts)
            for src in srcs
            if src.extension == "cc" and src.is_source
        ]
    return [_ReportsInfo(reports = depset(reports, transitive = [
        dep[_ReportsInfo].reports
        for dep in deps
        if _ReportsInfo in dep
    ]))]

_reports_aspect = aspect(
    implementation = _reports_aspect_impl,
    attr_aspects = ["deps"],
    attrs = {
        "_clang_headers": attr.label(default = "@ep_clang_tidy//:headers"),
        "_clang_tidy": attr.label(
            allow_single_file = True,
            cfg = "exec",
            default = "@ep_clang_tidy//:bin/clang-tidy",
            executable = True,
        ),
    },
)

_TEST = """\
#!/usr/bin/env bash
output=$(cat {reports})
echo "$output"
[[ {condition} ]]
"""

def _thread_safety_test_impl(ctx):
    reports = depset(transitive = [
        dep[_ReportsInfo].reports
        for dep in ctx.attr.deps
    ])
    if not reports:
        fail("There is no source to check.")
    condition = '-z "$output"'
    if ctx.attr.expected:
        condition = '"$output" == *"{}"*'.format(ctx.attr.expected)
    test = ctx.actions.declare_file(ctx.label.name)
    ctx.actions.write(
        test,
        _TEST.format(
            reports = " ".join([file.short_path for file in reports.to_list()]),
            condition = condition,
        ),
        is_executable = True,
    )
    return [DefaultInfo(
        executable = test,
        runfiles = ctx.runfiles(transitive_files = reports),
    )]

thread_safety_test = rule(
    implementation = _thread_safety_test_impl,
    doc = """\
Checks the sources of some targets, and of their dependencies in this module.

Bazel keeps the report on a source until the source or a header changes.""",
    attrs = {
        "deps": attr.label_list(aspects = [_reports_aspect], mandatory = True),
        "expected": attr.string(
            doc = "An error that Clang must find. Without it, none.",
        ),
    },
    test = True,
)
