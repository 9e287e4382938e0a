# SPDX-License-Identifier: Apache-2.0
"""Which kernels NCCL EP 0.2.0 compiles for a group, by its sizes.

These are decisions of NCCL EP, which depend on sizes, the GPU and NCCL EP's
defaults. A kernel that differs from what NCCL EP will ask for is compiled in
vain, and does no other harm.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from ep._src.backends.nccl import sources

# NCCL EP's defaults: the thread blocks of the kernels that communicate, and the
# stages of their buffers; a combine has stages for what comes and what goes.
_BLOCKS = 16
_DISPATCH_STAGES = 12
_COMBINE_STAGES = 12, 2
_COMBINE_STAGES_OF_TEAMS = 4, 2
_REDUCING_WARPS = 4
_LAYOUT = "NCCL_EP_LAYOUT_RANK_MAJOR"

# NCCL's name of a dtype, NCCL EP's tag, and NCCL's number.
_DTYPES = {
  "float32": ("ncclFloat32", "_tfp32", 7),
  "float16": ("ncclFloat16", "_tfp16", 6),
  "bfloat16": ("ncclBfloat16", "_tbf16", 9),
}


@dataclasses.dataclass(frozen=True)
class Gpu:
  """Describes a GPU, as far as kernels depend on it."""

  sm: int  # the compute capability, such as 90
  num_sms: int
  shared_bytes: int  # of shared memory that a block of threads may have


@dataclasses.dataclass(frozen=True)
class Sizes:
  """Describes a group, as far as kernels depend on it."""

  num_experts: int
  ep_size: int
  nvlink_ranks: int  # ranks of the EP domain that NVLink connects
  max_tokens: int
  width: int  # elements of a row
  dtype: np.dtype
  top_k: int | None  # None leaves out the kernel that depends on it
  max_num_sms: int

  @property
  def teams(self) -> int:
    return self.ep_size // self.nvlink_ranks

  @property
  def num_local(self) -> int:
    return self.num_experts // self.ep_size

  @property
  def row_bytes(self) -> int:
    return self.width * self.dtype.itemsize

  @property
  def blocks(self) -> int:
    return self.max_num_sms or _BLOCKS

  @property
  def chunk(self) -> int:
    """Returns the tokens that a block of threads moves at a time."""
    return 64 if self.teams > 1 else _up(4 * self.blocks, 32)

  @property
  def tokens(self) -> int:
    return _up(_up(self.max_tokens, 4), self.chunk)  # as limits.h, then chunks


@dataclasses.dataclass(frozen=True)
class Variant:
  """A kernel for some sizes."""

  family: str
  name: str
  entry: str
  source: str
  number: int | None = None  # that tells variants apart; None: the name does


def variants(sizes: Sizes, gpu: Gpu, pieces: sources.Pieces) -> list[Variant]:
  """Returns the kernels of a step with gradients.

  Raises:
    LookupError: the pieces are another NCCL EP's.
    ValueError: rows of the group are too long for the GPU.
  """
  kernels = [
    _combine(sizes, gpu, pieces, is_weighted=False),
    _combine(sizes, gpu, pieces, is_weighted=True),
    _dispatch(sizes, gpu, pieces, is_weighted=True),
    _dispatch(sizes, gpu, pieces, is_weighted=False),
    _scan(sizes, gpu, pieces),
    _copy(sizes, pieces),
  ]
  if sizes.top_k is not None:
    kernels.append(_reduce(sizes, sizes.top_k, pieces))
  return kernels


def _scan(sizes: Sizes, gpu: Gpu, pieces: sources.Pieces) -> Variant:
  blocks = sizes.max_num_sms or gpu.num_sms
  constants = [
    *(512, blocks, sizes.teams, sizes.nvlink_ranks, "false", "true"),
    *(sizes.num_local, "int64_t"),
  ]
  entry = "nccl_ep_jit_ht_scan_flat_kernel"
  return Variant(
    family="ht_scan_flat",
    name=f"scan_flat{_teams(sizes)}_threads512_blocks{blocks}_nopec_em"
    f"_epr{sizes.num_local}_i64",
    entry=entry,
    source=sources.scan(pieces, entry, constants, -(-sizes.nvlink_ranks // 64)),
  )


def _dispatch(
  sizes: Sizes, gpu: Gpu, pieces: sources.Pieces, is_weighted: bool
) -> Variant:
  pipelines, stages, in_flight = _dispatch_stages(sizes, gpu, is_weighted)
  bits = 8 * sizes.dtype.itemsize
  network = 2 if sizes.teams > 1 else 0
  groups = _in_a_row(
    [network, pipelines, pipelines, 0, max(0, 3 - network - 2 * pipelines)]
  )
  entry = "nccl_ep_jit_ht_dispatch_kernel"
  return Variant(
    family="ht_dispatch",
    name=f"dispatch{_teams(sizes)}_hdim{sizes.width}_stages{stages}"
    f"_pipe{pipelines}_inflt{in_flight}_chunk{sizes.chunk}_maxt{sizes.tokens}"
    f"_blocks{sizes.blocks}{'_fwd' if is_weighted else '_bwd'}_rm_recipenone"
    f"_payloadu{bits}_scalenone_sf0",
    entry=entry,
    source=sources.dispatch(
      pieces,
      entry,
      f"uint{bits}_t",
      groups,
      sizes.nvlink_ranks,
      [
        *(stages, in_flight, sizes.chunk, sizes.tokens, sizes.teams),
        *(sizes.blocks, _bool(is_weighted), pipelines, sizes.nvlink_ranks),
        *(_LAYOUT, sizes.width),
      ],
    ),
  )


def _combine(
  sizes: Sizes, gpu: Gpu, pieces: sources.Pieces, is_weighted: bool
) -> Variant:
  pipelines, (coming, going) = _combine_stages(sizes, gpu, is_weighted)
  dtype, tag, _ = _DTYPES[sizes.dtype.name]
  groups = _in_a_row(
    [_REDUCING_WARPS, _REDUCING_WARPS, 1, pipelines, 1]
    if sizes.teams > 1
    else [0, _REDUCING_WARPS, 0, pipelines, 0]
  )
  entry = "nccl_ep_jit_ht_combine_kernel"
  return Variant(
    family="ht_combine",
    name=f"combine{_teams(sizes)}_hdim{sizes.width}_g2s{coming}_s2g{going}"
    f"_pipe{pipelines}_chunk{sizes.chunk}_maxt{sizes.tokens}_group4"
    f"_blocks{sizes.blocks}{'_bwd' if is_weighted else '_fwd'}_rm{tag}",
    entry=entry,
    source=sources.combine(
      pieces,
      entry,
      groups,
      sizes.nvlink_ranks,
      [
        *(pipelines, coming, going, 4, sizes.chunk, sizes.tokens, sizes.teams),
        *(sizes.blocks, _bool(is_weighted), sizes.width, sizes.nvlink_ranks),
        *(_LAYOUT, dtype),
      ],
    ),
  )


def _copy(sizes: Sizes, pieces: sources.Pieces) -> Variant:
  units, blocks = _units(sizes)
  vector = next(v for v in (8, 4, 2, 1) if v == 1 or units % (32 * v) == 0)
  entry = "nccl_ep_jit_local_permute_dup_kernel"
  return Variant(
    family="local_permute_dup",
    name=f"local_permute_dup_h{units}_v{vector}_b{blocks}",
    entry=entry,
    source=sources.copy(
      pieces,
      entry,
      f"288, {blocks}",
      f"{units}, {vector}, NCCL_EP_DISP_QUANT_NONE",
    ),
    number=units << 16 | vector << 8 | blocks,
  )


def _reduce(sizes: Sizes, top_k: int, pieces: sources.Pieces) -> Variant:
  units, blocks = _units(sizes)
  dtype, tag, number = _DTYPES[sizes.dtype.name]
  entry = "nccl_ep_jit_local_permute_reduce_kernel"
  return Variant(
    family="local_permute_reduce",
    name=f"local_permute_reduce_topk{top_k}_h{units}_b{blocks}{tag}",
    entry=entry,
    source=sources.reduce(
      pieces, entry, f"1024, {blocks}", f"{top_k}, {units}, {dtype}"
    ),
    number=number << 48 | units << 32 | blocks << 16 | top_k,
  )


def _units(sizes: Sizes) -> tuple[int, int]:
  """Returns the units of 16 bytes of a row, and a kernel's blocks on an SM."""
  units = sizes.row_bytes // 16
  return units, 2 if units <= 256 else 1


