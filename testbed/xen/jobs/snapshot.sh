# On each of $disks a file system on which files are written and verified again and again, and markers made durable, until dom0
# says that it is enough.
mkdir -p /data
for each in $disks; do
    disk=/dev/$each
    wait_for_disk
    make_filesystem
    mnt=/data/$each
    mkdir -p "$mnt"
    mount_disk
    mkdir "$mnt"/markers
    : >"$mnt"/counter
done
loads=
for each in $disks; do
    load_rounds "$each" /data/"$each"/load --bsrange=4k-32k --iodepth=8 --size=3m --thinktime=3000 &
    loads="$loads $!"
done
# What runs in the background has another input.
exec 3<&0
(read -r _ <&3 && : >/tmp/enough) &
n=1
until [ -f /tmp/enough ]; do
    for each in $disks; do
        mnt=/data/$each
        mark $n
    done
    say "marked=$n"
    n=$((n + 1))
    usleep 200000
done
# A round that finds something wrong ends the guest.
for load in $loads; do wait "$load"; done
forget
for each in $disks; do
    mnt=/data/$each
    disk=/dev/$each
    expect_markers $((n - 1))
    unmount_and_check
    say "$each=$(content_of "$disk")"
done
