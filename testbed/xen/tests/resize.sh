# Disks grow twice while their guest works on them; it learns of it, and uses what is new. Ours refuse to shrink, and stay what
# they are.
. /drop/storage.sh
images 96
mib=$((1 << 20))
truncate -s 16M /images/a.raw
sizes="$((24 * mib)) $((28 * mib + 64 * 1024))"
case $backend in
blkback)
    disk=$(looped /images/a.raw)
    guest a resize "disks=xvda sizes='$sizes'" "$disk"
    ;;
tapline)
    image create qcow2:/images/b.qcow2 --size 16M
    image create vhd:/images/c.vhd --size 16M
    guest a resize "disks='xvda xvdb xvdc' sizes='$sizes'" /images/a.raw qcow2:/images/b.qcow2 vhd:/images/c.vhd
    ;;
esac

# grow BYTES
grow() {
    case $backend in
    blkback) truncate -s "$1" /images/a.raw && /sbin/losetup -c "$disk" || fail "losetup" ;;
    tapline) for each in xvda xvdb xvdc; do control a $each resize --size "$1" || fail "resize $each"; done ;;
    esac
}

n=1
for size in $sizes; do
    wait_said a "waiting=$n" 200
    grow "$size"
    wait_said a "used=$n" 200
    n=$((n + 1))
done
if [ "$backend" = tapline ]; then
    for each in xvda xvdb xvdc; do
        control a $each resize --size 8M >/tmp/shrunk 2>&1 && fail "$each has shrunk"
        grep -q "cannot shrink" /tmp/shrunk || { cat /tmp/shrunk; fail "why $each does not shrink"; }
    done
fi
wait_end a 200
expect "the raw disk" "$(hash_of /images/a.raw)" "$(said a xvda)"
expect "its length" "$(stat -c %s /images/a.raw)" "$size"
if [ "$backend" = tapline ]; then
    for each in qcow2:b.qcow2:xvdb vhd:c.vhd:xvdc; do
        file=${each%:*}
        sound "${file%%:*}:/images/${file#*:}"
        image convert "${file%%:*}:/images/${file#*:}" raw:/images/flat.raw
        expect "the disk $file" "$(hash_of /images/flat.raw)" "$(said a "${each##*:}")"
        rm /images/flat.raw
    done
fi
