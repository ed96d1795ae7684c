#!/bin/sh
# Two processes of Open MPI, two ranks each; --host a,b puts them on two hosts. As root, as in many
# containers, mpirun also needs --allow-run-as-root.
exec mpirun -n 2 -x JAXPP_SECRET python examples/launch/train.py launched "$@"
