# Was booted from what lies on its own disk, and finds there what the host has put beside it.
wait_for_disk
say "words=$(sed 's/.*from=\([^ ]*\).*/\1/' /proc/cmdline)"
mkdir -p /mnt
mount -t ext4 $disk /mnt || fail "mount"
say "note=$(cat /mnt/note)"
echo "from the guest" >/mnt/answer || fail "write"
umount /mnt || fail "umount"
