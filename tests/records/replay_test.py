# SPDX-License-Identifier: Apache-2.0
"""ep.replay reads a record; errors name the faults of damaged files."""

import zipfile

import numpy as np
import pytest

from conftest import assert_shards_equal
import ep
from ep._tools.records import files
from groups import E, K, layer


def calls(steps, ranks=(0, 1), **changes):
  """Yields calls of two ranks, whose ids encode step and rank."""
  for step in steps:
    for rank in ranks:
      yield files.Call(
        **dict(
          layer="moe",
          num_ranks=2,
          calls_per_step=1,
          rank=rank,
          step=step,
          call=0,
          site="jit_step#0/1",
          run=step,
          topk_idx=np.full((2, K), 10 * step + rank),
        )
        | changes
      )


def test_ranks_may_run_independent_calls_in_any_order(tmp_path):
  """Calls match by site and run, and rank 0 determines the order of steps."""
  rows = [
    call._replace(site=site, step=step, run=0, topk_idx=call.topk_idx + add)
    for rank, order in [(0, "ab"), (1, "ba")]
    for step, site in enumerate(order)
    for add in [dict(a=100, b=200)[site]]
    for call in calls([0], [rank])
  ]
  files.Writer(tmp_path, 0).write(rows)
  record = ep.replay(tmp_path)
  assert record.topk_idx("moe", 0)[:, 0].tolist() == [100, 100, 101, 101]
  assert record.topk_idx("moe", 1)[:, 0].tolist() == [200, 200, 201, 201]


def test_steps_may_differ_in_their_tokens(tmp_path):
  """Calls with and without weights may mix; ranks of a step must agree."""
  other, weights = np.full((1, K), 7), np.ones((2, K), np.float32)
  files.Writer(tmp_path, 0).write(
    [
      *calls([0]),
      *calls([1], topk_idx=other),
      *calls([2], topk_weights=weights),
      *calls([3], [0]),
      *calls([3], [1], topk_idx=other),
    ]
  )
  record = ep.replay(tmp_path)
  assert [len(record.topk_idx("moe", step)) for step in range(3)] == [4, 2, 4]
  with pytest.raises(ValueError, match="ranks differ in shape in step 3"):
    record.topk_idx("moe", 3)
  assert record.topk_weights("moe", 2).shape == (4, K)
  with pytest.raises(ValueError, match="has no moe.topk_weights"):
    record.topk_weights("moe", 0)


