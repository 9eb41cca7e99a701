# What an HVM guest has before its own driver: the IDE disk that QEMU emulates, which libxl takes if nothing is said,
# and the NBD client behind it. A guest's firmware reads it for ever; the disk's process is killed, is replaced, and the
# firmware reads on. Then a guest with a driver of its own takes such a disk over.
. /drop/life.sh
. /drop/storage.sh
images 64
xl_names_disks
head -c $((8 << 20)) /dev/zero | tr '\000' k >/images/disk
# A boot sector that reads 4 KiB here and there by int 13h and says the first byte on the serial port: `k`; `E` where
# the firmware says that it could not be read; `?` where it says nothing and has read nothing.
#
#     cli; ax = ds = es = ss = 0; sp = 7c00h; cld; sti
#     again: byte [8000h] = '?'; si = the packet; word [si+2] = 8 sectors; word [si+8] = ([si+8] + 128 & 3fffh) | 64
#     ah = 42h; dl = 80h; int 13h; al = 'E'; if no carry: al = [8000h]; out 3f8h, al; jmp again
#     the packet: 10h bytes, 8 sectors to 0:8000h, from a sector that begins at 0
{
    printf '\372\061\300\216\330\216\300\216\320\274\000\174\374\373\306\006\000\200\077\276\075\174\307\104\002\010\000\213'
    printf '\104\010\005\200\000\045\377\077\203\310\100\211\104\010\264\102\262\200\315\023\260\105\162\003\240\000\200\272'
    printf '\370\003\356\353\321\020\000\010\000\000\200\000\000\000\000\000\000\000\000\000\000'
} | dd of=/images/disk conv=notrunc 2>/dev/null
printf '\125\252' | dd of=/images/disk bs=1 seek=510 conv=notrunc 2>/dev/null
disk=$(hash_of /images/disk)

spec="'vdev=xvda,access=rw,script=block-tapline,target=raw:/images/disk'"
boots_by_firmware a "$spec"
xl create -q /tmp/config || { cat /var/log/xen/qemu-dm-a.log; fail "xl create of an HVM guest"; }
reads() { tail -c 8 /out/serial 2>/dev/null | grep -q kkkkkkkk; }
errors() { tail -c 8 /out/serial 2>/dev/null | grep -q EEEEEEEE; }
soon "read by the firmware" 200 reads
kill_server a xvda
soon "error of the firmware's" 200 errors
follow a xvda
soon "read by the firmware, after another process has come" 200 reads
was=$(tr -cd E </out/serial | wc -c)
$tapline xen upgrade a xvda || fail "upgrade while the firmware reads"
before=$(wc -c </out/serial)
goes_on_reading() { [ "$(wc -c </out/serial)" -gt $((before + 64)) ] && reads; }
soon "read by the firmware, after an upgrade" 200 goes_on_reading
also=$(($(tr -cd E </out/serial | wc -c) - was))
echo "the firmware has seen $was errors of a process that was killed, and $also of one that was replaced"
! grep -q '?' /out/serial || fail "the firmware has read nothing, and has not said so"
xl destroy a || fail "xl destroy"
wait_gone a 60
nothing_left
no_xl_nodes
expect "the disk" "$(hash_of /images/disk)" "$disk"

# By the kernel that xl loads itself, since the firmware and a boot loader would read it for minutes from such a disk.
rm /images/disk
dd if=/dev/zero of=/images/disk bs=1M count=16 2>/dev/null
loop=$(looped /images/disk) || fail "loop"
file_system "$loop" /mnt
echo "beside the kernel" >/mnt/note
echo 0 >/mnt/boots
umount /mnt && /sbin/losetup -d "$loop" || fail "unmount"
initrd_of b boot "boots_wanted=1"
boots_by_firmware b "$spec" "kernel='/guest/vmlinuz'" "ramdisk='$place/initrd'" "extra='$(guest_words)'"
xl create -q /tmp/config || { cat /var/log/xen/qemu-dm-b.log; fail "xl create of an HVM guest with a kernel"; }
log=/var/log/tapline/xen-$(xl domid b)-xvda.log
wait_said b boot=1 300
expect "the driver" "$(said b driver)" vbd
wait_gone b 100
cat /var/log/tapline/*
# QEMU is told to give the disk up before the guest's own driver connects.
line_of() { grep -n "$1" "$log" | head -n 1 | cut -d: -f1; }
given_up=$(line_of "client disconnected")
taken=$(line_of "the front end is connected")
[ "${given_up:-0}" -gt 0 ] && [ "$given_up" -lt "${taken:-0}" ] || fail "QEMU's end of the disk was not given up before it was taken"
nothing_left
no_xl_nodes
mount -o ro,loop /images/disk /mnt || fail "mount"
expect "how often it has booted" "$(cat /mnt/boots)" 1
set -- $(sha256sum /mnt/written)
expect "what it wrote last" "$1" "$(said b written)"
umount /mnt
