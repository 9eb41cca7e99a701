# Leaves the initramfs for the disk with the distribution's programs, and goes on there with the program $INIT.
tries=0
while [ ! -b /dev/vda ]; do
    tries=$((tries + 1))
    [ $tries -lt 200 ] || fail "no disk after 10 seconds"
    usleep 50000
done
mount -t ext4 -o noatime /dev/vda /mnt || fail "mount the root"
cp /job/parameters /mnt/parameters
umount /tmp /dev /sys /proc
exec switch_root /mnt "$INIT"
