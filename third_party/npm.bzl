# SPDX-License-Identifier: Apache-2.0
"""A repository rule that fetches an npm package, pinned by hash."""

def _npm_archive_impl(rctx):
    npm = rctx.which("npm")
    if not npm:
        fail("{} comes from npm, which is not on PATH. Install npm and run this again.".format(rctx.attr.package))
    result = rctx.execute([npm, "pack", "--silent", rctx.attr.package])
    if result.return_code:
        fail("npm could not download {}:\n{}".format(
            rctx.attr.package,
            result.stderr,
        ))

    # npm packs into the current folder and prints the file's name last. npm
    # checks no hash of ours, but `download_and_extract` does.
    archive = rctx.path(result.stdout.strip().split("\n")[-1])
    rctx.download_and_extract(
        "file://" + str(archive),
        sha256 = rctx.attr.sha256,
        type = "tgz",
    )
    rctx.delete(archive)
    rctx.file("BUILD.bazel", rctx.read(rctx.attr.build_file))

npm_archive = repository_rule(
    implementation = _npm_archive_impl,
    attrs = {
        "build_file": attr.label(mandatory = True),
        "package": attr.string(mandatory = True, doc = "name@version"),
        "sha256": attr.string(mandatory = True, doc = "hash of the archive"),
    },
)
