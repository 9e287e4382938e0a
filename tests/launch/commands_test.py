# SPDX-License-Identifier: Apache-2.0
"""`python -m ep launch` and `python -m ep info` do what the pages say.

ends_test has the ranks that end otherwise than by success.
"""

import ast
import io
import os
import pathlib
import subprocess
import sys
import textwrap

import jax
import pytest

import ep
from ep import launch
from ep.__main__ import main
from ep._src.native import gpus
from ep.launch import _command as command
from ep.launch import _launch
import jobs
import programs


@pytest.fixture(autouse=True)
def environment_without_a_launcher(monkeypatch):
  """Bazel runs this file under the launcher."""
  for name in (*programs.OF_A_RANK, "XLA_FLAGS"):
    monkeypatch.delenv(name, raising=False)


def _launch_code(code, *args, **kwargs):
  """Launches Python code on two ranks with short time limits."""
  options = dict(num_processes=2, timeout_s=50.0, grace_s=0.5)
  return launch.launch(
    ["-c", textwrap.dedent(code), *args], **(options | kwargs)
  )


def _logs(folder, ranks=2):
  return [(folder / f"rank_{rank}.log").read_text() for rank in range(ranks)]


_SHOW_VARIABLES = """
  import os, sys
  print(sys.argv[1:], file=sys.stderr)
  print(dict(os.environ))
"""


def _variables(log):
  """Returns the variables in a rank's log; checks the argument in the log."""
  argument, variables = log.splitlines()
  assert argument == "['a b']"
  return ast.literal_eval(variables)


def test_ranks_have_their_variables_and_logs_are_kept(
  tmp_path, monkeypatch, capsys
):
  """`devices_per_process` replaces the user's flag; other variables stay."""
  count = "--xla_force_host_platform_device_count="
  monkeypatch.setenv("XLA_FLAGS", f"--a=1 {count}4 --b=2")
  for name in _launch.KEEP_MEMORY:
    monkeypatch.delenv(name, raising=False)
  users = {"EXTRA": "é", "MALLOC_MMAP_MAX_": "7"}
  users["JAX_ENABLE_PREEMPTION_SERVICE"] = "1"
  options = dict(num_processes=3, devices_per_process=5, env=users)
  assert _launch_code(_SHOW_VARIABLES, "a b", log_dir=tmp_path, **options) == 0
  logs = _logs(tmp_path, 3)
  for rank, variables in enumerate(map(_variables, logs)):
    own = {"JAX_PROCESS_ID": str(rank), "JAX_NUM_PROCESSES": "3"}
    assert (_launch.KEEP_MEMORY | users | own).items() <= variables.items()
    assert variables["XLA_FLAGS"].split() == ["--a=1", "--b=2", f"{count}5"]
  assert capsys.readouterr().out == logs[0]


@pytest.mark.parametrize(
  "ranks_per_gpu, expected",
  [
    (1, [["2", None, None, None], ["GPU-7", None, None, None]]),
    (2, [["2", "1", "0.375", None]] * 2),
    (4, [["2", "1", "0.188", "4"]] * 2),
  ],
)
def test_each_rank_has_its_gpu(monkeypatch, ranks_per_gpu, expected):
  monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, GPU-7")
  monkeypatch.delenv("NCCL_MAX_CTAS", raising=False)
  names = ["CUDA_VISIBLE_DEVICES", "NCCL_MULTI_RANK_GPU_ENABLE"]
  names += ["XLA_PYTHON_CLIENT_MEM_FRACTION", "NCCL_MAX_CTAS"]
  ranks = gpus.rank_variables(2, ranks_per_gpu)
  assert [[own.get(name) for name in names] for own in ranks] == expected
  monkeypatch.setenv("NCCL_MAX_CTAS", "7")  # the user's value stays
  for own in gpus.rank_variables(2, ranks_per_gpu):
    assert "NCCL_MAX_CTAS" not in own


