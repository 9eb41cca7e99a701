# An HVM guest boots from an image that our block script serves: its firmware and a boot loader read it through QEMU, over NBD, and then
# its own driver takes the disk over. It reboots, which makes all of that anew, and shuts down; the image holds what it wrote, and
# nothing is left.
. /drop/life.sh
. /drop/storage.sh
images 192
xl_names_disks
initrd_of a boot "boots_wanted=2"
dd if=/dev/zero of=/images/raw bs=1M count=40 2>/dev/null
loop=$(looped /images/raw) || fail "loop"
# What the boot loader cannot read, it must not find.
file_system "$loop" /mnt -O ^64bit,^metadata_csum,^metadata_csum_seed,^orphan_file
mkdir /mnt/boot
extlinux --install /mnt/boot >/tmp/extlinux 2>&1 || { cat /tmp/extlinux; fail "extlinux"; }
cp /guest/vmlinuz "$place/initrd" /mnt/boot/ || fail "copy"
echo "beside the kernel" >/mnt/note
echo 0 >/mnt/boots
printf '%s\n' "serial 0 115200" "default guest" "label guest" "linux vmlinuz" "initrd initrd" "append $(guest_words)" >/mnt/boot/extlinux.conf
umount /mnt && /sbin/losetup -d "$loop" || fail "unmount"
image convert raw:/images/raw vhd:/images/base.vhd
rm /images/raw
image create vhd:/images/disk.vhd --parent vhd:/images/base.vhd
base=$(hash_of /images/base.vhd)

# Both disks are emulated; only one of them can be written, and libxl has no emulated disk for one that cannot.
ram_content() { head -c 1048576 /dev/urandom >"$1"; }
ram_content /images/second
disks="'vdev=xvda,access=rw,script=block-tapline,target=vhd:/images/disk.vhd vhd:/images/base.vhd','vdev=xvdb,access=ro,script=block-tapline,target=raw:/images/second'"
on_reboot=restart
: >"$(console_of a)"
{
    printf '%s\n' "name='a'" "type='hvm'" "memory=320" "tsc_mode='native'" "vga='none'" "boot='c'" "serial='file:/out/serial'" "on_poweroff='destroy'" "on_crash='destroy'"
    at_start
} >/tmp/config
# boot_log NUMBER: what became of the firmware's way to the disk.
begun=$(cut -d. -f1 /proc/uptime)
xl create -q /tmp/config || { cat /var/log/xen/qemu-dm-a.log; fail "xl create of an HVM guest"; }
first=$(xl domid a)
tr '\0' ' ' <"/proc/$(xenstore-read "/local/domain/0/device-model/$first/backends/x" 2>/dev/null || pidof qemu-system-i386 | cut -d' ' -f1)/cmdline"
# QEMU knows where the disk is, so nobody else is told.
no_word() { ! xenstore-ls "/local/domain/0/backend/vbd" 2>/dev/null | grep -q .; }
soon "end of libxl's word for QEMU" 60 no_word
wait_said a boot=1 300
echo "the first boot took $(($(cut -d. -f1 /proc/uptime) - begun)) s"
expect "the driver" "$(said a driver)" vbd
expect "the guest's disks" "$(said a disks)" "xvda xvdb"
expect "what the guest has found" "$(said a note)" "beside the kernel"
wait_said a again=yes 60
wait_said a boot=2 300
echo "the second boot took until $(($(cut -d. -f1 /proc/uptime) - begun)) s"
no_disk "$first" xvda
wait_end a 100
nothing_left
no_xl_nodes
cat /var/log/tapline/*
expect "the base after the guest" "$(hash_of /images/base.vhd)" "$base"
image check vhd:/images/disk.vhd --parent vhd:/images/base.vhd
image convert vhd:/images/disk.vhd --parent vhd:/images/base.vhd raw:/images/raw
mount -o ro,loop /images/raw /mnt || fail "mount"
expect "how often it has booted" "$(cat /mnt/boots)" 2
set -- $(sha256sum /mnt/written)
expect "what it wrote last" "$1" "$(said a written)"
umount /mnt
