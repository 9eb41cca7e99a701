# What a job is made of. Read by init before the job; every step ends the guest when it fails.

disk=/dev/vda
mnt=/mnt

# Ours begins a line, whatever a program has left standing on it.
say() { printf '\rTAPLINE %s\n' "$*"; }

power_off() {
    # The console is slow and poweroff does not wait for it.
    usleep 100000
    poweroff -f
    # poweroff returns before the machine is gone.
    sleep 60
}

fail() {
    say "fail=$*"
    power_off
}

# Prints a line for people.
tell() { say "doing=$*"; }

# Stops until the host has done what it does at this point (measured the image, taken statistics).
ask() {
    say "ask=$1"
    read -r _ || fail "no answer to ask=$1"
}

wait_for_disk() {
    tries=0
    while [ ! -b $disk ]; do
        tries=$((tries + 1))
        [ $tries -lt 200 ] || fail "no disk after 10 seconds"
        usleep 50000
    done
    read -r sectors <"/sys/block/${disk#/dev/}/size"
    say "size=$((sectors * 512))"
    read -r cache <"/sys/block/${disk#/dev/}/queue/write_cache"
    say "cache=$cache"
}

make_filesystem() {
    tell "mkfs.ext4"
    /tools/mke2fs -t ext4 -q -F $disk || fail "mkfs.ext4"
}

mount_disk() { mount -t ext4 -o "noatime${1:+,$1}" $disk $mnt || fail "mount $disk ${1:-}"; }

unmount_and_check() {
    umount $mnt || fail "umount"
    tell "e2fsck"
    /tools/e2fsck -f -n $disk >/tmp/e2fsck 2>&1 || { cat /tmp/e2fsck; fail "e2fsck -f -n ended with $?"; }
    say "e2fsck=clean"
}

# load NAME FILE OPTION...: fio with verification of what it writes, past the guest's page cache; FILE stays. Not for jobs that are
# time_based: fio ends them when their time is over, which is before it verifies. That a block is not an older one is seen only where
# all blocks have one size.
load() {
    name=$1
    file=$2
    shift 2
    /tools/fio --name="$name" --filename=$mnt/"$file" --direct=1 --verify=crc32c --verify_fatal=1 --end_fsync=1 \
        --eta=always --eta-newline=1 "$@" || fail "fio $name ended with $?"
    say "verified=$name"
}

# load_rounds NAME FILE OPTION...: in the background; writes all of what the options name at random and verifies it, round after
# round, until /tmp/enough is there. Each round writes something else, so what one before it left does not pass for its own.
load_rounds() {
    name=$1
    file=$2
    shift 2
    round=0
    until [ -e /tmp/enough ]; do
        round=$((round + 1))
        /tools/fio --name="$name" --filename="$file" --rw=randwrite --randseed=$((round + 100)) --ioengine=libaio --direct=1 \
            --verify=crc32c --verify_fatal=1 --eta=never --output=/tmp/"$name" "$@" </dev/null ||
            { cat /tmp/"$name"; fail "round $round of the load $name"; }
    done
    say "verified=$name $round"
}

# end_load PID OUTPUT...: fio that runs until it is told to end is told so, and has found nothing wrong.
end_load() {
    pid=$1
    shift
    kill -0 "$pid" || fail "a load has ended: $(cat "$@")"
    kill -INT "$pid"
    wait "$pid"
    code=$?
    # fio ends with 128 when it was told to end, and with 1 when it found something wrong.
    [ $code = 0 ] || [ $code = 128 ] || { cat "$@"; fail "fio ended with $code"; }
}

# content_of DEVICE: the MD5 sum of all that it holds, past the cache.
content_of() {
    set -- $(dd if="$1" bs=256k iflag=direct 2>/dev/null | md5sum)
    echo "$1"
}

# sum FILE: its SHA-256.
sum() {
    set -- $(sha256sum "$1")
    echo "$1"
}

# new_file NAME MIB: a durable file of random bytes.
new_file() {
    head -c "$(($2 * 1048576))" /dev/urandom >$mnt/"$1" || fail "write $1"
    /tools/sync $mnt/"$1" $mnt || fail "fsync $1"
}

# trim FILE...: removes the files and gives their space back; the host measures the image before and after.
trim() {
    tell "fstrim"
    for file in "$@"; do rm $mnt/"$file"; done
    sync
    ask trim-before
    /tools/fstrim $mnt || fail "fstrim"
    sync
    ask trim-after
}

# forget: what is read next comes from the disk.
forget() { echo 3 >/proc/sys/vm/drop_caches; }

# expect_sum NAME SHA256
expect_sum() {
    [ "$(sum $mnt/"$1")" = "$2" ] || fail "$1 does not hold what was written"
}

# statistics NAME: uptime in seconds, then reads, sectors read, writes, sectors written, ms in queue since boot.
statistics() {
    read -r up _ </proc/uptime
    say "$1=$up $(awk '$3 == "vda" { print $4, $6, $8, $10, $14 }' /proc/diskstats)"
}

# The content of marker N: numbered lines, so that a stale or torn one shows.
marker_text() { yes "marker $1" | head -c "$2"; }

# mark N: makes marker N durable, then says so. The counter is overwritten in place, the marker is a new file.
mark() {
    marker_text "$1" 16384 >$mnt/markers/"$1" || fail "write marker $1"
    marker_text "$1" 4096 >/tmp/counter
    # One write of one block: a crash between two values shows either, never a mixture.
    dd if=/tmp/counter of=$mnt/counter bs=4096 conv=notrunc 2>/dev/null || fail "write counter $1"
    /tools/sync $mnt/markers/"$1" $mnt/counter $mnt/markers || fail "fsync marker $1"
    say "marker=$1"
}

# expect_markers N: markers 1 to N are there, whole, and the counter is not older than N.
expect_markers() {
    n=1
    while [ $n -le "$1" ]; do
        marker_text $n 16384 | cmp -s - $mnt/markers/$n || fail "marker $n was fsynced and is not there as written"
        n=$((n + 1))
    done
    read -r _ counter <$mnt/counter
    [ "$counter" -ge "$1" ] || fail "the counter says $counter, but $1 was fsynced"
    marker_text "$counter" 4096 | cmp -s - $mnt/counter || fail "the counter is torn at $counter"
    say "markers=$1"
}