def _dispatch_stages(
  sizes: Sizes, gpu: Gpu, is_weighted: bool
) -> tuple[int, int, int]:
  """Returns the pipelines, stages and writes in flight that fit on the GPU.

  NCCL EP first keeps most writes in flight, and then fills the shared memory.
  """
  fixed = 0
  if sizes.teams > 1:
    fixed = (sizes.teams - 1) * 72 + _up(sizes.chunk * (sizes.teams - 1), 8)
  per_pipeline = 2 * _up(4 * sizes.chunk * sizes.nvlink_ranks, 128) + 24
  per_stage = _up(sizes.row_bytes, 128) + 16
  per_stage += is_weighted * _up(_weights_bytes(sizes), 16)
  for in_flight in (4, 3, 2, 1):
    fits = []
    for pipelines in (1, 2):
      free = gpu.shared_bytes // 128 * 128 - fixed - pipelines * per_pipeline
      each = min(free // (pipelines * per_stage), _DISPATCH_STAGES // pipelines)
      if each >= max(3, in_flight + 1):
        stages = each * pipelines
        used = _up(fixed + pipelines * per_pipeline + stages * per_stage, 128)
        fits.append((used, pipelines, stages))
    if fits:
      _, pipelines, stages = max(fits)
      return pipelines, stages, in_flight
  raise ValueError("a dispatch does not fit into the GPU's shared memory")


def _combine_stages(
  sizes: Sizes, gpu: Gpu, is_weighted: bool
) -> tuple[int, tuple[int, int]]:
  """Returns the pipelines, and the stages that fit on the GPU.

  NCCL EP keeps pipelines rather than stages, and stages for what goes rather
  than for what comes.
  """
  teams = sizes.teams
  buffers = 2 if teams > 1 else 1
  weights = is_weighted * _weights_bytes(sizes)
  fixed = 0
  if teams > 1:
    fixed = (teams - 1) * (sizes.tokens // sizes.chunk * 8 + 40) + 4
  row = _up(sizes.row_bytes, 128)
  per_coming = buffers * (row + _up(weights, 16) + 17)
  per_going = buffers * row + _up(weights * teams, 16)
  per_going += (buffers - 1) * _up(weights, 16)
  most = _COMBINE_STAGES_OF_TEAMS if teams > 1 else _COMBINE_STAGES
  room = gpu.shared_bytes // 128 * 128 - fixed
  for pipelines in (1,) if teams > 1 else (2, 1):
    for going in range(most[1], 0, -pipelines):
      free = min((room - going * per_going) // per_coming, most[0])
      coming = free // pipelines * pipelines
      if going < most[1]:
        coming = min(coming, pipelines)
      if coming >= pipelines:
        return pipelines, (coming, going)
  raise ValueError("a combine does not fit into the GPU's shared memory")


def _weights_bytes(sizes: Sizes) -> int:
  """Returns the bytes of a token's weights for the ranks of one team."""
  return 4 * sizes.num_local * sizes.nvlink_ranks


def _teams(sizes: Sizes) -> str:
  return f"_LSATeams{sizes.teams}_lsa{sizes.nvlink_ranks}"


def _in_a_row(warps: list[int]) -> list[tuple[int, int]]:
  """Returns the number of each group's warps, and the first of them."""
  return [(count, sum(warps[:i])) for i, count in enumerate(warps)]


def _bool(value: bool) -> str:
  return "true" if value else "false"


def _up(number: int, multiple: int) -> int:
  return -(-number // multiple) * multiple
