# Says what the kernel makes of each disk's sectors, and puts a filesystem with a verified load on it.
for each in $disks; do
    disk=/dev/$each
    wait_for_disk
    read -r logical </sys/block/"$each"/queue/logical_block_size
    read -r physical </sys/block/"$each"/queue/physical_block_size
    say "$each-sectors=$logical $physical"
    if [ "$logical" != 512 ]; then
        # busybox's dd would give up O_DIRECT.
        /tools/fio --name=part --filename="$disk" --rw=read --bs=512 --size=512 --direct=1 --eta=never --output=/tmp/fio \
            && fail "a part of a sector was read"
    fi
    make_filesystem
    mount_disk
    load "$each" file --rw=randwrite --bs=4k --size=2m --ioengine=libaio --iodepth=16
    load "$each" large --rw=write --bs=64k --size=2m --ioengine=libaio --iodepth=4
    unmount_and_check
    say "$each=$(content_of "$disk")"
done
