# Uses xvdb mounted, each time that it comes, until it fails; the system and the first disk go on, at each beat.
wait_for_disk
make_filesystem
mount_disk
(
    beat=0
    while beat=$((beat + 1)); do
        echo $beat >$mnt/beat
        /tools/sync $mnt/beat || fail "the first disk"
        say "beat=$beat"
        sleep 1
    done
) &
mkdir /second
say "ready=yes"
n=1
while :; do
    if [ ! -b /dev/xvdb ]; then
        usleep 50000
        continue
    fi
    /tools/mke2fs -t ext4 -q -F /dev/xvdb || fail "mkfs.ext4 of xvdb"
    mount -t ext4 -o errors=continue /dev/xvdb /second || fail "mount of xvdb"
    # Said when there are writes; they end when the disk is gone, and not before.
    (usleep 700000; say "busy=$n") &
    while dd if=/dev/zero of=/second/file bs=64k count=64 conv=fsync 2>/dev/null; do :; done
    umount /second || fail "umount of what is gone"
    while [ -b /dev/xvdb ]; do usleep 50000; done
    say "failed=$n"
    n=$((n + 1))
done
