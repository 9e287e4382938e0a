# SPDX-License-Identifier: Apache-2.0
"""The launcher starts, monitors and stops ranks as documented."""

import ast
import contextlib
import io
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from ep import launch
from ep._src.native import gpus
from ep.launch import _command as command
from ep.launch import _launch
from ep.launch import _limits as limits
from ep.launch import _supervision as supervision
import programs


@pytest.fixture(autouse=True)
def environment_without_a_launcher(monkeypatch):
  """Bazel runs this file under the launcher."""
  for name in (*programs.OF_A_RANK, "XLA_FLAGS"):
    monkeypatch.delenv(name, raising=False)


_STUCK = "import time; time.sleep(600)"


def _launch_code(code, *args, **kwargs):
  """Launches Python code on two ranks with short time limits."""
  options = dict(num_processes=2, timeout_s=50.0, grace_s=0.5)
  return launch.launch(
    ["-c", textwrap.dedent(code), *args], **(options | kwargs)
  )


def _python(argv, env=None, **options):
  """Starts a Python process with the import path of this process."""
  env = programs.environment(**(env or {}))
  return subprocess.Popen([sys.executable, *argv], env=env, **options)


def _logs(folder, ranks=2):
  return [(folder / f"rank_{rank}.log").read_text() for rank in range(ranks)]


def _wait_until(condition):
  deadline = time.monotonic() + 60
  while not condition():
    assert time.monotonic() < deadline, "the condition did not become true"
    time.sleep(0.02)


def _is_running(pid):
  """Returns whether a process exists and is not a zombie."""
  with contextlib.suppress(FileNotFoundError, ProcessLookupError):
    state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
    return state.split()[0] != "Z"
  return False


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


def test_one_failure_ends_all(tmp_path, capsys):
  program = """
    import os, sys, time
    print("hello from", os.environ["JAX_PROCESS_ID"])
    if os.environ["JAX_PROCESS_ID"] == "1":
      sys.exit(7)
    time.sleep(600)
  """
  assert _launch_code(program, log_dir=tmp_path) == 7
  out = capsys.readouterr().out
  assert "rank 1 failed with exit code 7" in out
  assert "  | hello from 1" in out
  assert "rank 0 was still running after another's failure" in out
  assert "most recent call first" in _logs(tmp_path)[0]


@pytest.mark.parametrize(
  "way, code, words",
  [
    ("os.kill(os.getpid(), 9)", 128 + 9, "was killed by signal 9; out of mem"),
    ("sys.exit(9)", 9, "failed with exit code 9"),
  ],
)
def test_the_culprit_is_reported_first(tmp_path, capsys, way, code, words):
  """The launcher blames the killed rank, even if others exit at the same time.

  During `grace_s`, the other ranks may report which failure they saw.
  """
  program = f"""
    import contextlib, os, pathlib, sys, time
    rank = int(os.environ["JAX_PROCESS_ID"])
    died = pathlib.Path({str(tmp_path / "died")!r})
    if rank == 2:
      draft = died.with_suffix(".draft")
      draft.write_text(str(os.getpid()))
      draft.rename(died)
      {way}
    while not died.exists():
      time.sleep(0.001)
    stat = pathlib.Path("/proc", died.read_text(), "stat")
    with contextlib.suppress(OSError):  # the launcher has reaped rank 2
      while ") Z" not in stat.read_text():  # rank 2 is not dead yet
        time.sleep(0.001)
    time.sleep(0.0 if "kill" in {way!r} else 0.5)
    print("line", 1)
    sys.exit(f"rank {{rank}} lost rank 2")
  """
  options = dict(num_processes=3, log_dir=tmp_path, grace_s=20.0)
  assert _launch_code(program, **options) == code
  out = capsys.readouterr().out.splitlines()
  first, *others = [line for line in out if line.startswith("ep.launch: ")]
  assert first.startswith(f"ep.launch: rank 2 {words}")
  for rank, line in zip(range(2), sorted(others), strict=True):
    assert f"rank {rank} failed with exit code 1: rank {rank} lost" in line
  assert "  | line 1" not in out


