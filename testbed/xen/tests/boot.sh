# An HVM guest boots from an image that our block script serves: its firmware and a boot loader read it through QEMU, over NBD, and then
# its own driver takes the disk over. It reboots, which makes all of that anew, and is destroyed while the boot loader reads. The image
# holds what it wrote, and nothing is left.
. /drop/life.sh
. /drop/storage.sh
images 192
xl_names_disks
initrd_of a boot "boots_wanted=2"
bootable /images/raw "$place/job"
image convert raw:/images/raw vhd:/images/base.vhd
rm /images/raw
image create vhd:/images/disk.vhd --parent vhd:/images/base.vhd
base=$(hash_of /images/base.vhd)

# The second is for the guest's own driver only: libxl has no emulated disk that cannot be written.
fill /images/second 1
boots_by_firmware a "'vdev=xvda,access=rw,script=block-tapline,target=vhd:/images/disk.vhd vhd:/images/base.vhd','vdev=xvdb,access=ro,script=block-tapline,target=raw:/images/second'" \
    "on_reboot='restart'" "hdtype='ahci'"
# (SeaBIOS reads by DMA there, and from an IDE disk one sector after the other, which takes four times as long.)
begun=$(cut -d. -f1 /proc/uptime)
xl create -q /tmp/config || { cat /var/log/xen/qemu-dm-a.log; fail "xl create of an HVM guest"; }
first=$(xl domid a)
tr '\0' ' ' <"/proc/$(xenstore-read "/local/domain/$first/image/device-model-pid")/cmdline" | grep -o 'file=nbd[^ ]*' || fail "QEMU was told of no disk over NBD"
# QEMU knows where the disk is, so nobody else is told.
no_word() { ! xenstore-ls "/local/domain/0/backend/vbd" 2>/dev/null | grep -q .; }
soon "end of libxl's word for QEMU" 60 no_word
wait_said a boot=1 300
echo "the first boot took $(($(cut -d. -f1 /proc/uptime) - begun)) s"
expect "the driver" "$(said a driver)" vbd
expect "the guest's disks" "$(said a disks)" "xvda xvdb"
expect "what the guest has found" "$(said a note)" "beside the kernel"
# The firmware's and the boot loader's words are the next QEMU's from here on.
rm /out/serial
wait_said a again=yes 60
reads_again() { [ "$(xl domid a 2>/dev/null)" != "$first" ] && grep -q SYSLINUX /out/serial 2>/dev/null; }
soon "boot loader, after the reboot" 120 reads_again
no_disk "$first" xvda
xl destroy a || fail "xl destroy"
wait_gone a 60
nothing_left
no_xl_nodes
cat /var/log/tapline/*
expect "the base after the guest" "$(hash_of /images/base.vhd)" "$base"
sound vhd:/images/disk.vhd --parent vhd:/images/base.vhd
image convert vhd:/images/disk.vhd --parent vhd:/images/base.vhd raw:/images/raw
mount -o ro,loop /images/raw /mnt || fail "mount"
expect "how often it has booted" "$(cat /mnt/boots)" 1
set -- $(sha256sum /mnt/written)
expect "what it wrote last" "$1" "$(said a written)"
umount /mnt
