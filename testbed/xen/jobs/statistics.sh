# Requests of which the number is known, one kind after the other; dom0 looks at its counters in between.
wait_for_disk
ask before
dd if=$disk of=/dev/null bs=4k count=100 iflag=direct 2>/dev/null || fail "reads"
ask 100-reads-of-4k
dd if=/dev/zero of=$disk bs=32k count=40 conv=notrunc oflag=direct 2>/dev/null || fail "writes"
ask 40-writes-of-32k
n=0
while [ $n -lt 7 ]; do
    /tools/sync $disk || fail "fsync"
    n=$((n + 1))
done
ask 7-flushes
for mib in 2 4 6; do
    blkdiscard -o $((mib << 20)) -l 1048576 $disk || fail "blkdiscard"
done
ask 3-discards
sleep 3
ask idle
