#!/bin/sh
# Two processes of Open MPI, two ranks each; --host a,b puts them on two hosts.
exec mpirun -n 2 -x JAXPP_SECRET python examples/launch/train.py launched "$@"
