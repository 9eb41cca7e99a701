# The firmware of an HVM guest boots from its disk, which QEMU shows it as an IDE disk: the bed has such guests. Its boot sector says
# a word on the serial port.
ram_disks 1 8
# mov dx, 3f8h; out dx, al with 'TAP' and the end of the line; hlt; for ever.
printf '\372\270\000\000\216\330\272\370\003\260\124\356\260\101\356\260\120\356\260\012\356\364\353\375' >/tmp/boot
dd if=/tmp/boot of=/dev/ram0 2>/dev/null
printf '\125\252' | dd of=/dev/ram0 bs=1 seek=510 2>/dev/null
printf "%s\n" "name='a'" "type='hvm'" "memory=64" "tsc_mode='native'" "vga='none'" "boot='c'" "serial='file:/out/serial'" \
    "disk=['$(spec /dev/ram0 hda)']" >/tmp/config
xl create -q /tmp/config || { cat /var/log/xen/qemu-dm-a.log; fail "xl create of an HVM guest"; }
left=120
until [ "$(cat /out/serial 2>/dev/null)" = TAP ]; do
    [ $left -gt 0 ] || { cat /var/log/xen/qemu-dm-a.log; xl dmesg | tail -n 40; fail "the firmware does not boot from the disk"; }
    left=$((left - 1))
    sleep 1
done
# A processor that halts for ever is a guest that has powered off.
wait_gone a 60
