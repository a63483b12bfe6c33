#!/bin/bash
# One lease's work: unpack the kernel cache and fla, train one variant a GPU, evaluate each. Usage: lease.sh OUT "GPU NAME ARGS..." ...
out=$1; shift
export PYTHONUNBUFFERED=1 TRITON_CACHE_DIR=/tmp/tc OMP_NUM_THREADS=1
mkdir -p /tmp/tc && tar xzf .tc/tc.tgz -C /tmp
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site .whl/*.whl && export PYTHONPATH=/tmp/site || exit 1
nvidia-smi -L; nproc
one() {
  gpu=$1 name=$2; shift 2
  export CUDA_VISIBLE_DEVICES=$gpu
  timeout "${TRAIN_LIMIT:-500}" python3 -m training.train --out "$out" --name "$name" "$@" >"$out/$name.log" 2>&1
  code=$?
  if [ $code = 1 ]; then
    echo "graphs failed, eager" >>"$out/$name.log"
    timeout 400 python3 -m training.train --out "$out" --name "$name" "$@" --eager >>"$out/$name.log" 2>&1
  fi
  timeout "${EVAL_LIMIT:-95}" python3 -m training.evaluate "$out/$name.pt" --lengths ${EVAL_LENGTHS:-1024 2048 4096 8192} --count "${EVAL_COUNT:-96}" --json "$out/$name.json" >>"$out/$name.log" 2>&1
}
for job in "$@"; do one $job & done
wait
tar czf "$out/tc.tgz" -C /tmp tc
tail -n 70 "$out"/*.log
