# pygrub finds the kernel of a guest on its disk, a qcow2 image that our block script serves: first to dom0 itself, where xl wants it
# for pygrub, and then to the guest. What served dom0 is gone before that, and nothing is left of it.
. /drop/life.sh
. /drop/storage.sh
images 128
xl_names_disks
insmod $modules/xen_blkfront.ko || fail "dom0's own blkfront"
initrd_of a found ""
initrd=$place/initrd
dd if=/dev/zero of=/images/raw bs=1M count=32 2>/dev/null
loop=$(looped /images/raw) || fail "loop"
file_system "$loop" /mnt
mkdir -p /mnt/boot/grub
cp /guest/vmlinuz "$initrd" /mnt/ || fail "copy"
echo "beside the kernel" >/mnt/note
printf 'default 0\ntimeout 0\ntitle guest\nroot (hd0,0)\nkernel /vmlinuz from=pygrub %s\ninitrd /initrd\n' "$(guest_words)" >/mnt/boot/grub/menu.lst
umount /mnt && /sbin/losetup -d "$loop" || fail "unmount"
image convert raw:/images/raw qcow2:/images/disk.qcow2
rm /images/raw

# -q: dom0 has no description of a terminal on which it could show its menu.
: >"/var/log/xen/console/guest-a.log"
printf "%s\n" "name='a'" "type='$guest_type'" "memory=320" "tsc_mode='native'" "bootloader='pygrub'" "bootloader_args=['-q']" "on_poweroff='destroy'" \
    "disk=['vdev=xvda,access=rw,script=block-tapline,target=qcow2:/images/disk.qcow2']" >/tmp/config
begun=$(cut -d. -f1 /proc/uptime)
xl create -p /tmp/config || { cat /var/log/xen/bootloader*; cat /var/log/tapline/*; fail "xl create with pygrub"; }
echo "xl create took $(($(cut -d. -f1 /proc/uptime) - begun)) s"
cat /var/log/tapline/xen-0-xvda.log
grep -q "all requests are completed and flushed" /var/log/tapline/xen-0-xvda.log || fail "dom0's disk was not taken away as it should"
[ ! -b /dev/xvda ] || fail "dom0 has it still"
no_disk 0 xvda
expect "processes that serve" "$(pidof tapline-disk | wc -w)" 1
xl unpause a
wait_end a 200
expect "the kernel's words" "$(said a words)" pygrub
expect "what the guest has found" "$(said a note)" "beside the kernel"
nothing_left
no_xl_nodes

# A person may do the same, to look at an image in dom0.
xl block-attach 0 "$(printf 'vdev=xvdf,access=r,script=block-tapline,target=qcow2:/images/disk.qcow2')" || fail "xl block-attach to dom0"
mount -t ext4 -o ro,noload /dev/xvdf /mnt || fail "mount in dom0"
expect "what the guest has written" "$(cat /mnt/answer)" "from the guest"
umount /mnt
xl block-detach 0 xvdf || fail "xl block-detach"
no_disk 0 xvdf
nothing_left
sound qcow2:/images/disk.qcow2
