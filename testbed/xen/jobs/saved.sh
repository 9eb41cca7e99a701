# Has written, flushed and remembered what its disk holds before it is saved; writes, reads and verifies without a pause meanwhile; reads it
# all again whenever it is asked to.
wait_for_disk
# What is in the background has no console of its own.
exec 3<&0
dd if=/dev/urandom of=$disk bs=64k count=32 oflag=direct conv=fsync 2>/dev/null || fail "write"
kept() {
    # Past the page cache, which is saved with the guest.
    set -- $(dd if=$disk bs=64k count=32 iflag=direct 2>/dev/null | md5sum)
    echo "$1"
}
say "kept=$(kept)"
(
    while read -r _ <&3; do
        say "found=$(kept)"
        say "write_cache=$(cat /sys/block/xvda/queue/write_cache)"
        say checked=yes
    done
) &
/tools/fio --name=busy --filename=$disk --rw=randread --bs=16k --iodepth=8 --offset=8m --size=2m --time_based --runtime=60000 \
    --thinktime=500 --ioengine=libaio --direct=1 --eta=never --output=/tmp/busy &
busy=$!
n=1
while :; do
    /tools/fio --name=round --filename=$disk --rw=randwrite --bsrange=4k-64k --iodepth=16 --offset=4m --size=2m --ioengine=libaio \
        --direct=1 --end_fsync=1 --verify=crc32c --verify_fatal=1 --randseed=$n --eta=never --output=/tmp/round \
        || { cat /tmp/round; dmesg | tail -n 20; fail "round $n"; }
    kill -0 $busy || { cat /tmp/busy; fail "the reader has ended"; }
    dmesg | grep -i 'xvda.*error' && fail "the kernel has seen errors"
    say "round=$n"
    n=$((n + 1))
done
