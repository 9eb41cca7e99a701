# Writes until it is killed.
wait_for_disk
/tools/fio --name=busy --filename=$disk --rw=randwrite --bs=16k --iodepth=32 --size=20m --time_based --runtime=6000 \
    --ioengine=libaio --direct=1 --eta=never --output=/tmp/fio &
sleep 1
kill -0 $! || { cat /tmp/fio; fail "no load"; }
say "busy=yes"
wait $!
fail "the load has ended: $(cat /tmp/fio)"
