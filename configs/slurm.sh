#!/usr/bin/env bash
# A run on SLURM: one process for all GPUs of a node, found by what srun sets.
#
# Command:  sbatch configs/slurm.sh --data.path TEXT --data.tokenizer tokenizer.json     (anything else goes on as well)
# Hardware: 2 nodes of 8 GPUs of 80 GB, and a folder for the run that all nodes share
# Time:     not measured yet; five minutes before its end the job saves, and is queued again
# Expect:   the log of process 0, and a run folder from which the next start goes on

#SBATCH --job-name=jaxdist
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append

set -uo pipefail

srun --kill-on-bad-exit=1 \
    python -m jaxdist.train --config llama-1b --mesh 16x1 --checkpoint.minutes 30 --checkpoint.keep 3 \
    --output runs/llama-1b --resume "$@"
code=$?

if [ "$code" -eq 75 ]; then # stopped early, with a checkpoint to go on from
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
