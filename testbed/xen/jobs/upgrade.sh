# Writes all of the disk again and again, and verifies each time what it has written, until it is killed.
wait_for_disk
n=1
while :; do
    /tools/fio --name=round --filename=$disk --rw=randwrite --bsrange=4k-64k --iodepth=16 --size=4m --ioengine=libaio \
        --direct=1 --end_fsync=1 --verify=crc32c --verify_fatal=1 --eta=never --output=/tmp/round || { cat /tmp/round; fail "round $n"; }
    say "round=$n"
    n=$((n + 1))
done
