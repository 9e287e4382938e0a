# SPDX-License-Identifier: Apache-2.0
"""Puts the sources of NCCL EP's kernels together, as NCCL EP 0.2.0 does it.

A source consists of pieces of text and of sizes. The pieces are taken from
NCCL EP's library, because a kernel that is compiled here serves NCCL EP only if
its source is equal to NCCL EP's in each byte.
"""

from __future__ import annotations

import pathlib


class Pieces:
  """The pieces of text in a library."""

  def __init__(self, library: pathlib.Path):
    texts = set(library.read_bytes().split(b"\0"))
    # Code, and no name alone.
    self._pieces = {
      text.decode()
      for text in texts
      if text.isascii() and (b" " in text or b"\n" in text)
    }

  def __call__(self, *words: str) -> str:
    """Returns the pieces that contain these words, one after the other.

    Raises:
      LookupError: a word is in no piece, or in several and equal to none.
    """
    return "".join(map(self._piece, words))

  def _piece(self, word: str) -> str:
    if word in self._pieces:
      return word
    found = [piece for piece in self._pieces if word in piece]
    if len(found) != 1:
      raise LookupError(
        f"{len(found)} texts of libnccl_ep.so contain {word!r}, so it is not"
        " NCCL EP 0.2.0; install nccl-extensions==0.1.0."
      )
    return found[0]


def scan(
  pieces: Pieces, entry: str, sizes: list[object], mask_words: int
) -> str:
  """Returns the source of the kernel that counts and places the choices."""
  return (
    _head(pieces, entry, f"{sizes[0]}, 1")
    + pieces("ht_ep::scan_flat_kernel_param_t", "extern __shared__")
    + pieces("ht_ep::scan_impl_flat")
    + _lines(*sizes[:-1])
    + f"      {sizes[-1]}>(\n"
    + pieces("p.input_routing_map, p.tmp", "<ht_ep::rank_mask_t<")
    + str(mask_words)
    + pieces(
      "(p.token_rank_mask)",
      "p.num_of_tokens_for_experts",
      "p.num_of_tokens_per_rank, p.experts_per_rank,",
      "p.recv_total_counter",
      "p.token_to_recv_slot",
    )
    + ",\n"
    + pieces("p.expert_scan_tmp")
    + f"      reinterpret_cast<{sizes[-1]}"
    + pieces("p.em_padded_out_counts")
    + f"      reinterpret_cast<{sizes[-1]}"
    + pieces("p.em_out_offsets")
    + ");\n}\n"
  )


def dispatch(
  pieces: Pieces,
  entry: str,
  payload: str,
  groups: list[tuple[int, int]],
  ranks: int,
  sizes: list[object],
) -> str:
  """Returns the source of the kernel that sends tokens to ranks.

  Args:
    payload: the type of an element.
    groups: the number of warps of each task, and the first.
    ranks: the ranks that NVLink connects.
    sizes: the constants of the kernel.
  """
  names = (
    "using GIN_GROUP     =",
    "using LSA_G2S_GROUP =",
    "using LSA_S2G_GROUP",
    "using PAD_GROUP",
    "using HEAD_EXTRA_GROUP",
  )
  return (
    pieces('device/ht_ep.cuh"\n')
    + "\n"
    + pieces("using TOKEN_DATA_TYPE")
    + f"{payload};\n"
    + pieces("using SCALE_DATA_TYPE")
    + "uint8_t;\n"
    + pieces("int kSfBytesPerToken =")
    + "0;\n"
    + _groups(pieces, names, groups)
    + pieces("PAD_GROUP::size()", "__global__ void ")
    + f"{entry}(\n"
    + pieces("ht_ep::dispatch_kernel_param_t")
    + str(ranks)
    + pieces("> param) {", "extern __shared__", "ht_ep::dispatch_kernel_impl")
    + _lines("TOKEN_DATA_TYPE", "SCALE_DATA_TYPE", "NCCL_EP_DISP_QUANT_NONE")
    + _lines(*(name.split()[1] for name in names))
    + _lines(*sizes)
    + pieces("kSfBytesPerToken>(param")
    + "}\n"
  )


