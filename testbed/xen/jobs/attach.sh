# Reads all of a disk, makes a filesystem, writes with verification, and says what the disk holds before and after.
wait_for_disk
all() {
    set -- $(dd if=$disk bs=256k iflag=direct 2>/dev/null | md5sum)
    echo "$1"
}
say "before=$(all)"
make_filesystem
mount_disk
load sequential big --rw=write --bs=64k --size=6m --ioengine=libaio --iodepth=8
load random small --rw=randwrite --bs=4k --size=2m --ioengine=libaio --iodepth=32
load durable synced --rw=randwrite --bs=4k --size=256k --fsync=8
unmount_and_check
say "after=$(all)"
