# SPDX-License-Identifier: Apache-2.0
"""Between CPUs of two hosts, "xla" works, and "host" says why it does not.

Each host runs this file as a program.
"""

import hosts


def main():
  # These modules make this process a rank.
  from cases import Case
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


def test_xla_is_right_and_host_says_why_not(tmp_path):
  with hosts.two_hosts() as both:
    env = {"EP_TEST_BACKEND": "xla"}
    ranks = hosts.start_ranks(both, tmp_path, __file__, devices=2, env=env)
    codes = [rank.wait(200) for rank in ranks]
  for rank, code in enumerate(codes):
    output = (tmp_path / f"rank_{rank}.log").read_text()
    assert code == 0, output
    assert "picked xla" in output
    assert "refused ep_bootstrap: " in output
    assert f"processes {rank} and {1 - rank} run on different hosts" in output
    assert "checked" in output


if __name__ == "__main__":
  main()
