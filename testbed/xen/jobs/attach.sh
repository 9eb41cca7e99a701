# Reads all of a disk, makes a filesystem, writes with verification, and says what the disk holds before and after.
wait_for_disk
say "before=$(content_of $disk)"
make_filesystem
mount_disk
load sequential big --rw=write --bs=64k --size=6m --ioengine=libaio --iodepth=8
load random small --rw=randwrite --bs=4k --size=2m --ioengine=libaio --iodepth=32
load durable synced --rw=randwrite --bs=4k --size=256k --fsync=8
unmount_and_check
say "after=$(content_of $disk)"
