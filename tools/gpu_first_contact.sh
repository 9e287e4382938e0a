#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0

# Runs ep on a machine with one Hopper GPU, in order of the information gained:
# (1) grouped matmuls, (2) ops, (3) layers, and a profile of a step, (4) all GPU
# tests, (5) another NCCL, XLA's communicator, resized groups, a stopped rank,
# two threads. The commands of part 5 run side by side. Each command has a time
# limit: part 1 takes at most 280 s, 2 240, 3 300, 4 500 and 5 120.
# Run the script in the root of the repository, with JAX installed:
#
#   EP_FFI_LIBRARY_PATH=<folder of libep_ffi_cuda.so> tools/gpu_first_contact.sh
#
# OUT        the folder of summary.txt and logs.tgz (default: gpu_first_contact)
# PARTS      the parts to run, for instance "1 2 3" (default: all)
# LIMIT      seconds for all parts (default: no limit)
# NEWER_NCCL a folder with a newer nvidia/nccl/lib/libnccl.so.2, for part 5
# PLATFORM   cpu tests the script without a GPU
set -uo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."

OUT=$(readlink -m "${OUT:-gpu_first_contact}")
PARTS=${PARTS:-1 2 3 4 5}
LIMIT=${LIMIT:-100000}
PLATFORM=${PLATFORM:-cuda}
PYTHON=${PYTHON:-python3}
LOGS=$(mktemp -d)
trap 'rm -rf "$LOGS"' EXIT
mkdir -p "$OUT" "$LOGS/ranks" "$LOGS/tests"
: >"$OUT/summary.txt"
export LOGS PYTHON PYTHONUNBUFFERED=1 TEST_UNDECLARED_OUTPUTS_DIR=$LOGS/ranks
export JAX_PLATFORMS=$PLATFORM XLA_PYTHON_CLIENT_PREALLOCATE=false
export PYTHONPATH=$PWD:$PWD/tests${PYTHONPATH:+:$PYTHONPATH}
# NCCL EP compiles into a folder of this run, and logs each kernel.
export NCCL_EP_JIT_CACHE_DIR=${NCCL_EP_JIT_CACHE_DIR:-$LOGS/jit}
export NCCL_EP_JIT_LOG=1

# Runs a command, and prints its status and the last lines of its output:
#   part NUMBER SECONDS LINES NAME COMMAND...
# With EXPECT, the command must fail, and its output must match this pattern.
part() {
  local number=$1 seconds=$2 lines=$3 name=$1.$4 status start=$SECONDS
  local log=$LOGS/$name.log left=$((LIMIT - SECONDS))
  shift 4
  [[ " $PARTS " == *" $number "* ]] || return 0
  if [[ $left -lt 20 ]]; then
    echo "== $name: not run, LIMIT is over" | tee -a "$OUT/summary.txt"
    return
  fi
  [[ $left -lt $seconds ]] && seconds=$left
  # The launcher ends earlier, and its ranks dump their stacks.
  local early=$((seconds - 5))
  timeout --kill-after=5 "$seconds" "${@/#--timeout=/--timeout=$early}" \
    >"$log" 2>&1
  status=$?
  if [[ ${EXPECT:-} && $status != 0 && $((SECONDS - start)) -lt $early ]]; then
    grep -qE "$EXPECT" "$log"
    status=$?
  elif [[ ${EXPECT:-} ]]; then
    status="$status, but it must fail in time"
  fi
  if [[ $status == 0 ]]; then
    status=passed
  else
    status="FAILED ($status)" lines=10
  fi
  status="== $name: $status after $((SECONDS - start)) s"
  echo "$status" >>"$OUT/summary.txt"
  # One write, because other commands may print at the same time.
  echo "$(tail -n "$lines" "$log" | cut -c 1-110)
$status"
  # A machine may return few files, and may stop this script at any time.
  tar czf "$OUT/.$name" -C "$LOGS" . 2>/dev/null
  mv "$OUT/.$name" "$OUT/logs.tgz"
}

# Prints the command of ranks on one GPU: ranks COUNT [program arguments...]
ranks() {
  local count=$1
  shift
  echo "$PYTHON" -m ep launch "--num_processes=$count" \
    "--ranks_per_gpu=$count" "--timeout=${TIMEOUT:-}" "$@"
}

contact() { ranks "$1" tools/gpu_first_contact.py "${@:2}"; }

# Runs all GPU tests, four files at a time, each on four ranks.
all_tests() {
  "$PYTHON" tools/gpu_first_contact.py tests |
    xargs -P 4 -I FILE sh -c '"$@" -m pytest -q -p no:cacheprovider FILE \
      >"$0/$(basename FILE .py).log" 2>&1; echo "FILE $?"' \
      "$LOGS/tests" $(TIMEOUT=450 ranks 4) | tee "$LOGS/tests/summary.txt"
  ! grep -vq ' 0$' "$LOGS/tests/summary.txt"
}

OPS="tests/ops/dispatch_test.py tests/ops/transformations_test.py"
# XLA could not merge buffers of 25 and 32 GiB that it allocates apart.
MATMULS="env XLA_PYTHON_CLIENT_PREALLOCATE=true
  $PYTHON benchmarks/grouped_matmul.py --rounds=10"
models=(mixtral_8x7b qwen3_30b_a3b olmoe_1b_7b)
[[ $PLATFORM == cuda ]] || MATMULS+=" --model_scale=32 --model_tokens=32"
nccl=
if [[ ${NEWER_NCCL:-} ]]; then
  # NCCL EP needs the headers of the installed NCCL.
  nccl="NCCL_EP_JIT_BUILD_INCLUDE_DIR=$("$PYTHON" -c \
    'import nvidia.nccl as n; print(n.__path__[0])')/include"
fi

part 1 10 1 card nvidia-smi -L
part 1 60 4 libraries "$PYTHON" -m ep info
for model in "${models[@]}"; do
  part 1 70 20 "$model" $MATMULS "--models=$model"
done
part 2 240 2 ops $(ranks 4 -m pytest -q $OPS)
for model in "${models[@]}"; do
  part 3 80 5 "layer_$model" $MATMULS --layers "--models=$model"
done
part 3 60 2 profile $(contact 2 profile)
part 4 500 34 all_tests bash -c "$(declare -f ranks all_tests); all_tests"
[[ ! $nccl ]] ||
  part 5 120 2 newer_nccl env "$nccl" "PYTHONPATH=$NEWER_NCCL:$PYTHONPATH" \
    $(ranks 4 -m pytest -q $OPS) &
part 5 120 2 xla_communicator env EP_NCCL_COMMUNICATOR=xla \
  $(ranks 4 -m pytest -q tests/ops/dispatch_test.py) &
part 5 120 2 resize $(contact 4 resize) &
EXPECT="(Missing: rank 1|waited timeout_s = 20 s for rank 1)" \
  part 5 120 3 one_stops $(contact 2 one_stops) &
EXPECT="rank 1 was killed by signal 9" \
  part 5 120 3 one_dies $(contact 2 one_dies) &
part 5 120 2 threads \
  $(ranks 4 -m pytest -q tests/group/concurrency_test.py -k thread) &
wait

printf '\n%s\nThe logs are in %s. ' "$(cat "$OUT/summary.txt")" "$OUT/logs.tgz"
echo "Add all results to docs/gpu_results.md, with device, driver and versions."
! grep -q FAILED "$OUT/summary.txt"