def test_bad_files_are_errors(tmp_path):
  with pytest.raises(ValueError, match="holds no record"):
    ep.replay(tmp_path)
  for process, ranks in (0, [0]), (1, [1]):
    writer = files.Writer(tmp_path, process)
    writer.write(calls([0, 1], ranks))
    writer.write(calls([2], ranks))
  first, last = tmp_path / "00000-000000.npz", tmp_path / "00001-000001.npz"
  whole = first.read_bytes()
  (tmp_path / "00001-000002.npz.part").write_bytes(whole[:100])  # After a kill.
  assert ep.replay(tmp_path).steps("moe") == (0, 1, 2)
  for broken, words in [
    (whole[: len(whole) // 2], "truncated or damaged"),
    (b"", "truncated or damaged"),
    (
      whole.replace(
        "ep.record 1".encode("utf-32-le"), "ep.record 2".encode("utf-32-le")
      ),
      "truncated",
    ),
    (b"step,layer,rank\n0,moe,1\n", "was not written by ep.record"),
  ]:
    first.write_bytes(broken)
    with pytest.raises(ValueError, match=f"{first.name} .*{words}.*; remove"):
      ep.replay(tmp_path)
  np.savez(first, weights=np.zeros(3))
  with pytest.raises(ValueError, match=f"{first.name} was not written by"):
    ep.replay(tmp_path)
  np.savez_compressed(first, **np.load(last))  # it could expand to any size
  with pytest.raises(ValueError, match=f"{first.name} was not written by"):
    ep.replay(tmp_path)
  first.unlink()
  first.mkdir()
  with pytest.raises(ValueError, match="cannot read .*: Is a .*; make it read"):
    ep.replay(tmp_path)
  first.rmdir()
  np.savez(first, format="ep.record 1")
  with zipfile.ZipFile(first, "a") as archive:
    archive.writestr("moe.rank.npy", b"no array")
  with pytest.raises(ValueError, match="'moe': its columns differ"):
    ep.replay(tmp_path)
  np.savez(first, format="ep.record 2")
  with pytest.raises(ValueError, match="another format than 'ep.record 1'"):
    ep.replay(tmp_path)
  first.write_bytes(whole)
  last.unlink()
  record = ep.replay(tmp_path)
  assert record.steps("moe") == (0, 1)
  with pytest.raises(ValueError, match=r"step 2 is not there of ranks \[1\]"):
    record.topk_idx("moe", 2)
  for step, call, words in [
    (3, 0, "3 steps were recorded"),
    (-1, 0, "step = -1"),
    (0, 1, "calls"),
  ]:
    with pytest.raises(ValueError, match=words):
      record.topk_idx("moe", step, call)
  with pytest.raises(ValueError, match=r"no layer 'other', but \['moe'\]"):
    record.steps("other")
  files.Writer(tmp_path, 2).write(calls([0], [1]))
  with pytest.raises(ValueError, match="a call of a rank twice"):
    ep.replay(tmp_path)
  files.Writer(tmp_path, 3).write(calls([0], num_ranks=3))
  with pytest.raises(ValueError, match=r"\[\(2, 1\), \(3, 1\)\]; they are of"):
    ep.replay(tmp_path)


@pytest.mark.parametrize(
  "column, change, words",
  [
    ("topk_idx", lambda x: x.astype(float), "moe.topk_idx is float64"),
    ("topk_idx", lambda x: x[:-1], r"\[3, 2, 3\], which .* for 4 calls"),
    ("topk_idx", lambda x: x[:, 0, 0], r"is int64 \[4\], which"),
    ("topk_idx", lambda x: x + 2**32, "has ids in .*, but valid ids are -1..7"),
    ("topk_idx", lambda x: x + E, "but valid ids are -1..7"),
    ("step", lambda x: x + 2**30, "not there of ranks"),
    ("step", lambda x: x + 2**40, "its columns differ"),
    ("site", lambda x: np.zeros(len(x), "M8[s]"), "its columns differ"),
    ("num_ranks", lambda _: np.int32(2**31 - 1), r"of ranks \[2, 3, 4, "),
    ("calls_per_step", lambda _: np.int32(2**31 - 1), None),
    ("run", lambda x: x + 2**62, None),
  ],
)
def test_contents_that_were_changed(column, change, words, tmp_path):
  """Wrong values in a file neither allocate much memory nor create choices."""
  few = (call._replace(topk_idx=call.topk_idx % E) for call in calls([0, 1]))
  files.Writer(tmp_path, 0).write(few)
  (path,) = tmp_path.iterdir()
  arrays = dict(np.load(path))
  column = f"moe.{column}"
  np.savez(path, **arrays | {column: change(arrays[column])})

  def replayed():
    return ep.replay(tmp_path).forced_idx(layer(), 1)

  if words is None:
    assert_shards_equal(
      replayed(), arrays["moe.topk_idx"][2:].reshape(4, K).astype(np.int32)
    )
  else:
    with pytest.raises(ValueError, match=f"(?i)replay.*{words}"):
      replayed()


def test_a_replay_is_asked_and_shown(tmp_path):
  files.Writer(tmp_path, 0).write([*calls([0, 1]), *calls([2], [0])])
  record = ep.replay(tmp_path)
  assert repr(record) == (
    f"<ep.Replay of {tmp_path}, with these complete steps: {{'moe': 2}}>"
  )
  for args, words in [
    (("moe", 0.0), "step = 0.0 is a float"),
    (("moe", 0, "0"), "call = '0' is a str"),
    ((3, 0), "layer is a int"),
  ]:
    with pytest.raises(TypeError, match=words):
      record.topk_idx(*args)


def test_a_record_does_not_fit_every_layer(tmp_path):
  files.Writer(tmp_path, 0).write([*calls([0])])
  record = ep.replay(tmp_path)
  with pytest.raises(ValueError, match="has 3 choices .* top_k = 2"):
    record.forced_idx(layer(top_k=2), 0)
  files.Writer(tmp_path, 1).write(calls([1], topk_idx=np.zeros((1, K), int)))
  with pytest.raises(ValueError, match="cannot be split over 4 ranks"):
    ep.replay(tmp_path).forced_idx(layer(), 1)
  with pytest.raises(TypeError, match="layer is a str"):
    record.forced_idx("moe", 0)


def test_one_of_two_writers_has_the_folder(tmp_path):
  """A second writer is refused before and after the first one has written."""
  first = files.Writer(tmp_path, 0)
  for _ in range(2):
    with pytest.raises(ValueError, match="holds a record already"):
      files.Writer(tmp_path, 0)
    first.write(calls([0]))
  files.Writer(tmp_path, 1).write(calls([0]))
