# Was booted by its firmware from a disk that QEMU emulates, and has that disk by its own driver now. Says what it finds there, writes
# and makes that durable; then powers off, or boots anew for as often as a file on the disk says.
wait_for_disk
say "driver=$(basename "$(readlink /sys/block/xvda/device/driver)")"
say "disks=$(cd /sys/block && echo *d?)"
mkdir -p $mnt
mount_disk
say "note=$(cat $mnt/note)"
boots=$(($(cat $mnt/boots) + 1))
say "boot=$boots"
echo $boots >$mnt/boots
new_file written 2
/tools/sync $mnt/boots $mnt || fail "fsync"
say "written=$(sum $mnt/written)"
umount $mnt || fail "umount"
[ $boots -ge "$boots_wanted" ] || { say again=yes; reboot -f; sleep 60; }