@pytest.mark.parametrize(
  "joins, code", [([0, 1], 0), ([], 0), ([1], 1)], ids=str
)
def test_ranks_that_run_alone_are_named(capsys, joins, code):
  """The job fails if some ranks join the others and some do not."""
  program = f"""
    import os, sys
    if os.environ["JAX_PROCESS_ID"] in {str(joins)!r}:
      open(os.environ["EP_LAUNCH_STATE"] + ".joined", "w").close()
  """
  assert _launch_code(program) == code
  errors = capsys.readouterr().err
  alone = ", ".join(str(rank) for rank in range(2) if rank not in joins)
  assert alone in errors
  assert ("Call ep.launch.initialize() before" in errors) == bool(alone)


def test_a_rank_that_ends_before_it_joins_ends_the_job(capsys):
  """Without the launcher, JAX would let the other ranks wait for 300 s."""
  program = """
    import os
    if os.environ["JAX_PROCESS_ID"] == "0":
      from ep import launch
      launch.initialize()
  """
  assert _launch_code(program) == 1
  output, errors = capsys.readouterr()
  assert "rank 1 ended with exit code 0 before it joined the other" in output
  assert "rank 0 was still running after another's failure" in output
  assert "of 2 ranks, these have not joined the others: 1." in errors


def test_a_rank_that_left_with_success_is_named(capsys):
  """XLA's error in the other ranks, "Connection closed", names no rank."""
  program = """
    from ep import launch
    launch.initialize()
    import jax, sys
    from jax.experimental import multihost_utils
    multihost_utils.process_allgather(1)
    if jax.process_index() == 1:
      sys.exit()
    multihost_utils.process_allgather(2)
  """
  assert _launch_code(program, num_processes=3, grace_s=20.0) != 0
  output = capsys.readouterr().out
  left = "ep.launch: rank 1 ended with exit code 0 before the others"
  assert 0 < output.index(left) < output.index("ep.launch: rank 0 ")


def test_ranks_that_left_before_a_timeout_are_named(capsys):
  program = f"""
    import os
    open(os.environ["EP_LAUNCH_STATE"] + ".joined", "w").close()
    if os.environ["JAX_PROCESS_ID"] == "2":
      {_STUCK}
  """
  assert _launch_code(program, num_processes=3, timeout_s=2.0) == 124
  output = capsys.readouterr().out
  left = "ep.launch: rank 0, rank 1 ended with exit code 0 before the others"
  assert 0 <= output.index(left) < output.index("rank 2 was still running at")


def test_the_rank_that_began_to_exit_first_decides_the_code(capsys):
  """Rank 1 begins to exit, then rank 0 fails, and then rank 1 has exited."""
  program = """
    import os, pathlib, sys, time
    one = pathlib.Path(os.environ["EP_LAUNCH_STATE"]).with_name("rank_1.ending")
    if os.environ["JAX_PROCESS_ID"] == "1":
      one.write_text(str(time.monotonic()))
      time.sleep(1)
      sys.exit(75)
    while not one.exists():
      time.sleep(0.01)
    sys.exit("lost rank 1")
  """
  assert _launch_code(program, grace_s=20.0) == 75
  output = capsys.readouterr().out
  assert output.index("rank 1 failed with exit code 75") < output.index(
    "rank 0 failed with exit code 1: lost rank 1"
  )


def test_a_rank_keeps_its_code_when_its_group_cannot_close(tmp_path, capsys):
  """Rank 0 waits in an op that rank 1 never runs."""
  program = """
    from ep import launch
    launch.initialize()
    import jax, sys, time
    import jax.numpy as jnp
    import ep
    mesh = jax.make_mesh((2,), ("ep",), (jax.sharding.AxisType.Auto,))
    layer = ep.EpLayerConfig(ep.ep_bootstrap(mesh, num_experts=2, top_k=1))
    rows = jax.NamedSharding(mesh, jax.P("ep"))
    topk_idx = jax.device_put(jnp.zeros((2, 1), jnp.int32), rows)
    prepare = jax.jit(lambda topk_idx: ep.ep_prepare(layer, topk_idx).mem)
    with jax.set_mesh(mesh):
      jax.block_until_ready(prepare(topk_idx))
      if jax.process_index() == 1:
        time.sleep(1)
        sys.exit(75)
      jax.block_until_ready(prepare(topk_idx))
  """
  assert _launch_code(program, log_dir=tmp_path, grace_s=20.0) == 75
  assert "At exit: ep_finalize: rank 0 (process 0) ran" in _logs(tmp_path)[1]
  assert "ep.launch: rank 1 failed with exit code 75" in capsys.readouterr().out


