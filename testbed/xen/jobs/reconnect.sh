# Uses xvda each time that it comes, verified; in even rounds the driver is then told to let it go.
disk=/dev/xvda
n=1
while [ $n -le "$rounds" ]; do
    until [ -b $disk ]; do usleep 20000; done
    /tools/fio --name=used --filename=$disk --rw=randwrite --bs=16k --iodepth=8 --size=1m --ioengine=libaio --direct=1 \
        --verify=crc32c --verify_fatal=1 --randseed=$n --thread --eta=never --output=/tmp/fio || { cat /tmp/fio; fail "round $n"; }
    say "used=$n"
    if [ $((n % 2)) = 0 ]; then
        read -r _
        echo vbd-51712 >/sys/bus/xen/drivers/vbd/unbind || fail "unbind"
    fi
    while [ -d /sys/bus/xen/devices/vbd-51712 ] || [ -b $disk ]; do usleep 20000; done
    say "gone=$n"
    n=$((n + 1))
done
read -r _
