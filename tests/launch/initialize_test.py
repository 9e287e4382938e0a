# SPDX-License-Identifier: Apache-2.0
"""`ep.launch.initialize` joins ranks of clusters, which these tests imitate.

Two processes get the variables that JAX reads on a cluster. JAX takes further
values from Python packages, which have imitations here.
"""

import contextlib
import os
import re
import sys

import pytest

from ep import launch
import hosts
import jobs
import programs


@pytest.fixture(autouse=True)
def environment_without_a_launcher(monkeypatch):
  """Bazel runs this file under the launcher."""
  for name in programs.OF_A_RANK:
    monkeypatch.delenv(name, raising=False)


_PROGRAM = """
import sys
import ep.launch
hooks = sys.excepthook, sys.exit
ep.launch.initialize()
assert hooks == (sys.excepthook, sys.exit)
import jax
from jax.experimental import multihost_utils
rank, ranks = jax.process_index(), jax.process_count()
everyone = multihost_utils.process_allgather(rank).tolist()
sys.stderr.write(f"rank {rank} of {ranks}: {everyone}\\n")  # Gloo uses stdout
"""


def _run(folder, program, hosts, **options):
  """Runs a program on hosts, whose ranks must exit with 0; returns the logs."""
  job = jobs.Plain(folder, "-c", program, hosts=hosts, **options)
  with contextlib.closing(job):
    codes = job.codes(100)
  logs = [*map(job.log, job.ranks)]
  assert not any(codes), logs
  return logs


def _check(folder, hosts=(jobs.ThisHost,) * 2, **options):
  for rank, log in enumerate(_run(folder, _PROGRAM, hosts, **options)):
    assert f"rank {rank} of 2: [0, 1]\n" in log, log


def _slurm(rank):
  return {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_NODELIST": "localhost",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": str(rank),
    "SLURM_LOCALID": str(rank),
  }


def _open_mpi_4(rank):
  return {
    "OMPI_MCA_orte_hnp_uri": "1314521088.0;tcp://127.0.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": str(rank),
    "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
  }


def _mpich(rank):
  return {"PMI_SIZE": "2", "PMI_RANK": str(rank)}


def _open_mpi_5(rank):
  variables = _open_mpi_4(rank)
  del variables["OMPI_MCA_orte_hnp_uri"]
  return variables | {"PMI_RANK": str(rank)}  # for the imitation of mpi4py


def _tpu(folder):
  """Lets JAX assume that this machine has a TPU."""
  library = folder / "libtpu.so"
  library.touch()
  return {"JAX_FORCE_TPU_INIT": "1", "TPU_LIBRARY_PATH": str(library)}


def _slice(rank):
  return {
    "TPU_WORKER_HOSTNAMES": "localhost,localhost",
    "TPU_WORKER_ID": str(rank),
    # With no value, JAX would ask the metadata server of the cloud.
    "MEGASCALE_COORDINATOR_ADDRESS": "",
    "MEGASCALE_NUM_SLICES": "",
    "MEGASCALE_SLICE_ID": "",
  }


_MPI4PY = """
import os, socket
class COMM_WORLD:
  Get_rank = staticmethod(lambda: int(os.environ["PMI_RANK"]))
  Get_size = staticmethod(lambda: 2)
  Split_type = staticmethod(lambda kind: COMM_WORLD)
  @staticmethod
  def bcast(value, root):
    return f"{socket.gethostname()}:{os.environ['JAX_COORDINATOR_PORT']}"
COMM_TYPE_SHARED = None
"""


def _path_with(folder):
  return os.pathsep.join([*filter(None, sys.path), str(folder)])


@pytest.mark.parametrize(
  "of_rank", [_slurm, _open_mpi_4, _open_mpi_5, _mpich, _slice]
)
def test_initialize_joins_the_processes_of_a_cluster(tmp_path, of_rank):
  env = dict(JAX_COORDINATOR_PORT=str(programs.free_port()))
  if of_rank in (_open_mpi_5, _mpich):
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py/MPI.py").write_text(_MPI4PY)
    env["PYTHONPATH"] = _path_with(tmp_path)
  if of_rank is _slice:
    env |= _tpu(tmp_path)
  _check(tmp_path, of_rank=of_rank, env=env)


_KUBERNETES = """
from types import SimpleNamespace as Of

class config:
  load_incluster_config = staticmethod(lambda: None)

class client:
  exceptions = Of(ApiException=OSError)

  class CoreV1Api:
    def list_namespaced_pod(self, namespace, field_selector):
      owners = [Of(controller=True, kind="Job")]
      labels = {"job-name": "train-workers-0"}
      pod = Of(labels=labels, owner_references=owners)
      return Of(items=[Of(metadata=pod)])

  class BatchV1Api:
    def read_namespaced_job(self, name, namespace):
      labels = {"jobset.sigs.k8s.io/jobset-name": "train"}
      return Of(metadata=Of(name=name, labels=labels), spec=Of(parallelism=2))
"""
# Kubernetes puts these files into a pod.
_POD = """
mount --bind "$0" /etc/hosts
mount -t tmpfs none /var/run/
mkdir -p /var/run/secrets/kubernetes.io/serviceaccount
echo default >/var/run/secrets/kubernetes.io/serviceaccount/namespace
exec "$@"
"""