def test_the_cause_is_an_exception_or_a_fatal_error(capsys):
  """The report names the error, even if other lines follow it in the log."""
  program = """
    import os, sys, time
    rank = os.environ["JAX_PROCESS_ID"]
    if rank == "0":
      sys.exit(7)
    time.sleep(0.5)
    if rank == "1":
      error = ValueError("as planned\\nwith a second line")
      error.add_note("-" * 20)
      error.add_note("For simplicity, JAX has removed its internal frames.")
      raise error
    if rank == "2":
      print("F1125 10:58:22.683026 180 client.h:80] Terminating")
      os.abort()
    exec("1 +")
  """
  assert _launch_code(program, num_processes=4, grace_s=20.0) == 7
  output = capsys.readouterr().out
  for rank, words in enumerate(
    [
      "rank 1 failed with exit code 1: ValueError: as planned;",
      "rank 2 was killed by signal 6: F1125 10:58:22.683026 180 client.h:80]"
      " Terminating;",
      "rank 3 failed with exit code 1: SyntaxError: invalid syntax;",
    ]
  ):
    assert f"ep.launch: {words} its log is" in output, rank


def test_a_timeout_stops_all_ranks_and_logs_their_stacks(
  tmp_path, monkeypatch, capsys
):
  """The launcher kills rank 1, which ignores SIGABRT."""
  monkeypatch.setattr(supervision, "_KILL_AFTER_S", 0.5)
  program = f"""
    import faulthandler, os, signal
    if os.environ["JAX_PROCESS_ID"] == "1":
      faulthandler.disable()
      signal.signal(signal.SIGABRT, signal.SIG_IGN)
    def am_stuck():
      {_STUCK}
    am_stuck()
  """
  assert _launch_code(program, log_dir=tmp_path, timeout_s=1.0) == 124
  assert "rank 1 was still running at the timeout" in capsys.readouterr().out
  assert "in am_stuck" in _logs(tmp_path)[0]


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
  monkeypatch.setenv("TEST_UNDECLARED_OUTPUTS_DIR", "/proc/nope")
  with pytest.raises(ValueError, match="log_dir = '/proc/nope'"):
    _launch_code("", num_processes=1)


def test_a_child_of_a_rank_does_not_outlive_it(tmp_path):
  program = f"""
    import os, subprocess, sys
    child = subprocess.Popen([sys.executable, "-c", {_STUCK!r}])
    print(child.pid)
  """
  assert _launch_code(program, num_processes=1, log_dir=tmp_path) == 0
  (pid,) = map(int, _logs(tmp_path, 1))
  _wait_until(lambda: not _is_running(pid))


def _when_logged(log_dir, act):
  """Starts a thread that calls `act` when both logs have text."""
  last = log_dir / "rank_1.log"

  def wait_and_act():
    _wait_until(lambda: last.exists() and all(_logs(log_dir)))
    act()

  thread = threading.Thread(target=wait_and_act)
  thread.start()
  return thread


def test_sigterm_stops_ranks_immediately(tmp_path):
  """The launcher turns off JAX's SIGTERM handler, which stops no process.

  Rank 1 uses some of `grace_s`.
  """
  program = """
    import os, time, jax, signal
    from ep import launch
    launch.initialize()
    if jax.process_index() == 1:
      def stop(*_):
        time.sleep(0.5)
        print("stopped")
        os._exit(0)
      signal.signal(signal.SIGTERM, stop)
    print(jax.device_count())
    time.sleep(600)
  """
  sent = []

  def send():
    sent.append(time.monotonic())
    os.kill(os.getpid(), signal.SIGTERM)

  thread = _when_logged(tmp_path, send)
  code = _launch_code(program, log_dir=tmp_path, grace_s=10.0)
  thread.join()
  assert time.monotonic() - sent[0] < 5
  assert code == 128 + signal.SIGTERM
  assert _logs(tmp_path) == ["2\n", "2\nstopped\n"]


