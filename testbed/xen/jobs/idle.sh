# Uses its disks as guests do, with small requests, large ones and many at once, and then not at all until it is killed.
wait_for_disk
for each in $disks; do
    for load in "--rw=randrw --bs=4k --size=2m --iodepth=32" "--rw=rw --bs=1m --size=6m --iodepth=4"; do
        # shellcheck disable=SC2086 # the words of one load
        /tools/fio --name=load --filename=/dev/xvd"$each" --ioengine=libaio --direct=1 --end_fsync=1 --eta=never \
            --output=/tmp/load $load || { cat /tmp/load; fail "$each $load"; }
    done
done
say "idle=yes"
sleep 100000
