# Uses its disk as guests do, with small requests, large ones and many at once, and then not at all until it is killed.
wait_for_disk
for load in "--rw=randrw --bs=4k --size=4m --iodepth=32" "--rw=rw --bs=1m --size=8m --iodepth=4"; do
    # shellcheck disable=SC2086 # the words of one load
    /tools/fio --name=load --filename=$disk --ioengine=libaio --direct=1 --end_fsync=1 --eta=never --output=/tmp/load $load \
        || { cat /tmp/load; fail "$load"; }
done
say "idle=yes"
sleep 100000
