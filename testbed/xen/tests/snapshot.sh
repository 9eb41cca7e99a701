# While a guest writes, a qcow2 and a VHD are each kept as they are, three times, and all that was kept is merged again. Each state
# that was kept is that of a machine whose power went away: its file system is mended by its journal, and has all that the guest
# had made durable before. The guest notices nothing.
. /drop/storage.sh
images 160
image create qcow2:/images/a-0.qcow2 --size 16M
image create vhd:/images/b-0.vhd --size 16M --block-size 512K
guest a snapshot "disks='xvda xvdb'" qcow2:/images/a-0.qcow2 vhd:/images/b-0.vhd

# kept FORMAT LETTER NUMBER MARKER: the state that is now the parent is whole, and has the guest's markers up to that one.
kept() {
    chain=
    n=$(($3 - 1))
    while [ $n -ge 0 ]; do
        chain="$chain --parent $1:/images/$2-$n.$1"
        n=$((n - 1))
    done
    # Words.
    # shellcheck disable=SC2086
    image convert "$1:/images/$2-$3.$1" $chain raw:/images/kept.raw --force
    e2fsck -p /images/kept.raw
    [ $? -le 1 ] || fail "the file system that was kept in $2-$3.$1"
    e2fsck -f -n /images/kept.raw || fail "the file system that was kept in $2-$3.$1"
    mount "$(looped /images/kept.raw)" /mnt || fail "mount what was kept"
    n=1
    while [ $n -le "$4" ]; do
        yes "marker $n" | head -c 16384 | cmp -s - /mnt/markers/$n || fail "marker $n is not in $2-$3.$1"
        n=$((n + 1))
    done
    read -r _ counter </mnt/counter
    [ "$counter" -ge "$4" ] || fail "the counter says $counter in $2-$3.$1, and $4 was durable before"
    yes "marker $counter" | head -c 4096 | cmp -s - /mnt/counter || fail "the counter is torn"
    umount /mnt || fail "umount"
    /sbin/losetup -D
}

mkdir -p /mnt
wait_said a marked=2 200
for number in 1 2 3; do
    for disk in xvda:qcow2:a xvdb:vhd:b; do
        format=${disk#*:}
        letter=${format#*:}
        format=${format%:*}
        durable=$(said a marked)
        control a "${disk%%:*}" snapshot --to "$format:/images/$letter-$number.$format" || fail "snapshot of $disk"
        kept "$format" "$letter" $((number - 1)) "$durable"
    done
    wait_said a marked=$(($(said a marked) + 2)) 100
done
control a xvda merge --from 0 --into 3 --delete || fail "merge of the qcow2s"
control a xvdb merge --from 0 --into 3 --delete || fail "merge of the VHDs"
wait_said a marked=$(($(said a marked) + 2)) 100
answer a
wait_end a 200
expect "the files that are left" "$(cd /images && echo *.qcow2 *.vhd)" "a-0.qcow2 b-0.vhd"
for disk in xvda:qcow2:a xvdb:vhd:b; do
    format=${disk#*:}
    letter=${format#*:}
    format=${format%:*}
    sound "$format:/images/$letter-0.$format"
    image convert "$format:/images/$letter-0.$format" raw:/images/kept.raw --force
    expect "the disk ${disk%%:*} after the guest" "$(hash_of /images/kept.raw)" "$(said a "${disk%%:*}")"
done
mkdir /out/images
mv /images/a-0.qcow2 /out/images/
