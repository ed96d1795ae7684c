#!/bin/sh
# Two processes on this host, two ranks each. On several hosts, run it on each with
# --nnodes=2 --node-rank=0 (1, ...) --master-addr=HOST-OF-PROCESS-0 --master-port=29500, and the
# same JAXPP_SECRET.
exec torchrun --nproc-per-node=2 --master-addr=127.0.0.1 --master-port=29500 \
    examples/launch/train.py launched "$@"
