#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0

# Answers ten questions about ep on a machine with GPUs. A question makes sense
# only if the answers before it are good: do the libraries load, does a compiler
# work, may ranks share a card, are the results of NCCL EP right, are ours, and
# what do our ops cost? It takes at most 25 minutes on one Hopper card. Each
# step has a time limit, and the next one runs whatever the result is. Run it in
# the root of the repository, with JAX installed:
#
#   EP_FFI_LIBRARY_PATH=<folder of libep_ffi_cuda.so> tools/gpu_first_contact.sh
#
# OUT       the folder of all logs (default: gpu_first_contact)
# STEPS     which ones, "1 2 3" for instance (default: all)
# PLATFORM  cpu tries the script without a GPU; the steps that need one fail
#
# Steps 5 and 9 need libnccl_ep_bench.so in the folder of libep_ffi_cuda.so.
set -uo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."

OUT=$(readlink -m "${OUT:-gpu_first_contact}")
STEPS=${STEPS:-1 2 3 4 5 6 7 8 9 10}
PLATFORM=${PLATFORM:-cuda}
PYTHON=${PYTHON:-python3}
mkdir -p "$OUT"
export JAX_PLATFORMS=$PLATFORM PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
# NCCL EP compiles into a folder of this run, and logs what it compiles.
export NCCL_EP_JIT_CACHE_DIR=${NCCL_EP_JIT_CACHE_DIR:-$OUT/jit} NCCL_EP_JIT_LOG=1
QUIET=${XLA_FLAGS:-}
failed=()

# Runs a command: step NUMBER SECONDS NAME COMMAND...
step() {
  local number=$1 seconds=$2 name=$3 log status
  shift 3
  [[ " $STEPS " == *" $number "* ]] || return 0
  log=$OUT/$number.$name.log
  printf '== %s. %s (at most %s s)\n' "$number" "$name" "$seconds" | tee "$log"
  local start=$SECONDS
  timeout --kill-after=10 "$seconds" "$@" 2>&1 | tee -a "$log" | tail -n 15
  status=${PIPESTATUS[0]}
  # If ep_bench skips a contender that it cannot run, it prints so and succeeds.
  grep -q '^skipped ' "$log" && status=skipped
  printf '== %s. %s: %s after %s s\n' "$number" "$name" \
    "$([[ $status == 0 ]] && echo passed || echo "FAILED ($status)")" \
    $((SECONDS - start)) | tee -a "$log" "$OUT/summary.txt"
  [[ $status == 0 ]] || failed+=("$number.$name")
}

# Prints the command of ranks on one card: ranks COUNT [program arguments...]
ranks() {
  local count=$1
  shift
  echo "$PYTHON" -m ep.launch "--num_processes=$count" \
    "--ranks_per_gpu=$count" "$@"
}

ask() { echo "$PYTHON" tools/gpu_first_contact.py "$1"; }
ask_ranks() { ranks "$1" tools/gpu_first_contact.py "$2"; }
bench() {
  echo "$PYTHON" benchmarks/ep_bench.py "--worlds=$1x1" "--ranks_per_gpu=$1" \
    --tail=unspecified "${@:2}"
}
MOVES=--ops=dispatch,combine,dispatch_bwd,combine_bwd
OPS_TESTS="tests/ops/dispatch_test.py tests/ops/combine_test.py \
  tests/ops/derivatives_test.py tests/ops/overflow_test.py"

: >"$OUT/summary.txt"
step 1 60 libraries $(ask libraries)
step 2 120 compiler $(ask compiler)
step 3 60 sharing_2 $(ask_ranks 2 sharing)
step 3 60 sharing_4 $(ask_ranks 4 sharing)
step 4 60 group_2 $(ask_ranks 2 group)
step 4 60 group_4 $(ask_ranks 4 group)
step 5 90 nccl_ep_bfloat16 $(bench 2 --contenders=nccl_ep --dtypes=bfloat16 \
  --shapes=256x1024x2x16 --rounds=2 $MOVES)
step 5 90 nccl_ep_float32 $(bench 2 --contenders=nccl_ep --dtypes=float32 \
  --shapes=256x1024x2x16 --rounds=2 $MOVES)
export XLA_FLAGS="$QUIET --xla_gpu_enable_command_buffer="
[[ $PLATFORM == cuda ]] || export XLA_FLAGS=$QUIET
step 6 240 ops_4 $(ranks 4 -m pytest -q -x $OPS_TESTS)
step 6 60 faults_4 $(ranks 4 -m pytest -q tests/ops/errors_test.py)
export XLA_FLAGS="$QUIET --xla_gpu_graph_min_graph_size=1"
[[ $PLATFORM == cuda ]] || export XLA_FLAGS=$QUIET
step 7 120 command_buffers_cold env "NCCL_EP_JIT_CACHE_DIR=$OUT/cold" \
  $(ranks 4 -m pytest -q tests/ops/dispatch_test.py)
step 7 60 command_buffers_warm env "NCCL_EP_JIT_CACHE_DIR=$OUT/cold" \
  $(ranks 4 -m pytest -q tests/ops/dispatch_test.py)
export XLA_FLAGS="$QUIET --xla_dump_to=$OUT/dump --xla_dump_hlo_as_text"
step 8 60 streams $(ask_ranks 2 streams)
step 8 10 streams_dump grep -rl --include='*thunk*' ep_dispatch "$OUT/dump"
export XLA_FLAGS=$QUIET
step 9 180 costs $(bench 2 --contenders=nccl,nccl_ep --dtypes=bfloat16 \
  --shapes=1024x4096x4x16 "--json=$OUT/costs.json" $MOVES)
step 10 50 finalized_twice $(ask_ranks 2 finalized_twice)
step 10 50 never_finalized $(ask_ranks 2 never_finalized)
# The survivors must fail, and before the time limit.
step 10 50 one_dies bash -c "! $(ask_ranks 2 one_dies)"

printf '\n%s\n' "$(cat "$OUT/summary.txt")"
printf 'The logs are in %s. ' "$OUT"
echo "Results go to docs/gpu_results.md, also bad ones: device, driver, versions."
[[ ${#failed[@]} == 0 ]]