def test_ranks_on_gpus(tmp_path, monkeypatch):
  """Each rank sees one GPU; ranks share a GPU only if the user allows it."""
  monkeypatch.setenv("JAX_PLATFORMS", "cuda")
  monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, GPU-7")
  assert _launch_code(_SHOW_VARIABLES, "a b", log_dir=tmp_path) == 0
  variables = _variables(_logs(tmp_path)[1])
  assert variables["CUDA_VISIBLE_DEVICES"] == "GPU-7"
  monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
  with pytest.raises(ValueError, match="2 GPUs.*1 are.*--ranks_per_gpu=2"):
    _launch_code("")


def test_gpus_are_counted(monkeypatch, tmp_path):
  smi = tmp_path / "nvidia-smi"
  smi.write_text("#!/bin/sh\necho GPU 0: H200\necho GPU 1: H200\n")
  smi.chmod(0o700)
  monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
  monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
  assert gpus.visible() == ["0", "1"]


def test_only_failures_and_bazel_keep_default_logs(tmp_path, monkeypatch):
  monkeypatch.delenv("TEST_UNDECLARED_OUTPUTS_DIR", raising=False)
  monkeypatch.setattr(_launch.tempfile, "tempdir", str(tmp_path))
  assert _launch_code("", num_processes=1) == 0
  assert not list(tmp_path.iterdir())
  assert _launch_code("raise SystemExit(1)") == 1
  assert len(list(tmp_path.glob("*/rank_*.log"))) == 2
  monkeypatch.setenv("TEST_UNDECLARED_OUTPUTS_DIR", str(tmp_path / "bazel"))
  (tmp_path / "bazel").mkdir()
  for _ in range(2):
    assert _launch_code("", num_processes=1) == 0
  assert len(list(tmp_path.glob("bazel/*/rank_*.log"))) == 2


def _script(folder, text):
  path = folder / "script.py"
  path.write_text(text)
  return path


def _start(tmp_path, program):
  """Starts two ranks of a program; returns the launcher, with pipes."""
  flags = ["--num_processes=2", "--grace=0.5", f"--log_dir={tmp_path}"]
  pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
  return programs.start_launcher(*flags, _script(tmp_path, program), **pipes)


def test_the_job_continues_when_stdout_is_closed(tmp_path):
  """The launcher writes to a pipe to `head`, and reports errors to stderr."""
  launcher = _start(
    tmp_path,
    """if True:
    import os, sys, time
    print("first")
    time.sleep(0.5)
    for i in range(20_000):
      print(i)
    if os.environ["JAX_PROCESS_ID"] == "1":
      time.sleep(0.5)
      sys.exit(3)
    """,
  )
  assert launcher.stdout.readline() == "first\n"
  launcher.stdout.close()
  errors = launcher.stderr.read()
  assert launcher.wait() == 3
  assert _logs(tmp_path)[0].endswith("\n19999\n")
  assert "ep.launch: rank 1 failed with exit code 3" in errors
  assert "  | 19999\n" in errors


def test_a_reader_that_stalls_does_not_stop_the_launcher(tmp_path):
  """The pipe is full when rank 1 fails; the launcher ends rank 0."""
  launcher = _start(
    tmp_path,
    """if True:
    import os, sys, time
    if os.environ["JAX_PROCESS_ID"] == "0":
      print(os.getpid())
      print((1 << 20) * "x")
    time.sleep(600 if os.environ["JAX_PROCESS_ID"] == "0" else 1)
    sys.exit(3)
    """,
  )
  rank = pathlib.Path("/proc", launcher.stdout.readline().strip())
  assert rank.exists()
  jobs.wait_until(lambda: not rank.exists())
  output = launcher.communicate()[0]
  assert launcher.returncode == 3
  assert "ep.launch: rank 1 failed with exit code 3" in output


def test_output_that_the_terminal_cannot_encode(monkeypatch):
  """The launcher escapes characters that the terminal cannot encode."""
  program = r"import os; os.write(1, 'a caf\xe9\nand more\n'.encode())"
  terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
  monkeypatch.setattr(sys, "stdout", terminal)
  assert _launch_code(program, num_processes=1) == 0
  assert terminal.buffer.getvalue() == b"a caf\\xe9\nand more\n"


