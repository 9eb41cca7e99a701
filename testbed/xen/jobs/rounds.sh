# Writes at random to each of $disks, round after round, and reads back what it wrote, until a line comes on the console.
for each in $disks; do
    disk=/dev/$each
    wait_for_disk
done
# What is in the background has no console of its own.
exec 3<&0
(read -r _ <&3; : >/tmp/enough) &
n=0
until [ -e /tmp/enough ]; do
    n=$((n + 1))
    set --
    for each in $disks; do set -- "$@" --name="$each" --filename="/dev/$each"; done
    # The seed is part of what is verified: what an earlier round left does not pass for this one's.
    /tools/fio --rw=randwrite --bsrange=4k-64k --iodepth=16 --size=3m --ioengine=libaio --direct=1 --fsync=32 --verify=crc32c \
        --verify_fatal=1 --randseed=$((n + 100)) --thread --eta=never --output=/tmp/fio "$@" || { cat /tmp/fio; dmesg | tail -n 20; fail "round $n"; }
    say "round=$n"
done
dmesg | grep -i 'I/O error' && fail "the kernel has seen errors"
for each in $disks; do say "$each=$(content_of /dev/"$each")"; done
