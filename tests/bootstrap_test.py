"""ep_bootstrap, ep_finalize and EpLayerConfig: what they take and refuse."""

import os
import secrets
import socket

import jax.numpy as jnp
import pytest

from cases import (
  BACKEND,
  bootstrap,
  Case,
  E,
  GPU,
  K,
  layer,
  MESHES,
  there_and_back,
)
from conftest import make_mesh
import ep

OTHER_BACKEND = "host" if GPU else "nccl"


@pytest.mark.parametrize(
  "options, words",
  [
    (dict(axis_name="expert"), ["axis_name", "'expert'", "dp", "ep"]),
    (dict(data_axes=("tp",)), ["data_axes", "tp", "dp"]),
    (dict(data_axes=("ep",)), ["data_axes", "ep"]),
    (dict(data_axes=("dp", "dp")), ["data_axes"]),
    (dict(num_experts=E + 1), ["num_experts", "9", "2"]),
    (dict(num_experts=0), ["num_experts", "0"]),
    (dict(top_k=E + 1), ["top_k", "9", "8"]),
    (dict(top_k=0), ["top_k", "0"]),
    (dict(max_tokens_per_rank=0), ["max_tokens_per_rank", "0"]),
    (dict(hidden_dim=0), ["hidden_dim", "0"]),
    (dict(alignment=0), ["alignment", "0"]),
    (
      dict(recv_capacity_per_rank=15, alignment=4),
      ["recv_capacity_per_rank", "15", "16"],
    ),
    (
      dict(recv_capacity_per_rank=18, alignment=4),
      ["recv_capacity_per_rank", "18", "multiple", "4"],
    ),
    (dict(recv_capacity_per_rank=0), ["recv_capacity_per_rank", "0"]),
    (dict(max_token_dtype=jnp.int32), ["max_token_dtype", "int32"]),
    (dict(max_token_dtype=jnp.float64), ["max_token_dtype", "float64"]),
    (dict(overflow="wrap"), ["overflow", "wrap", "error", "drop"]),
    (dict(backend="gloo"), ["backend", "gloo", "host"]),
    (dict(backend=OTHER_BACKEND), ["backend", OTHER_BACKEND, "cpu"]),
    (dict(timeout_s=0), ["timeout_s", "0"]),
    (dict(max_num_sms=-1), ["max_num_sms", "-1"]),
  ],
  ids=str,
)
def test_refuses(options, words):
  """With a message that says what was expected and what came."""
  mesh = make_mesh({"dp": 2, "ep": 2})
  with pytest.raises((ValueError, TypeError)) as error:
    bootstrap(mesh, **options)
  for word in ["ep_bootstrap", *words]:
    assert word in str(error.value)


@pytest.mark.parametrize(
  "options, words",
  [
    (dict(top_k=E + 1), ["top_k", "9", "8"]),
    (dict(top_k=0), ["top_k", "0"]),
    (dict(alignment=-1), ["alignment", "-1"]),
    (dict(alignment=4, recv_capacity_per_rank=4), ["capacity", "4", "8"]),
    (dict(alignment=4, recv_capacity_per_rank=10), ["capacity", "10", "4"]),
    (dict(overflow="wrap"), ["overflow", "wrap", "error", "drop"]),
    (dict(tail="nan"), ["tail", "nan", "zero", "unspecified"]),
  ],
  ids=str,
)
def test_a_layer_refuses(options, words):
  with pytest.raises((ValueError, TypeError)) as error:
    layer(name="moe_3", **options)
  for word in ["EpLayerConfig", "moe_3", *words]:
    assert word in str(error.value)


def test_a_refusal_leaves_nothing_behind():
  mesh = make_mesh({"ep": 4})
  with pytest.raises(ValueError, match="overflow"):
    bootstrap(mesh, name="reused", overflow="wrap")
  ep.ep_finalize(bootstrap(mesh, name="reused"))


def test_a_live_name_is_taken():
  mesh = make_mesh({"ep": 4})
  with (
    bootstrap(mesh, name="taken"),
    pytest.raises(ValueError, match="taken"),
  ):
    bootstrap(mesh, name="taken")


def test_a_finalized_name_is_free():
  for _ in range(2):
    with bootstrap(make_mesh({"ep": 4}), name="again") as group:
      case = Case(ep.EpLayerConfig(group))
      case.check(there_and_back, case.tokens(), case.weights())


def test_a_name_taken_leaves_its_owner_whole():
  mesh = make_mesh({"ep": 4})
  with bootstrap(mesh, name="owner") as group:
    with pytest.raises(ValueError, match="owner"):
      bootstrap(mesh, name="owner")
    case = Case(ep.EpLayerConfig(group))
    case.check(there_and_back, case.tokens(), case.weights())


@pytest.mark.parametrize("mesh", MESHES)
def test_a_group_says_what_it_is(mesh):
  axes = MESHES[mesh]
  with bootstrap(make_mesh(axes)) as group:
    assert group.axis_name == "ep"
    assert group.data_axes == tuple(axis for axis in axes if axis != "ep")
    assert group.ep_size == axes["ep"]
    assert group.num_experts == E
    assert group.num_local_experts == E // axes["ep"]
    assert group.top_k == K
    assert group.backend == (BACKEND or ("nccl" if GPU else "host"))
    hash(group)


def test_groups_are_named_apart():
  mesh = make_mesh({"ep": 4})
  with bootstrap(mesh) as a, bootstrap(mesh) as b:
    assert a.name != b.name


def test_finalize_twice_does_nothing():
  group = bootstrap(make_mesh({"ep": 4}))
  ep.ep_finalize(group)
  ep.ep_finalize(group)


@pytest.mark.skipif(
  GPU or BACKEND == "xla", reason="only host listens on sockets of its own"
)
def test_an_address_that_is_taken_is_not_used(monkeypatch):
  name = f"test-{os.getpid()}"
  names = iter([name, name, f"{name}-free"])
  monkeypatch.setattr(secrets, "token_hex", lambda _: next(names))
  with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as taken:
    taken.bind(f"\0ep_ffi-{name}")
    with bootstrap(make_mesh({"ep": 4})) as group:
      assert not list(names)
      case = Case(ep.EpLayerConfig(group))
      case.check(there_and_back, case.tokens(), case.weights())


def test_many_groups_come_and_go():
  for _ in range(20):
    ep.ep_finalize(bootstrap(make_mesh({"ep": 4})))
