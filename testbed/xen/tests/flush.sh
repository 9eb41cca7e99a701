# The power of the devices below a guest's disks is cut while it works: what it flushed is there. The devices have caches that
# keep every write until a flush, which a flush that was swallowed would not outlive, as the write without any does not.
. /drop/storage.sh
. /drop/power.sh
null_disk nullb0 16 512 64
null_disk nullb1 16 512 64
guest a flush "disks='xvda xvdb'" /dev/nullb0 /dev/nullb1
wait_said a unflushed=yes 300
node=$(xenstore-read "/local/domain/$(xl domid a)/device/vbd/51712/backend") || fail "no backend in the store"
expect "feature-flush-cache" "$(xenstore-read "$node/feature-flush-cache")" 1
# QEMU has none.
[ "$backend" = qdisk ] || expect "feature-barrier" "$(xenstore-read "$node/feature-barrier")" 1
cut_power nullb0 nullb1
xl destroy a || fail "xl destroy"
wait_gone a 60
give_power nullb0 nullb1
after_power_loss a xvda /dev/nullb0
mkdir -p /mnt
mount -t ext4 /dev/nullb1 /mnt || fail "mount after the loss of power"
expect "a file that was fsynced" "$(sha256sum </mnt/durable)" "$(said a file)  -"
umount /mnt || fail "umount"
e2fsck -f -n /dev/nullb1 || fail "e2fsck"
