# Writes to each of $disks, makes some of it durable and the rest not, and waits for the power to be cut.
#
# A disk: 2 MiB that are written and then flushed by an fsync of the device, 2 MiB by writes with O_SYNC, 2 MiB that nobody flushes.
# The last of the disks has a file system with a file that was fsynced; nothing else is done there, for its journal flushes too.
region() { # name device MiB: random, written past the page cache
    head -c 2097152 /dev/urandom >/tmp/region || fail "random bytes"
    say "$1=$(sum /tmp/region)"
    dd if=/tmp/region of="$2" bs=64k seek=$(($3 * 16)) conv=notrunc oflag=direct 2>/dev/null || fail "write $1"
}
for each in $disks; do
    disk=/dev/$each
    wait_for_disk
    read -r cache </sys/block/"$each"/queue/write_cache
    read -r fua </sys/block/"$each"/queue/fua
    say "$each-cache=$cache, fua $fua"
    [ "$each" != "${disks##* }" ] || break
    region "$each-fsync" "$disk" 2
    /tools/sync "$disk" || fail "fsync $disk"
    /tools/fio --name=osync --filename="$disk" --rw=write --bs=16k --size=2m --offset=4m --sync=1 --ioengine=libaio --iodepth=4 \
        --direct=1 --randseed=7 --eta=never --output=/tmp/fio || { cat /tmp/fio; fail "O_SYNC"; }
    set -- $(dd if="$disk" bs=64k skip=64 count=32 iflag=direct 2>/dev/null | sha256sum)
    say "$each-osync=$1"
done
make_filesystem
mount_disk
new_file durable 2
say "file=$(sum $mnt/durable)"
# What comes after the last flush of a disk is lost.
for each in $disks; do
    [ "$each" = "${disks##* }" ] || region "$each-unflushed" "/dev/$each" 8
done
say "unflushed=yes"
read -r _
