# The chain below the disk changes while fio writes to it: snapshots, a merge, more room; then space is given back.
# Parameters: FILL_MIB, LOAD_SECONDS
wait_for_disk
make_filesystem
mount_disk
new_file reference 8
reference=$(sum $mnt/reference)
say "reference=$reference"

tell "fio: random 4 to 64 KiB writes for $LOAD_SECONDS s, verified at the end; the host changes the chain meanwhile"
(load live big --rw=randwrite --bsrange=4k-64k --size="${FILL_MIB}M" --ioengine=libaio --iodepth=8 \
    --time_based --runtime="$LOAD_SECONDS" </dev/null >/tmp/fio 2>&1; echo $? >/tmp/fio-ended) &
sleep 2
ask snapshot-1
sleep 2
ask snapshot-2
sleep 1
ask merge
ask grow
tries=0
while [ ! -f /tmp/fio-ended ]; do
    tries=$((tries + 1))
    [ $tries -lt 600 ] || fail "fio did not end"
    sleep 1
    [ $((tries % 10)) -ne 0 ] || tell "fio goes on"
done
read -r ended </tmp/fio-ended
[ "$ended" = 0 ] || { cat /tmp/fio; fail "fio ended with $ended"; }
say "verified=live"
read -r sectors <"/sys/block/${disk#/dev/}/size"
say "grown=$((sectors * 512))"

trim big

forget
expect_sum reference "$reference"
unmount_and_check
