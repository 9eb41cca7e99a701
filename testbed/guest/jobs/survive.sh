# Two loads that verify all that they write, a queue each, and records that are fsynced and then announced, while the host kills the
# disk's process again and again. The guest must not notice but for the wait; then the host takes its power away.
#
# fio holds a block against the number of the write that it must show only where blocks have one size and the job is not
# time_based; a time_based job that writes is never verified at all. So each round writes all blocks in a random order, verifies
# them, does it again, and is followed by another round.
# Parameters: ROUND_MIB, SLOTS (records, after which the first is overwritten)
wait_for_disk
set -- /sys/block/vda/mq/*
say "queues=$#"
dmesg -c >/dev/null

# rounds NAME CPU AT_MIB BLOCK: until the host has had enough. Says what was verified, and the longest that fio waited for an answer.
rounds() {
    blocks=$((ROUND_MIB * 1048576 / $4))
    while [ ! -f /tmp/enough ]; do
        /tools/fio --name="$1" --filename=$disk --offset="$3m" --size=$((blocks * $4)) --bs="$4" --rw=randwrite --randrepeat=0 \
            --direct=1 --ioengine=libaio --iodepth=32 --cpus_allowed="$2" --verify=crc32c --verify_fatal=1 --loops=2 --eta=never \
            --output-format=terse --terse-version=3 --output=/tmp/"$1" </dev/null >/tmp/"$1".err 2>&1 ||
            { cat /tmp/"$1" /tmp/"$1".err; fail "fio $1 found something wrong, or had an error"; }
        # Error, KiB read and written, and the maxima of the completion latency of both in microseconds.
        say "round=$1 $(awk -F';' '$3 == "'"$1"'" { print $5, $6, $15, $47, $56 }' /tmp/"$1")"
    done
    say "verified=$1"
}

record() { yes "record $1" | head -c 4096; }

# A record goes into the next slot, and into the first block, which is overwritten each time.
records() {
    n=0
    while :; do
        n=$((n + 1))
        record $n >/tmp/record
        dd if=/tmp/record of=$disk bs=4096 conv=notrunc 2>/tmp/dd || fail "write: $(cat /tmp/dd)"
        dd if=/tmp/record of=$disk bs=4096 seek=$((n % SLOTS + 1)) conv=notrunc,fsync 2>/tmp/dd || fail "fsync: $(cat /tmp/dd)"
        say "fsynced=$n"
    done
}

# What the kernel has to say about its disk, which is nothing.
complaints() { dmesg | grep -i -e vda -e virtio -e 'blk_' -e 'I/O' -e reset -e 'blocked for' -e BUG; }

rounds small 0 256 4096 &
small=$!
rounds large 1 512 12288 &
large=$!
records &
say "loads=running"
ask enough
touch /tmp/enough
wait $small
wait $large
if complaints >/tmp/complaints; then
    cat /tmp/complaints
    fail "the kernel complains: $(head -n 1 /tmp/complaints)"
fi
say "quiet=yes"
ask power
sleep 600
