#!/bin/sh
# Two processes on this host, two ranks each. On several hosts, run it on each with
# --nnodes=2 --node-rank=0 (1, ...) --master-addr=HOST-OF-PROCESS-0 --master-port=29500, and the
# same JAXPP_SECRET.
command -v torchrun > /dev/null || {
    echo "torchrun comes with PyTorch: pip install torch, or take mpirun.sh" >&2
    exit 127
}
exec torchrun --nproc-per-node=2 --master-addr=127.0.0.1 --master-port=29500 \
    examples/launch/train.py launched "$@"