def test_the_job_continues_when_stdout_is_closed(tmp_path, monkeypatch, capsys):
  """The launcher writes to a pipe to `head`, and reports errors to stderr."""
  program = """
    import os, sys, time
    print("first")
    time.sleep(0.5)
    for i in range(20_000):
      print(i)
    time.sleep(0.5)
    open(os.environ["DONE"] + os.environ["JAX_PROCESS_ID"], "w").close()
    if os.environ["JAX_PROCESS_ID"] == "1":
      sys.exit(3)
  """
  reader, writer = map(os.fdopen, os.pipe(), "rw")
  monkeypatch.setattr(sys, "stdout", writer)
  first = []

  def head():
    first.append(reader.readline())
    reader.close()

  thread = threading.Thread(target=head)
  thread.start()
  done = {"DONE": str(tmp_path / "done_")}
  assert _launch_code(program, log_dir=tmp_path, env=done, grace_s=20.0) == 3
  thread.join()
  assert first == ["first\n"]
  assert all((tmp_path / f"done_{rank}").exists() for rank in range(2))
  assert _logs(tmp_path)[0].endswith("\n19999\n")
  stderr = capsys.readouterr().err
  assert "ep.launch: rank 1 failed with exit code 3" in stderr
  assert "  | 19999\n" in stderr
  with contextlib.suppress(BrokenPipeError):
    writer.close()


def test_a_reader_that_stalls_does_not_stop_the_launcher(tmp_path):
  """The pipe is full when rank 1 fails; the launcher ends rank 0."""
  program = """
import os, pathlib, sys, time
pid = pathlib.Path(sys.argv[1])
if os.environ["JAX_PROCESS_ID"] == "0":
  pid.with_suffix(".draft").write_text(str(os.getpid()))
  print((1 << 20) * "x")
  pid.with_suffix(".draft").rename(pid)
  time.sleep(600)
while not pid.exists():
  time.sleep(0.1)
time.sleep(1)
sys.exit(3)
"""
  flags = ["--num_processes=2", "--grace=0.5", f"--log_dir={tmp_path}"]
  argv = [*flags, _script(tmp_path, program), tmp_path / "pid"]
  launcher = programs.start_launcher(*argv, stdout=subprocess.PIPE)
  _wait_until((tmp_path / "pid").exists)
  pid = int((tmp_path / "pid").read_text())
  _wait_until(lambda: not _is_running(pid))
  output = launcher.communicate()[0].decode()
  assert launcher.returncode == 3
  assert "ep.launch: rank 1 failed with exit code 3" in output


def test_a_huge_log_needs_little_memory(tmp_path):
  """The launcher cuts the line of 100 MB in its report."""
  script = _script(tmp_path, "import os\nos.write(1, bytes(100 << 20))\n1 / 0")
  flags = ["--num_processes=2", f"--log_dir={tmp_path}", str(script)]
  with (tmp_path / "output").open("wb") as output:
    launcher = programs.start_launcher(*flags, stdout=output)
  _, status, usage = os.wait4(launcher.pid, 0)
  launcher.returncode = os.waitstatus_to_exitcode(status)
  assert launcher.returncode == 1
  assert usage.ru_maxrss < 300 << 10  # KiB; JAX has half of it
  text = (tmp_path / "output").read_bytes()[100 << 20 :].decode()
  assert "ZeroDivisionError" in text
  assert max(map(len, text.splitlines())) < 2000


def test_output_that_the_terminal_cannot_encode(monkeypatch):
  """The launcher escapes characters that the terminal cannot encode."""
  program = r"import os; os.write(1, 'a caf\xe9\nand more\n'.encode())"
  terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
  monkeypatch.setattr(sys, "stdout", terminal)
  assert _launch_code(program, num_processes=1) == 0
  assert terminal.buffer.getvalue() == b"a caf\\xe9\nand more\n"


def test_a_flag_starts_more_ranks_than_the_host_can_hold(monkeypatch):
  monkeypatch.setattr(limits, "_RANKS_PER_PROCESSOR", 0)
  with pytest.raises(ValueError, match="can hold 0 such processes"):
    _launch_code("")
  flags = ["--num_processes=1", "--oversubscribe", "-m", "this"]
  assert command.main(flags) == 0


def test_ranks_do_not_outlive_a_launcher_that_is_killed(tmp_path):
  script = _script(tmp_path, f"import os; print(os.getpid()); {_STUCK}")
  flags = ["--num_processes=2", f"--log_dir={tmp_path}"]
  launcher = programs.start_launcher(*flags, script)
  _when_logged(tmp_path, launcher.kill).join()
  assert launcher.wait(timeout=20) == -signal.SIGKILL
  pids = [*map(int, _logs(tmp_path))]
  _wait_until(lambda: not any(map(_is_running, pids)))


def _script(folder, text):
  path = folder / "script.py"
  path.write_text(text)
  return path


