# As flush, with images on a file system of dom0: what each format must make durable with the data. A qcow2 and a VHD past the page
# cache, and a raw file through it, of which a flush is the only way to the device.
. /drop/storage.sh
. /drop/power.sh
null_disk nullb0 96 512 160
# By a loop device, so that losing power does not sync the file system first (storage.sh).
device=$(looped /dev/nullb0)
file_system "$device" /images
image create qcow2:/images/a.qcow2 --size 16M
image create vhd:/images/b.vhd --size 16M
truncate -s 16M /images/c.raw
image create qcow2:/images/d.qcow2 --size 16M
sync
guest a flush "disks='xvda xvdb xvdc xvdd'" qcow2:/images/a.qcow2 vhd:/images/b.vhd writeback:/images/c.raw qcow2:/images/d.qcow2
wait_said a unflushed=yes 300
cut_power nullb0
xl destroy a || fail "xl destroy"
wait_gone a 60
umount /images || fail "umount without power"
/sbin/losetup -d "$device"
give_power nullb0
mount -t ext4 -o noatime "$(looped /dev/nullb0)" /images || fail "mount after the loss of power"
sound qcow2:/images/a.qcow2
sound vhd:/images/b.vhd
sound qcow2:/images/d.qcow2
for each in qcow2:a.qcow2 vhd:b.vhd qcow2:d.qcow2; do
    image convert "${each%%:*}:/images/${each#*:}" "raw:/images/${each#*:}.raw"
done
after_power_loss a xvda /images/a.qcow2.raw
after_power_loss a xvdb /images/b.vhd.raw
after_power_loss a xvdc /images/c.raw
mkdir -p /mnt
mount -t ext4 "$(looped /images/d.qcow2.raw)" /mnt || fail "mount the guest's file system"
expect "a file that was fsynced" "$(sha256sum </mnt/durable)" "$(said a file)  -"
umount /mnt || fail "umount"
