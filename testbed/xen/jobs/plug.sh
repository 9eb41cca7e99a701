# Works on the first disk all the time; uses the second whenever it is there.
wait_for_disk
load_rounds first "$disk" --bs=4k --iodepth=8 --size=4m --thinktime=2000 &
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
: >/tmp/enough
# A round that finds something wrong ends the guest.
wait $first
