#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0

# Runs ep on a machine with one Hopper GPU, in order of the information gained:
# (1) grouped matmuls, (2) ops with two versions of NCCL, (3) a layer, and a
# profile of a step, (4) all GPU tests, (5) XLA's communicator, resized groups,
# a stopped rank, two threads, (6) other schedules of XLA, (7) a memory checker.
# Each part has a time limit, and all parts run; together they take at most 44
# minutes. Run the script in the root of the repository, with JAX installed:
#
#   EP_FFI_LIBRARY_PATH=<folder of libep_ffi_cuda.so> tools/gpu_first_contact.sh
#
# OUT        the folder of all logs (default: gpu_first_contact)
# PARTS      the parts to run, for instance "1 2 3" (default: all)
# NEWER_NCCL a folder with a newer libnccl.so.2 than JAX's, for part 2
# PLATFORM   cpu tests the script without a GPU
set -uo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."

OUT=$(readlink -m "${OUT:-gpu_first_contact}")
PARTS=${PARTS:-1 2 3 4 5 6 7}
PLATFORM=${PLATFORM:-cuda}
PYTHON=${PYTHON:-python3}
export OUT
mkdir -p "$OUT"
export JAX_PLATFORMS=$PLATFORM XLA_PYTHON_CLIENT_PREALLOCATE=false
export PYTHONPATH=$PWD:$PWD/tests${PYTHONPATH:+:$PYTHONPATH}
# NCCL EP compiles into a folder of this run, and logs each kernel.
export NCCL_EP_JIT_CACHE_DIR=${NCCL_EP_JIT_CACHE_DIR:-$OUT/jit} NCCL_EP_JIT_LOG=1
failed=()

# Runs a command: part NUMBER SECONDS NAME COMMAND...
part() {
  local number=$1 seconds=$2 name=$3 log status
  shift 3
  [[ " $PARTS " == *" $number "* ]] || return 0
  log=$OUT/$number.$name.log
  printf '== %s. %s (at most %s s)\n' "$number" "$name" "$seconds" | tee "$log"
  local start=$SECONDS
  timeout --kill-after=10 "$seconds" "$@" 2>&1 | tee -a "$log" | tail -n 15
  status=${PIPESTATUS[0]}
  # If ep_bench cannot run a contender, it prints "skipped" and succeeds.
  grep -q '^skipped ' "$log" && status=skipped
  printf '== %s. %s: %s after %s s\n' "$number" "$name" \
    "$([[ $status == 0 ]] && echo passed || echo "FAILED ($status)")" \
    $((SECONDS - start)) | tee -a "$log" "$OUT/summary.txt"
  [[ $status == 0 ]] || failed+=("$number.$name")
}

# Prints the command of ranks on one GPU: ranks COUNT [program arguments...]
ranks() {
  local count=$1
  shift
  echo "$PYTHON" -m ep launch "--num_processes=$count" \
    "--ranks_per_gpu=$count" "$@"
}

contact() { ranks "$1" tools/gpu_first_contact.py "$2"; }

# Adds XLA flags, which the CPU's XLA would not know.
xla() {
  [[ $PLATFORM == cuda ]] && echo env "XLA_FLAGS=${XLA_FLAGS:-} $*" || echo env
}

# Runs all GPU tests, four files at a time, each on four ranks.
all_tests() {
  mkdir -p "$OUT/tests"
  grep -lE '^(from|import) (groups|conftest|layer_steps)' tests/*/*_test.py |
    xargs -P 4 -I FILE sh -c '"$@" -m pytest -q -p no:cacheprovider FILE \
      >"$0/tests/$(basename FILE .py).log" 2>&1; echo "FILE $?"' \
      "$OUT" $(ranks 4) | tee "$OUT/tests/summary.txt"
  ! grep -vq ' 0$' "$OUT/tests/summary.txt"
}

OPS="tests/ops/dispatch_test.py tests/ops/combine_test.py \
  tests/ops/derivatives_test.py"
models=mixtral_8x7b,qwen3_30b_a3b,olmoe_1b_7b
[[ $PLATFORM == cuda ]] || models=
RAGGED="--xla_gpu_experimental_use_ragged_dot_fusion=true \
  --xla_gpu_experimental_use_ragged_dot_grouped_gemm=true"
BENCH="$PYTHON benchmarks/ep_bench.py --rounds=5 --dtypes=bfloat16"

: >"$OUT/summary.txt"
part 1 30 card nvidia-smi
part 1 60 libraries "$PYTHON" -m ep check
part 1 240 matmuls "$PYTHON" benchmarks/grouped_matmul.py "--models=$models"
part 1 150 matmuls_flags $(xla "$RAGGED") \
  "$PYTHON" benchmarks/grouped_matmul.py "--models=$models"
part 2 240 ops_newer_nccl env "LD_PRELOAD=${NEWER_NCCL:+$NEWER_NCCL/libnccl.so.2}" \
  $(ranks 4 -m pytest -q -x $OPS)
part 2 240 ops $(ranks 4 -m pytest -q -x $OPS)
part 3 200 layer $BENCH --worlds=1x1 --ops=moe,moe_grad --tokens=4096 --scale=1 \
  "--shapes=${models:-32x16x2x8x16}" --contenders=xla
part 3 120 profile $(contact 2 profile)
part 3 100 costs $BENCH --worlds=2x1 --ranks_per_gpu=2 --tail=unspecified \
  --contenders=nccl,xla --shapes=1024x4096x4x16
part 4 360 all_tests bash -c "$(declare -f ranks all_tests); all_tests"
part 5 60 xla_communicator env EP_NCCL_COMMUNICATOR=xla \
  $(ranks 4 -m pytest -q tests/ops/dispatch_test.py)
part 5 90 resize $(contact 4 resize)
# The survivors must fail before the time limit.
part 5 60 one_stops bash -c "! $(contact 2 one_stops)"
part 5 60 one_dies bash -c "! $(contact 2 one_dies)"
part 5 60 two_threads $(ranks 4 -m pytest -q tests/group/threads_test.py)
part 6 60 no_latency_hiding \
  $(xla --xla_gpu_enable_latency_hiding_scheduler=false) $(contact 2 steps)
part 6 60 overlap_limit \
  $(xla --xla_gpu_experimental_parallel_collective_overlap_limit=4) \
  $(contact 2 steps)
part 6 60 command_buffers $(xla --xla_gpu_graph_min_graph_size=1) \
  $(contact 2 steps)
part 6 60 device_kernel $(xla \
  --xla_gpu_experimental_ragged_all_to_all_use_device_kernel=true \
  --xla_enable_nccl_symmetric_buffers_for_collectives=raggedalltoall) \
  env EP_TEST_BACKEND=xla "$PYTHON" -m pytest -q tests/ops/dispatch_test.py
part 7 240 memcheck compute-sanitizer --target-processes=all --tool=memcheck \
  --error-exitcode=9 $(contact 2 finalized)

printf '\n%s\n' "$(cat "$OUT/summary.txt")"
printf 'The logs are in %s. ' "$OUT"
echo "Add all results to docs/gpu_results.md, with device, driver and versions."
[[ ${#failed[@]} == 0 ]]
