# SPDX-License-Identifier: Apache-2.0
"""Repository rules that fetch PyPI packages, pinned by hash.

Both rules run the machine's pip. pip uses the configured index of the machine
(pip.conf, PIP_* variables), and accepts only files whose hashes are in the
lock.
"""

load(":python.bzl", "host_python")

# The Python versions of the locks.
_PYTHONS = ["3.11", "3.12", "3.13", "3.14"]

_LOCK_DOC = "Label of the lock, which has markers for every Python."

def _run(rctx, arguments, environment = {}):
    result = rctx.execute(
        arguments,
        timeout = 1800,
        environment = environment,
    )
    if result.return_code:
        fail("{} failed. If its output names the network or an index, check that `pip download six` works here; Bazel runs the same pip.\n{}\n{}".format(
            " ".join([str(a) for a in arguments]),
            result.stdout,
            result.stderr,
        ))

def _pip(rctx, python):
    """Returns the command line that runs pip with `python`."""
    if not rctx.execute([python.path, "-m", "pip", "--version"]).return_code:
        return [python.path, "-m", "pip"]

    # Debian's python3 has no pip. bazelw fetches a wheel of pip, which needs no
    # installation.
    wheel = rctx.getenv("EP_PIP_WHEEL")
    if wheel:
        return [python.path, wheel + "/pip"]
    fail("{} has no pip. Install it (on Debian: apt-get install python3-pip) and run this again.".format(python.path))

def _only(lock, packages):
    """Returns the requirements of `packages` in `lock`, the text of a lock."""
    lines = []
    wanted = False
    for line in lock.split("\n"):
        if line and line[0] not in " #":
            wanted = line.partition("==")[0] in packages
        if wanted:
            lines.append(line)
    return "\n".join(lines)

def _pip_packages_impl(rctx):
    python = host_python(rctx)
    if python.version not in _PYTHONS:
        fail("The locks are for Python {}, and this machine has {}. Name another Python with --repo_env=HERMETIC_PYTHON_VERSION=3.11, or, in a module that uses jax_ep, replace these packages by that module's: --@jax_ep//third_party/py:jax=@their_pip//jax.".format(", ".join(_PYTHONS), python.version))
    lock = rctx.path(rctx.attr.lock)
    rctx.watch(lock)  # pip reads the lock, so Bazel does not watch it otherwise
    if rctx.attr.packages:
        rctx.file("lock.txt", _only(rctx.read(lock), rctx.attr.packages))
        lock = rctx.path("lock.txt")
    rctx.report_progress("pip installs {}".format(lock.basename))
    _run(rctx, _pip(rctx, python) + [
        "install",
        "--target=site",
        "--no-compile",
        "--no-deps",
        "--require-hashes",
        "--requirement",
        lock,
    ], {"PIP_ROOT_USER_ACTION": "ignore"})

    # Otherwise each process would compile the modules that it imports, because
    # a process cannot write to its inputs. A file that does not compile is no
    # error: some packages contain templates, or code for another Python.
    # Without a folder, compileall would compile the machine's own packages.
    if rctx.attr.bytecode:
        rctx.report_progress("compiling to bytecode")
        rctx.execute(
            [python.path, "-m", "compileall", "-q", "-j0", "-x/tests/"] +
            ["site/" + folder for folder in rctx.attr.bytecode],
        )
    _run(rctx, [
        python.path,
        rctx.path(rctx.attr._write_build),
        "site",
        "BUILD.bazel",
    ])

pip_packages = repository_rule(
    implementation = _pip_packages_impl,
    doc = """\
Installs packages of a lock, and declares a py_library for each.

The name of a library is the name of its package, in lower case with underscores.
The data of a library are whole folders, so that a runfiles tree or a sandbox has
one link instead of thousands.""",
    attrs = {
        "bytecode": attr.string_list(doc = """\
The folders to compile to bytecode, which many processes import."""),
        "lock": attr.label(mandatory = True, doc = _LOCK_DOC),
        "packages": attr.string_list(doc = """\
The packages to install. The default is all packages of the lock."""),
        "_write_build": attr.label(default = ":pip_write_build.py"),
    },
)

def _requirement(lock, package):
    """Returns the lines that pin `package` in `lock`, the text of a lock.

    If the version depends on the Python, returns the lines of the oldest Python,
    without the marker.
    """
    start = ("\n" + lock).find("\n" + package + "==")
    if start < 0:
        fail("The lock does not pin {}.".format(package))
    lines = []
    for line in lock[start:].split("\n"):
        lines.append(line.partition(" ;")[0] + " \\" if " ;" in line else line)
        if not line.endswith("\\"):
            break
    return "\n".join(lines) + "\n"

def _pip_archive_impl(rctx):
    python = host_python(rctx)
    pip = _pip(rctx, python)
    version = rctx.attr.python_version
    lock = rctx.read(rctx.attr.lock)
    wheels = []
    if version:
        wheels = ["--only-binary=:all:", "--python-version=" + version]

    # pip reads the metadata of a source archive, and so needs its build backend,
    # which is in the lock.
    for package in rctx.attr.build_requires:
        rctx.file("backend.txt", _requirement(lock, package))
        _run(rctx, pip + [
            "install",
            "--target=backend",
            "--no-deps",
            "--require-hashes",
            "--requirement=backend.txt",
        ], {"PIP_ROOT_USER_ACTION": "ignore"})

    for package, folder in rctx.attr.packages.items():
        rctx.report_progress("pip downloads " + package)
        rctx.file("package.txt", _requirement(lock, package))
        _run(rctx, pip + [
            "download",
            "--dest=archive",
            "--no-build-isolation",
            "--no-deps",
            "--require-hashes",
            "--requirement=package.txt",
        ] + wheels, {"PYTHONPATH": str(rctx.path("backend"))})

        archive = rctx.path("archive").readdir()[0]
        if archive.basename.endswith(".whl"):
            # Bazel before 8.3 recognizes an archive only by its name.
            rctx.symlink(archive, "archive/wheel.zip")
            archive = rctx.path("archive/wheel.zip")
        rctx.extract(archive, "", folder)
        rctx.delete("archive")

    for scratch in ["backend", "backend.txt", "package.txt"]:
        rctx.delete(scratch)
    rctx.file("BUILD.bazel", rctx.read(rctx.attr.build_file))

pip_archive = repository_rule(
    implementation = _pip_archive_impl,
    doc = "Unpacks one folder of each of several locked packages into one folder.",
    attrs = {
        "build_file": attr.label(mandatory = True),
        "build_requires": attr.string_list(
            doc = "The build backend, if the lock pins a source archive.",
        ),
        "lock": attr.label(mandatory = True, doc = _LOCK_DOC),
        "packages": attr.string_dict(
            mandatory = True,
            doc = "The packages, and the folder to unpack of each.",
        ),
        "python_version": attr.string(
            doc = """\
The Python version of the wheels. The default is this machine's.""",
        ),
    },
)
