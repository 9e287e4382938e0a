# SPDX-License-Identifier: Apache-2.0
"""ep.trace reads JAX's profiles, with backend "xla".

Profiles of GPUs and TPUs are synthetic. Their names are from programs that
XLA's compilers made, and from public profiles of a GPU and a TPU.
"""

import dataclasses
import functools
import json
import time
import types

import jax
import numpy as np
import pytest

from cases import Case
from conftest import make_mesh
import ep
from ep._src.backends.xla import profile
from ep._tools.trace import explain, trace
from groups import bootstrap, of_one_process, spec
from op_functions import after, Ops

LATE_S = 0.05
LAYERS = "a", "b"


@pytest.fixture(scope="module")
def step():
  """Returns a program of two layers; a rank may be late at one ep_combine."""
  group = bootstrap(make_mesh({"ep": 4}), backend="xla")
  configs = [ep.EpLayerConfig(group, name=name) for name in LAYERS]

  def nap(name, rank, late_rank, late_layer):
    if (int(rank), name) == (int(late_rank), LAYERS[int(late_layer)]):
      time.sleep(LATE_S)

  def sleep(x, late, name):
    return after(functools.partial(nap, name), x, *late)

  def forward(tokens, topk_idx, weights, late):
    for config in configs:
      ops = Ops(ep.ep_prepare(config, topk_idx))
      recv, recv_weights = ops.dispatch(tokens, weights)
      recv = jax.shard_map(
        functools.partial(sleep, name=config.name),
        in_specs=(spec(config), jax.P()),
        out_specs=spec(config),
        check_vma=False,
      )(recv, late)
      tokens = ops.combine(recv, recv_weights)
    return tokens

  case = Case(configs[0])
  args = [case.put(x) for x in (case.tokens(), case.topk_idx, case.weights())]
  program = jax.jit(forward)

  def run(late=(-1, -1), num_steps=8):
    late = np.array(late, np.int32)
    with jax.set_mesh(group.mesh):
      for _ in range(num_steps):
        jax.block_until_ready(program(*args, late))

  run(num_steps=1)
  run.program, run.group = program, group
  return run


@pytest.mark.parametrize("rank", range(4))
def test_a_late_rank_is_blamed_in_the_same_program(step, folder, rank):
  path = folder / "steps.json"
  with ep.trace(step.group, path):
    step((rank, rank % 2))
  assert step.program._cache_size() == 1
  found = ep.explain(path)
  blame, *_ = found.blames  # A busy machine may delay another rank.
  assert (blame.rank, blame.layer) == (rank, LAYERS[rank % 2])
  assert blame.op == "ep_combine"
  assert blame.late_s > 0.8 * LATE_S
  assert "its rows are not known: it computed longer before" in str(found)
  assert found.program.startswith("jit_forward#")
  assert found.num_steps == 7


def test_equal_ranks_are_not_blamed(step, folder):
  path = folder / "steps.json"
  with ep.trace(step.group, path):
    step()
  found = ep.explain(path)
  assert not found.blames
  exchanges = trace.load(path)["exchanges"]
  assert {e["layer"] for e in exchanges} == {*LAYERS}
  assert {e["step"] for e in exchanges} == {*range(-8, 0)}
  for op in "ep_prepare", "ep_dispatch", "ep_combine":
    assert [e["op"] for e in exchanges].count(op) == 16
  for e in exchanges:
    assert min(e["ended"]) >= max(e["came"]) - 1e-3


def test_a_profile_that_runs_already_is_kept(step, folder, tmp_path):
  with jax.profiler.trace(tmp_path):
    with pytest.raises(RuntimeError, match="Only one profile"):
      with ep.trace(step.group, folder / "steps.json"):
        pytest.fail("the context has begun")
  with ep.trace(step.group, folder / "steps.json"):
    step(num_steps=3)
  assert ep.explain(folder / "steps.json").num_steps == 2


def encoded(**fields):
  """Serializes a protocol buffer; `_7` is the field 7."""
  message = b""
  for key, values in fields.items():
    for value in values if isinstance(values, list) else [values]:
      number = int(key[1:]) << 3
      if isinstance(value, int):
        message += varint(number) + varint(value)
      else:
        data = value.encode() if isinstance(value, str) else value
        message += varint(number | 2) + varint(len(data)) + data
  return message


def varint(value):
  more, low = divmod(value, 128)
  return bytes([low | 128]) + varint(more) if more else bytes([low])


