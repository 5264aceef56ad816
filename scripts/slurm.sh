#!/usr/bin/env bash
# One job of expert-parallel training under Slurm; what follows the script goes to the recipe:
#
#   sbatch --nodes 2 --gres gpu:8 --ntasks-per-node 8 scripts/slurm.sh model=trinity_nano run_name=nano
#
# Submitted again it continues the same run folder, which has to lie on a disk that all nodes see.
#SBATCH --job-name=afmoe
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
# time to write a checkpoint before the limit
#SBATCH --signal=TERM@120
set -euo pipefail

export OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-8}"
# one process a task: Lightning and DeepSpeed take ranks and addresses from Slurm
srun --kill-on-bad-exit=1 "${PYTHON:-python}" recipes/sft.py \
  trainer.num_nodes="$SLURM_JOB_NUM_NODES" trainer.devices="$SLURM_NTASKS_PER_NODE" \
  trainer/strategy=deepspeed trainer.strategy.ep_size="${EP_SIZE:-$SLURM_NTASKS_PER_NODE}" \
  moe/dispatch=all_to_all "$@"
