#!/usr/bin/env bash
# Runs inside the guest of scripts/rdma: three soft-RoCE devices on one bridge, then the tests (or what is given).
set -euo pipefail
echo "guest: up after $(cut -d' ' -f1 /proc/uptime) s"
ip link set lo up
ip link add fabric type bridge
ip link set fabric mtu 4500 up
for name in a b c; do
  ip link add "port-$name" type veth peer name "wire-$name"
  ip link set "port-$name" mtu 4500 up
  ip link set "wire-$name" mtu 4500 up master fabric
  rdma link add "rx$name" type rxe netdev "port-$name"
done
# No queue pair reaches a peer from an address whose uniqueness is still being checked.
for _ in $(seq 100); do
  ip -6 address show tentative | grep -q inet6 || break
  sleep 0.1
done
echo "guest: devices after $(cut -d' ' -f1 /proc/uptime) s"
cd "$LAMINAR_REPOSITORY"
export LAMINAR_TEST_RDMA_DEVICES=rxa,rxb,rxc LAMINAR_TEST_SLOWNESS=${LAMINAR_TEST_SLOWNESS:-5}
export PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1
if [ "${1:-}" = --shell ]; then shift; exec bash -c "$*"; fi
# Plug-ins and the other tests' helpers import much, which takes long over a shared file system.
export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
pytest=("$LAMINAR_PYTHON" -m pytest -v --color=no --timeout=900 -p pytest_asyncio.plugin -p pytest_timeout -p no:cacheprovider --noconftest)
tests=(tests/contract/test_transport.py tests/rdma/test_rdma_chain.py)
case "${1:-}" in
  "") tests+=(tests/rdma/test_rdma_queues.py) ;;
  --short) ;;
  *) exec "${pytest[@]}" "$@" ;;
esac
status=0
"${pytest[@]}" --durations=8 -k "verbs or rdma" "${tests[@]}" || status=$?
# Which of the devices met what they had to do again or refuse: soft-RoCE on a loaded machine does.
for device in rxa rxb rxc; do
  (cd "/sys/class/infiniband/$device/ports/1/hw_counters" && grep -H -v '^0$' -- *) | tr '\n' ' ' | sed "s/^/$device: /;s/$/\n/"
done
exit "$status"
