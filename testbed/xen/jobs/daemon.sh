# Writes at random to xvda, round after round, and reads back what it wrote; whenever there is an xvdb, does so there once and
# says what it holds. Ends when the host asks the guest to power off, or a line comes on the console.
wait_for_disk
cat >/tmp/power-off <<'END'
#!/bin/sh
: >/tmp/enough
END
chmod +x /tmp/power-off
# What the kernel runs for control/shutdown in Xen's store.
echo /tmp/power-off >/proc/sys/kernel/poweroff_cmd
# What is in the background has no console of its own.
exec 3<&0
(read -r _ <&3; : >/tmp/enough) &
(
    n=1
    while :; do
        until [ -b /dev/xvdb ]; do usleep 50000; done
        /tools/fio --name=second --filename=/dev/xvdb --rw=randwrite --bs=16k --iodepth=8 --size=2m --ioengine=libaio --direct=1 \
            --end_fsync=1 --verify=crc32c --verify_fatal=1 --eta=never --output=/tmp/second || { cat /tmp/second; fail "the plugged disk"; }
        say "content=$(content_of /dev/xvdb)"
        say "plugged=$n"
        while [ -b /dev/xvdb ]; do usleep 50000; done
        say "gone=$n"
        n=$((n + 1))
    done
) &
say "before=$(content_of $disk)"
n=0
until [ -e /tmp/enough ]; do
    n=$((n + 1))
    /tools/fio --name=first --filename=$disk --rw=randwrite --bsrange=4k-64k --iodepth=16 --size=3m --ioengine=libaio --direct=1 \
        --fsync=32 --verify=crc32c --verify_fatal=1 --randseed=$((n + 100)) --thread --eta=never --output=/tmp/fio \
        || { cat /tmp/fio; dmesg | tail -n 20; fail "round $n"; }
    say "round=$n"
done
dmesg | grep -i 'xvda.*error' && fail "the kernel has seen errors"
say "xvda=$(content_of $disk)"