def test_the_command_line_takes_a_script_or_a_module(
  tmp_path, monkeypatch, capsys
):
  script = _script(tmp_path, "import sys; print(sys.argv[1:])")
  monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
  for program in ([str(script)], ["-m", "script"]):
    argv = ["--num_processes=1", *program, "--num_processes=9", "-m"]
    assert command.main(argv) == 0
    assert capsys.readouterr().out == "['--num_processes=9', '-m']\n"
  for argv, words in [
    (["--num_processes=1"], "name a program"),
    (["--num_processes=0", "a.py"], "num_processes = 0, but it must be"),
  ]:
    with pytest.raises(SystemExit) as exit:
      command.main(argv)
    assert exit.value.code == 2
    assert words in capsys.readouterr().err


def test_ranks_join_jax_and_end_without_each_other(tmp_path, capsys):
  """After rank 0 dies, rank 1 exits by an exception, and does not await rank 2.

  A failed barrier of JAX stays failed for ranks that reach it later.
  The native library can be loaded before JAX makes its devices.
  """
  program = """
    from ep import launch
    launch.initialize()
    launch.initialize()
    import jax, os, pathlib, signal, sys, time
    jax.config.update("jax_platforms", "cpu")  # there are no devices yet
    assert not jax._src.xla_bridge.backends_are_initialized()
    from ep._src.native import ffi
    ffi.library("host")
    rank, client = jax.process_index(), jax._src.distributed.global_state.client
    print(rank, jax.local_device_count(), jax.device_count())
    if rank == 0:
      client.blocking_key_value_get("failed", 20_000)
    try:
      client.wait_at_barrier("of 0", 20_000, process_ids=[0])
    except jax.errors.JaxRuntimeError as e:
      print(str(e).partition(" (")[0])
    if rank == 1:
      client.key_value_set("failed", "")
    if rank == 0:
      os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1)
    pid = pathlib.Path(sys.argv[1])
    if rank == 1:
      pid.write_text(str(os.getpid()))
      raise ValueError("as planned")
    while not pid.exists() or not pid.read_text():
      time.sleep(0.1)
    while pathlib.Path("/proc", pid.read_text()).exists():
      time.sleep(0.1)
    print("alive")
  """
  options = dict(num_processes=3, devices_per_process=2, grace_s=20.0)
  pid = str(tmp_path / "pid")
  code = _launch_code(program, pid, log_dir=tmp_path, **options)
  assert code == 128 + signal.SIGKILL
  refused = "INVALID_ARGUMENT: A non-participating task\n"
  logs = _logs(tmp_path, 3)
  assert logs[0] == f"0 2 6\n{refused}"
  assert logs[1].startswith(f"1 2 6\n{refused}")
  assert "ValueError: as planned" in logs[1]
  assert logs[2] == f"2 2 6\n{refused}alive\n"
  assert capsys.readouterr().err == ""


def test_without_a_coordinator_no_rank_waits_for_it(
  tmp_path, monkeypatch, capsys
):
  broken = _script(tmp_path, "raise SystemExit('no jaxlib here')")
  monkeypatch.setattr(_launch, "_COORDINATOR", str(broken))
  assert _launch_code(_STUCK, log_dir=tmp_path) == 1
  out = capsys.readouterr().out
  assert "coordinator failed with exit code 1" in out
  assert "  | no jaxlib here" in out


def test_running_the_launcher_as_a_module_gives_no_warning(tmp_path):
  program = """
from ep import launch
import ep
assert ep.launch is launch and not hasattr(ep, "lunch")
"""
  process = programs.start_launcher(
    "--num_processes=1",
    _script(tmp_path, program),
    env={"PYTHONWARNINGS": "error"},
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
  )
  assert process.communicate() == (b"", b"")
  assert process.returncode == 0


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
  sentence = (
    f"ep needs jax 0.10.2 or newer, but {found} is installed;"
    ' run: pip install --upgrade "jax>=0.10.2"'
  )
  for argv, lines in [
    (["-c", "import ep"], None),  # an ImportError
    (["-m", "ep", "info"], 1),
    (["-m", "ep", "launch", "--help"], 1),
  ]:
    process = _python(argv, {"PYTHONPATH": path}, stderr=subprocess.PIPE)
    errors = process.communicate()[1].decode().splitlines()
    assert process.returncode == 1
    assert f"ImportError: {sentence}" in errors[-1]
    assert lines in (None, len(errors)), errors
