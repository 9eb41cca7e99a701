# Works on the first disk all the time; uses the second whenever it is there.
wait_for_disk
/tools/fio --name=first --filename=$disk --rw=randwrite --bs=4k --iodepth=8 --size=8m --time_based --runtime=600 \
    --thinktime=2000 --ioengine=libaio --direct=1 --verify=crc32c --verify_fatal=1 --eta=never --output=/tmp/first &
first=$!
n=1
while [ $n -le "$rounds" ]; do
    say "waiting=$n"
    until [ -b /dev/xvdb ]; do usleep 50000; done
    say "content=$(content_of /dev/xvdb)"
    /tools/fio --name=second --filename=/dev/xvdb --rw=randwrite --bs=16k --iodepth=8 --size=4m --ioengine=libaio --direct=1 \
        --verify=crc32c --verify_fatal=1 --eta=never --output=/tmp/second || { cat /tmp/second; fail "the plugged disk"; }
    say "plugged=$n"
    while [ -b /dev/xvdb ]; do usleep 50000; done
    say "gone=$n"
    n=$((n + 1))
done
end_load $first /tmp/first
