# Writes under load, with markers that are fsynced and then announced, until the host ends it all.
wait_for_disk
mount_disk
mkdir -p $mnt/markers
marker_text 0 4096 >$mnt/counter
/tools/sync $mnt/counter $mnt/markers $mnt
tell "random writes that allocate, and fsynced markers beside them"
/tools/fio --name=storm --filename=$mnt/storm --rw=randwrite --bsrange=4k-256k --size=512M --direct=1 --ioengine=libaio \
    --iodepth=16 --time_based --runtime=600 --fallocate=none --eta=never >/tmp/storm 2>&1 &
n=0
while :; do
    n=$((n + 1))
    mark $n
done
