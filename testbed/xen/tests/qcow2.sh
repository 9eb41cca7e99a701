# A guest's verified load on a qcow2 with a backing file: it reads what the base holds, the base stays, and the image is sound in
# the eyes of QEMU's own tool too, which looks at what is left in /out/images.
. /drop/storage.sh
images 64
fill /tmp/content 16
before=$(hash_of /tmp/content)
image convert raw:/tmp/content qcow2:/images/base.qcow2 --cache writeback
image create qcow2:/images/disk.qcow2 --parent qcow2:/images/base.qcow2
base=$(hash_of /images/base.qcow2)
case $backend in
qdisk) disk=qcow2:/images/disk.qcow2 ;;
tapline) disk=qcow2:/images/disk.qcow2,qcow2:/images/base.qcow2 ;;
esac
guest a attach "" "$disk"
wait_end a 300
expect "the disk's content as the guest reads it" "$(said a before)" "$before"
[ "$(said a after)" != "$before" ] || fail "the guest wrote nothing"
expect "the base after the guest" "$(hash_of /images/base.qcow2)" "$base"
image check qcow2:/images/disk.qcow2 --parent qcow2:/images/base.qcow2
image convert qcow2:/images/disk.qcow2 --parent qcow2:/images/base.qcow2 raw:/images/flat.raw
expect "the disk's content after the guest" "$(hash_of /images/flat.raw)" "$(said a after)"
e2fsck -f -n /images/flat.raw || fail "e2fsck in dom0"
mkdir /out/images
mv /images/disk.qcow2 /images/base.qcow2 /out/images/