class _Pod:
  """A simulated host with the files of a pod."""

  def __init__(self, host, names):
    self._host, self._argv = host, ["sh", "-ec", _POD, str(names)]

  def start(self, argv, **options):
    return self._host.start([*self._argv, *argv], **options)


def test_initialize_joins_the_pods_of_a_jobset(tmp_path):
  """A pod has the names that JobSet gives it."""
  (tmp_path / "kubernetes.py").write_text(_KUBERNETES)
  names = tmp_path / "hosts"
  with hosts.two_hosts() as both:
    lines = ["127.0.0.1 localhost"]
    for index, host in enumerate(both):
      name = f"train-workers-0-{index}"
      lines.append(f"{host.address} {name} {name}.train")
    names.write_text("\n".join(lines))
    _check(
      tmp_path,
      [_Pod(host, names) for host in both],
      of_rank=lambda rank: dict(
        HOSTNAME=f"train-workers-0-{rank}", JOB_COMPLETION_INDEX=str(rank)
      ),
      env=dict(
        KUBERNETES_SERVICE_HOST="10.64.0.99", PYTHONPATH=_path_with(tmp_path)
      ),
    )


_ON_TWO_HOSTS = """
from cases import Case  # makes this process a rank
import ep
from groups import group, layer
from op_functions import everything
for backend in None, "host":
  try:
    with ep.ep_bootstrap(group().mesh, num_experts=4, backend=backend) as new:
      print(f"picked {new.backend}")
  except ValueError as e:
    print(f"refused {e}")
case = Case(layer(), "skewed", whole=True)
case.check(everything, *case.inputs())
print("checked")
"""


def test_between_hosts_xla_is_right_and_host_says_why_not(tmp_path):
  options = dict(devices=2, env={"EP_TEST_BACKEND": "xla"})
  with hosts.two_hosts() as both:
    logs = _run(tmp_path, _ON_TWO_HOSTS, both, **options)
  for rank, log in enumerate(logs):
    assert "picked xla" in log
    words = f"processes {rank} and {1 - rank} run on different hosts"
    assert re.search(rf"refused ep_bootstrap: .*{words}", log), log
    assert "checked" in log


@pytest.mark.parametrize(
  "name",
  ["JAX_NUM_PROCESSES", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "WORLD_SIZE"],
)
def test_initialize_does_not_make_one_process_of_many(monkeypatch, name):
  monkeypatch.setenv(name, "4")
  monkeypatch.setitem(sys.modules, "mpi4py", None)  # it is not installed
  is_mpi = name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
  cure = "install mpi4py, or set" if is_mpi else "set"
  with pytest.raises(
    RuntimeError, match=f"{name} = 4.*; {cure} JAX_COORDINATOR_ADDRESS"
  ):
    launch.initialize()


def test_initialize_refuses_an_address_without_a_port(monkeypatch):
  """JAX would connect to another port, and wait for 300 s."""
  monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
  monkeypatch.setenv("JAX_PROCESS_ID", "1")
  for address in "localhost:65536", "localhost":
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", address)
    with pytest.raises(ValueError, match=f"'{address}', but .* to 65535"):
      launch.initialize()


def test_initialize_does_nothing_alone(monkeypatch):
  hook = sys.excepthook
  launch.initialize()
  monkeypatch.setenv("WORLD_SIZE", "1")
  launch.initialize()
  for name, value in (_slurm(0) | {"SLURM_NTASKS": "1"}).items():
    monkeypatch.setenv(name, value)
  launch.initialize()
  monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "localhost:1")
  monkeypatch.setenv("JAX_NUM_PROCESSES", "1")
  launch.initialize()
  assert sys.excepthook is hook


@pytest.mark.parametrize(
  "provide",
  [
    None,
    "jax_plugins/xla_cuda13/__init__.py",
    "cuda-1.dist-info/entry_points.txt",
  ],
)
def test_a_missing_plugin_is_named(tmp_path, monkeypatch, provide):
  """JAX finds a plugin by its module or by its entry point."""
  if provide:
    (tmp_path / provide).parent.mkdir(parents=True)
    (tmp_path / provide).write_text("[jax_plugins]\ncuda = cuda\n")
  # On this sys.path, Python finds none of the installed plugins.
  monkeypatch.setattr(sys, "path", [str(tmp_path)])
  monkeypatch.delitem(sys.modules, "jax_plugins", raising=False)
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")
  launch.initialize()
  monkeypatch.setenv("JAX_PLATFORMS", "cuda,cpu")
  if provide:
    return launch.initialize()
  with pytest.raises(RuntimeError, match=r"CUDA plugin .*jax_gpu.*cuda13"):
    launch.initialize()
