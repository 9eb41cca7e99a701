# Writes to its disk again and again, and verifies each time what it has written, until it is killed. Meanwhile it reads
# without a pause, so that there is always something under way.
wait_for_disk
/tools/fio --name=busy --filename=$disk --rw=randread --bs=16k --iodepth=8 --offset=8m --size=8m --time_based --runtime=6000 \
    --thinktime=500 --ioengine=libaio --direct=1 --eta=never --output=/tmp/busy &
busy=$!
n=1
while :; do
    /tools/fio --name=round --filename=$disk --rw=randwrite --bsrange=4k-64k --iodepth=16 --size=2m --ioengine=libaio \
        --direct=1 --end_fsync=1 --verify=crc32c --verify_fatal=1 --eta=never --output=/tmp/round || { cat /tmp/round; fail "round $n"; }
    kill -0 $busy || { cat /tmp/busy; fail "the reader has ended"; }
    say "round=$n"
    n=$((n + 1))
done