def hlo(*computations):
  """Serializes programs of (id, name, opcode, op_name, operands, calls)."""
  return encoded(
    _1=encoded(
      _1="jit_step",
      _3=[
        encoded(
          _5=number,
          _6=body[-1][0],
          _2=[
            encoded(_1=name, _2=opcode, _7=encoded(_2=op_name), _9=0, _35=key,
                    _36=operands, _38=calls)
            for key, name, opcode, op_name, operands, calls in body
          ],
        )
        for number, body in enumerate(computations)
      ],
      _6=len(computations) - 1,
    )
  )  # fmt: skip


def plane(name, lines=(), metadata=None):
  """Serializes a plane with lines of (event, begin_us, end_us, stats)."""
  names, stats = {"": 0}, {"": 0}

  def number(of, name):
    return of.setdefault(name, len(of))

  def stat(name, value):
    kind = "_5" if isinstance(value, str) else "_3"
    if isinstance(value, bytes):
      kind = "_6"
    return encoded(_1=number(stats, name), **{kind: value})

  written = [
    encoded(_2=line, _4=[
      encoded(_1=number(names, event), _2=10**6 * begin,
              _3=10**6 * (end - begin),
              _4=[stat(*item) for item in more.items()])
      for event, begin, end, more in events
    ])
    for line, events in dict(lines).items()
  ]  # fmt: skip
  details = {
    name: [stat(*item) for item in more.items()]
    for name, more in (metadata or {}).items()
  }
  for event in details:
    number(names, event)
  return encoded(
    _2=name,
    _3=written,
    _4=[
      encoded(_1=i, _2=encoded(_1=i, _2=n, _5=details.get(n, [])))
      for n, i in names.items()
    ],
    _5=[encoded(_1=i, _2=encoded(_1=i, _2=n)) for n, i in stats.items()],
  )


@dataclasses.dataclass(frozen=True)
class Device:
  local_hardware_id: int
  platform: str
  process_index: int = 0


def read(platform, *planes):
  """Returns the exchanges of two devices, through the files of `ep.trace`."""
  devices = [Device(0, platform), Device(1, platform)]
  mesh = types.SimpleNamespace(
    axis_names=("ep",),
    shape={"ep": 2},
    devices=np.array(devices),
    local_devices=devices,
  )
  group = types.SimpleNamespace(mesh=mesh, axis_name="ep")
  space = encoded(_1=list(planes))
  head = dict(process=0, ep_size=2, processes=[0, 0])
  lines = [head, *profile.exchanges(space, group), dict(lost=0)]
  merged = trace.merge(["".join(json.dumps(x) + "\n" for x in lines)])
  return merged["exchanges"]


SCOPE = "jit(step)/shard_map/ep_{}[moe_3]/cond/branch_0_fun/{}"
STEPS_US = range(0, 240_000, 20_000)


def times_ms(exchanges, op):
  """Returns arrivals and end of an op, since the first rank's arrival."""
  for e in exchanges:
    if e["op"] == op:
      times = np.array([*e["came"], e["ended"][0]]) - min(e["came"])
      yield (times * 1e3).round(1).tolist()


