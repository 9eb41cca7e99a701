# The chain below the disk changes while fio writes to it: snapshots, a merge, more room; then space is given back.
# Parameters: FILL_MIB, LOAD_SECONDS
wait_for_disk
make_filesystem
mount_disk
new_file reference 8
reference=$(sum $mnt/reference)
say "reference=$reference"

tell "fio: rounds of random 16 KiB writes for $LOAD_SECONDS s or more, each verified; the host changes the chain meanwhile"
(while [ ! -f /tmp/enough ]; do
    /tools/fio --name=live --filename=$mnt/big --rw=randwrite --bs=16k --size="${FILL_MIB}M" --direct=1 --ioengine=libaio \
        --iodepth=8 --verify=crc32c --verify_fatal=1 --end_fsync=1 </dev/null >/tmp/fio 2>&1 || { cat /tmp/fio; fail "fio live"; }
done; touch /tmp/fio-ended) &
read -r begun _ </proc/uptime
sleep 2
ask snapshot-1
sleep 2
ask snapshot-2
sleep 1
ask merge
ask grow
while read -r up _ </proc/uptime && [ "${up%.*}" -lt $((${begun%.*} + LOAD_SECONDS)) ]; do sleep 1; done
touch /tmp/enough
tries=0
while [ ! -f /tmp/fio-ended ]; do
    tries=$((tries + 1))
    [ $tries -lt 600 ] || fail "fio did not end"
    sleep 1
    [ $((tries % 10)) -ne 0 ] || tell "fio goes on"
done
say "verified=live"
read -r sectors <"/sys/block/${disk#/dev/}/size"
say "grown=$((sectors * 512))"

trim big

forget
expect_sum reference "$reference"
unmount_and_check
