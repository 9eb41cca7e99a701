# Writes and reads the first disk round after round, and reports disks that come and grow. Read by init, which has loaded steps.sh.

wait_for_disk
seen=
round=0
while :; do
    round=$((round + 1))
    place=$((round % 64))
    # A block of its own for each round: the number, repeated.
    yes "$round" | head -c 65536 >/tmp/block
    dd if=/tmp/block of=$disk bs=64k seek=$place count=1 oflag=direct conv=notrunc 2>/dev/null || fail "write in round $round"
    dd if=$disk of=/tmp/read bs=64k skip=$place count=1 iflag=direct 2>/dev/null || fail "read in round $round"
    cmp -s /tmp/block /tmp/read || fail "round $round read something else"
    # The block of the round before is still there, whatever has happened to the disk since.
    if [ $round -gt 1 ]; then
        dd if=$disk of=/tmp/read bs=64k skip=$(((round - 1) % 64)) count=1 iflag=direct 2>/dev/null ||
            fail "read in round $round"
        yes "$((round - 1))" | head -c 65536 | cmp -s - /tmp/read || fail "round $((round - 1)) is lost"
    fi
    now=
    for block in /sys/block/vd*; do
        read -r sectors <"$block/size"
        now="$now ${block##*/}:$((sectors * 512))"
        # Each disk responds, also those that came later.
        dd if="/dev/${block##*/}" of=/dev/null bs=64k count=1 iflag=direct 2>/dev/null || fail "read ${block##*/} in round $round"
    done
    if [ "$now" != "$seen" ]; then
        say "disks=$now"
        seen=$now
    fi
    say "round=$round"
    usleep 200000
done
