#!/bin/sh
# Runs a command as ranks on several hosts, by Open MPI. Start it in a folder that all hosts share:
#   HOSTS=node1:4,node2:4 pipelines/hosts/mpirun.sh pathoseg train --resume --out run …
#
# What this adds to a plain mpirun, and why:
# - A rank that fails can tell the others before it ends; mpirun would end them at once. Told not
#   to, mpirun ends with 0, so rank 0's exit code is kept in a file and is that of this script.
#   Other ranks that fail wait 15 s: a lost host's daemon ends soon after its last rank, and mpirun
#   then kills rank 0, which may not have ended.
# - Ranks that have lost a host end after 10 s; mpirun would go on waiting for that host. It is to
#   ask after 5 s of rest, then each second, and to give up after 30 questions.
# - ssh leaves this shell's environment behind, so that another host would not find the command. What
#   says where programs and libraries are, and how they run, goes to all hosts.
# - At SIGTERM and Ctrl-C mpirun would kill the ranks within a second or so. Instead each gets a
#   SIGTERM and all the time it needs to save.
: "${HOSTS:?names the hosts and how many ranks each has: node1:4,node2:4}"
result=$(mktemp "$PWD/.mpirun-XXXXXX") || exit 1

# "$0" is the file for the exit code. mpirun passes SIGUSR1 on, to this shell and to the command.
rank='
trap "kill -TERM \$child" USR1
(trap "" USR1; exec "$@") & child=$!
while wait $child; code=$?; kill -0 $child 2> /dev/null; do :; done
if [ "$OMPI_COMM_WORLD_RANK" = 0 ]; then
    echo $code > "$0"
elif [ $code != 0 ]; then
    sleep 15
fi
exit $code'

as_root=
[ "$(id -u)" != 0 ] || as_root=--allow-run-as-root

names='PATH|LD_LIBRARY_PATH|PYTHONPATH|VIRTUAL_ENV|OMP_NUM_THREADS|MASTER_ADDR|NCCL_[A-Z0-9_]+'
passed=$(env | sed -n -E "s/^($names)=.*/-x \1/p") # those that are set: mpirun warns of others

trap 'kill -USR1 $mpirun' INT TERM
setsid mpirun $as_root $passed --host "$HOSTS" --bind-to none --rtos continuous,error-nonzero-status=0 \
    --prtemca oob_tcp_keepalive_time 5 \
    --prtemca oob_tcp_keepalive_intvl 1 \
    --prtemca oob_tcp_keepalive_probes 30 \
    sh -c "$rank" "$result" "$@" &
mpirun=$!
while wait $mpirun; code=$?; kill -0 $mpirun 2> /dev/null; do :; done
if [ -s "$result" ]; then
    read -r code < "$result"
elif [ "$code" = 0 ]; then
    code=1 # rank 0 was killed before it could say
fi
rm -f "$result"
exit "$code"