def combine(
  pieces: Pieces,
  entry: str,
  groups: list[tuple[int, int]],
  ranks: int,
  sizes: list[object],
) -> str:
  """Returns the source of the kernel that sums a token's rows of all ranks.

  The arguments are like those of `dispatch`.
  """
  names = (
    "using LSA_RED_GROUP",
    "using CROSS_LSA_RED_GROUP",
    "using LSA_G2S_GROUP = ",
    "using CROSS_LSA_G2S_GROUP",
    "using GIN_GROUP = ",
  )
  return (
    pieces('device/ht_ep.cuh"\n')
    + "\n"
    + _groups(pieces, names, groups)
    + pieces("LSA_RED_GROUP::size()", "__global__ void ")
    + f"{entry}(\n"
    + pieces("ht_ep::combine_kernel_param_t")
    + str(ranks)
    + pieces("> param) {", "extern __shared__", "ht_ep::combine_kernel_impl")
    + _lines(*(name.split()[1] for name in names))
    + _lines(*sizes[:-1])
    + f"      {sizes[-1]}"
    + pieces(">(param, smem_bytes);\n")
    + "}\n"
  )


def copy(pieces: Pieces, entry: str, bounds: str, sizes: str) -> str:
  """Returns the source of the kernel that copies tokens to their slots."""
  return (
    _head(pieces, entry, bounds)
    + pieces("ht_ep::local_permute_dup_param_t p)", "ht_ep::local_permute_dup<")
    + sizes
    + pieces(
      ">(\n",
      "<uint8_t*>(p.recv_x_em)",
      "p.recv_topk_weights_em",
      "<const uint8_t*>(p.flat_staging)",
      "p.recv_topk_weights_flat",
      "      p.flat2em_slot_map",
      "      p.num_recv_tokens_dev",
      "p.expert_token_offsets",
      "p.per_expert_counts_active",
      "      p.top_k",
      "      p.experts_per_rank",
      "      p.row_bytes",
      "p.caller_num_recv_tokens,",
      "p.recv_scales_em",
      "p.flat_scale_staging",
      "p.scale_row_bytes",
    )
    + "}\n"
  )


def reduce(pieces: Pieces, entry: str, bounds: str, sizes: str) -> str:
  """Returns the source of the kernel that sums a token's rows of one rank."""
  return (
    _head(pieces, entry, bounds)
    + pieces(
      "ht_ep::local_permute_reduce_param_t p)", "ht_ep::local_permute_reduce<"
    )
    + sizes
    + pieces(
      ">(\n",
      "<uint8_t*>(p.flat_staging)",
      "<const uint8_t*>(p.recv_x_em)",
      "      p.flat2em_slot_map",
      "      p.num_recv_tokens_dev",
      "p.em_weights_in",
      "p.flat_weights_out",
      "      p.top_k",
      "      p.row_bytes",
      "p.caller_num_recv_tokens)",
    )
    + "}\n"
  )


def _head(pieces: Pieces, entry: str, bounds: str) -> str:
  return (
    pieces('device/ht_ep.cuh"\n')
    + "\n"
    + pieces('extern "C" __launch_bounds__(')
    + f"{bounds})\n"
    + pieces("__global__ void ")
    + f"{entry}(\n"
  )


def _groups(
  pieces: Pieces, names: tuple[str, ...], groups: list[tuple[int, int]]
) -> str:
  lines = (
    f"{pieces(name)}{warps}, {first}>;\n"
    for name, (warps, first) in zip(names, groups, strict=True)
  )
  return "".join(lines) + "\n"


def _lines(*arguments: object) -> str:
  return "".join(f"      {argument},\n" for argument in arguments)
