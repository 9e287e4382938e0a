#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0

# Tries ep on a machine with GPUs in seven steps: (1) libraries and compiler,
# (2) ranks that share a GPU, (3) results, (4) results with command buffers,
# (5) streams of the ops, (6) costs, (7) ways in which a program may end. A step
# makes sense only if the steps before it pass, but all steps run. Each step has
# a time limit; all take at most 20 minutes on one Hopper GPU. Run the script in the
# root of the repository, with JAX installed:
#
#   EP_FFI_LIBRARY_PATH=<folder of libep_ffi_cuda.so> tools/gpu_first_contact.sh
#
# OUT       the folder of all logs (default: gpu_first_contact)
# STEPS     the steps to run, for instance "1 2 3" (default: all)
# PLATFORM  cpu tests the script without a GPU
set -uo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."

OUT=$(readlink -m "${OUT:-gpu_first_contact}")
STEPS=${STEPS:-1 2 3 4 5 6 7}
PLATFORM=${PLATFORM:-cuda}
PYTHON=${PYTHON:-python3}
mkdir -p "$OUT"
export JAX_PLATFORMS=$PLATFORM PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
# NCCL EP compiles into a folder of this run, and logs each kernel.
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

end() { ranks "$1" tools/gpu_first_contact.py "$2"; }
OPS_TESTS="tests/ops/dispatch_test.py tests/ops/combine_test.py \
  tests/ops/derivatives_test.py tests/ops/overflow_test.py"

: >"$OUT/summary.txt"
step 1 60 card nvidia-smi
step 1 120 libraries "$PYTHON" -m ep check
step 2 90 sharing_2 $(end 2 finalized_twice)
step 2 90 sharing_4 $(end 4 finalized_twice)
export XLA_FLAGS="$QUIET --xla_gpu_enable_command_buffer="
[[ $PLATFORM == cuda ]] || export XLA_FLAGS=$QUIET
step 3 240 ops_4 $(ranks 4 -m pytest -q -x $OPS_TESTS)
step 3 60 faults_4 $(ranks 4 -m pytest -q tests/ops/errors_test.py)
export XLA_FLAGS="$QUIET --xla_gpu_graph_min_graph_size=1"
[[ $PLATFORM == cuda ]] || export XLA_FLAGS=$QUIET
step 4 120 command_buffers_cold env "NCCL_EP_JIT_CACHE_DIR=$OUT/cold" \
  $(ranks 4 -m pytest -q tests/ops/dispatch_test.py)
step 4 60 command_buffers_warm env "NCCL_EP_JIT_CACHE_DIR=$OUT/cold" \
  $(ranks 4 -m pytest -q tests/ops/dispatch_test.py)
export XLA_FLAGS="$QUIET --xla_dump_to=$OUT/dump --xla_dump_hlo_as_text"
step 5 60 streams $(end 2 finalized_twice)
step 5 10 streams_dump grep -rl --include='*thunk*' ep_dispatch "$OUT/dump"
export XLA_FLAGS=$QUIET
step 6 180 costs "$PYTHON" benchmarks/ep_bench.py --worlds=2x1 \
  --ranks_per_gpu=2 --tail=unspecified --contenders=nccl,xla \
  --dtypes=bfloat16 --shapes=1024x4096x4x16 \
  --ops=dispatch,combine,dispatch_bwd,combine_bwd
step 7 50 never_finalized $(end 2 never_finalized)
# The survivors must fail before the time limit.
step 7 50 one_dies bash -c "! $(end 2 one_dies)"

printf '\n%s\n' "$(cat "$OUT/summary.txt")"
printf 'The logs are in %s. ' "$OUT"
echo "Add all results to docs/gpu_results.md, with device, driver and versions."
[[ ${#failed[@]} == 0 ]]
