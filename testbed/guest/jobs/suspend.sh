# A guest whose memory is saved while it is at work: two loops write, read and compare on a disk, and one compares what
# is kept in memory. It says how many rounds all have done since it was booted, and what was found wrong.
disk=/dev/vda
say "boot=$(cat /proc/sys/kernel/random/boot_id)"
head -c 8388608 /dev/urandom >/tmp/kept
kept=$(sha256sum </tmp/kept)

# work N: 1 MiB of its own at N MiB of the disk, straight from and to its memory.
work() {
    round=0
    while :; do
        round=$((round + 1))
        yes "loop $1, round $round" | head -c 1048576 >/tmp/new.$1
        dd if=/tmp/new.$1 of=$disk bs=65536 seek=$(($1 * 16)) oflag=direct conv=notrunc,fsync 2>/dev/null || say "bad=write $1 $round"
        dd if=$disk of=/tmp/old.$1 bs=65536 skip=$(($1 * 16)) count=16 iflag=direct 2>/dev/null || say "bad=read $1 $round"
        cmp -s /tmp/new.$1 /tmp/old.$1 || say "bad=loop $1 reads something else in round $round"
        echo "$round" >/tmp/round.$1.new
        mv /tmp/round.$1.new /tmp/round.$1
    done
}

echo 0 >/tmp/round.1
echo 0 >/tmp/round.2
work 1 &
work 2 &
while :; do
    [ "$(sha256sum </tmp/kept)" = "$kept" ] || say "bad=memory is not what it was"
    one=$(cat /tmp/round.1)
    two=$(cat /tmp/round.2)
    [ "$one" -lt "$two" ] && two=$one
    say "rounds=$two"
    usleep 100000
done
