# Uses its disks as guests do, with small requests, large ones and many at once, and then not at all until it is killed.
for each in $disks; do
    disk=/dev/xvd$each
    wait_for_disk
    for load in "--rw=randrw --bs=4k --size=2m --iodepth=32" "--rw=rw --bs=1m --size=6m --iodepth=4"; do
        # shellcheck disable=SC2086 # the words of one load
        /tools/fio --name=load --filename=$disk --ioengine=libaio --direct=1 --end_fsync=1 --eta=never \
            --output=/tmp/load $load || { cat /tmp/load; fail "$disk $load"; }
    done
done
say "idle=yes"
sleep 100000
