#!/usr/bin/env bash
# A Ray cluster inside a Slurm job, and one run on it. The first node is head and learner, the second holds the
# rewards, the others sample. From the repository's root, where .venv lies, on a file system that all nodes share:
#   RUN_DIR=/shared/runs/quickstart sbatch cluster/deploy/slurm.sh
# A little before the time limit the run is stopped and the job queued again; scancel --batch --signal=TERM stops it.
#SBATCH --job-name=flowcredit
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --gpus-per-node=1
#SBATCH --exclusive
#SBATCH --time=08:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

: "${RUN_DIR:?a folder that every node can write, as an absolute path}"
CONFIG=${CONFIG:-configs/cluster.toml}
WORKERS_PER_NODE=${WORKERS_PER_NODE:-1}
NUM_REWARDS=${NUM_REWARDS:-4}
NUM_RANKS=${NUM_RANKS:-1}

cd "$SLURM_SUBMIT_DIR"
[[ -f .venv/bin/activate ]] && source .venv/bin/activate

# One token for this user's clusters, in the home directory, which the nodes share.
export RAY_AUTH_MODE=token
(umask 077 && ray get-auth-token --generate >/dev/null)

# Ray's workers take ports 10002 to 19999; whatever is fixed here keeps out of them.
GCS_PORT=6379
DASHBOARD_PORT=8265
OBJECT_PORT=8076
NODE_PORT=8077

export HF_HOME=${HF_HOME:-/tmp/huggingface-$UID} # on each node's own disk
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
((${#nodes[@]} >= 3)) || { echo "needs three nodes or more: head and learner, rewards, rollout" >&2; exit 2; }
head_ip=$(srun --nodes=1 --ntasks=1 --overlap --nodelist="${nodes[0]}" hostname --ip-address | awk '{print $1}')

start() { # start NODE ARGUMENT...: a Ray node that lives as long as this job
  srun --nodes=1 --ntasks=1 --overlap --nodelist="$1" ray start --block --temp-dir="/tmp/ray-$SLURM_JOB_ID" \
    --object-manager-port="$OBJECT_PORT" --node-manager-port="$NODE_PORT" "${@:2}" &
}
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT

start "${nodes[0]}" --head --node-ip-address="$head_ip" --port="$GCS_PORT" --dashboard-host=127.0.0.1 \
  --dashboard-port="$DASHBOARD_PORT" --resources="{\"learner\": $NUM_RANKS}"
start "${nodes[1]}" --address="$head_ip:$GCS_PORT" --resources="{\"reward\": $NUM_REWARDS}"
for node in "${nodes[@]:2}"; do
  start "$node" --address="$head_ip:$GCS_PORT" --resources="{\"rollout\": $WORKERS_PER_NODE}"
done

# A config that cannot be placed is refused at once, so all nodes have to be there first.
python - "$head_ip:$GCS_PORT" "${#nodes[@]}" <<'PYTHON'
import sys, time
import ray

address, wanted, deadline = sys.argv[1], int(sys.argv[2]), time.monotonic() + 600
while not ray.is_initialized() or sum(node["Alive"] for node in ray.nodes()) < wanted:
    if time.monotonic() > deadline:
        sys.exit(f"after ten minutes, fewer than {wanted} Ray nodes at {address}")
    try:
        ray.init(address, ignore_reinit_error=True, log_to_driver=False)
    except (ConnectionError, RuntimeError):
        pass
    time.sleep(2)
PYTHON

dashboard=http://127.0.0.1:$DASHBOARD_PORT
job=slurm-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}
signalled=no again=no
stop() {
  signalled=yes
  ray job stop --address="$dashboard" "$job" || true
}
trap stop TERM
trap 'again=yes; stop' USR1

ray job submit --address="$dashboard" --submission-id="$job" --working-dir=. \
  --runtime-env-json='{"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "120"}}' \
  -- python -m cluster train "$CONFIG" run.dir="$RUN_DIR" run.resume=auto "$@" &
submitter=$!
while
  signalled=no code=0
  wait "$submitter" || code=$?
  [[ $signalled == yes ]] # a signal ends the waiting, not the run
do :; done

if [[ $again == yes ]]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
