# Reads a disk that may not be written, and tries to write it in the ways that Linux has.
wait_for_disk
read -r only </sys/block/xvda/ro
say "ro=$only"
say "content=$(content_of $disk)"
refused() {
    "$@" >/tmp/refused 2>&1 && fail "succeeded: $*"
    tell "$(tail -n 1 /tmp/refused)"
}
zeros() { head -c 65536 /dev/zero; }
zeros >/tmp/zeros
refused dd if=/tmp/zeros of=$disk bs=4k conv=notrunc
refused dd if=/tmp/zeros of=$disk bs=4k conv=notrunc oflag=direct
refused blkdiscard $disk
# The kernel lets root say so; the disk stays what it is.
blockdev --setrw $disk
refused dd if=/tmp/zeros of=$disk bs=4k conv=notrunc,fsync
# Mounts what cannot be written read-only.
mount -t ext4 $disk $mnt || fail "mount"
refused touch $mnt/new
say "file=$(sum $mnt/file)"
umount $mnt || fail "umount"