def test_the_command_line_takes_a_script_or_a_module(
  tmp_path, monkeypatch, capsys
):
  script = _script(tmp_path, "import sys; print(sys.argv[1:])")
  monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
  for program in ([str(script)], ["-m", "script"]):
    argv = ["--num_processes=1", *program, "--num_processes=9", "-m"]
    assert command.main(argv) == 0
    assert capsys.readouterr().out == "['--num_processes=9', '-m']\n"
  with pytest.raises(SystemExit) as exit:
    command.main(["--num_processes=1"])
  assert exit.value.code == 2
  assert "name a program" in capsys.readouterr().err


def test_without_a_coordinator_no_rank_waits_for_it(
  tmp_path, monkeypatch, capsys
):
  broken = _script(tmp_path, "raise SystemExit('no jaxlib here')")
  monkeypatch.setattr(_launch, "_COORDINATOR", str(broken))
  assert _launch_code("import time; time.sleep(600)", log_dir=tmp_path) == 1
  out = capsys.readouterr().out
  assert "coordinator failed with exit code 1" in out
  assert "  | no jaxlib here" in out


@pytest.mark.parametrize(
  "jax, found",
  [
    ("__version__ = '0.9.2'; __version_info__ = (0, 9, 2)", "jax 0.9.2"),
    ("raise ModuleNotFoundError(name='jax')", "no jax"),
  ],
)
def test_an_old_jax_is_refused_with_the_cure(tmp_path, jax, found):
  (tmp_path / "jax.py").write_text(jax)
  path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
  env = programs.environment(PYTHONPATH=path)
  sentence = (
    f"ep needs jax 0.10.2 or newer, but {found} is installed;"
    ' run: pip install --upgrade "jax>=0.10.2"'
  )
  for argv, lines in [
    (["-c", "import ep"], None),  # an ImportError
    (["-m", "ep", "info"], 1),
    (["-m", "ep", "launch", "--help"], 1),
  ]:
    done = subprocess.run(
      [sys.executable, *argv], env=env, capture_output=True, text=True
    )
    errors = done.stderr.splitlines()
    assert done.returncode == 1
    assert f"ImportError: {sentence}" in errors[-1]
    assert lines in (None, len(errors)), errors


# --- python -m ep info -------------------------------------------------------


def check(capsys):
  return main(["info"]), capsys.readouterr().out


def test_a_missing_library(capsys, tmp_path, monkeypatch):
  """Without the library, the check tries other backends, and names a cure."""
  monkeypatch.setenv("EP_FFI_LIBRARY_PATH", str(tmp_path))
  code, output = check(capsys)
  assert code == 1, output
  assert "host (the default) cannot run: libep_ffi_cpu.so was not" in output
  assert "install a wheel of jax-ep" in output
  assert "xla  can run\n" in output
  assert "grouped matmul: the loop over tiles, because the native" in output
  assert "WARNING" not in output


def test_the_default_backend_runs(capsys, tmp_path, monkeypatch):
  """The check prints versions and paths, and warns of another package `ep`."""
  other = tmp_path / "ep-0.2.4.dist-info"
  other.mkdir()
  (other / "METADATA").write_text("Name: ep\nVersion: 0.2.4\n")
  (other / "top_level.txt").write_text("ep\n")
  monkeypatch.syspath_prepend(tmp_path)
  code, output = check(capsys)
  assert code == 0, output
  assert f"ep {ep.__version__} in {os.path.dirname(ep.__file__)}\n" in output
  assert f"jax {jax.__version__}," in output
  assert "host (the default) can run on " in output
  assert "nccl cannot run: it needs NVIDIA GPUs" in output
  assert "xla  can run\n" in output
  assert "grouped matmul: the native library; the loop over tiles in" in output
  assert "pip uninstall ep jax-ep;" in output


def test_the_output_is_closed(tmp_path):
  """Commands print to closed pipes."""
  done = subprocess.run(
    ["bash", "-c", f"set -o pipefail; {sys.executable} -m ep info | true"],
    cwd=tmp_path,
    env=programs.environment(),
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )
  assert done.returncode == 0, done.stdout
  assert "Traceback" not in done.stdout
