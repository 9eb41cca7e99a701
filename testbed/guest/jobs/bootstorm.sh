# One of many guests that boot from clones of one image: all disks hold what that holds, and take writes that stay.
# Parameters: DISKS, how many there are; SUM, the SHA-256 of the first MIB mebibytes of each; ROUNDS, how often each is written;
# BLOCK, the place of 4096 bytes that is written
tries=0
while [ "$(ls -d /sys/block/vd* 2>/dev/null | wc -l)" -lt "$DISKS" ]; do
    tries=$((tries + 1))
    [ $tries -lt 600 ] || fail "not $DISKS disks after 30 seconds"
    usleep 50000
done

tell "what $DISKS disks hold"
for disk in /sys/block/vd*; do
    set -- $(dd if=/dev/"${disk##*/}" bs=1M count="$MIB" iflag=direct 2>/dev/null | sha256sum)
    [ "$1" = "$SUM" ] || fail "${disk##*/} does not hold what the golden image holds"
done

tell "$ROUNDS rounds of writes, each durable"
round=0
while [ $round -lt "$ROUNDS" ]; do
    round=$((round + 1))
    marker_text $round 4096 >/tmp/marker
    for disk in /sys/block/vd*; do
        device=/dev/${disk##*/}
        dd if=/tmp/marker of="$device" bs=4096 seek="$BLOCK" oflag=direct conv=notrunc,fsync 2>/dev/null || fail "write $device"
        dd if="$device" bs=4096 skip="$BLOCK" count=1 iflag=direct 2>/dev/null | cmp -s - /tmp/marker || fail "$device holds something else"
    done
    say "round=$round"
done