@of_one_process
def test_a_profile_of_gpus():
  """XLA:GPU drops the metadata of a ragged all-to-all, and has streams."""
  gather = SCOPE.format("dispatch", "gather")
  combine = SCOPE.format("combine", "gather")
  sent = "ragged-all-to-all", "ragged-all-to-all"
  program = hlo(
    [
      (9, "param_0.1", "parameter", "", [], []),
      (10, f"{sent[0]}.4", sent[1], "", [9], []),
    ],
    [
      (11, "param_0.2", "parameter", "", [], []),
      (12, "gather.8", "gather", combine, [11], []),
      (13, "add.9", "add", "jit(step)/add", [12], []),
    ],
    [
      (20, "loop_gather_fusion", "gather", gather, [], []),
      (21, "bitcast.22.0", "bitcast", "", [20], []),
      (22, f"{sent[0]}-start", "async-start", "", [21], [0]),
      (23, f"{sent[0]}-done", "async-done", "", [22], []),
      (24, "loop_multiply_fusion", "multiply", "jit(step)/mul", [23], []),
      (25, "all-reduce-start", "all-reduce-start", "jit(step)/psum", [24], []),
      (26, "all-reduce-done", "all-reduce-done", "jit(step)/psum", [25], []),
      (27, f"{sent[0]}.2.2", sent[1], "", [26], []),
      (28, "loop_add_fusion", "fusion", "jit(step)/add", [27], [1]),
    ],
  )

  def kernels(rank):
    """Rank 1 is 8 ms late at dispatch, which has a copy and a kernel."""

    def kernel(op, begin, end, name="kernel"):
      return (
        name,
        begin,
        end,
        dict(hlo_op=op, hlo_module="jit_step", program_id=15),
      )

    late = 8000 * rank
    main, other = [], []
    # Rank 0 has the end of a launch that began before the profile.
    for at in ([-20_000] if rank == 0 else []) + [*STEPS_US]:
      at += 20_000
      launch = [
        kernel("loop_gather_fusion", at, at + 100),
        kernel("loop_multiply_fusion", at + 9000, at + 9100),
        kernel("all-reduce-start", at + 9200, at + 9300),
        kernel("ragged-all-to-all.2.2", at + 9400, at + 9900),
        kernel("loop_add_fusion", at + 9950, at + 9990),
      ]
      if (rank, at) == (0, 80_000):
        del launch[1]  # Profiles of GPUs sometimes lack a kernel.
      main += launch[0 if at else 2 :]
      if at:
        other += [
          kernel("ragged-all-to-all.4", at + 200 + late, at + 220 + late),
          kernel("ragged-all-to-all.4", at + 300 + late, at + 8900, "nccl"),
        ]
    return {"Stream #13(Compute)": main, "Stream #14(MemcpyD2H,Compute)": other}

  exchanges = read(
    "gpu",
    plane("/host:metadata", metadata={"jit_step(15)": {"Hlo Proto": program}}),
    # Threads that launch kernels have the same statistics.
    plane("/host:CPU", {"Host Threads/7": kernels(1)["Stream #13(Compute)"]}),
    plane("/device:GPU:0", kernels(0)),
    plane("/device:GPU:1", kernels(1)),
  )
  assert {e["op"] for e in exchanges} == {"ep_dispatch", "ep_combine"}
  assert [*times_ms(exchanges, "ep_dispatch")] == 12 * [[0.0, 8.0, 8.7]]
  assert [*times_ms(exchanges, "ep_combine")] == 12 * [[0.0, 0.0, 0.5]]
  assert {e["step"] for e in exchanges} == {*range(-12, 0)}
  (blame,) = explain.explain_exchanges(exchanges).blames
  assert (blame.rank, blame.layer, blame.op) == (1, "moe_3", "ep_dispatch")


@of_one_process
def test_a_profile_of_tpus():
  """XLA:TPU turns the gather of `ep_prepare` into an all-reduce."""
  program = hlo(
    [
      (10, "fusion.2", "add", "jit(step)/add", [], []),
      (11, "ragged_all_to_all.40", "ragged-all-to-all",
       SCOPE.format("combine", "ragged_all_to_all"), [10], []),
    ],
    [
      (20, "all-reduce.2", "all-reduce", "", [], []),
      (21, "reshape.196", "reshape",
       SCOPE.format("prepare", "all_gather"), [20], []),
      (22, "ragged-all-to-all-start", "ragged-all-to-all-start",
       SCOPE.format("dispatch", "ragged_all_to_all"), [21], []),
      (23, "ragged-all-to-all-done", "ragged-all-to-all-done", "", [22], []),
      (24, "while.1", "while", "", [23], [0]),
    ],
  )  # fmt: skip

  def lines(rank):
    """Rank 0 is 8 ms late at `ep_combine`, which runs twice in a loop."""
    launches, ops = [], []

    def add(name, begin, end):
      ops.append((f"%{name} = f32[8]{{0}} ...", begin, end, {}))

    for at in STEPS_US:
      launches.append(("jit_step(12190760917235803885)", at, at + 19_000, {}))
      add("all-reduce.2", at + 100, at + 200)
      add("ragged-all-to-all-start", at + 300, at + 310)
      add("ragged-all-to-all-done", at + 500, at + 600)
      add("while.1", at + 600, at + 18_800)
      for turn in at + 600, at + 9600:
        late = 8000 * (1 - rank)
        add("fusion.2", turn, turn + 100 + late)
        add("ragged_all_to_all.40", turn + 200 + late, turn + 8900)
    steps = [(str(i), at, at + 19_000, {}) for i, at in enumerate(STEPS_US)]
    return {"Steps": steps, "XLA Modules": launches, "XLA Ops": ops}

  exchanges = read(
    "tpu",
    plane("/device:TPU:0", lines(0)),
    plane("/device:TPU:1", lines(1)),
    plane(
      "/host:metadata",
      metadata={"jit_step(12190760917235803885)": {"hlo_proto": program}},
    ),
  )
  assert [*times_ms(exchanges, "ep_prepare")] == 12 * [[0.0, 0.0, 0.1]]
  assert [*times_ms(exchanges, "ep_dispatch")] == 12 * [[0.0, 0.0, 0.3]]
  assert [*times_ms(exchanges, "ep_combine")] == 24 * [[8.0, 0.0, 8.7]]
  found = explain.explain_exchanges(exchanges)
  assert {(b.rank, b.op) for b in found.blames} == {(0, "ep_combine")}
  assert found.num_steps == 11
